"""Calls that one launch cannot compute are split: the merged results of the parts are those of the whole call."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_gpu import FakePlan, checked_plan, gpu_on_the_cpu
from float64_reference import attend, attend_packed

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, fp8_attention, sdpa, sdpa_paged, sdpa_varlen
from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.fp8 import fp8_attention as fp8_module
from cudnn_sdpa.attention.parts import GRADIENTS, packed_gradient_limits
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import TensorLayout

LIMIT = known_issues.MAX_OFFSET


@pytest.mark.parametrize(
    "shape",
    [
        (130, 32, 32, 4100, 4100, 128, 128),
        (9, 128, 8, 15_000, 15_000, 128, 128),
        (1, 128, 1, 131_072, 131_072, 128, 128),
        (1, 16, 16, 4096, 2_000_000, 64, 128),
        (1, 512, 4, 200_000, 1_000_000, 128, 64),
    ],
    ids=str,
)
def test_every_part_fits_and_every_head_is_in_one_part(shape):
    batch, heads, heads_kv, sq, skv, dim, dim_v = shape
    q = torch.empty(batch, heads, sq, dim, device="meta")
    k, v = (torch.empty(batch, heads_kv, skv, d, device="meta") for d in (dim, dim_v))
    seen = torch.zeros(batch, heads, dtype=torch.int32)
    for part in parts.split(q, k, v, GRADIENTS):
        seen[part.entries, part.heads] += 1
        for tensor in (
            q[part.entries, part.heads],
            k[part.entries, part.heads_kv],
            v[part.entries, part.heads_kv],
        ):
            assert 0 < tensor.numel() <= LIMIT
        of_q, of_kv = part.heads.indices(heads), part.heads_kv.indices(heads_kv)
        group = heads // heads_kv
        assert of_q[0] // group == of_kv[0]
        assert (of_q[1] - 1) // group == of_kv[1] - 1
    assert (seen == 1).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_large_strides_are_detected_in_every_tensor(name):
    small = torch.empty(2, 2, 8, 8, device="meta")
    tensors = {"q": small, "k": small, "v": small}
    assert not GRADIENTS.exceeded(*tensors.values())
    for large in (torch.empty(2, 2**15, 2**9, 2**8, device="meta"), small.as_strided((2, 2, 8, 8), (2**31, 64, 8, 1))):
        assert "elements" in GRADIENTS.exceeded(*(tensors | {name: large}).values())[0]
        assert packed_gradient_limits(deterministic=False).exceeded(TensorLayout.of(large))
    assert not GRADIENTS.exceeded(torch.empty(1, 2, 2**20, 2**10, device="meta"))


def test_a_head_that_is_too_large_alone_is_refused():
    q = torch.empty(1, 2, 2**25, 128, device="meta")
    with pytest.raises(UnsupportedError, match="one head"):
        parts.split(q, q, q, GRADIENTS)


@pytest.mark.parametrize(("total", "most"), [(70_000, 65_535), (65_536, 65_535), (7, 3), (1, 1), (9, 100)])
def test_few_plans_serve_the_parts(total, most):
    found = parts.ranges(total, most)
    sizes = [x.stop - x.start for x in found]
    assert sum(sizes) == total
    assert len(sizes) == -(-total // most)
    assert max(sizes) <= most
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]


# Public calls on the fake GPU, whose plans are refused beyond the limits.


@pytest.fixture
def limits(monkeypatch):
    """At most two batch entries and heads in a launch."""
    monkeypatch.setattr(known_issues, "MAX_GRID", 2)
    with cudnn_sdpa.cpu_checks(None), cudnn_sdpa.shape_policy("exact"):
        yield


def close(found, wanted, tolerance=2e-2):
    torch.testing.assert_close(found.detach().double(), wanted.double(), rtol=tolerance, atol=tolerance)


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_single_queries(limits, layout, given, scale):  # noqa: ARG001
    batch, heads, heads_kv = 5, 6, 3
    q, k, v = bf16(batch, heads, 1, 16), bf16(batch, heads_kv, 9, 16), bf16(batch, heads_kv, 9, 24)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    lengths = torch.randint(0, 10, (batch,), dtype=torch.int32)
    sinks, mask = torch.randn(heads), bf16(batch, 1, 1, 9)
    out = torch.full((batch, heads, 1, 24), torch.nan, dtype=torch.bfloat16) if given else None
    options = {"scale": scale, "sinks": sinks, "attn_mask": mask, "seq_lens_kv": lengths}
    wanted, wanted_lse = attend(q.double(), k.double(), v.double(), **options)
    with gpu_on_the_cpu(plan_of=checked_plan):
        for _ in range(2):
            before = len(FakePlan.launched)
            found, lse = sdpa(q, k, v, **options, return_lse=True, out=out)
            assert len(FakePlan.launched) - before == 9
            close(found, wanted)
            close(lse, wanted_lse, 1e-3)
            assert out is None or found is out
        with cudnn_sdpa.no_plan_builds():  # two sizes of parts, which are known
            sdpa(q, k, v, **options, return_lse=True, out=out)


def test_several_queries_of_grouped_heads_are_split_and_others_are_not(limits):  # noqa: ARG001
    for heads_kv, launches in ((1, 2), (2, 2), (4, 1)):
        q, k, v = bf16(3, 4, 7, 16), bf16(3, heads_kv, 9, 16), bf16(3, heads_kv, 9, 16)
        with gpu_on_the_cpu(plan_of=checked_plan):
            before = len(FakePlan.launched)
            found = sdpa(q, k, v, is_causal=True)
            assert len(FakePlan.launched) - before == launches
        close(found, attend(q.double(), k.double(), v.double(), is_causal=True)[0])


def of_mask(shape, layout="bhsd", **options):
    """Inputs whose gradients are compared, and the other arguments."""
    batch, heads, heads_kv, sq, skv = 3, 4, 2, 7, 9
    sizes = ((heads, sq), (heads_kv, skv), (heads_kv, skv))
    tensors = [bf16(batch, n, length, 16) for n, length in sizes]
    if layout == "bshd":
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    lengths = {"seq_lens_kv": torch.tensor([9, 4, 7], dtype=torch.int32)} if options.pop("lengths", False) else {}
    return [x.requires_grad_() for x in (*tensors, torch.randn(shape), torch.randn(heads))], {**lengths, **options}


def assert_gradients(leaves, options, *, compiled=False, wanted=(0, 1, 2, 3, 4)):
    def run(q, k, v, mask, sinks):
        return sdpa(q, k, v, attn_mask=mask, sinks=sinks, scale=0.3, **options)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend(*exact[:3], attn_mask=exact[3], sinks=exact[4], scale=0.3, **options)[0]
    grad_out = bf16(*expected.shape)
    right = torch.autograd.grad(expected, exact, grad_out.double())
    leaves = [x if number in wanted else x.detach() for number, x in enumerate(leaves)]
    with gpu_on_the_cpu(plan_of=checked_plan):
        call = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        for _ in range(2):
            out = call(*leaves)
            found = torch.autograd.grad(out, [leaves[number] for number in wanted], grad_out)
            close(out, expected.detach())
            for number, gradient in zip(wanted, found, strict=True):
                close(gradient, right[number], 4e-2)
                assert gradient.dtype == leaves[number].dtype
                assert TensorLayout.of(gradient).stride == TensorLayout.of(leaves[number]).stride


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_gradients_with_a_mask(limits, compiled):  # noqa: ARG001
    assert_gradients(*of_mask((4, 1, 9)), compiled=compiled)


MASKS = {"heads": (1, 4, 1, 9), "entries": (3, 1, 7, 9), "row": (9,), "full": (3, 4, 7, 9)}


@pytest.mark.parametrize("limit", [{"MAX_OFFSET": 300}, {"MAX_OFFSET": 900}, {"MAX_GRID": 1}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_within_any_limit(monkeypatch, limit, layout, mask):
    for name, value in limit.items():
        monkeypatch.setattr(known_issues, name, value)
    with cudnn_sdpa.cpu_checks(None), cudnn_sdpa.shape_policy("exact"):
        before = len(FakePlan.launched)
        assert_gradients(*of_mask(MASKS[mask], layout, lengths=True, is_causal=True))
        assert len(FakePlan.launched) - before > 4, "the whole call in one launch"


def test_only_needed_gradients_of_parts(limits):  # noqa: ARG001
    assert_gradients(*of_mask((9,)), wanted=(1,))


def test_packed_sequences_of_few_elements_at_a_time(monkeypatch):
    ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    leaves = [bf16(12, heads, 8).requires_grad_() for heads in (6, 1, 1)] + [torch.randn(6, requires_grad=True)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"is_causal": True, "scale": -0.2}
    wanted = attend_packed(*exact[:3], ends, ends, sinks=exact[3], **options)[0]
    grad_out = bf16(*wanted.shape)
    monkeypatch.setattr(known_issues, "MAX_OFFSET", 300)
    with gpu_on_the_cpu(plan_of=checked_plan), cudnn_sdpa.cpu_checks(None):
        out = sdpa_varlen(*leaves[:3], ends, ends, 7, 7, sinks=leaves[3], **options)
        before = len(FakePlan.launched)
        found = torch.autograd.grad(out, leaves, grad_out)
        assert len(FakePlan.launched) - before == 2
    for one, other, leaf in zip(found, torch.autograd.grad(wanted, exact, grad_out.double()), leaves, strict=True):
        close(one, other, 4e-2)
        assert TensorLayout.of(one).stride == TensorLayout.of(leaf).stride


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_packed_sequences_with_sinks(limits, with_lse, scale):  # noqa: ARG001
    """One launch without the sinks, which are applied to its output: with them there would be too many sequences."""
    ends = torch.tensor([0, 3, 3, 7, 12], dtype=torch.int32)
    leaves = [*(bf16(12, heads, 16) for heads in (4, 4, 4)), torch.randn(4)]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted, wanted_lse = attend_packed(*exact[:3], ends, ends, sinks=exact[3], is_causal=True, scale=scale)
    with gpu_on_the_cpu(plan_of=checked_plan):
        before = len(FakePlan.launched)
        options = {"sinks": leaves[3], "is_causal": True, "scale": scale}
        found = sdpa_varlen(*leaves[:3], ends, ends, 5, 5, **options, return_lse=with_lse)
        assert len(FakePlan.launched) - before == 1
        out = found[0] if with_lse else found
        grad_out = bf16(*out.shape)
        gradients = torch.autograd.grad(out, leaves, grad_out)
    close(out, wanted)
    if with_lse:
        close(found[1], wanted_lse, 1e-3)
    for got, right in zip(gradients, torch.autograd.grad(wanted, exact, grad_out.double()), strict=True):
        close(got, right, 4e-2)


@pytest.mark.parametrize(("tokens", "launches"), [(1, 3), (2, 5), (12, 1)])
def test_paged_calls(limits, tokens, launches):  # noqa: ARG001
    batch = 5
    pages = [bf16(13, 2, 4, 16) for _ in range(2)]
    table = torch.stack([torch.randperm(13)[:5] for _ in range(batch)]).int()
    lengths = torch.tensor([20, 12, 17, 13, 12], dtype=torch.int32)
    q, sinks = bf16(batch, 4, tokens, 16), torch.randn(4)
    if tokens > 8:  # prefill is packed, and grouped heads may not be too many there
        q, sinks = q[:, ::2].contiguous(), sinks[::2].contiguous()
    rows = (x[table.long()].transpose(1, 2).flatten(2, 3).double() for x in pages)
    options = {"is_causal": True, "causal_alignment": "bottom_right", "sinks": sinks}
    wanted = attend(q.double(), *rows, seq_lens_kv=lengths, **options)
    with gpu_on_the_cpu(plan_of=checked_plan):
        for out in (None, torch.full(q.shape, torch.nan, dtype=torch.bfloat16)):
            before = len(FakePlan.launched)
            found = sdpa_paged(q, *pages, table, lengths, **options, return_lse=True, out=out, page_layout="HND")
            assert len(FakePlan.launched) - before == launches
            close(found[0], wanted[0])
            close(found[1], wanted[1], 1e-3)


def test_gradients_in_fp8(limits):  # noqa: ARG001
    fp8 = torch.float8_e4m3fn
    q, k, v, grad_out = ((torch.randn(5, heads, 16, 128) * 20).to(fp8) for heads in (4, 2, 2, 4))
    numbers = iter((torch.rand(20) + 0.5).unsqueeze(1))
    scales = cudnn_sdpa.Fp8Scales(
        *(next(numbers) / 20 for _ in range(3)), torch.tensor([1 / 200]), torch.tensor([200.0]), next(numbers)
    )
    of_backward = cudnn_sdpa.Fp8BackwardScales(
        *scales[:3],
        1 / scales.scale_o,
        next(numbers) / 20,
        scales.descale_s,
        torch.tensor([1 / 3]),
        scales.scale_s,
        *(next(numbers) for _ in range(3)),
        torch.tensor([3.0]),
    )
    forward = cudnn_sdpa.sdpa_fp8(q, k, v, scales, return_lse=True)
    whole = cudnn_sdpa.sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, of_backward)
    with gpu_on_the_cpu(plan_of=checked_plan):
        before = len(FakePlan.launched)
        found = cudnn_sdpa.sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, of_backward)
        assert len(FakePlan.launched) - before == 6
    for a, b in zip(found, whole, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-4, atol=1e-4)


def packed(**options):
    ends = torch.arange(0, 16, 3, dtype=torch.int32)
    q, k, v = (bf16(15, heads, 16).requires_grad_() for heads in options.pop("heads"))
    return sdpa_varlen(q, k, v, ends, ends, 3, 3, **options)


def dense(**options):
    q, k, v = (bf16(2, heads, 7, 16).requires_grad_() for heads in options.pop("heads", (4, 4, 4)))
    return sdpa(q, k, v, **options)


def in_fp8():
    q, k, v = (bf16(2, heads, 16, 128).requires_grad_() for heads in (4, 1, 1))
    return fp8_attention(q, k, v)


REFUSED = {
    "dropout": (lambda: dense(dropout_p=0.1), "calls with dropout cannot be split"),
    "alibi": (lambda: dense(alibi=True, is_causal=True), "cannot be split along heads"),
    "packed, grouped heads": (lambda: packed(heads=(4, 2, 2)), "query heads that share key heads"),
    "packed, deterministic": (lambda: packed(heads=(2, 2, 2), deterministic=True), "gradients of more packed"),
    "heads of a group in FP8": (in_fp8, "query heads that share key heads"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_what_cannot_be_split_is_refused_before_the_forward_pass(monkeypatch, name, on_gpu):
    call, reason = REFUSED[name]
    monkeypatch.setattr(known_issues, "MAX_GRID", 2)
    fp8_module._support.cache_clear()
    with gpu_on_the_cpu(plan_of=checked_plan) if on_gpu else contextlib.nullcontext(), cudnn_sdpa.shape_policy("exact"):
        before = len(FakePlan.launched)
        with pytest.raises(UnsupportedError, match=reason):
            call()
        assert len(FakePlan.launched) == before
    fp8_module._support.cache_clear()


@pytest.mark.parametrize(
    "call",
    [
        lambda: dense(alibi=True, is_causal=True, heads=(2, 2, 2)),
        lambda: packed(heads=(2, 1, 1)),
        lambda: packed(heads=(4, 4, 4)),
        lambda: packed(heads=(2, 2, 2), deterministic=False),
    ],
    ids=["alibi along the batch", "few packed heads", "packed heads of their own", "not deterministic"],
)
def test_what_can_be_computed_is_not_refused(monkeypatch, call):
    monkeypatch.setattr(known_issues, "MAX_GRID", 2)
    assert call().isfinite().all()
