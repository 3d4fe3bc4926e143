"""Bit-exact results and gradients from run to run, where requested."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, make, poison

import cudnn_sdpa
from cudnn_sdpa import plan_cache, sdpa_paged
from cudnn_sdpa.graph.backend import is_repeatable

#: Runs that must give the same bits.
RUNS = 1000
BATCH, LENGTH, DIM = 2, 1100, 64  # many tiles of keys are summed into one tile of query gradients

CASES = {
    "grouped heads": ((8, 2), {}),
    "causal": ((4, 4), {"is_causal": True}),
    "bottom-right": ((4, 1), {"is_causal": True, "causal_alignment": "bottom_right"}),
    "window_size": ((4, 2), {"is_causal": True, "window_size": (300, 0)}),
    "sinks": ((4, 2), {"is_causal": True, "sinks": True}),
    "lengths": ((4, 2), {"lengths": True}),
    "mask": ((4, 2), {"attn_mask": True}),
    "dropout": ((4, 2), {"dropout_p": 0.2}),
}


def inputs(heads, dtype=torch.bfloat16, dim=DIM, length=LENGTH):
    q = make("bshd", BATCH, heads[0], length, dim, dtype)
    k, v = (make("bshd", BATCH, heads[1], length, dim, dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v)]


def once(function, leaves, grad_out, **options):
    """Output and gradients of one run, written into memory with other contents."""
    for x in leaves:
        poison(tuple(x.shape), dtype=x.dtype)
    torch.manual_seed(3)
    out = function(*leaves[:3], **options)
    return [x.clone() for x in (out, *torch.autograd.grad(out, leaves, grad_out))]


def assert_all_equal(run):
    first = run()
    assert all(x.isfinite().all() and x.any() for x in first)
    for number in range(1, RUNS):
        for name, (a, b) in enumerate(zip(first, run(), strict=True)):
            assert torch.equal(a, b), f"result {name} of run {number} differs by {float((a - b).abs().max())}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_dense(name, dtype):
    heads, options = CASES[name]
    options = dict(options)
    leaves = inputs(heads, dtype)
    if options.pop("lengths", False):
        options["seq_lens_kv"] = torch.tensor([1100, 700], dtype=torch.int32, device="cuda")
    for side, shape in (("sinks", (heads[0],)), ("attn_mask", (1, heads[0], LENGTH, LENGTH))):
        if options.get(side):
            side_dtype = torch.float32 if side == "sinks" else dtype
            options[side] = torch.randn(shape, device="cuda", dtype=side_dtype).requires_grad_()
            leaves.append(options[side])
    grad_out = torch.randn_like(leaves[0])
    assert_all_equal(lambda: once(cudnn_sdpa.sdpa, leaves, grad_out, **options, deterministic=True))
    assert_chosen(deterministic=True)


@pytest.mark.parametrize(("dim", "length"), [(64, LENGTH), (160, 300), (33, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ["grouped heads", "causal", "mask"])
def test_own_kernels(name, dtype, dim, length):
    """Above 128 scores are kept in memory; head vectors of 33 are read element by element."""
    heads, options = CASES[name]
    leaves, options = inputs(heads, dtype, dim, length), dict(options)
    if options.get("attn_mask"):
        options["attn_mask"] = torch.randn((1, heads[0], length, length), device="cuda", dtype=dtype)
    grad_out = torch.randn_like(leaves[0])
    with cudnn_sdpa.providers("own"):
        assert_all_equal(lambda: once(cudnn_sdpa.sdpa, leaves, grad_out, **options, deterministic=True))
    assert {plan.key.provider for plan in plan_cache.plans()} == {"own"}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen(is_causal, sinks):
    ends = torch.tensor([0, 900, 900, 1003, 2200], dtype=torch.int32, device="cuda")
    leaves = [torch.randn(2200, heads, DIM, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    options = {"is_causal": is_causal, "deterministic": True}
    if sinks:
        options["sinks"] = torch.randn(8, device="cuda").requires_grad_()
        leaves.append(options["sinks"])
    grad_out = torch.randn_like(leaves[0])

    def attend(q, k, v, **options):
        return cudnn_sdpa.sdpa_varlen(q, k, v, ends, ends, 1197, 1197, **options)

    assert_all_equal(lambda: once(attend, leaves, grad_out, **options))
    assert_chosen(deterministic=True)


KEYS = 4096


def of_single_queries(where):
    """A call with 32 single queries on thousands of keys each, and the float64 result of one of them."""
    dim = 64 if "paged" in where else 128  # cuDNN's kernels serve single queries of 64 on pages
    q, k, v = (torch.randn(32, heads, n, dim, device="cuda", dtype=torch.bfloat16) for heads, n in SINGLE)
    lengths = torch.randint(KEYS // 2, KEYS, (32,), device="cuda", dtype=torch.int32)
    sinks = torch.randn(32, device="cuda")
    number = 17
    length = KEYS if where == "dense" else int(lengths[number])
    keys, values = (x[number, :, :length].double().repeat_interleave(4, 0) for x in (k, v))
    scores = (q[number].double() @ keys.mT) * dim**-0.5
    if where == "sinks":
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1)], 2)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    expected = scores.softmax(-1) @ values
    options = {"dense": {}, "sinks": {"sinks": sinks, "seq_lens_kv": lengths}, "lengths": {"seq_lens_kv": lengths}}
    if where in options:
        return lambda **more: cudnn_sdpa.sdpa(q, k, v, **options[where], **more), number, expected
    page = 64
    k_pages, v_pages = (x.transpose(1, 2).reshape(32 * KEYS // page, page, 8, dim) for x in (k, v))
    table = torch.arange(len(k_pages), device="cuda", dtype=torch.int32).view(32, -1)
    if where == "paged, in place":
        cudnn_sdpa.trusted_pages(table, lengths, pages=len(k_pages), page_size=page)
    return lambda: sdpa_paged(q, k_pages, v_pages, table, lengths, page_layout="NHD"), number, expected


SINGLE = ((32, 1), (8, KEYS), (8, KEYS))


@pytest.mark.parametrize("where", ["dense", "lengths", "sinks", "paged, in place", "paged, copied"])
def test_single_queries(where, deterministic_algorithms):
    """cuDNN's kernels for them sum in any order; deterministic calls use others."""
    attend, number, expected = of_single_queries(where)
    attend(), attend()  # nondeterministic
    deterministic_algorithms(True)
    first = attend()
    assert_right(first[number], expected)
    for _ in range(RUNS):
        assert torch.equal(attend(), first)
    (exact,) = (plan for plan in plan_cache.plans() if plan.key.option_values.get("deterministic"))
    assert is_repeatable(exact.engine, exact.knobs, single_query=True)
    deterministic_algorithms(False)
    builds = plan_cache.info().builds
    used = exact.last_used
    assert_right(attend()[number], expected)
    assert (plan_cache.info().builds, exact.last_used) == (builds, used)  # the earlier plan
    if "paged" not in where:
        for _ in range(RUNS):
            assert torch.equal(attend(deterministic=True), first)
        assert exact.last_used > used


def assert_right(found, expected):
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


def backward_plans():
    return [plan for plan in plan_cache.plans() if plan.key.name == "sdpa_backward"]


def assert_chosen(*, deterministic):
    """There is one backward plan, built with or without determinism."""
    assert {plan.key.option_values["deterministic"] for plan in backward_plans()} == {deterministic}


@pytest.fixture
def deterministic_algorithms():
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


OPTIONS = {"plain": {}, "window_size": {"window_size": (50, 3)}, "scale": {"scale": -0.2}}


@pytest.mark.usefixtures("default_providers")
@pytest.mark.parametrize("name", [*OPTIONS, "varlen"])
def test_deterministic_none_follows_pytorchs_setting(name, deterministic_algorithms):
    leaves = inputs((4, 2))

    def attend(deterministic):
        if name == "varlen":
            packed = [x[0].transpose(0, 1) for x in leaves]
            ends = torch.tensor([0, 500, LENGTH], dtype=torch.int32, device="cuda")
            return cudnn_sdpa.sdpa_varlen(*packed, ends, ends, 600, 600, deterministic=deterministic)
        return cudnn_sdpa.sdpa(*leaves, **OPTIONS[name], deterministic=deterministic)

    for switch, said, expected in (
        (False, None, False),
        (True, None, True),
        (True, False, False),
        (False, True, True),
        (False, None, False),
    ):
        plan_cache.clear()
        for _ in range(3):  # cold, found by its signature, and as the last call
            deterministic_algorithms(switch)
            out = attend(said)
            deterministic_algorithms(not switch)  # the setting of the forward pass decides
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            deterministic_algorithms(switch)
            torch.autograd.grad(attend(said), leaves, torch.ones_like(out))
            assert_chosen(deterministic=expected)
