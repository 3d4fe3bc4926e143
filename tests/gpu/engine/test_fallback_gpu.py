"""`fallback("torch")`: unsupported calls run on PyTorch, only if requested."""

from __future__ import annotations

import logging

import dense_calls
import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.engine import fallback as module

#: Unsupported configurations: changes to a plain one.
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
    "softcap and the gradient of a mask": {
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
    return dense_calls.plain(number=7, sq=40, skv=50, **DECLINED[name])


@pytest.mark.parametrize("name", DECLINED)
def test_unsupported_calls_are_right_on_pytorch(name, caplog):
    c = config(name)
    with pytest.raises(cudnn_sdpa.UnsupportedError):
        dense_calls.check(c)
    with cudnn_sdpa.fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        assert dense_calls.check(c) == []
        assert dense_calls.check(c) == []
    assert len(caplog.records) == 1
    assert "running on PyTorch instead" in caplog.text
    with pytest.raises(cudnn_sdpa.UnsupportedError):
        dense_calls.check(c)


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
    with cudnn_sdpa.cpu_checks(None):
        expected = cudnn_sdpa.sdpa(x.cpu(), x.cpu(), x.cpu(), alibi=True)
    torch.testing.assert_close(target, expected.cuda(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (20, 30)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"softcap": 5.0}, {"deterministic": True}, {"mask": "bool"}, {"mask": "float"}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_unsupported_dtypes_and_head_dims_run_with_gradients(dtype, dims, options):
    shapes = ((4, 40, dims[0]), (2, 50, dims[0]), (2, 50, dims[1]))
    tensors = [torch.randn(2, *shape).to(dtype).double() for shape in shapes]
    grad_out = torch.randn(2, 4, 40, dims[1]).to(dtype).double()
    options = dict(options)
    kind = options.pop("mask", None)
    if kind is not None:
        mask = torch.rand(40, 50) < 0.7
        mask[3] = False  # a fully masked row
        number = torch.randn(40, 50).to(dtype).double().masked_fill(~mask, -torch.inf)
        options["attn_mask"] = mask if kind == "bool" else number
    results = []
    for device, to in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [x.to(device, to).requires_grad_() for x in tensors]
        own = dict(options)
        if kind is not None:
            own["attn_mask"] = options["attn_mask"].to(device, torch.bool if kind == "bool" else to)
        with cudnn_sdpa.fallback("torch"):
            out = cudnn_sdpa.sdpa(*leaves, **own)
        results.append((out, *torch.autograd.grad(out, leaves, grad_out.to(device, to))))
        if device == "cuda" and (dtype != torch.bfloat16 or dims != (64, 64)):
            with pytest.raises(cudnn_sdpa.ArgumentError, match=r"head dim|float16 or bfloat16 on cuda"):
                cudnn_sdpa.sdpa(*leaves, **own)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6, torch.bfloat16: 6e-2}[dtype]
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu().double(), exact, rtol=tolerance, atol=tolerance)
