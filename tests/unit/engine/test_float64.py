"""float64 on the CPU: modules that were made `.double()`, and what is refused. `generators` has values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_sdpa
from cudnn_sdpa import DtypeError
from cudnn_sdpa import nn as cn

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
