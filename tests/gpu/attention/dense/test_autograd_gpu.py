"""Autograd of `sdpa` on a GPU: which gradients are computed, what is copied, and checkpoints."""

from __future__ import annotations

import dense_calls
import pytest
import torch
import torch.nn.functional as F
from attention_checks import make
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import plan_cache, sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense import launch
from cudnn_sdpa.attention.dense.sdpa import SDPA

NAMES = ("q", "k", "v", "attn_mask", "sinks")


def inputs(layout="bshd", dtype=torch.bfloat16, sq=64, skv=96):
    cuda = {"device": "cuda"}
    return {
        "q": make(layout, 2, 4, sq, 64, dtype),
        "k": make(layout, 2, 2, skv, 64, dtype),
        "v": make(layout, 2, 2, skv, 64, dtype),
        "attn_mask": torch.randn(4, 1, skv, dtype=dtype, **cuda),
        "sinks": torch.randn(4, **cuda) + 0.5,
    }


def qkv(layout="bshd", dtype=torch.bfloat16):
    return [x.requires_grad_() for x in list(inputs(layout, dtype).values())[:3]]


def assert_close(actual, expected, tolerance=1e-2):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert dense_calls.difference(a, b.detach().double()) < tolerance


READABLE = {
    "dense": lambda g: g,
    "bshd": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda g: torch.cat([g, g], dim=-1)[..., : g.shape[-1]],
    "every other row": lambda g: g.repeat_interleave(2, dim=2)[:, :, ::2],
}
COPIED = {
    "one number": lambda g: g[:1, :1, :1, :1].expand_as(g),
    "expanded rows": lambda g: g[:, :, :1].expand_as(g),
    "expanded batch": lambda g: g[:1].expand_as(g),
    "expanded columns": lambda g: g[..., :1].expand_as(g),
    "transposed": lambda g: g.mT.contiguous().mT,
    "every other column": lambda g: torch.cat([g, g], dim=-1)[..., ::2],
    "odd steps": lambda g: F.pad(g, (0, 3))[..., : g.shape[-1]],
    "odd address": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g),
}


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("name", [*READABLE, *COPIED])
def test_grad_out_is_copied_only_if_necessary(name, order):
    c = dense_calls.plain(layouts=(order, "bhsd", "bshd"))
    t = dense_calls.tensors(c)
    t["grad_out"] = (READABLE | COPIED)[name](t["grad_out"])
    with torch.no_grad():
        out = sdpa(t["q"], t["k"], t["v"])
    read = launch.readable_gradient(t["grad_out"], out)
    assert (read is t["grad_out"]) == (name in READABLE)
    assert torch.equal(read, t["grad_out"])
    if name in COPIED:
        assert read.stride() == out.stride()
    assert dense_calls.check(c, t) == []


@pytest.mark.parametrize("wanted", [*((name,) for name in NAMES), ("q", "v"), ("k", "sinks"), NAMES], ids="+".join)
def test_only_needed_gradients_are_computed(wanted):
    tensors = inputs()
    everything = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    sdpa(**everything).square().sum().backward()
    plan_cache.clear()
    some = {name: x.clone().requires_grad_(name in wanted) for name, x in tensors.items()}
    sdpa(**some).square().sum().backward()
    for name, x in some.items():
        if name in wanted:
            assert_close([x.grad], [everything[name].grad])
        else:
            assert x.grad is None
    (plan,) = [plan for plan in plan_cache.plans() if plan.key.name == "sdpa_backward"]
    written = {operand.name for operand in plan.key.outputs}
    assert ("grad_bias" in written) == ("attn_mask" in wanted)  # as large as the scores
    call = SDPA.inputs_of(from_fields(ForwardArguments, **tensors))
    out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(*call)
    needs = [name in wanted for name in NAMES]
    made = torch.ops.cudnn_sdpa.sdpa_backward(2 * out, out, lse, *call, needs)
    assert_close(made, [some[name].grad for name in NAMES if name in wanted])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4}, {"softcap": 9.0}], ids=str)
def test_checkpointing_changes_nothing(options, use_reentrant):
    tensors = inputs() if "softcap" not in options else dict(zip("qkv", qkv(), strict=True))
    names = list(tensors)

    def attend(*leaves):
        named = dict(zip(names, leaves, strict=True))
        return sdpa(**named, **options, is_causal=True, deterministic=True).square()

    results = []
    for run in (attend, lambda *leaves: checkpoint(attend, *leaves, use_reentrant=use_reentrant)):
        leaves = [tensors[name].detach().clone().requires_grad_() for name in names]
        torch.manual_seed(77)
        out = run(*leaves)
        torch.randn(3, device="cuda")  # the generator moves on before the backward pass
        out.sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
