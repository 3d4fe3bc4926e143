"""Engines of cuDNN's fallback heuristics: right wherever they accept a graph."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_checks import difference, poison

from cudnn_sdpa import UnsupportedError, conv2d, gelu_mul, graph_op, layer_norm, rms_norm, silu_mul, use_plan_store
from cudnn_sdpa.fused.conv_graphs import ACTIVATIONS, channels_last
from cudnn_sdpa.graph import backend

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 2e-3}


@pytest.fixture
def reserve(monkeypatch, tmp_path):
    """Uses fallback engines only, and a separate plan store."""

    def propose(builder):
        builder._graph.create_execution_plans([builder.types.heur_mode.FALLBACK])

    monkeypatch.setattr(backend.GraphBuilder, "_propose", propose)
    with use_plan_store(tmp_path / "plans"):
        yield


def make(*shape, dtype):
    return torch.randn(shape, device="cuda", dtype=dtype)


CONVOLUTIONS = {
    "3x3": ((2, 32, 20, 24), (64, 32, 3, 3), {"padding": 1}),
    "1x1": ((2, 64, 14, 14), (32, 64, 1, 1), {}),
    "odd": ((3, 8, 13, 11), (37, 8, 3, 3), {"padding": 1}),
    "one filter": ((2, 16, 19, 23), (1, 16, 3, 3), {"padding": 1}),
    "steps": ((3, 16, 33, 29), (24, 16, 3, 5), {"stride": (2, 1), "padding": (1, 4), "dilation": (1, 2)}),
    "groups": ((2, 64, 16, 16), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
    "each channel": ((2, 32, 16, 16), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
}


@pytest.mark.usefixtures("reserve")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolutions(name, dtype):
    grad_x, grad_weight, sizes = CONVOLUTIONS[name]
    x = channels_last(make(*grad_x, dtype=dtype)).requires_grad_()
    weight = channels_last((make(*grad_weight, dtype=torch.float32) * math.prod(grad_weight[1:]) ** -0.5).to(dtype))
    weight.requires_grad_()
    bias = make(grad_weight[0], dtype=dtype)
    exact = F.conv2d(x.double(), weight.double(), bias.double(), **sizes)
    worked = 0
    for activation, function in ACTIVATIONS.items():
        try:
            poison(tuple(exact.shape), dtype=dtype)
            with torch.no_grad():
                out = conv2d(x, weight, bias, **sizes, activation=activation)
        except UnsupportedError:
            continue
        worked += 1
        assert difference(out, function(exact)) < TOLERANCE[dtype], activation
    assert worked
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    wanted = F.conv2d(*leaves, **sizes)
    grad = torch.randn_like(wanted).to(dtype)
    try:
        found = torch.autograd.grad(conv2d(x, weight, **sizes), (x, weight), grad)
    except UnsupportedError:
        return
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, grad.double()), strict=True):
        assert difference(one, other) < 2 * TOLERANCE[dtype]


@pytest.mark.usefixtures("reserve")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(64, 1024), (7, 4096), (33, 1000), (4096, 64), (2, 16384)], ids=str)
def test_norms_and_gates(shape, dtype):
    size = shape[-1]
    x, other = (make(*shape, dtype=dtype) for _ in range(2))
    weight, bias = make(2, size, dtype=dtype)
    exact = [tensor.double() for tensor in (x, other, weight, bias)]
    normed = F.rms_norm(exact[0], (size,), exact[2], 1e-6)
    calls = {
        "rms_norm": (lambda: rms_norm(x, weight), normed),
        "zero-centered": (
            lambda: rms_norm(x, weight, zero_centered=True),
            F.rms_norm(exact[0], (size,), 1 + exact[2], 1e-6),
        ),
        "layer_norm": (lambda: layer_norm(x, weight, bias), F.layer_norm(exact[0], (size,), *exact[2:])),
        "SiLU behind": (lambda: rms_norm(x, weight, activation="silu"), F.silu(normed)),
        "silu_mul": (lambda: silu_mul(x, other), F.silu(exact[0]) * exact[1]),
        "gelu_mul": (lambda: gelu_mul(x, other), F.gelu(exact[0]) * exact[1]),
    }
    worked = []
    for name, (call, wanted) in calls.items():
        try:
            poison(shape, dtype=dtype)
            out = call()
        except UnsupportedError:
            continue
        worked.append(name)
        assert difference(out, wanted) < TOLERANCE[dtype], name
    assert worked


@graph_op(reference=lambda x, weight: F.conv2d(x, weight).exp().contiguous(memory_format=torch.channels_last))
def exp_of_convolution(g, x, weight):
    """A custom graph; with a single filter its result is laid out like rows."""
    y = g.conv_fprop(image=x, weight=weight, padding=[0, 0], stride=[1, 1], dilation=[1, 1])
    return g.exp(input=y)


@pytest.mark.parametrize("filters", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_custom_graphs(filters, dtype, tmp_path):
    """With cuDNN's first heuristics, and with fallback engines where those find none."""
    x = channels_last(make(2, 32, 15, 17, dtype=dtype))
    weight = channels_last((make(filters, 32, 1, 1, dtype=torch.float32) * 0.1).to(dtype))
    wanted = F.conv2d(x.double(), weight.double()).exp()
    with use_plan_store(tmp_path / "plans"):
        for _ in range(2):
            poison(tuple(wanted.shape), dtype=dtype)
            try:
                out = exp_of_convolution(x, weight)
            except UnsupportedError as error:
                assert error.reasons  # noqa: PT017 - it depends on cuDNN's version
                return
            assert difference(out, wanted) < TOLERANCE[dtype]
