"""`rms_norm_fp8`: its kernel on the fake GPU and its reference on the CPU, against float64; scales, arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from fake_gpu import TARGET, gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError, rms_norm_fp8

LENGTHS = (1, 2, 8, 48, 1000, 4096, 20_000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact(x, weight, eps, residual=None, *, zero_centered=False):
    total = x.double() + (0.0 if residual is None else residual.double())
    normalized = total / (total.square().mean(-1, keepdim=True) + eps).sqrt()
    return normalized * (weight.double() + zero_centered), total


@pytest.mark.parametrize(("length", "dtype"), list(itertools.product(LENGTHS, DTYPES)), ids=str)
@pytest.mark.parametrize("where", ["kernel", "reference"])
def test_values_match_float64(length, dtype, where):
    x, residual = ((3 * torch.randn(2, 3, length)).to(dtype) for _ in range(2))
    weight, given = (torch.rand(length) - 0.3).to(dtype), torch.tensor([0.004])
    for added, scale in itertools.product((None, residual), (None, given)):
        with gpu_on_the_cpu() if where == "kernel" else contextlib.nullcontext():
            found = rms_norm_fp8(x, weight, 1e-3, residual=added, scale=scale, zero_centered=True)
        wanted, total = exact(x, weight, 1e-3, added, zero_centered=True)
        amax = wanted.abs().amax(-1, keepdim=True)
        if scale is None:
            assert found.amax is None
            torch.testing.assert_close(found.scale.double(), amax / 448, rtol=1e-5, atol=0.0)
        else:
            assert found.scale is scale
            torch.testing.assert_close(found.amax.double(), amax.amax(), rtol=1e-5, atol=0.0)
        values = (wanted / found.scale).clamp(-448, 448)
        off, half = (found.out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half).all()
        assert (found.total is None) == (added is None)
        if added is not None:
            torch.testing.assert_close(found.total, total.to(dtype))


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
    with gpu_on_the_cpu(target=ampere), pytest.raises(UnsupportedError, match=r"8\.9"):
        rms_norm_fp8(torch.randn(3, 64))


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
    with pytest.raises(error, match=named):
        rms_norm_fp8(**{"x": torch.randn(3, 64), **changed})
