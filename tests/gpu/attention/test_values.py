"""Values against float64 at every head dim, at any scale, with large scores, and without elements."""

from __future__ import annotations

import pytest
import torch
from attention_checks import check, make

import cudnn_sdpa

HEAD_DIMS = [*((d, d) for d in range(8, 257, 8)), (192, 128), (64, 32), (32, 64), (128, 256), (256, 8), (8, 128)]


@pytest.mark.parametrize("sq", [45, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(("dim", "dim_v"), HEAD_DIMS)
def test_head_dims(dim, dim_v, sq):
    q = make("bshd", 2, 4, sq, dim, torch.bfloat16)
    k = make("bshd", 2, 2, 75, dim, torch.bfloat16)
    v = make("bshd", 2, 2, 75, dim_v, torch.bfloat16)
    check(q, k, v, is_causal=True, causal_alignment="bottom_right", scale=1.7 * dim**-0.5)


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
