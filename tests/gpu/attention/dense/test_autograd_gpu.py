"""Autograd of `sdpa` on a GPU: which gradients are computed, their memory order, and what is refused."""

from __future__ import annotations

import dense_calls
import pytest
import torch
import torch.nn.functional as F
from attention_checks import LAYOUTS, make
from torch.utils.checkpoint import checkpoint

import cudnn_sdpa
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


def dense_in_order_of(tensor):
    """Strides of a dense tensor in this one's memory order, with the last dimension innermost."""
    order = [*sorted(range(tensor.dim() - 1), key=lambda dim: (-tensor.stride(dim), dim)), tensor.dim() - 1]
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return tuple(strides)


def assert_close(actual, expected, tolerance=1e-2):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert dense_calls.difference(a, b.detach().double()) < tolerance


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_memory_order_of_their_inputs(layout, fast_path):
    leaves = qkv(layout)
    options = {} if fast_path else {"softcap": 20.0}
    for _ in range(3):
        out = sdpa(*leaves, **options)
        gradients = torch.autograd.grad(out, leaves, torch.randn_like(out))
        for x, gradient in zip(leaves, gradients, strict=True):
            assert gradient.shape == x.shape
            assert gradient.stride() == dense_in_order_of(x)
    c = dense_calls.plain(layouts=(layout,) * 3, is_causal=False, softcap=options.get("softcap"))
    assert dense_calls.check(c) == []


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("names", ["k", "v", "kv", "q", "qkv"])
def test_expanded_inputs(names, dims):
    """Gradients of expanded inputs are dense; autograd sums them over the expanded dimensions."""
    t = dense_calls.tensors(dense_calls.plain(layouts=("bhsd",) * 3))
    bases = {name: t[name].narrow(dims[0], 0, 1) for name in names}
    for name in names:
        for dim in dims[1:]:
            bases[name] = bases[name].narrow(dim, 0, 1)
        t[name] = bases[name].expand(t[name].shape)
    assert dense_calls.check(dense_calls.plain(), {**t}) == []
    bases = {name: x.clone().requires_grad_() for name, x in bases.items()}
    given = {name: (bases[name].expand(t[name].shape) if name in bases else t[name].detach()) for name in "qkv"}
    out = sdpa(**given, scale=0.2, is_causal=True)
    found = torch.autograd.grad(out, [*bases.values()], t["grad_out"])
    *_, reference, sizes = dense_calls.expected(
        dense_calls.plain(), {**t, **{name: x.detach() for name, x in given.items()}}, None
    )
    for gradient, name in zip(found, bases, strict=True):
        exact, size = (x[name].sum_to_size(gradient.shape) for x in (reference, sizes))
        assert dense_calls.difference(gradient, exact, torch.finfo(gradient.dtype).eps / 4 * size.norm()) < 2e-2
    whole = [x.detach().requires_grad_() for x in given.values()]
    for gradient in torch.autograd.grad(sdpa(*whole, scale=0.2, is_causal=True), whole, t["grad_out"]):
        assert sorted(gradient.stride()) == sorted(dense_in_order_of(gradient))  # dense, nothing repeated


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


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=["fast path", "general path"])
def test_expanded_grad_out_of_a_sum(options):
    """The most common grad_out, one value expanded, on the fast path and on the general one."""
    leaves = qkv()
    ones = torch.autograd.grad(sdpa(*leaves, **options), leaves, torch.ones_like(leaves[0]))
    for _ in range(2):
        assert_close(torch.autograd.grad(sdpa(*leaves, **options).sum(), leaves), ones)


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


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": True}], ids=str)
def test_autocast_matches_pytorch(options, to):
    tensors = [torch.randn(2, 4, n, 64, device="cuda") for n in (64, 96, 96)]
    mask = [torch.randn(64, 96, device="cuda")] if "attn_mask" in options else []
    results = []
    for function in (cudnn_sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in (*tensors, *mask)]
        named = {**options, "attn_mask": leaves[3]} if mask else options
        with torch.autocast("cuda", dtype=to):
            out = function(*leaves[:3], **named)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
    assert results[0][0].dtype == to
    assert_close(results[0], results[1], 2e-2)
