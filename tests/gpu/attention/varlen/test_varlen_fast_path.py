"""The fast path of packed sequences: cached calls compute what the first call did, and none are mixed up."""

from __future__ import annotations

import dense_calls
import pytest
import torch
from test_varlen import assert_right, expected, offsets, tensors

from cudnn_sdpa import plan_cache, sdpa_varlen
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall
from cudnn_sdpa.engine.operation import Operation

LENGTHS = (100, 77, 153)
LONGEST, TOKENS = max(LENGTHS), sum(LENGTHS)


def ends():
    return offsets(*LENGTHS)


def leaves():
    return [x.requires_grad_() for x in tensors(TOKENS)]


@pytest.fixture
def general(monkeypatch):
    """Counts forward calls outside the fast path, and backward calls that are bound to a plan."""
    taken = {"forward": 0, "backward": 0}

    def counted(name, function):
        def run(*args, **kwargs):
            taken[name] += 1
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(Operation, "on_gpu", counted("forward", Operation.on_gpu))
    monkeypatch.setattr(VarlenBackwardCall, "bind", counted("backward", VarlenBackwardCall.bind))
    plan_cache.clear()
    return taken


def differentiate(inputs, ends, ends_kv=None, **options):
    out = sdpa_varlen(*inputs, ends, ends if ends_kv is None else ends_kv, LONGEST, LONGEST, **options)
    out = out[0] if isinstance(out, tuple) else out
    grad_out = torch.randn_like(out)
    return out, torch.autograd.grad(out, inputs, grad_out), grad_out


@pytest.mark.parametrize("shared_cu_seqlens", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_size": (30, 0)}, {"softcap": 6.0}, {"return_lse": True}], ids=str)
def test_repeated_training_steps_are_right(general, options, shared_cu_seqlens):
    for number in range(4):
        inputs, where = leaves(), ends()
        out, gradients, grad_out = differentiate(
            inputs, where, None if shared_cu_seqlens else where.clone(), is_causal=True, **options
        )
        kept = {name: value for name, value in options.items() if name != "return_lse"}
        scale = {"scale": inputs[0].shape[2] ** -0.5}
        assert_right([out, *gradients], expected(LENGTHS, LENGTHS, *inputs, grad_out, is_causal=True, **scale, **kept))
        if number == 1:
            first = dict(general)
    if not options.get("return_lse"):
        assert general == first


def test_repeated_inference_is_right(general):
    for _ in range(4):
        q, k, v = tensors(TOKENS)
        where = ends()
        out = sdpa_varlen(q, k, v, where, where, LONGEST, LONGEST, is_causal=True)
        assert_right([out], expected(LENGTHS, LENGTHS, q, k, v, is_causal=True, scale=q.shape[2] ** -0.5))
    assert general["forward"] == 1


def test_offsets_are_read_in_each_call():
    q, k, v = tensors(TOKENS)
    for lengths in (LENGTHS, (10, 200, 120), (330, 0, 0)):
        where = offsets(*lengths)
        out = sdpa_varlen(q, k, v, where, where, TOKENS, TOKENS)
        assert_right([out], expected(lengths, lengths, q, k, v, scale=q.shape[2] ** -0.5))


CALLS = {
    "causal": {"is_causal": True},
    "full": {},
    "window_size": {"window_size": (20, 0)},
    "scale": {"scale": 0.3},
    "another scale": {"scale": 0.6},
    "softcap": {"softcap": 3.0},
    "another softcap": {"softcap": 9.0},
    "deterministic": {"deterministic": True, "is_causal": True},
}


def test_interleaved_calls_are_not_mixed_up():
    inputs, where = leaves(), ends()
    grad_out = torch.randn_like(inputs[0])

    def run(name):
        out = sdpa_varlen(*inputs, where, where, LONGEST, LONGEST, **CALLS[name])
        return [out, *torch.autograd.grad(out, inputs, grad_out)]

    wanted = {name: run(name) for name in CALLS}
    for name in [*CALLS, *reversed(CALLS), *("causal", "full") * 3]:
        for found, before in zip(run(name), wanted[name], strict=True):
            assert dense_calls.difference(found.detach(), before.detach().double()) < 1e-3
    outs = [results[0] for results in wanted.values()]
    assert sum(torch.equal(outs[0], other) for other in outs) == 2  # itself and the deterministic one


def test_grad_out_of_another_layout_is_right_when_warm():
    inputs, where = leaves(), ends()
    call = lambda: sdpa_varlen(*inputs, where, where, LONGEST, LONGEST, is_causal=True)  # noqa: E731
    dense = torch.randn_like(inputs[0])
    apart = torch.randn(TOKENS, 4, 128, device="cuda", dtype=torch.bfloat16)[..., 64:]
    for grad_out in (dense, dense, apart, torch.ones_like(dense[:1, :1]).expand_as(dense), dense):
        gradients = torch.autograd.grad(call(), inputs, grad_out)
        reference = expected(LENGTHS, LENGTHS, *inputs, grad_out, is_causal=True, scale=64**-0.5)
        assert_right([call(), *gradients], reference)


def test_the_fast_path_matches_the_operators():
    """The fast path computes what the operators compute."""
    inputs, where = leaves(), ends()
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    for _ in range(3):
        out = sdpa_varlen(*inputs, where, where, LONGEST, LONGEST, is_causal=True, sinks=sinks, deterministic=True)
        grad_out = torch.ones_like(out)
        short = torch.autograd.grad(out, [*inputs, sinks], grad_out)
        options = (LONGEST, LONGEST, True, "bottom_right", -1, -1, None, 0.0, None, True)
        operator = torch.ops.cudnn_sdpa.varlen_forward_lse(*inputs, sinks, where, None, None, *options)[0]
        assert torch.equal(out, operator)
        for one, other in zip(short, torch.autograd.grad(operator, [*inputs, sinks], grad_out), strict=True):
            assert torch.equal(one, other)
