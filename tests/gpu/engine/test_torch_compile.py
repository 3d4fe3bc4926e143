"""torch.compile and the operators' contract on CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa


def problem(sq=64, skv=96):
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, skv, 64, torch.bfloat16) for _ in range(2))
    return q, k, v


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_out_under_compile():
    def into(q, k, v, out):
        cudnn_sdpa.sdpa(q, k, v, out=out)
        return out + 1

    q, k, v = problem()
    out = torch.full_like(q, torch.nan)
    with torch.no_grad():
        result = torch.compile(into, fullgraph=True)(q, k, v, out)
    expected, _ = exact(q, k, v)
    assert error(out, expected) < TOLERANCE[torch.bfloat16]
    assert error(result - 1, expected) < 2e-2


TRAINING = {
    "plain": lambda q, k, v, *_: cudnn_sdpa.sdpa(q * 1.5, k, v, is_causal=True),
    "window_size": lambda q, k, v, *_: cudnn_sdpa.sdpa(q * 1.5, k, v, window_size=(9, 3)),
    "mask": lambda q, k, v, mask, _: cudnn_sdpa.sdpa(q * 1.5, k, v, attn_mask=mask),
    "mask and sinks": lambda q, k, v, mask, sinks: cudnn_sdpa.sdpa(q * 1.5, k, v, attn_mask=mask, sinks=sinks),
    "drop-in": lambda q, k, v, mask, _: cudnn_sdpa.scaled_dot_product_attention(
        q * 1.5, k, v, attn_mask=mask, enable_gqa=True
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TRAINING)
def test_training(name, dynamic):
    """Both passes in one graph each, with the gradients of eager mode, in the same memory order."""
    compiled = torch.compile(TRAINING[name], fullgraph=True, dynamic=dynamic)
    for sq, skv in ((64, 96), (33, 40), (70, 152)):
        mask = torch.randn(4, sq, skv, device="cuda", dtype=torch.bfloat16)
        tensors = [*problem(sq, skv), mask, torch.randn(4, device="cuda")]
        grad_out, results = torch.randn_like(tensors[0]), []
        for function in (compiled, TRAINING[name]):
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, grad_out, allow_unused=True)])
        for ours, theirs in zip(*results, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.stride() == theirs.stride()
                assert error(ours.detach(), theirs.detach().double()) < 2 * TOLERANCE[torch.bfloat16]
