"""`sdpa_backward`, `sdpa_varlen_backward` and `merge_states`: gradients of a part of the keys, given results of all."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend, gradients
from native_way import native_way

import cudnn_sdpa
from cudnn_sdpa import (
    Fp8BackwardScales,
    UnsupportedError,
    merge_states,
    sdpa,
    sdpa_backward,
    sdpa_fp8_backward,
    sdpa_varlen,
    sdpa_varlen_backward,
)
from cudnn_sdpa.attention import merge_states as merge_module
from cudnn_sdpa.attention import sink_scores
from cudnn_sdpa.attention.arguments import GradientCall
from cudnn_sdpa.attention.fp8.sdpa_fp8 import FP8_BACKWARD

PARTS = (slice(0, 5), slice(5, 6), slice(6, 17))  # of the keys


def drawn(dtype=torch.float32, *, sq=11, heads=(4, 2), grad_scale=1.0):
    shapes = {"q": (2, heads[0], sq, 16), "k": (2, heads[1], 17, 16), "v": (2, heads[1], 17, 24)}
    made = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return made, grad_scale * torch.randn(2, heads[0], sq, 24, dtype=dtype)


def errors(found, wanted):
    """The relative error of each of the wanted gradients."""
    return {
        name: float((found[name].double() - exact).norm() / exact.norm().clamp_min(1e-30))
        for name, exact in wanted.items()
    }


@pytest.mark.parametrize("way", ["reference", "plans"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.4}, {"softcap": 2.0}, {"seq_lens_q": torch.tensor([11, 3]).int()}])
def test_gradients_of_parts_are_those_of_the_whole(way, options):
    dtype = torch.float32 if way == "reference" else torch.bfloat16
    tensors, grad_out = drawn(dtype)
    q, k, v = tensors.values()
    wanted = gradients(tensors, grad_out, **options)[2]
    with gpu_on_the_cpu() if way == "plans" else torch.no_grad():
        parts = [(k[:, :, part].contiguous(), v[:, :, part].contiguous()) for part in PARTS]
        out, lse = merge_states(*zip(*(sdpa(q, *part, return_lse=True, **options) for part in parts), strict=True))
        found = [sdpa_backward(grad_out, out, lse, q, *part, **options) for part in parts]
        whole = {"q": sum(x.dq.double() for x in found)}
        whole |= {name: torch.cat([getattr(x, f"d{name}") for x in found], 2) for name in "kv"}
    assert all(error < (1e-5 if way == "reference" else 2e-2) for error in errors(whole, wanted).values())


def test_sinks_count_once():
    tensors, grad_out = drawn()
    q, k, v = tensors.values()
    sinks = torch.randn(4)
    exact_out, exact_lse, wanted = gradients({**tensors, "sinks": sinks}, grad_out)
    first, *others = [(k[:, :, part], v[:, :, part]) for part in PARTS]
    states = [sdpa(q, *first, sinks=sinks, return_lse=True), *(sdpa(q, *x, return_lse=True) for x in others)]
    out, lse = merge_states(*zip(*states, strict=True))
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    found = [sdpa_backward(grad_out, out, lse, q, *first, sinks=sinks)]
    found += [sdpa_backward(grad_out, out, lse, q, *part) for part in others]
    whole = {"q": sum(x.dq for x in found), "sinks": found[0].dsinks}
    assert all(error < 1e-5 for error in errors(whole, {name: wanted[name] for name in whole}).values())
    assert found[1].dsinks is None


@pytest.mark.parametrize("way", ["reference", "plans"])
def test_one_query_and_one_key_of_many(way):
    """Plain PyTorch computes it on the GPU, too, and heeds the given LSE."""
    q, k, v = (torch.randn(2, 3, n, 8).bfloat16() for n in (1, 4, 4))
    out, lse = sdpa(q, k, v, return_lse=True)
    grad_out = torch.randn_like(out)
    _, _, wanted = gradients({"q": q, "k": k, "v": v}, grad_out)
    with gpu_on_the_cpu() if way == "plans" else torch.no_grad():
        found = [sdpa_backward(grad_out, out, lse, q, k[:, :, j : j + 1], v[:, :, j : j + 1]) for j in range(4)]
    whole = {"q": sum(x.dq.float() for x in found)}
    whole |= {name: torch.cat([getattr(x, f"d{name}") for x in found], 2) for name in "kv"}
    assert all(error < 2e-2 for error in errors(whole, wanted).values())


@pytest.mark.parametrize("way", ["reference", "plans"])
def test_packed_parts(way):
    """Three sequences, the second without queries, in two parts of their keys."""
    dtype = torch.float32 if way == "reference" else torch.bfloat16
    of_q, of_kv = torch.tensor([0, 4, 4, 9]).int(), torch.tensor([0, 6, 8, 15]).int()
    q, k, v = (torch.randn(n, heads, 16, dtype=dtype) for n, heads in ((9, 4), (15, 2), (15, 2)))
    grad_out = torch.randn(9, 4, 16, dtype=dtype)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(sdpa_varlen(*leaves, of_q, of_kv, 5, 7), leaves, grad_out)
    rows = [torch.tensor([0, 1, 6, 8, 9]), torch.tensor([2, 3, 4, 5, 7, 10, 11, 12, 13, 14])]
    ends = [torch.tensor([0, 2, 3, 5]).int(), torch.tensor([0, 4, 5, 10]).int()]
    with gpu_on_the_cpu() if way == "plans" else torch.no_grad():
        states = [sdpa_varlen(q, k[r], v[r], of_q, e, 5, 5, return_lse=True) for r, e in zip(rows, ends, strict=True)]
        out, lse = merge_states(*zip(*states, strict=True))
        found = [
            sdpa_varlen_backward(grad_out, out, lse, q, k[r], v[r], of_q, e, 5, 5)
            for r, e in zip(rows, ends, strict=True)
        ]
    whole = {"q": sum(x.dq.float() for x in found), "k": torch.zeros(15, 2, 16), "v": torch.zeros(15, 2, 16)}
    for r, one in zip(rows, found, strict=True):
        whole["k"][r], whole["v"][r] = one.dk.float(), one.dv.float()
    exact = dict(zip("qkv", (x.double() for x in wanted), strict=True))
    assert all(error < (1e-5 if way == "reference" else 3e-2) for error in errors(whole, exact).values())


def test_only_wanted_gradients_are_given():
    tensors, grad_out = drawn()
    mask, sinks = torch.randn(11, 17), torch.randn(4).bfloat16()
    out, lse = sdpa(**tensors, attn_mask=mask, sinks=sinks, return_lse=True)
    run = {"attn_mask": mask, "sinks": sinks}
    whole = sdpa_backward(grad_out, out, lse, **tensors, **run)
    assert whole.dsinks.dtype == torch.bfloat16
    some = sdpa_backward(grad_out, out, lse, **tensors, **run, wanted=("attn_mask", "k"))
    assert [x is None for x in some] == [True, False, True, False, True]
    assert torch.equal(some.dk, whole.dk)
    assert torch.equal(some.dmask, whole.dmask)
    boolean = sdpa_backward(grad_out, out, lse, **tensors, attn_mask=mask > -9)
    assert boolean.dmask is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad_out": torch.ones(2, 4, 11, 16)}, "^grad_out: got shape"),
        ({"out": torch.ones(2, 4, 11, 24).half()}, "^out: got float16; expected float32"),
        ({"lse": torch.ones(2, 4, 11, 1)}, "^lse: got shape"),
        ({"lse": torch.ones(2, 4, 11).double()}, "^lse: got float64; expected float32"),
        ({"lse": None}, "^lse: got NoneType"),
        ({"out": torch.empty(2, 4, 11, 24, device="meta")}, "^out: got meta; expected cpu"),
        ({"wanted": ("sinks",)}, "^wanted: got 'sinks'; expected None for all gradients"),
        ({"wanted": ()}, "^wanted: got"),
        ({"wanted": "q"}, "^wanted: got 'q'"),
        ({"is_causal": 1}, "^is_causal: got 1"),
        ({"deterministic": "yes"}, "^deterministic: got 'yes'"),
        ({"k": torch.ones(2, 3, 17, 16)}, "^k: got 3 heads"),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    tensors, grad_out = drawn()
    out, lse = sdpa(**tensors, return_lse=True)
    with pytest.raises(cudnn_sdpa.ArgumentError, match=message):
        sdpa_backward(**{"grad_out": grad_out, "out": out, "lse": lse, **tensors, **changed})


def test_a_gradient_of_the_gradient_is_refused():
    tensors, grad_out = drawn()
    out, lse = sdpa(**tensors, return_lse=True)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="grad_out requires grad"):
        sdpa_backward(grad_out.requires_grad_(), out, lse, **tensors)
    with torch.no_grad():
        assert not sdpa_backward(grad_out, out, lse, **tensors).dq.requires_grad


@pytest.mark.parametrize("name", ["grad_out", "out", "lse", "q"])
def test_no_tensor_is_silently_detached(name):
    tensors, grad_out = drawn()
    out, lse = sdpa(**tensors, return_lse=True)
    given = {"grad_out": grad_out, "out": out, "lse": lse, **tensors}
    with pytest.raises(UnsupportedError, match=f"{name} requires grad"):
        sdpa_backward(**given | {name: given[name].detach().clone().requires_grad_()})
    with fwAD.dual_level(), pytest.raises(UnsupportedError, match=f"{name} has a tangent"):
        sdpa_backward(**given | {name: fwAD.make_dual(given[name], given[name])})


def test_a_tangent_of_an_output_in_fp8_is_refused():
    q = torch.zeros(1, 1, 8, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    scales = Fp8BackwardScales(*[one] * len(Fp8BackwardScales._fields))
    lse = torch.zeros(1, 1, 8)
    with fwAD.dual_level(), pytest.raises(UnsupportedError, match="lse has a tangent"):
        sdpa_fp8_backward(q, q, q, q, q, fwAD.make_dual(lse, lse), scales)
    call = FP8_BACKWARD.call._make([q] * len(FP8_BACKWARD.fields))
    assert FP8_BACKWARD._named_tensors(call)["out"] is q


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(()).expand(2, 4, 8, 16),
        torch.ones((), dtype=torch.int64).expand(2, 4, 8, 16),
        torch.ones((), dtype=torch.float16).expand(1, 4, 8, 16),
    ],
    ids=["float32", "int64", "one batch entry"],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_wrong_gradients_are_refused_after_right_ones(wrong, is_known):
    q = torch.randn(2, 4, 8, 16, dtype=torch.float16)
    with native_way(on=False), gpu_on_the_cpu(), cudnn_sdpa.cpu_checks(None):
        out, lse = sdpa(q, q, q, return_lse=True)
        if is_known:
            sdpa_backward(torch.randn_like(out), out, lse, q, q, q)
        with pytest.raises(cudnn_sdpa.ArgumentError, match=r"^grad_out: got"):
            sdpa_backward(wrong, out, lse, q, q, q)


def test_what_a_gpu_would_refuse_is_refused():
    tensors, grad_out = drawn()
    out, lse = sdpa(**tensors, return_lse=True)
    with cudnn_sdpa.cpu_checks("h200,any-dtype"), pytest.raises(cudnn_sdpa.UnsupportedError, match="softcap"):
        sdpa_backward(grad_out, out, lse, **tensors, softcap=2.0, attn_mask=torch.zeros(11, 17))
    q, ends = torch.randn(8, 2, 16), torch.tensor([0, 8]).int()
    with cudnn_sdpa.cpu_checks("a100,any-dtype"), pytest.raises(cudnn_sdpa.UnsupportedError, match="SM 80"):
        sdpa_varlen_backward(q, q, torch.zeros(8, 2), q, q, q, ends, ends, 8, 8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles(backend):
    tensors, grad_out = drawn()
    out, lse = sdpa(**tensors, return_lse=True)

    def run(grad_out, q, k, v):
        found = sdpa_backward(grad_out, out, lse, q, k, v, wanted=("q", "v"))
        return found.dq * 2, found.dv

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(grad_out, *tensors.values()), run(grad_out, *tensors.values()))
    torch._dynamo.reset()


@pytest.mark.slow
def test_explain_shows_the_plan_and_the_copies():
    q, k, v, out = (torch.empty(1, 4, 128, 64, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.empty(1, 128, 4).transpose(1, 2)
    grad_out = torch.empty(1, 4, 64, 128, dtype=torch.bfloat16).transpose(2, 3)
    found = cudnn_sdpa.explain(sdpa_backward, grad_out, out, lse, q, k, v, is_causal=True)
    assert found.call == "sdpa_backward"
    assert any(note.startswith("grad_out is copied") for note in found.extra_kernels)
    assert any(note.startswith("lse is copied") for note in found.extra_kernels)
    ends = torch.tensor([0, 128]).int()
    rows = torch.empty(128, 4, 64, dtype=torch.bfloat16)
    packed = cudnn_sdpa.explain(
        sdpa_varlen_backward, rows, rows, torch.empty(128, 4), rows, rows, rows, ends, ends, 9, 9
    )
    assert packed.call == "sdpa_varlen_backward"


# merge_states


def test_rows_without_keys_are_zeros_and_do_not_touch_others():
    outs = [torch.randn(3, 2, 8) for _ in range(2)]
    lses = [torch.randn(3, 2) for _ in range(2)]
    lses[0][0], lses[1][0], lses[1][1] = -torch.inf, -torch.inf, -torch.inf
    outs[1][1] = torch.nan  # memory that nothing has written
    out, lse = merge_states(outs, lses)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    torch.testing.assert_close(out[1], outs[0][1])
    torch.testing.assert_close(lse[1], lses[0][1])
    weights = torch.softmax(torch.stack(lses)[:, 2], 0).unsqueeze(-1)
    torch.testing.assert_close(out[2], (weights * torch.stack(outs)[:, 2]).sum(0))


def test_large_scores_lose_nothing():
    q, k, v = (torch.randn(1, 1, 6, 8, dtype=torch.float64) for _ in range(3))
    exact = attend(q, k, v, scale=90.0)[0]
    parts = [sdpa(q, k[:, :, at], v[:, :, at], scale=90.0, return_lse=True) for at in (slice(0, 2), slice(2, 6))]
    out, _ = merge_states(*zip(*parts, strict=True))
    assert (out - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "^outs: got none"),
        (torch.ones(1, 2, 3), [torch.ones(1, 2)], "^outs: got Tensor"),
        ([torch.ones(1, 2, 3)], [], "^lses: got none"),
        ([torch.ones(1, 2, 3)] * 2, [torch.ones(1, 2)], "^lses: got 1 tensors; expected 2"),
        ([torch.ones(1, 2, 3), torch.ones(1, 2, 4)], [torch.ones(1, 2)] * 2, r"^outs\[1\]: got shape"),
        ([torch.ones(1, 2, 3), torch.ones(1, 2, 3).half()], [torch.ones(1, 2)] * 2, r"^outs\[1\]: got float16"),
        ([torch.ones(1, 2, 3)], [torch.ones(1, 2).half()], r"^lses\[0\]: got float16; expected float32"),
        ([torch.ones(1, 2, 3)], [torch.ones(1, 2, 1)], r"^lses\[0\]: got shape"),
        ([torch.ones(1, 2, 3)], [torch.ones(1, 2, device="meta")], r"^lses\[0\]: got meta"),
        ([torch.ones(1, 2, 3).int()], [torch.ones(1, 2)], r"^outs\[0\]: got int32"),
        ([3], [torch.ones(1, 2)], r"^outs\[0\]: got int"),
    ],
)
def test_wrong_states_are_named(outs, lses, message):
    with pytest.raises(cudnn_sdpa.ArgumentError, match=message):
        merge_states(outs, lses)


def test_merging_with_a_gradient_is_refused():
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    out, lse = sdpa(q, k, v, return_lse=True)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="sdpa_backward"):
        merge_states([out], [lse])
    with torch.no_grad():
        merged, _ = merge_states([out], [lse])
    torch.testing.assert_close(merged, out.detach())


def test_merged_states_under_vmap_are_refused():
    out, lse = torch.randn(3, 1, 2, 4, 16), torch.zeros(3, 1, 2, 4)
    with pytest.raises(UnsupportedError, match=r"merge_states under torch\.vmap"):
        torch.vmap(lambda x: merge_states([x, x], [lse[0], lse[0]])[0])(out)


class WithSlopes(NamedTuple):
    """A call of an operation with one more differentiable tensor, behind the sinks."""

    q: torch.Tensor
    sinks: torch.Tensor
    slopes: torch.Tensor


@pytest.mark.parametrize("needs", [(False, True, False), (True, False, True)])
def test_the_sinks_are_found_by_name_among_what_has_gradients(needs):
    sinks = torch.randn(4)
    made, grad_out = drawn()
    lse = torch.zeros(grad_out.shape[:3])
    of = GradientCall(grad_out, grad_out, lse, call=WithSlopes(made["q"], sinks, sinks), needs=needs)
    assert sink_scores.is_needed(of) is needs[1]
    assert len(sink_scores.needed_gradient(of)) == needs[1]
    assert len(sink_scores.notes_on_gradient(of)) == needs[1]
    assert len(sink_scores.notes_on_converted_gradient({"sinks": sinks.half()}, of)) == needs[1]


def states(r, dtype, parts):
    """Outputs and LSEs of parts, some of them empty, in memory orders of their own."""
    shape = [r.choice((1, 2, 5)) for _ in range(r.choice((1, 2, 3)))] + [r.choice((1, 8, 20, 128))]
    outs, lses = [], []
    for _ in range(parts):
        order = list(range(len(shape) - 1)) if r.random() < 0.6 else r.sample(range(len(shape) - 1), len(shape) - 1)
        gap, empty = r.choice((0, 0, 8, 3)), torch.rand(shape[:-1]) < r.choice((0.0, 0.3, 1.0))
        whole = torch.empty([shape[x] for x in order] + [shape[-1] + gap], dtype=dtype)
        out = whole[..., gap:].permute(*[order.index(x) for x in range(len(order))], len(order))
        outs.append(out.copy_(torch.randn(shape)).masked_fill_(empty.unsqueeze(-1), torch.nan))
        lses.append((torch.randn(shape[:-1]) * 30).masked_fill_(empty, -torch.inf))
    return outs, lses


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_that_merges_equals_plain_pytorch(seed, dtype, monkeypatch):
    r = random.Random(seed)
    torch.manual_seed(seed)
    outs, lses = states(r, dtype, r.choice((1, 2, 3, 64)))
    exact, of_exact = merge_states([x.double() for x in outs], lses)
    wanted, of_wanted = merge_states(outs, lses)
    given = torch.full((2, *outs[0].shape), torch.nan, dtype=dtype)[r.randrange(2)] if seed % 2 else None
    launched = []
    with gpu_on_the_cpu():
        launch = merge_module._merge_by_kernel
        monkeypatch.setattr(merge_module, "_merge_by_kernel", lambda *x: launched.append(x) or launch(*x))
        out, lse = merge_states(outs, lses, out=given)
    assert launched
    assert given is None or out is given
    assert out.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(lse, of_wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, of_exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=4e-5)
    torch.testing.assert_close(out, wanted, rtol=2 * tolerance, atol=4e-5)


@pytest.mark.parametrize("places", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "strides", [(0, 8, 1), (8, 0, 1), (0, 0, 1), (24, 8, 0), (0, 0, 0), (4, 2, 1), (1, 5, 1)], ids=str
)
def test_parts_that_overlap_themselves(strides, places):
    """Where one address is that of many elements, as in an expanded part, nothing is written."""

    def drawn(sizes, stride, number):
        if number not in places:
            return torch.randn(sizes)
        return torch.randn(200)[number:].as_strided(sizes, stride)

    outs = [drawn((4, 3, 8), strides, number) for number in range(3)]
    lses = [drawn((4, 3), strides[:2], number) for number in range(3)]
    weights = torch.softmax(torch.stack(lses).double(), 0)
    right = (weights.unsqueeze(-1) * torch.stack(outs).double()).sum(0)
    before = [x.clone() for x in (*outs, *lses)]
    for way in (contextlib.nullcontext, gpu_on_the_cpu):
        with way():
            out, lse = merge_states(outs, lses)
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))
    assert all(map(torch.equal, (*outs, *lses), before))


def test_merged_states_that_are_no_numbers():
    """Infinite LSEs, NaN, and outputs that no row of weight zero hides."""
    outs = [torch.randn(8, 1, 8), torch.randn(8, 1, 8)]
    lses = [torch.zeros(8, 1), torch.zeros(8, 1)]
    for row, (first, second) in enumerate([(torch.inf, 0.0), (torch.nan, 1.0), (-torch.inf, torch.nan)]):
        lses[0][row], lses[1][row] = first, second
    lses[0][3] = torch.inf
    lses[1][3] = torch.inf
    outs[0][4], lses[0][4] = torch.nan, -300.0
    outs[0][5], lses[0][5] = torch.nan, -torch.inf
    outs[0][6] = torch.inf
    wanted = merge_states(outs, lses)
    with gpu_on_the_cpu():
        found = merge_states(outs, lses)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_more_parts_than_the_kernel_takes_are_merged_in_pytorch():
    outs, lses = [torch.randn(3, 2, 8) for _ in range(65)], [torch.randn(3, 2) for _ in range(65)]
    wanted = merge_states(outs, lses)
    with gpu_on_the_cpu():
        found = merge_states(outs, lses)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("way", [contextlib.nullcontext, gpu_on_the_cpu])
def test_where_merged_states_may_be_written(way):
    outs, memory = [torch.randn(3, 2, 8) for _ in range(2)], torch.randn(3, 2, 9)
    lses = [torch.randn(3, 2), memory[..., 8].contiguous()]
    wanted, _ = merge_states(outs, lses)
    with way():
        with pytest.raises(cudnn_sdpa.LayoutError, match=r"out: got memory that overlaps lses\[1\]"):
            merge_states(outs, [lses[0], memory[..., 8]], out=memory[..., :8])
        apart = torch.full((3, 2, 8, 2), torch.nan)[..., 1]
        out, _ = merge_states(outs, lses, out=apart)
        assert out is apart
        torch.testing.assert_close(out, wanted)
        for wrong, message in (
            (torch.empty(3, 2, 4), "out: got shape"),
            (torch.empty(3, 2, 8).half(), "out: got float16"),
            (torch.empty(1, 2, 8).expand(3, 2, 8), "out: got strides"),
            (outs[1], r"out: got memory that overlaps outs\[1\]"),
            ([1.0], "out: got list"),
        ):
            with pytest.raises(cudnn_sdpa.ArgumentError, match=message):
                merge_states(outs, lses, out=wrong)
