"""Large calls are split: the merged gradients of the parts are those of the whole call."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall
from cudnn_sdpa.attention.dense import large_backward
from cudnn_sdpa.attention.dense import reference as dense_reference
from cudnn_sdpa.attention.dense.plans import Needs
from cudnn_sdpa.attention.varlen import launch as varlen_launch
from cudnn_sdpa.attention.varlen import reference as varlen_reference
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.graph.layouts import TensorLayout

# B, Hq, Hkv, Sq, Skv, D, Dv
SHAPES = [
    (5, 4, 2, 6, 7, 8, 8),
    (1, 8, 4, 6, 7, 8, 16),
    (2, 6, 1, 12, 7, 8, 8),
    (1, 4, 2, 3, 40, 8, 8),
    (3, 2, 2, 6, 6, 16, 8),
]


def backward_of(shape, *, layout="bhsd", **options):
    batch, heads, heads_kv, sq, skv, dim, dim_v = shape

    def make(h, s, d):
        if layout == "bhsd":
            return torch.randn(batch, h, s, d, dtype=torch.float64)
        return torch.randn(batch, s, h, d, dtype=torch.float64).transpose(1, 2)

    q, k, v, grad_out = (
        make(heads, sq, dim),
        make(heads_kv, skv, dim),
        make(heads_kv, skv, dim_v),
        make(heads, sq, dim_v),
    )
    call = ForwardArguments(q, k, v, scale=0.3, with_lse=True, **options)
    out, lse = dense_reference.attention(call)
    needs = Needs(True, True, True, False, call.sinks is not None)
    return GradientCall(grad_out, out, lse, call, needs)


def run_and_record(sizes):
    def run(of):
        sizes.append(max(x.numel() for x in (*of.call[:3], of.out, of.grad_out)))
        return dense_reference.gradients(of)

    return run


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("most", [700, 350])
def test_merged_parts_match_the_whole(monkeypatch, shape, layout, most):
    batch, heads = shape[:2]
    of = backward_of(
        shape,
        layout=layout,
        sinks=torch.randn(heads),
        attn_mask=torch.randn(1, heads, 1, shape[4], dtype=torch.float64),
        seq_lens_kv=torch.randint(1, shape[4] + 1, (batch,), dtype=torch.int32),
        is_causal=True,
    )
    whole, sizes = dense_reference.gradients(of), []
    monkeypatch.setattr(large_backward, "MAX_OFFSET", most)
    found = large_backward.gradients(of, run_and_record(sizes))
    assert max(sizes) <= most
    assert len(sizes) > 1 or max(x.numel() for x in (*of.call[:3], of.out)) <= most
    for a, b, tensor in zip(found, whole, (*of.call[:3], of.call.sinks), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)
        assert a.stride() == b.stride()
        assert a.dtype == tensor.dtype


def test_only_needed_gradients_are_returned(monkeypatch):
    of = backward_of(SHAPES[0])._replace(needs=Needs(False, True, False, False, False))
    whole = dense_reference.gradients(of)
    monkeypatch.setattr(large_backward, "MAX_OFFSET", 700)
    (found,) = large_backward.gradients(of, dense_reference.gradients)
    torch.testing.assert_close(found, whole[0])


def test_merged_parts_of_packed_calls_equal_the_whole(monkeypatch):
    ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, grad_out = (torch.randn(12, 6, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(12, 1, 8, dtype=torch.float64) for _ in range(2))
    call = VarlenArguments(q, k, v, torch.randn(6), ends, None, None, 7, 7, is_causal=True, scale=-0.2, with_lse=True)
    out, lse = varlen_reference.attention(call)
    backward = GradientCall(grad_out, out, lse, call, (True, True, True, True))
    whole = varlen_reference.gradients(backward)
    monkeypatch.setattr(large_backward, "MAX_OFFSET", 300)
    sizes = []

    def run(part):
        sizes.append(part.call.q.numel())
        return varlen_reference.gradients(part)

    monkeypatch.setattr(varlen_launch, "gradients", run)
    found = varlen_launch.prepare_gradients(backward).run(backward)
    assert len(sizes) == 2
    assert max(sizes) <= 300
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)
        assert TensorLayout.of(a).stride == TensorLayout.of(b).stride


LIMIT = large_backward.MAX_OFFSET


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
    for part in large_backward.split(q, k, v):
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
    assert not large_backward.is_too_large(*tensors.values())
    for large in (torch.empty(2**16, 2**15 + 1, device="meta"), torch.empty(2**31 + 8, device="meta")[:: 2**30]):
        assert large_backward.is_too_large(*(tensors | {name: large}).values())
        assert large_backward.is_too_large(TensorLayout.of(large))
    assert not large_backward.is_too_large(torch.empty(2**31, device="meta"))


@pytest.mark.parametrize(
    ("options", "mask_gradient"), [({"dropout_p": 0.1}, False), ({"alibi": True, "is_causal": True}, False), ({}, True)]
)
def test_calls_that_cannot_be_split_are_refused(options, mask_gradient):
    q = torch.empty(1, 2, 8, 8, device="meta")
    with pytest.raises(UnsupportedError, match="large call"):
        large_backward.check(ForwardArguments(q, q, q, **options), mask_gradient=mask_gradient)


def test_a_head_that_is_too_large_alone_is_refused():
    q = torch.empty(1, 2, 2**25, 128, device="meta")
    with pytest.raises(UnsupportedError, match="one head"):
        large_backward.check(ForwardArguments(q, q, q), mask_gradient=False)
