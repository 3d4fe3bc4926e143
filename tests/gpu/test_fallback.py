"""`fallback("torch")`: what cuDNN declines runs on PyTorch, if asked for and not otherwise."""

from __future__ import annotations

import logging

import fuzz
import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention import fallback as module

#: What cuDNN declines: changes to a plain configuration.
DECLINED = {
    "head dims of 264 with gradients": {"dims": (264, 264)},
    "linear biases without a causal mask": {"alibi": True, "is_causal": False},
    "bottom-right with lengths and a mask": {
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "lengths": "kv",
        "mask": "float",
        "mask_shape": (1, 4, 40, 50),
        "mask_grad": True,
    },
    "a soft cap and the gradient of a mask": {
        "softcap": 5.0,
        "mask": "float",
        "mask_shape": (40, 50),
        "mask_grad": True,
    },
}


@pytest.fixture(autouse=True)
def nothing_said():
    module._said.clear()


def config(name):
    return fuzz.plain(number=7, sq=40, skv=50, **DECLINED[name])


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined_is_right_on_pytorch(name, caplog):
    c = config(name)
    with pytest.raises(cudnn_sdpa.UnsupportedError):
        fuzz.check(c)
    with cudnn_sdpa.fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        assert fuzz.check(c) == []
        assert fuzz.check(c) == []
    assert len(caplog.records) == 1
    assert "running on PyTorch instead" in caplog.text
    with pytest.raises(cudnn_sdpa.UnsupportedError):
        fuzz.check(c)


def test_what_cudnn_takes_stays_with_it(caplog):
    with cudnn_sdpa.fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        assert fuzz.check(fuzz.plain(number=3)) == []
    assert not caplog.records
    assert cudnn_sdpa.plan_cache.info().builds == 2


def test_none_switches_an_outer_fallback_off():
    with (
        cudnn_sdpa.fallback("torch"),
        cudnn_sdpa.fallback(None),
        pytest.raises(cudnn_sdpa.UnsupportedError),
    ):
        fuzz.check(config("linear biases without a causal mask"))


def test_packed_sequences_and_out_fall_back_too():
    q = torch.randn(60, 4, 264, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([0, 20, 60], dtype=torch.int32, device="cuda")
    with cudnn_sdpa.fallback("torch"):
        out = cudnn_sdpa.sdpa_varlen(q, q, q, ends, ends, 40, 40, is_causal=True)
        (gradient,) = torch.autograd.grad(out.square().sum(), q)
        assert torch.isfinite(gradient).all()
        x = torch.randn(1, 4, 30, 64, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(x)
        assert cudnn_sdpa.sdpa(x, x, x, alibi=True, out=target) is target
    torch.testing.assert_close(
        target, cudnn_sdpa.sdpa(x.cpu(), x.cpu(), x.cpu(), alibi=True).cuda(), atol=2e-2, rtol=2e-2
    )
