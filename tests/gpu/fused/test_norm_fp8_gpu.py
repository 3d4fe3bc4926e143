"""`rms_norm_fp8` and `layer_norm_fp8` on the GPU: values against float64, and a linear layer that reads them."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_checks import poison

from cudnn_sdpa import layer_norm_fp8, rms_norm_fp8

SHAPES = [(1, 4096), (7, 48), (4096, 4096), (64, 8192), (131_072, 128), (33, 5120), (3, 20_000), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values(shape, dtype):
    x, residual = ((3 * torch.randn(shape, device="cuda")).to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], device="cuda") - 0.3).to(dtype)
    for added, scale in itertools.product((None, residual), (None, torch.tensor(0.004, device="cuda"))):
        poison(shape, (*shape[:-1], 1), dtype=dtype)
        found = rms_norm_fp8(x, weight, 1e-3, residual=added, scale=scale, zero_centered=True)
        total = x.double() + (0.0 if added is None else added.double())
        wanted = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + 1)
        amax = wanted.abs().amax(-1, keepdim=True)
        if scale is None:
            torch.testing.assert_close(found.scale.double(), amax / 448, rtol=1e-5, atol=0.0)
        else:
            torch.testing.assert_close(found.amax.double(), amax.amax(), rtol=1e-5, atol=0.0)
        values = (wanted / found.scale).clamp(-448, 448)
        off, half = (found.out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half).all()
        if added is not None:
            torch.testing.assert_close(found.total, total.to(dtype))


@pytest.mark.parametrize("sizes", [(1e-17, 1e-18), (1e15, 1e20), (1.0, 1e-25)], ids=str)
def test_rows_whose_products_with_the_weight_are_beyond_the_range(sizes):
    """The amax of long rows is found from x times the weight, unless that is too small or too large."""
    x = sizes[0] * torch.randn(8, 8192, device="cuda")
    weight = sizes[1] * (torch.rand(8192, device="cuda") + 0.3)
    found = rms_norm_fp8(x, weight, 0.0)
    wanted = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.double()
    torch.testing.assert_close(found.scale.double(), wanted.abs().amax(-1, keepdim=True) / 448, rtol=1e-5, atol=0.0)
    values = wanted / found.scale
    off, half = (found.out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
    assert (off <= 1.001 * half).all()


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_of_a_layer_norm(shape, dtype):
    x, residual = ((3 * torch.randn(shape, device="cuda") + 1).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(2, shape[-1], device="cuda")).to(dtype)
    for added, scale in itertools.product((None, residual), (None, torch.tensor(0.004, device="cuda"))):
        poison(shape, (*shape[:-1], 1), dtype=dtype)
        found = layer_norm_fp8(x, weight, bias, 1e-3, residual=added, scale=scale)
        total = x.double() + (0.0 if added is None else added.double())
        wanted = torch.nn.functional.layer_norm(total, shape[-1:], weight.double(), bias.double(), 1e-3)
        amax = wanted.abs().amax(-1, keepdim=True)
        if scale is None:
            torch.testing.assert_close(found.scale.double(), amax / 448, rtol=1e-5, atol=1e-7)
        else:
            torch.testing.assert_close(found.amax.double(), amax.amax(), rtol=1e-5, atol=0.0)
        values = (wanted / found.scale).clamp(-448, 448)
        off, half = (found.out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half + 1e-5 / found.scale).all()
        if added is not None:
            torch.testing.assert_close(found.total, total.to(dtype))


def test_a_linear_layer_of_pytorch_reads_it():
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 1024, device="cuda") / 32
    found = rms_norm_fp8(x)
    scale_b = weight.abs().amax(1, keepdim=True) / 448
    quantized = (weight / scale_b).to(torch.float8_e4m3fn)
    out = torch._scaled_mm(found.out, quantized.T, found.scale, scale_b.T, out_dtype=torch.bfloat16)
    right = (found.out.double() * found.scale) @ (quantized.double() * scale_b).T
    assert (out.double() - right).norm() < 1e-2 * right.norm()
