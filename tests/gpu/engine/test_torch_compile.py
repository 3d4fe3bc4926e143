"""torch.compile and the operators' contract on CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.sdpa import SDPA


def problem(sq=64, skv=96):
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, skv, 64, torch.bfloat16) for _ in range(2))
    return q, k, v


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def attend(q, k, v):
    out, lse = cudnn_sdpa.sdpa(q * 1.0, k, v, is_causal=True, causal_alignment="bottom_right", return_lse=True)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) * 2.0, lse


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fullgraph(dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for sq, skv in ((64, 96), (33, 40), (70, 150)):
            q, k, v = problem(sq, skv)
            out, lse = compiled(q, k, v)
            expected, expected_lse = exact(q, k, v, is_causal=True, causal_alignment="bottom_right")
            assert error(out, 2 * expected.transpose(1, 2).reshape(2, sq, -1)) < TOLERANCE[torch.bfloat16]
            assert error(lse, expected_lse) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_reduce_overhead():
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    q, k, v = problem()
    attend(q, k, v)
    with torch.no_grad():
        for _ in range(5):
            q.normal_()
            out, _ = compiled(q, k, v)
            expected, _ = exact(q, k, v, is_causal=True, causal_alignment="bottom_right")
            assert error(out, 2 * expected.transpose(1, 2).reshape(2, 64, -1)) < TOLERANCE[torch.bfloat16]


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_lengths", [False, True])
def test_opcheck(with_lengths):
    q, k, v = problem()
    ends = torch.tensor([96, 33], dtype=torch.int32, device="cuda") if with_lengths else None
    operators = torch.ops.cudnn_sdpa
    inputs = SDPA.inputs_of(
        from_fields(
            ForwardArguments, q, k, v, seq_lens_kv=ends, is_causal=True, causal_alignment="bottom_right", scale=0.3
        )
    )
    for operator, arguments in (
        (operators.sdpa_forward, inputs),
        (operators.sdpa_forward_lse, inputs),
        (operators.sdpa_forward_out, (*inputs, torch.empty_like(q))),
    ):
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("needs", [(True,) * 5, (True, False, False, False, False), (False, True, False, True, True)])
def test_opcheck_of_the_backward_pass(needs):
    q, k, v = problem()
    mask = torch.randn(4, 64, 96, device="cuda", dtype=torch.bfloat16)
    inputs = SDPA.inputs_of(
        from_fields(ForwardArguments, q, k, v, mask, torch.randn(4, device="cuda"), is_causal=True, scale=0.3)
    )
    out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(*inputs)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (torch.randn_like(out), out, lse, *inputs, list(needs))
    results = torch.library.opcheck(torch.ops.cudnn_sdpa.sdpa_backward, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}
