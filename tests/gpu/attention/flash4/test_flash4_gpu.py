"""FlashAttention-4's kernels by `providers("fa4")`: values and gradients against float64, and what it declines.

Each hazard of its interface is here: masks that it aligns to the last key, bounds that are −1 elsewhere, rows without
a key, tensors that it would copy.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import generators
import packed_calls
import pytest
import torch
from aot_inductor import exported, printed_with, providers_of
from attention_checks import (
    LAYOUTS,
    TOLERANCE,
    captured,
    check,
    error,
    is_served_as_recorded,
    poison,
    served_by,
)
from compiled_functions import given_functions
from flash4_cases import CAPPED, CASES, MASKS, PACKED, RANDOM, SHAPES, WITH_SINKS, packed
from float64_reference import attend as exact
from native_way import is_off

from benchmarks.tools.ways import by_provider, recording, until_recorded, wait_for_native_calls
from cudnn_sdpa import (
    LayoutError,
    UnsupportedError,
    autotune,
    explain,
    plan_cache,
    providers,
    sdpa,
    sdpa_varlen,
    use_plan_store,
)
from cudnn_sdpa.attention.flash4 import checks
from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.attention.flash4.plans import kind_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(installed().missing), reason=f"FlashAttention-4: {installed().missing}"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="FlashAttention-4 is tested on compute capability 9.0",
    ),
]

#: Into how many tests the random calls of an operation are divided.
PARTS = 4


@pytest.fixture(autouse=True)
def by_flash4():
    with given_functions(), providers("fa4"):
        yield


def problem(shape, dtype=torch.bfloat16, layout="bshd"):
    heads, heads_kv, sq, skv, dim, dim_v = shape
    sizes = (heads, sq, dim), (heads_kv, skv, dim), (heads_kv, skv, dim_v)
    return [LAYOUTS[layout](2, h, s, d, dtype=dtype, device="cuda") for h, s, d in sizes]


@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_values(shape, mask):
    q, k, v = problem(shape)
    _, by = served_by(lambda: check(q, k, v, scale=0.21, **MASKS[mask]))
    assert by == {"fa4"}


@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "packed", "padded"])
def test_layouts(layout):
    q, k, v = problem(SHAPES[0], torch.float16, layout)
    check(q, k, v, is_causal=True)
    out = torch.full_like(q, math.nan)
    assert sdpa(q, k, v, is_causal=True, out=out) is out
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[q.dtype]


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.7])
def test_scales(scale):
    q, k, v = problem(SHAPES[0])
    check(q, k, v, scale=scale, is_causal=True)


def test_rows_without_a_key():
    """Of 300 queries on 60 keys, the first 240 see none. Where the last see none, its mask has a negative bound."""
    q, k, v = problem((8, 2, 300, 60, 128, 128))
    check(q, k, v, is_causal=True, causal_alignment="bottom_right")
    with pytest.raises(UnsupportedError, match="end at the last query"):
        sdpa(q, k, v, window_size=(33, -1))


@pytest.mark.parametrize("mask", ["causal", "causal window"])
def test_sinks(mask):
    q, k, v = problem(WITH_SINKS)
    sinks = torch.randn(8, device="cuda") * 2 + 0.5
    check(q, k, v, sinks=sinks, **MASKS[mask])


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_a_soft_cap_is_data(mask):
    """Calls that differ in the cap alone share a plan, which reads it: it is not compiled in."""
    q, k, v = problem(CAPPED[0])
    for softcap in (20.0, 3.0, 50.0):
        check(q, k, v, softcap=softcap, scale=0.9, **MASKS[mask])
    assert [plan.key.provider for plan in plan_cache.plans()] == ["fa4", "fa4"]  # with LSE and without


def test_known_calls_read_their_own_soft_cap():
    q, k, v = problem(CAPPED[0])
    for softcap in (20.0, 3.0, 50.0, 3.0, 20.0):
        out = sdpa(q, k, v, softcap=softcap, scale=0.9, is_causal=True)
        assert error(out, exact(q, k, v, softcap=softcap, scale=0.9, is_causal=True)[0]) < TOLERANCE[q.dtype]


def test_gradients_of_a_soft_cap():
    tensors = [x.requires_grad_() for x in problem(CAPPED[1])]
    for softcap in (20.0, 4.0):
        options = {"softcap": softcap, "scale": 0.5, "is_causal": True}
        out = sdpa(*tensors, **options)
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, tensors, grad_out)
        doubles = [x.detach().double().requires_grad_() for x in tensors]
        wanted = torch.autograd.grad(exact(*doubles, **options)[0], doubles, grad_out.double())
        for one, other in zip(found, wanted, strict=True):
            assert error(one, other) < 1e-2


@pytest.mark.parametrize(
    ("shape", "mask"), [case for case in CASES if case[0][4] == case[0][5] or case[0][0] == case[0][1]]
)
def test_gradients(shape, mask):
    tensors = [x.requires_grad_() for x in problem(shape)]
    options = {"scale": 0.21, **MASKS[mask]}
    out, by = served_by(lambda: sdpa(*tensors, **options))
    assert by == {"fa4"}
    grad_out = torch.randn_like(out)
    poison(*(tuple(x.shape) for x in tensors), dtype=out.dtype)
    poison((2, shape[0], shape[2] * shape[4]), (2, shape[0], shape[2]), dtype=torch.float32)
    found, by = served_by(lambda: torch.autograd.grad(out, tensors, grad_out))
    assert by == {"fa4"}
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    wanted = torch.autograd.grad(exact(*doubles, **options)[0], doubles, grad_out.double())
    for name, one, other in zip("qkv", found, wanted, strict=True):
        assert one.isfinite().all()
        assert error(one, other) < 8e-3, name


@pytest.mark.parametrize(("forward", "backward"), [("fa4", "cudnn"), ("cudnn", "fa4")])
def test_passes_by_two_providers(forward, backward):
    """The LSE of both is the same: with sinks too, which the backward pass does not read."""
    tensors = [x.requires_grad_() for x in problem(WITH_SINKS)]
    sinks = torch.randn(8, device="cuda").requires_grad_()
    with providers(forward):
        out = sdpa(*tensors, sinks=sinks, is_causal=True)
    grad_out = torch.randn_like(out)
    with providers(backward):
        found, by = served_by(lambda: torch.autograd.grad(out, (*tensors, sinks), grad_out))
    assert by == {None if backward == "cudnn" else backward}
    doubles = [x.detach().double().requires_grad_() for x in (*tensors, sinks)]
    right = exact(*doubles[:3], sinks=doubles[3], is_causal=True)[0]
    for one, other in zip(found, torch.autograd.grad(right, doubles, grad_out.double()), strict=True):
        assert error(one, other) < 8e-3


@pytest.mark.parametrize(("forward", "backward"), [("fa4", "cudnn"), ("cudnn", "fa4")])
def test_passes_of_a_soft_cap_by_two_providers(forward, backward):
    """As "fastest" has them with head dims of 256: cuDNN is faster forward, and FlashAttention-4 backward."""
    tensors, options = [x.requires_grad_() for x in problem(CAPPED[1])], {"softcap": 20.0, "is_causal": True}
    with providers(forward):
        out, by = served_by(lambda: sdpa(*tensors, **options))
    assert by == {None if forward == "cudnn" else forward}
    grad_out = torch.randn_like(out)
    with providers(backward):
        found, by = served_by(lambda: torch.autograd.grad(out, tensors, grad_out))
    assert by == {None if backward == "cudnn" else backward}
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    right = exact(*doubles, **options)[0]
    for one, other in zip(found, torch.autograd.grad(right, doubles, grad_out.double()), strict=True):
        assert error(one, other) < 1e-2


@pytest.mark.parametrize(("forward", "backward"), [("fa4", "own"), ("own", "fa4")])
def test_passes_by_it_and_by_own_kernels(forward, backward):
    tensors = [x.requires_grad_() for x in problem(SHAPES[0])]
    options = {"is_causal": True, "scale": 0.21}
    with providers(forward):
        out, by = served_by(lambda: sdpa(*tensors, **options))
    assert by == {forward}
    grad_out = torch.randn_like(out)
    with providers(backward):
        found, by = served_by(lambda: torch.autograd.grad(out, tensors, grad_out))
    assert by == {backward}
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    right = exact(*doubles, **options)[0]
    assert error(out.detach(), right.detach()) < TOLERANCE[out.dtype]
    for one, other in zip(found, torch.autograd.grad(right, doubles, grad_out.double()), strict=True):
        assert error(one, other) < 8e-3


def test_other_lengths_need_no_compilation():
    """One kind serves all lengths, batches and heads."""
    for batch, heads, length in ((1, 4, 65), (3, 8, 1000), (2, 12, 127)):
        q = torch.randn(batch, length, heads, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        k = torch.randn(batch, length, heads // 4, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        check(q, k, k, is_causal=True)


def test_a_captured_call_reads_new_data():
    q, k, v = problem(SHAPES[0])
    sdpa(q, k, v, is_causal=True)
    graph, out = captured(lambda: sdpa(q, k, v, is_causal=True))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    out.fill_(math.nan)
    graph.replay()
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[q.dtype]


def test_both_passes_in_a_cuda_graph():
    """Sums of gradients are cleared in each replay."""
    tensors = [x.requires_grad_() for x in problem(SHAPES[0])]
    grad_out = torch.randn_like(tensors[0])

    def step():
        out = sdpa(*tensors, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, tensors, grad_out)

    _, by = served_by(step)
    assert by == {"fa4"}
    graph, found = captured(step)
    for x in (*tensors, grad_out):
        x.detach().copy_(torch.randn_like(x))
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    out = exact(*doubles, is_causal=True)[0]
    wanted = out.detach(), *torch.autograd.grad(out, doubles, grad_out.double())
    for _ in range(2):
        for one in found:
            one.fill_(math.nan)
        graph.replay()
        for one, other in zip(found, wanted, strict=True):
            assert error(one, other) < 8e-3


def test_both_passes_of_packed_sequences_in_a_cuda_graph():
    c = packed_calls.plain(**packed("causal"))
    t = packed_calls.tensors(c)
    given = [t[name].requires_grad_() for name in "qkv"]
    offsets = t["cu_seqlens_q"], t["cu_seqlens_kv"]

    def step():
        out, lse = sdpa_varlen(*given, *offsets, 333, 257, is_causal=True, scale=c.scale, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, given, t["grad_out"])

    _, by = served_by(step)
    assert by == {"fa4"}
    graph, found = captured(step)
    for x in (*given, t["grad_out"]):
        x.detach().copy_(torch.randn_like(x))
    out, lse, gradients, _ = packed_calls.expected(
        c, {name: None if x is None else x.detach() for name, x in t.items()}
    )
    for _ in range(2):
        for one in found:
            one.fill_(math.nan)
        graph.replay()
        rows = lse.isfinite()
        assert torch.equal(found[1].isfinite(), rows)
        assert (found[1][rows] - lse[rows]).abs().max() < 1e-2
        for one, other in zip((found[0], *found[2:]), (out, *(gradients[name] for name in "qkv")), strict=True):
            assert error(one, other) < 8e-3


def test_a_first_launch_may_be_captured():
    """As after `warmup`: the plan was built, and its kernels are loaded by the launch."""
    q, k, v = problem((8, 2, 301, 301, 128, 128))
    found = explain(sdpa, q, k, v, is_causal=True)
    assert found.supported
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, k, v, is_causal=True)
    out.fill_(math.nan)
    graph.replay()
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[q.dtype]


def test_streams():
    """A launch is on the current stream of PyTorch's."""
    q, k, v = problem((8, 2, 3000, 3000, 128, 128))
    sdpa(q, k, v, is_causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        k.copy_(torch.randn_like(k))
        out = sdpa(q, k, v, is_causal=True)
    side.synchronize()
    expected = exact(q[:, :, -300:], k, v, is_causal=True, causal_alignment="bottom_right")[0]
    assert error(out[:, :, -300:], expected) < TOLERANCE[q.dtype]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seq_lens_kv": [90, 300]}, "lengths"),
        ({"attn_mask": True}, "attn_mask"),
        ({"deterministic": True}, "deterministic"),
        ({"dropout_p": 0.25}, "dropout"),
        ({"alibi": True, "is_causal": True}, "ALiBi"),
    ],
)
def test_what_it_lacks_is_refused_or_cudnns(options, reason):
    q, k, v = problem(SHAPES[0])
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.rand(300, 300, device="cuda") > 0.2
    if "seq_lens_kv" in options:
        options["seq_lens_kv"] = torch.tensor(options["seq_lens_kv"], dtype=torch.int32, device="cuda")
    with pytest.raises(UnsupportedError, match=reason):
        sdpa(q, k, v, **options)
    with providers("fa4", "cudnn"):
        _, by = served_by(lambda: sdpa(q, k, v, **options))
        assert by == {None}
        assert reason in explain(sdpa, q, k, v, **options).choice


@pytest.mark.parametrize("dims", [(48, 80), (8, 8)])
def test_head_dims_with_which_its_gradients_are_wrong_are_declined(dims):
    q, k, v = problem((2, 2, 256, 256, *dims))
    with pytest.raises(UnsupportedError, match="192 with 128"):
        sdpa(q, k, v, is_causal=True)


@pytest.mark.parametrize("mask", ["causal", "causal window"])
def test_sinks_far_above_all_scores(mask):
    """Its running maximum is of scores alone, so its sum overflows, and the LSE would be infinite."""
    q, k, v = (x.requires_grad_() for x in problem(WITH_SINKS))
    sinks = torch.full((8,), 300.0, device="cuda").requires_grad_()
    sinks.data[::2] = -300.0
    out, lse = sdpa(q, k, v, sinks=sinks, return_lse=True, **MASKS[mask])
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, sinks), grad_out)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    right, right_lse = exact(*doubles[:3], sinks=doubles[3], **MASKS[mask])
    assert error(out.detach(), right.detach()) < TOLERANCE[out.dtype]
    assert error(lse.detach(), right_lse.detach()) < 1e-5
    for one, other in zip(found, torch.autograd.grad(right, doubles, grad_out.double()), strict=True):
        assert one.isfinite().all()
        assert error(one, other) < 8e-3


def test_expanded_keys_are_not_copied():
    q, k, v = problem(SHAPES[0])
    expanded = k[:, :1].expand(-1, 2, -1, -1)
    with pytest.raises(UnsupportedError, match="expanded"):
        sdpa(q, expanded, v)


def test_queries_that_it_cannot_read():
    """Where own kernels are named, they read such strides, and what begins at no multiple of 16 bytes is copied."""
    q, k, v = problem(SHAPES[0])
    apart = q.new_empty(*q.shape[:3], 132)[..., :128].copy_(q)
    beside = q.new_empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    expected = exact(q, k, v, is_causal=True)[0]
    for given, served, refused in ((apart, "own", "got stride 132"), (beside, "fa4", "got an address 2 bytes past")):
        with providers("fa4", "cudnn"), pytest.raises(LayoutError, match=f"^q: {refused}"):
            sdpa(given, k, v, is_causal=True)
        with providers("fa4", "own"):
            for _ in range(3):
                out, by = served_by(lambda given=given: sdpa(given, k, v, is_causal=True))
                assert by == {served}
                assert error(out, expected) < TOLERANCE[q.dtype]


RECORDED = {"full": {}, "causal": {"is_causal": True}, "soft cap": {"is_causal": True, "softcap": 20.0}}


@pytest.mark.skipif(is_off(), reason="only native calls are launched as recorded")
@pytest.mark.parametrize("mask", RECORDED)
def test_recorded_launches(mask):
    """Kernels are launched without its functions, with the same bits, for other data at other addresses."""
    options = {"scale": 0.21, **RECORDED[mask]}
    assert wait_for_native_calls()
    with recording():
        (said,) = until_recorded(lambda: sdpa(*problem(SHAPES[0]), **options))
        assert said == "as recorded (kernels: 1, memsets: 0)"
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                q, k, v = problem(SHAPES[0])
                poison(q.shape, dtype=q.dtype)
                out = sdpa(q, k, v, **options)
                assert is_served_as_recorded({"q": q, "k": k, "v": v, "out": out}, options)
                with by_provider():  # by its functions
                    assert torch.equal(sdpa(q, k, v, **options), out)
                assert error(out, exact(q, k, v, **options)[0]) < TOLERANCE[q.dtype]
                scaled = {**options, "scale": -0.4}  # the recorded scale is another
                assert error(sdpa(q, k, v, **scaled), exact(q, k, v, **scaled)[0]) < TOLERANCE[q.dtype]


@pytest.mark.skipif(is_off(), reason="only native calls are launched as recorded")
def test_recorded_launches_of_packed_sequences():
    c = packed_calls.plain(**packed("causal"))
    t = packed_calls.tensors(c)
    given = {name: t[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")}

    def call():
        return sdpa_varlen(**given, max_seqlen_q=333, max_seqlen_kv=257, is_causal=True, scale=c.scale)

    assert wait_for_native_calls()
    with recording():
        assert until_recorded(call) == ["as recorded (kernels: 1, memsets: 0)"]
        expected = packed_calls.expected(c, t)[0]
        given["v"] = -given["v"]
        poison(t["q"].shape, dtype=c.dtype)
        out = call()
        assert error(out, -expected) < TOLERANCE[out.dtype]
        with by_provider():
            assert torch.equal(call(), out)


@pytest.mark.skipif(is_off(), reason="only native calls are launched as recorded")
def test_gradients_are_not_recorded():
    """Kernels add to sums of gradients, which are cleared first, in any order."""
    q, k, v = (x.requires_grad_() for x in problem(SHAPES[0]))
    assert wait_for_native_calls()
    with recording():
        said = until_recorded(lambda: sdpa(q, k, v, is_causal=True).backward(torch.randn_like(q)))
    backward = "by FlashAttention-4, because its functions add to memory that is cleared before, in any order"
    assert sorted(said) == ["as recorded (kernels: 1, memsets: 0)", backward]


def test_explain_says_who_serves():
    q, k, v = problem(SHAPES[0])
    found = explain(sdpa, q, k, v, is_causal=True)
    assert (found.provider, found.engine) == ("fa4", "FlashAttention-4")
    assert "fa4" in found.choice


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name):
    """Both passes, with sequences without queries or keys, and queries that see no key."""
    faults, by = served_by(lambda: packed_calls.check(packed_calls.plain(**packed(name))))
    assert not faults, faults
    assert by == {"fa4"}


def test_packed_sequences_without_lse():
    c = packed_calls.plain(**packed("causal"))
    t = packed_calls.tensors(c)
    given = [t[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")]
    options = {"is_causal": True, "scale": c.scale}
    expected = packed_calls.expected(c, t)[0]
    out = torch.full_like(t["q"], math.nan)
    _, by = served_by(lambda: sdpa_varlen(*given, 333, 257, out=out, **options))
    assert by == {"fa4"}
    assert error(out, expected) < TOLERANCE[out.dtype]
    graph, captured_out = captured(lambda: sdpa_varlen(*given, 333, 257, **options))
    t["v"].mul_(-1)
    captured_out.fill_(math.nan)
    graph.replay()
    assert error(captured_out, -expected) < TOLERANCE[out.dtype]


@pytest.mark.parametrize(
    ("ends", "meant"),
    [
        ((0, 70, 50, 300, 400, 9000), (0, 70, 70, 300, 400, 537)),
        ((-5, 70, 75, 300, 400, 537), (0, 70, 75, 300, 400, 537)),
        ((0, 70, 75, 300, 400, 2**31 - 1), (0, 70, 75, 300, 400, 537)),
    ],
)
def test_offsets_that_lie_are_those_of_the_tensors(ends, meant):
    """They are clamped to the tensors and never decrease, so no launch reads or writes beyond them."""
    q, k, v = (torch.randn(537, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    wrong, right = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends, meant))
    out, by = served_by(lambda: sdpa_varlen(q, k, v, wrong, wrong, 537, 537, is_causal=True))
    assert by == {"fa4"}
    assert torch.equal(out, sdpa_varlen(q, k, v, right, right, 537, 537, is_causal=True))
    last = slice(400, 537)
    one = (x[last].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    assert error(out[last].transpose(0, 1).unsqueeze(0), exact(*one, is_causal=True)[0]) < TOLERANCE[q.dtype]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": True, "causal_alignment": "top_left"}, "last key of each sequence"),
        ({"is_causal": True, "deterministic": True}, "deterministic"),
        ({"dropout_p": 0.25}, "dropout"),
    ],
)
def test_packed_calls_that_it_lacks_are_refused_or_cudnns(options, reason):
    c = packed_calls.plain(**packed("causal"))
    t = packed_calls.tensors(c)
    given = [t[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")]
    with pytest.raises(UnsupportedError, match=reason):
        sdpa_varlen(*given, 333, 257, **options)
    with providers("fa4", "cudnn"):
        _, by = served_by(lambda: sdpa_varlen(*given, 333, 257, **options))
        assert by == {None}


@pytest.mark.parametrize(("forward", "backward"), [("fa4", "cudnn"), ("cudnn", "fa4")])
def test_packed_passes_by_two_providers(forward, backward):
    """The LSE of both is (T, H) to callers."""
    c = packed_calls.plain(**packed("causal"))
    t = packed_calls.tensors(c)
    inputs = [t[name].requires_grad_() for name in ("q", "k", "v")]
    with providers(forward):
        out, lse = sdpa_varlen(
            *inputs, t["cu_seqlens_q"], t["cu_seqlens_kv"], 333, 257, is_causal=True, scale=c.scale, return_lse=True
        )
    assert lse.shape == (out.shape[0], 4)
    assert lse.is_contiguous()
    with providers(backward):
        found, by = served_by(lambda: torch.autograd.grad(out, inputs, t["grad_out"]))
    assert by == {None if backward == "cudnn" else backward}
    plain = {name: None if x is None else x.detach() for name, x in t.items()}
    right = packed_calls.expected(c, plain)[2]
    for name, one in zip("qkv", found, strict=True):
        assert error(one, right[name]) < 8e-3


def test_autotune_compares_providers(tmp_path):
    """Both passes; who was faster serves the call from then on, and in other processes by the plan store."""
    q, k, v = (x.requires_grad_() for x in problem(SHAPES[0]))
    options = {"is_causal": True, "scale": 0.21}

    def both():
        out = sdpa(q, k, v, **options)
        return out, torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    both()  # FlashAttention-4's kernels are compiled, or come from the given store, which may know who was faster
    plan_cache.clear()
    with providers("fastest"), use_plan_store(tmp_path / "plans"):
        with autotune() as report:
            for _ in range(3):
                out, found = both()
        compared = [{x.engine for x in entry.candidates if x.microseconds} for entry in report.entries]
        others = {"FlashAttention-4": "fa4", "own kernels": "own"}
        assert sum(others.keys() < engines for engines in compared) == 2, str(report)
        fastest = [others.get(entry.candidates[entry.winner].engine, "cudnn") for entry in report.entries]
        with use_plan_store("off"):
            assert "autotune measured" not in explain(sdpa, q, k, v, **options).choice
        described = explain(sdpa, q, k, v, **options)
        for one, provider in zip((described, described.backward), fastest, strict=True):
            assert "autotune measured" in one.choice
            assert one.provider == provider
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = exact(*doubles, **options)[0]
    assert error(out.detach(), right.detach()) < TOLERANCE[out.dtype]
    for one, other in zip(found, torch.autograd.grad(right, doubles, torch.ones_like(right)), strict=True):
        assert error(one, other) < 8e-3


def test_exported_programs_are_served():
    program, tokens = exported("attention")
    assert providers_of(program.module(), tokens) == [{"fa4"}] * 2


def test_programs_that_aot_inductor_has_compiled_are_served(tmp_path):
    assert printed_with("fa4", "attention", tmp_path).count("served by {'fa4'}") == 2


def test_compiled_functions_are_served():
    q, k, v = (x.requires_grad_() for x in problem(SHAPES[0]))

    def attend(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True, scale=0.1) * 3

    found, by = served_by(lambda: torch.compile(attend, fullgraph=True)(q, k, v))
    gradients, by_backward = served_by(lambda: torch.autograd.grad(found, (q, k, v), torch.ones_like(found)))
    assert by == by_backward == {"fa4"}
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = exact(doubles[0] * 2, *doubles[1:], is_causal=True, scale=0.1)[0] * 3
    assert error(found.detach(), right.detach()) < 1e-2
    for one, other in zip(gradients, torch.autograd.grad(right, doubles, torch.ones_like(right)), strict=True):
        assert error(one, other) < 1e-2


@pytest.mark.parametrize("is_backward", [False, True])
def test_fixed_cases_of_a_kind_find_a_fault(monkeypatch, is_backward):
    q, k, v = (x.requires_grad_(is_backward) for x in problem(SHAPES[0]))
    found = explain(sdpa, q, k, v, is_causal=True)
    with plan_cache.watch_uses() as keys:
        out = sdpa(q, k, v, is_causal=True)
        if is_backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert found.provider == "fa4"
    (kind,) = (kind_of(key) for key in keys if kind_of(key).is_backward is is_backward)
    assert checks.fault(kind, 0) == ""
    monkeypatch.setattr(checks, "_passed", set())
    monkeypatch.setattr(checks.default_store, "active", lambda: None)
    monkeypatch.setitem(checks._NUMBERS, "scale", 0.22)
    monkeypatch.setattr(checks, "_launch", partial(_with_scale, checks._launch, 0.21))
    assert "differ from float64" in checks.fault(kind, 0)


def _with_scale(launch, scale, *given):
    before, checks._NUMBERS["scale"] = checks._NUMBERS["scale"], scale
    try:
        launch(*given)
    finally:
        checks._NUMBERS["scale"] = before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", RANDOM)
def test_random_calls_are_right_whoever_serves(name, part):
    """Kinds that are compiled already are served by FlashAttention-4, at least some; cuDNN serves the others."""
    faults, served = [], Counter[str]()
    for seed in range(part, RANDOM[name], PARTS):
        with providers("fa4", "cudnn"), plan_cache.watch_uses() as keys:
            outcome = generators.attempt(name, seed, "cuda")
        if outcome.kind in ("wrong", "crashed"):
            faults.append(f"{generators.line(name, seed, 'cuda')}  # {outcome.kind}: {outcome.problems}")
        passes = {key.name for key in keys if key.provider == "fa4"}
        served.update(passes or {f"none, {outcome.kind}"})
    print(f"served {name}: {dict(served)}")
    assert not faults, "\n".join(faults)
    assert served["flash4_forward"]
