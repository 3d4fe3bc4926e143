"""Values against float64 over dtypes, layouts, masks, groups, head dims and odd lengths."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_checks import LAYOUTS, check, exact, make

import cudnn_sdpa

DTYPES = [torch.bfloat16, torch.float16]
MASKS = {
    "full": {},
    "top-left": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, mask, dtype):
    q = make(layout, 2, 6, 77, 64, dtype)
    k = make(layout, 2, 2, 133, 64, dtype)
    v = make(layout, 2, 2, 133, 64, dtype)
    check(q, k, v, scale=0.21, **MASKS[mask])


@pytest.mark.parametrize(("q_layout", "k_layout", "v_layout"), list(itertools.permutations(LAYOUTS, 3))[::29])
def test_mixed_layouts(q_layout, k_layout, v_layout):
    q = make(q_layout, 3, 4, 40, 72, torch.bfloat16)
    k = make(k_layout, 3, 4, 51, 72, torch.bfloat16)
    v = make(v_layout, 3, 4, 51, 40, torch.bfloat16)
    check(q, k, v, is_causal=True, scale=0.17)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (5, 5), (8, 1), (8, 2), (71, 1), (6, 3), (32, 8)])
def test_groups(heads_q, heads_kv, mask):
    q = make("bshd", 2, heads_q, 65, 64, torch.bfloat16)
    k, v = (make("bshd", 2, heads_kv, 97, 64, torch.bfloat16) for _ in range(2))
    check(q, k, v, scale=0.3, **MASKS[mask])


LENGTHS = [(1, 1), (1, 2), (1, 1000), (2, 1), (17, 1), (7, 3), (3, 7), (127, 129), (129, 127), (128, 128), (200, 513)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sq", "skv"), LENGTHS)
def test_lengths(sq, skv, mask):
    q = make("bhsd", 2, 4, sq, 64, torch.float16)
    k, v = (make("bhsd", 2, 2, skv, 64, torch.float16) for _ in range(2))
    check(q, k, v, scale=0.4, **MASKS[mask])


HEAD_DIMS = [*((d, d) for d in range(8, 257, 8)), (192, 128), (64, 32), (32, 64), (128, 256), (256, 8), (8, 128)]


@pytest.mark.parametrize("sq", [45, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
def test_head_dims(dim, dim_v, sq):
    q = make("bshd", 2, 4, sq, dim, torch.bfloat16)
    k = make("bshd", 2, 2, 75, dim, torch.bfloat16)
    v = make("bshd", 2, 2, 75, dim_v, torch.bfloat16)
    check(q, k, v, is_causal=True, causal_alignment="bottom_right", scale=1.7 * dim**-0.5)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_expanded_keys_and_values(dims):
    """Stride 0 in any dimension but the last needs no copy."""
    shape = [2, 4, 50, 64]
    small = [1 if i in dims else n for i, n in enumerate(shape)]
    q = make("bhsd", 2, 4, 50, 64, torch.bfloat16)
    k, v = (torch.randn(small, device="cuda", dtype=torch.bfloat16).expand(shape) for _ in range(2))
    check(q, k, v, is_causal=True, scale=0.2)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,)], ids=str)
def test_expanded_queries_get_a_dense_output(dims):
    small = [1 if i in dims else n for i, n in enumerate([2, 4, 50, 64])]
    q = torch.randn(small, device="cuda", dtype=torch.bfloat16).expand(2, 4, 50, 64)
    k, v = (make("bhsd", 2, 4, 60, 64, torch.bfloat16) for _ in range(2))
    assert check(q, k, v, scale=0.2).is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_has_the_memory_order_of_q(layout):
    q = make(layout, 2, 4, 33, 64, torch.bfloat16)
    k, v = (make("bhsd", 2, 4, 20, 64, torch.bfloat16) for _ in range(2))
    v = v[..., :32]
    out = cudnn_sdpa.sdpa(q, k, v)
    order = sorted(range(4), key=lambda i: -q.stride(i))
    assert out.permute(order).is_contiguous()


@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0, 3, 1e-4])
def test_scales(scale):
    """The scale is data: every value reaches the kernel, and none builds a plan."""
    q, k, v = (make("bshd", 2, 4, 60, 64, torch.bfloat16) for _ in range(3))
    cudnn_sdpa.sdpa(q, k, v)
    cudnn_sdpa.sdpa(q, k, v, return_lse=True)
    with cudnn_sdpa.no_plan_builds():
        check(q, k, v, scale=scale)


@pytest.mark.parametrize("dims", [(), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "padded"])
def test_a_negative_scale_changes_neither_the_layout_nor_the_checks(layout, dims):
    q = make(layout, 2, 4, 16, 64, torch.bfloat16)
    for dim in dims:
        q = q.narrow(dim, 0, 1).expand(2, 4, 16, 64)
    k, v = (make("bshd", 2, 4, 30, 64, torch.bfloat16) for _ in range(2))
    assert check(q, k, v, scale=-0.3).stride() == cudnn_sdpa.sdpa(q, k, v, scale=0.3).stride()
    with pytest.raises(cudnn_sdpa.LayoutError):
        cudnn_sdpa.sdpa(q, k, v, scale=-0.3, out=q)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "padded"])
@pytest.mark.parametrize("mask", MASKS)
def test_out(layout, mask):
    q = make("bshd", 2, 4, 60, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, 35, 64, torch.bfloat16) for _ in range(2))
    out = make(layout, 2, 4, 60, 64, torch.bfloat16).fill_(torch.nan)
    stride = out.stride()
    assert cudnn_sdpa.sdpa(q, k, v, out=out, scale=0.3, **MASKS[mask]) is out
    assert out.stride() == stride
    expected, expected_lse = exact(q, k, v, scale=0.3, **MASKS[mask])
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    out.fill_(torch.nan)
    same, lse = cudnn_sdpa.sdpa(q, k, v, out=out, scale=0.3, return_lse=True, **MASKS[mask])
    assert same is out
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


def test_empty():
    def make_empty(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    full = make_empty(2, 4, 10, 64)
    out, lse = cudnn_sdpa.sdpa(full, full[:, :, :0], full[:, :, :0], return_lse=True)
    assert (out == 0).all()
    assert lse.isneginf().all()
    assert cudnn_sdpa.sdpa(full[:, :, :0], full, full).shape == (2, 4, 0, 64)
    assert cudnn_sdpa.sdpa(full[:0], full[:0], full[:0]).shape == (0, 4, 10, 64)
    with pytest.raises(cudnn_sdpa.LayoutError, match="memory that overlaps q"):
        cudnn_sdpa.sdpa(full, full[:, :, :0], full[:, :, :0], out=full)
    target = torch.full_like(full, torch.nan)
    cudnn_sdpa.sdpa(full, full[:, :, :0], full[:, :, :0], out=target)
    assert (target == 0).all()


def test_large_and_peaked_scores():
    """Scores of several hundred, as with an unlucky scale: the log-sum-exp stays exact and nothing overflows."""
    q, k, v = (make("bshd", 2, 4, 130, 64, torch.bfloat16) for _ in range(3))
    check(q, k, v, scale=12.0)
    check(q, k - 6 * q.mean(), v, scale=-9.0, is_causal=True)
