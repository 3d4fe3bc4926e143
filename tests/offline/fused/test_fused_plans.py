"""cuDNN accepts the graphs of norms, activations and convolutions on A100, H200, B200 and RTX 5090."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError, explain, layer_norm, providers, rms_norm
from cudnn_sdpa.fused.activation_graphs import (
    gelu_mul_rows,
    relu_squared_rows,
    silu_mul_grad_up,
    silu_mul_gradients,
    silu_mul_rows,
)
from cudnn_sdpa.fused.conv_graphs import (
    ACTIVATIONS,
    channels_last,
    conv_dgrad,
    conv_wgrad,
    convolution,
)
from cudnn_sdpa.fused.norm_graphs import layer_norm_gradients, layer_norm_rows, rms_norm_gradients, rms_norm_rows
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline.planner import engine_offline, plan_offline

pytestmark = pytest.mark.usefixtures("can_plan", "by_cudnn")


@pytest.fixture
def by_cudnn():
    with providers("cudnn"):
        yield


GPUS = ["a100", "h200", "b200", "rtx5090"]
HALF, FULL = torch.bfloat16, torch.float32
INFERENCE, TRAINING = ({"trains": trains, "activation": None} for trains in (False, True))


def bare(*shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta")


def images(*shape, dtype=HALF):
    return channels_last(bare(*shape, dtype=dtype))


def geometry(rank, stride=1, padding=1, dilation=1):
    return {"stride": (stride,) * rank, "padding": (padding,) * rank, "dilation": (dilation,) * rank}


def forward(rank, activation=None, groups=1, **sizes):
    return {**geometry(rank, **sizes), "groups": groups, "activation": activation}


X, W, W32 = bare(512, 1024), bare(1024), bare(1024, dtype=FULL)
OF_ROWS = bare(512, 1, dtype=FULL)
WIDE = bare(512, 8192)

NORMS = {
    "rms_norm": (rms_norm_rows, (X, W, 1e-6), INFERENCE),
    "rms_norm, training": (rms_norm_rows, (X, W, 1e-6), TRAINING),
    "rms_norm, float16": (rms_norm_rows, (X.half(), W.half(), 1e-6), INFERENCE),
    "rms_norm, float32": (rms_norm_rows, (X.float(), W32, 1e-6), TRAINING),
    "rms_norm, float32 weight": (rms_norm_rows, (X, W32, 1e-6), INFERENCE),
    "rms_norm, float32 weight, training": (rms_norm_rows, (X, W32, 1e-6), TRAINING),
    "rms_norm, no weight": (rms_norm_rows, (X, None, 1e-6), INFERENCE),
    "rms_norm, no weight, training": (rms_norm_rows, (X, None, 1e-6), TRAINING),
    "rms_norm, zero-centered": (rms_norm_rows, (X, W, 1e-6, 1.0), INFERENCE),
    "rms_norm, zero-centered, training": (rms_norm_rows, (X, W, 1e-6, 1.0), TRAINING),
    "rms_norm of 8192": (rms_norm_rows, (WIDE, bare(8192), 1e-6), INFERENCE),
    "rms_norm of 100": (rms_norm_rows, (bare(7, 100), bare(100), 1e-6), INFERENCE),
    "gradients of rms_norm": (rms_norm_gradients, (X, X, W, OF_ROWS), {}),
    "gradients of rms_norm, float32 weight": (rms_norm_gradients, (X, X, W32, OF_ROWS), {}),
    "gradients of rms_norm, no weight": (rms_norm_gradients, (X, X, None, OF_ROWS), {}),
    "gradients of rms_norm, zero-centered": (rms_norm_gradients, (X, X, W, OF_ROWS, 1.0), {}),
    "layer_norm": (layer_norm_rows, (X, W, W, 1e-5), {"trains": False}),
    "layer_norm, training": (layer_norm_rows, (X, W, W, 1e-5), {"trains": True}),
    "layer_norm, float32 weight": (layer_norm_rows, (X, W32, W32, 1e-5), {"trains": True}),
    "layer_norm, zero-centered": (layer_norm_rows, (X, W, W, 1e-5, 1.0), {"trains": False}),
    "layer_norm, zero-centered, training": (layer_norm_rows, (X, W, W, 1e-5, 1.0), {"trains": True}),
    "gradients of layer_norm": (layer_norm_gradients, (X, X, W, None, OF_ROWS, OF_ROWS), {}),
    "gradients of layer_norm, float32 weight": (layer_norm_gradients, (X, X, W32, None, OF_ROWS, OF_ROWS), {}),
    "gradients of layer_norm, zero-centered": (layer_norm_gradients, (X, X, W, None, OF_ROWS, OF_ROWS, 1.0), {}),
}

DENSE = bare(1, 8192, 64)
GATE_AND_UP = bare(512, 2048)
HALVES = bare(512, 400)
SQUARES = bare(57344, 1024)
PARTS = bare(512, 3072)

ONE_FOR_ALL = bare(1, 200).expand(512, 200), bare(512, 200)


def halves(x):
    return x.chunk(2, dim=-1)


GATES = {
    "silu_mul": (silu_mul_rows, (DENSE, DENSE), {}),
    "silu_mul of halves, split": (silu_mul_rows, halves(GATE_AND_UP), {}),
    "silu_mul of halves": (silu_mul_rows, halves(HALVES), {}),
    "silu_mul of both": (silu_mul_rows, (GATE_AND_UP,), {}),
    "silu_mul, float32": (silu_mul_rows, (DENSE.float(), DENSE.float()), {}),
    "silu_mul in squares": (silu_mul_rows, (SQUARES, SQUARES), {}),
    "gradients of silu_mul in squares": (silu_mul_gradients, (SQUARES, SQUARES, SQUARES), {}),
    "gradients in 32 parts": (silu_mul_gradients, (bare(512, 1536), PARTS), {}),
    "silu_mul of one row for all": (silu_mul_rows, ONE_FOR_ALL, {}),
    "gradients of one row for all": (silu_mul_gradients, (ONE_FOR_ALL[1], *ONE_FOR_ALL), {}),
    "relu_squared of one row for all": (relu_squared_rows, ONE_FOR_ALL[:1], {}),
    "gradients of silu_mul": (silu_mul_gradients, (DENSE, DENSE, DENSE), {}),
    "gradients of silu_mul of halves": (silu_mul_gradients, (bare(512, 1024), *halves(GATE_AND_UP)), {}),
    "gradients of silu_mul into halves": (silu_mul_gradients, (bare(512, 1024), GATE_AND_UP), {}),
    "gradient of silu_mul by gate": (silu_mul_gradients, (bare(512, 1024), *halves(GATE_AND_UP)), {"of_up": False}),
    "gradient of silu_mul by up": (silu_mul_grad_up, (bare(512, 1024), halves(GATE_AND_UP)[0]), {}),
    "gelu_mul": (gelu_mul_rows, (DENSE, DENSE), {}),
    "gelu_mul of halves": (gelu_mul_rows, halves(GATE_AND_UP), {}),
    "relu_squared": (relu_squared_rows, (DENSE,), {}),
    "relu_squared of a half": (relu_squared_rows, halves(GATE_AND_UP)[:1], {}),
}

IMAGE, LOSS = images(4, 64, 32, 32), images(4, 128, 32, 32)
FILTERS, BIAS = images(128, 64, 3, 3), bare(128)
VOLUME, CUBES, OF_CUBES = images(2, 32, 8, 16, 16), images(64, 32, 3, 3, 3), images(2, 64, 8, 16, 16)

CONVOLUTIONS = {
    **{
        f"conv2d, {'no ' if bias is None else ''}bias, {activation}": (
            convolution,
            (IMAGE, FILTERS, bias),
            forward(2, activation),
        )
        for bias in (None, BIAS)
        for activation in ACTIVATIONS
    },
    "conv2d, stride": (
        convolution,
        (IMAGE, FILTERS, BIAS),
        forward(2, "silu", stride=2),
    ),
    "conv2d, dilation": (convolution, (IMAGE, FILTERS), forward(2, dilation=2)),
    "conv2d, groups": (convolution, (IMAGE, images(128, 8, 3, 3)), forward(2, groups=8)),
    "conv2d, float32": (
        convolution,
        (IMAGE.float(), FILTERS.float()),
        forward(2),
    ),
    "conv1d": (
        convolution,
        (images(2, 64, 256), images(128, 64, 3), BIAS),
        forward(1, "silu"),
    ),
    "conv3d": (convolution, (VOLUME, CUBES), forward(3)),
    "conv3d, bias": (convolution, (VOLUME, CUBES, bare(64)), forward(3, "silu")),
    "gradient of conv2d by x": (conv_dgrad, (LOSS, FILTERS), {"shape": (64, 32, 32), **geometry(2)}),
    "gradient of conv2d by weight": (conv_wgrad, (LOSS, IMAGE), {"shape": (128, 64, 3, 3), **geometry(2)}),
    "gradient of conv3d by x": (conv_dgrad, (OF_CUBES, CUBES), {"shape": (32, 8, 16, 16), **geometry(3)}),
    "gradient of conv3d by weight": (
        conv_wgrad,
        (OF_CUBES, VOLUME),
        {"shape": (64, 32, 3, 3, 3), **geometry(3)},
    ),
}

SILU = {"trains": False, "activation": "silu"}

#: What is fused with a norm.
FUSED = {
    "residual": (rms_norm_rows, (X, W, 1e-6, None, X), INFERENCE),
    "residual, training": (rms_norm_rows, (X, W, 1e-6, None, X), TRAINING),
    "residual, zero-centered": (rms_norm_rows, (X, W, 1e-6, 1.0, X), INFERENCE),
    "SiLU": (rms_norm_rows, (X, W, 1e-6), SILU),
    "residual and SiLU": (rms_norm_rows, (X, W, 1e-6, None, X), SILU),
    "LayerNorm and SiLU": (layer_norm_rows, (X, W, W, 1e-5, 1.0), SILU),
}

ODD, OF_ODD = bare(512, 1000), bare(1000)

#: For which there is no kernel.
NOT_FUSED = {
    "a row of 1000 numbers": (rms_norm_rows, (ODD, OF_ODD, 1e-6, None, ODD), INFERENCE),
    "SiLU and 1000 numbers": (rms_norm_rows, (ODD, OF_ODD, 1e-6), SILU),
    "a weight in float32": (rms_norm_rows, (X, W.float(), 1e-6, None, X), INFERENCE),
}


def key_and_properties(gpu, call):
    function, tensors, options = call
    properties = load_properties(gpu)
    return function.describe(*tensors, **options).key(Target.from_properties(properties), None), properties


CASES = {**NORMS, **GATES, **CONVOLUTIONS}

#: Similar to others, and slow to compile: for these it is enough that cuDNN proposes an engine.
PROPOSED = [
    *("rms_norm, float16", "rms_norm of 100", "silu_mul, float32", "gelu_mul of halves", "relu_squared of a half"),
    *("conv2d, no bias, relu", "conv2d, no bias, silu", "conv2d, bias, relu", "conv2d, bias, None"),
    *("conv2d, stride", "conv2d, dilation", "conv2d, groups", "conv2d, float32", "conv1d"),
]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", PROPOSED)
def test_it_has_an_engine(gpu, name):
    assert engine_offline(*key_and_properties(gpu, CASES[name])).startswith("eng")


@pytest.mark.sample(4)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in PROPOSED])
def test_it_has_a_plan(gpu, name, monkeypatch):
    function, tensors, options = CASES[name]
    monkeypatch.setenv("CUDNN_SDPA_TARGET", gpu)
    result = explain(function, *tensors, **options)
    assert result.supported, result.reasons
    assert (result.call, result.offline) == (function.__name__, True)
    assert result.engine.startswith("eng")
    assert result.workspace >= 0
    assert result.key.startswith(function.__name__)


@pytest.mark.sample(3)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", FUSED)
def test_norms_with_fused_operations_have_a_plan(gpu, name):
    """From Hopper on, not among cuDNN's first proposals."""
    made = plan_offline(*key_and_properties(gpu, FUSED[name]))
    assert made.engine.startswith("eng")
    assert len(made.data) > 1000


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", NOT_FUSED)
def test_unsupported_fusions_are_refused_with_reasons(gpu, name, monkeypatch):
    with pytest.raises(UnsupportedError, match="rms_norm_rows is not supported here") as caught:
        engine_offline(*key_and_properties(gpu, NOT_FUSED[name]))
    assert caught.value.reasons
    assert all(caught.value.reasons)
    monkeypatch.setenv("CUDNN_SDPA_TARGET", gpu)
    function, tensors, options = NOT_FUSED[name]
    result = explain(function, *tensors, **options)
    assert not result.supported
    assert result.reasons
    assert result.engine == ""


@pytest.mark.parametrize("gpu", GPUS)
def test_norms_without_a_fused_kernel_run_in_several(gpu, monkeypatch):
    """Also rows of one element without a weight, which cuDNN trains with one alone."""
    monkeypatch.setenv("CUDNN_SDPA_TARGET", gpu)
    x, weight, one = bare(7, 100), bare(100, dtype=FULL), bare(7, 1)
    found = explain(rms_norm, x, weight, residual=x, activation="silu")
    assert found.supported, found.reasons
    assert found.extra_kernels == ["the sum of x and residual", "silu of the result"]
    found = explain(layer_norm, x, residual=x, activation="silu")
    assert found.supported, found.reasons
    sums = ["the sum of x and residual", "silu of the result"]
    assert found.extra_kernels == [*sums, "weight is created", "bias is created"]
    found = explain(rms_norm, one.requires_grad_(), residual=bare(7, 1))
    assert found.supported, found.reasons
    assert found.backward.supported, found.backward.reasons
