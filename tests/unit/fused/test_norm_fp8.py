"""`rms_norm_fp8` and `layer_norm_fp8`, on the fake GPU and by their references, against float64; arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from fake_gpu import TARGET, gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError, explain, layer_norm_fp8, rms_norm_fp8

pytestmark = pytest.mark.sample(2)  # most compile a kernel

LENGTHS = (1, 2, 8, 48, 1000, 4096, 20_000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact(function, x, residual=None, *, weight, bias=None, eps, zero_centered=False):
    total = x.double() + (0.0 if residual is None else residual.double())
    middle = total - total.mean(-1, keepdim=True) if function is layer_norm_fp8 else total
    normalized = middle / (middle.square().mean(-1, keepdim=True) + eps).sqrt()
    out = normalized * (1.0 if weight is None else weight.double() + zero_centered)
    return out if bias is None else out + bias.double(), total


@pytest.mark.parametrize(("length", "dtype"), list(itertools.product(LENGTHS, DTYPES)), ids=str)
@pytest.mark.parametrize("function", [rms_norm_fp8, layer_norm_fp8])
@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_values_match_float64(length, dtype, where, function):
    x, residual = ((3 * torch.randn(2, 3, length)).to(dtype) for _ in range(2))
    weight, given = (torch.rand(length) - 0.3).to(dtype), torch.tensor([0.004])
    for added, scale in itertools.product((None, residual), (None, given)):
        options = {"weight": weight, "eps": 1e-3}
        if function is rms_norm_fp8:
            options["zero_centered"] = True
        else:
            options |= {"bias": torch.randn(length).to(dtype)} if added is None or scale is None else {"weight": None}
        with gpu_on_the_cpu() if where == "kernel" else contextlib.nullcontext():
            found = function(x, residual=added, scale=scale, **options)
        wanted, total = exact(function, x, added, **options)
        amax = wanted.abs().amax(-1, keepdim=True)
        if scale is None:
            assert found.amax is None
            torch.testing.assert_close(found.scale.double(), amax / 448, rtol=1e-5, atol=0.0)
        else:
            assert found.scale is scale
            torch.testing.assert_close(found.amax.double(), amax.amax(), rtol=1e-5, atol=0.0)
        values = (wanted / found.scale).clamp(-448, 448)
        lost = 1e-6 * total.abs().amax() / found.scale if function is layer_norm_fp8 else 0.0
        off, half = (found.out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half + lost).all()
        assert (found.total is None) == (added is None)
        if added is not None:
            torch.testing.assert_close(found.total, total.to(dtype))


@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_a_bias_alone_and_a_weight_alone(of_bias, where):
    x, vector = torch.randn(5, 64).bfloat16(), torch.randn(64).to(of_bias)
    with gpu_on_the_cpu() if where == "kernel" else contextlib.nullcontext():
        for given in ({"bias": vector}, {"weight": vector}, {"weight": vector, "bias": vector.flip(0)}, {}):
            found = layer_norm_fp8(x, **given)
            wanted, _ = exact(layer_norm_fp8, x, **{"weight": None, "eps": 1e-5, **given})
            off = (found.out.double() * found.scale - wanted).abs()
            assert (off <= 1.01 * (wanted.abs() * 2**-4 + found.scale * 2**-10)).all()


@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_rows_of_zeros_and_of_nan(where):
    x = torch.randn(4, 64)
    x[1], x[2, 5], x[3, 7] = 0.0, torch.nan, 1e-20
    with gpu_on_the_cpu() if where == "kernel" else contextlib.nullcontext():
        found = rms_norm_fp8(x, eps=1e-6)
    values = found.out.float() * found.scale
    assert not values[1].any()
    assert values[2].isnan().all()
    assert found.scale[2].isnan().all()
    assert values[[0, 3]].isfinite().all()


def test_a_linear_layer_reads_it():
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(32, 64) / 8
    found = rms_norm_fp8(x)
    scale_b = weight.abs().amax(1, keepdim=True) / 448
    quantized = (weight / scale_b).to(torch.float8_e4m3fn)
    out = (found.out.float() * found.scale) @ (quantized.float() * scale_b).T
    right = cudnn_sdpa.rms_norm(x).float() @ weight.T
    assert (out - right).norm() < 0.06 * right.norm()


def test_gpus_without_fp8_refuse():
    ampere = dataclasses.replace(TARGET, properties=(("deviceVer", 800), ("multiProcessorCount", 108)))
    with gpu_on_the_cpu(target=ampere):
        for function in (rms_norm_fp8, layer_norm_fp8):
            instead = function.__name__.removesuffix("_fp8")
            with pytest.raises(UnsupportedError, match=rf"{function.__name__}(.|\n)*8\.9(.|\n)*{instead}"):
                function(torch.randn(3, 64))


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"scale": torch.ones(3)}, ShapeError, "scale"),
        ({"scale": torch.ones(1).half()}, DtypeError, "scale"),
        ({"scale": 1.0}, OptionError, "scale"),
        ({"weight": torch.ones(5)}, ShapeError, "weight"),
        ({"eps": -1}, OptionError, "eps"),
        ({"zero_centered": 3}, OptionError, "zero_centered"),
        ({"x": torch.randn(3, 64, requires_grad=True)}, UnsupportedError, "requires grad"),
    ],
)
def test_wrong_arguments_are_named(changed, error, named):
    for function in (rms_norm_fp8, layer_norm_fp8)[: 1 if "zero_centered" in changed else 2]:
        with pytest.raises(error, match=named):
            function(**{"x": torch.randn(3, 64), **changed})


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"bias": torch.ones(5)}, ShapeError, "bias"),
        ({"weight": torch.ones(64), "bias": torch.ones(64).bfloat16()}, DtypeError, "bias"),
        ({"bias": torch.ones(64, requires_grad=True)}, UnsupportedError, "requires grad"),
        ({"residual": torch.ones(2, 64)}, ShapeError, "residual"),
        ({"eps": None}, OptionError, "eps"),
    ],
)
def test_wrong_arguments_of_a_layer_norm_are_named(changed, error, named):
    with pytest.raises(error, match=named):
        layer_norm_fp8(**{"x": torch.randn(3, 64), **changed})


def test_explain_shows_the_kernel():
    x = torch.randn(6, 64).bfloat16()
    text = str(cudnn_sdpa.explain(layer_norm_fp8, x, scale=torch.ones(1)))
    assert "the amax of all rows" in text
    assert "own kernels" in text


def test_gradients_are_refused_in_the_functions_name():
    x, ones = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True), torch.ones(64, dtype=torch.bfloat16)
    for function, given in ((rms_norm_fp8, (x,)), (layer_norm_fp8, (x, ones, ones))):
        expected = (
            rf"the gradient of {function.__name__} is not supported here:\n  - .* requires grad, .* for inference"
        )
        with pytest.raises(UnsupportedError, match=expected):
            function(*given)
        report = explain(function, *given)
        assert not report.supported
        assert "an operand requires grad, and it is for inference" in report.reasons


@pytest.mark.parametrize("function", [rms_norm_fp8, layer_norm_fp8])
def test_an_unknown_number_of_rows_compiles(function):
    compiled, scale = torch.compile(function, backend="aot_eager", fullgraph=True), torch.tensor([0.01])
    torch._dynamo.reset()
    for rows in (1, 3, 2):
        x = torch.randn(rows, 48)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        found = compiled(x, scale=scale)
        assert found.amax.shape == ()
        torch.testing.assert_close(found.amax, function(x, scale=scale).amax)
