"""float64 on the CPU: gradients by finite differences, and modules that were made `.double()`."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_sdpa
from cudnn_sdpa import DtypeError
from cudnn_sdpa import nn as cn


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


CALLS = {
    "rms_norm": (cudnn_sdpa.rms_norm, lambda: (doubles(3, 2, 8), doubles(8))),
    "rms_norm without weight": (cudnn_sdpa.rms_norm, lambda: (doubles(3, 8),)),
    "zero-centered": (lambda x, w: cudnn_sdpa.rms_norm(x, w, zero_centered=True), lambda: (doubles(3, 8), doubles(8))),
    "residual": (
        lambda x, w, r: cudnn_sdpa.rms_norm(x, w, residual=r),
        lambda: (doubles(3, 8), doubles(8), doubles(3, 8)),
    ),
    "layer_norm": (cudnn_sdpa.layer_norm, lambda: (doubles(3, 8), doubles(8), doubles(8))),
    "silu_mul": (cudnn_sdpa.silu_mul, lambda: (doubles(3, 8), doubles(3, 8))),
    "silu_mul of halves": (cudnn_sdpa.silu_mul, lambda: (doubles(3, 16),)),
    "conv1d": (cudnn_sdpa.conv1d, lambda: (doubles(2, 4, 6), doubles(3, 4, 3), doubles(3))),
    "conv2d": (
        lambda *x: cudnn_sdpa.conv2d(*x, stride=2, padding=1, groups=2),
        lambda: (doubles(2, 4, 5, 5), doubles(4, 2, 3, 3), doubles(4)),
    ),
    "conv2d with silu": (
        lambda *x: cudnn_sdpa.conv2d(*x, activation="silu"),
        lambda: (doubles(1, 4, 4, 4), doubles(2, 4, 3, 3), doubles(2)),
    ),
    "conv3d": (cudnn_sdpa.conv3d, lambda: (doubles(1, 2, 3, 4, 4), doubles(2, 2, 2, 2, 2))),
    "patches": (
        lambda *x: cudnn_sdpa.conv2d(*x, stride=2),
        lambda: (doubles(1, 3, 4, 6), doubles(5, 3, 2, 2), doubles(5)),
    ),
    "sdpa": (
        lambda q, k, v: cudnn_sdpa.sdpa(q, k, v, is_causal=True),
        lambda: (doubles(1, 4, 3, 8), doubles(1, 2, 3, 8), doubles(1, 2, 3, 8)),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_finite_differences(name):
    call, make = CALLS[name]
    torch.manual_seed(0)
    leaves = make()
    results = call(*leaves)
    assert all(x.dtype is torch.float64 for x in (results if isinstance(results, tuple) else (results,)))
    assert torch.autograd.gradcheck(call, leaves)


MODULES = {
    "transformer layer": (lambda: cn.TransformerLayer(64, 4, 96, num_kv_heads=2, is_causal=True), (2, 5, 64)),
    "vision encoder": (
        lambda: cn.VisionEncoder(image_size=8, patch_size=4, embed_dim=32, num_heads=2, num_layers=2),
        (2, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_float64_match_float32_up_to_rounding(name):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(shape)
    rounded = module(x)
    found = module.double()(x.double())
    assert found.dtype is torch.float64
    error = float(((rounded.double() - found).norm() / found.norm()).detach())
    assert 1e-12 < error < 1e-5


def test_float64_is_refused_on_gpus():
    """cuDNN has no float64 kernels; the tensor's device decides."""
    with FakeTensorMode():
        x, elsewhere = (torch.empty(2, 8, dtype=torch.float64, device=device) for device in ("cpu", "cuda"))
    assert cudnn_sdpa.rms_norm(x).dtype is torch.float64
    with pytest.raises(DtypeError, match=r"x: got float64(.*)on the CPU only"):
        cudnn_sdpa.rms_norm(elsewhere)


def test_other_dtypes_are_refused():
    with pytest.raises(DtypeError, match=r"got int64"):
        cudnn_sdpa.silu_mul(torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))


def test_a_zero_centered_float32_weight_with_a_float64_input():
    x, weight = torch.randn(6, 32, dtype=torch.float64), torch.randn(32).mul_(1e-3)
    right = torch.nn.functional.rms_norm(x, (32,), weight.double() + 1, 1e-6)
    torch.testing.assert_close(
        cudnn_sdpa.rms_norm(x, weight, eps=1e-6, zero_centered=True), right, rtol=1e-12, atol=1e-12
    )
