"""Strides: inputs of any strides, outputs in the memory order of q, and `out=`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cudnn_sdpa
from cudnn_sdpa import sdpa

BATCH, HEADS, HEADS_KV, LENGTH, DIM = 2, 4, 2, 9, 16


def bhsd() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, LENGTH, DIM)
    k, v = torch.randn(2, BATCH, HEADS_KV, LENGTH, DIM)
    return q, k, v


def bshd() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)
    k, v = torch.randn(2, BATCH, LENGTH, HEADS_KV, DIM).transpose(2, 3)
    return q, k, v


def sbhd() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(LENGTH, BATCH, HEADS, DIM).permute(1, 2, 0, 3)
    k, v = torch.randn(2, LENGTH, BATCH, HEADS_KV, DIM).permute(0, 2, 3, 1, 4)
    return q, k, v


def packed() -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn(BATCH, LENGTH, HEADS + 2 * HEADS_KV, DIM)
    q, k, v = (part.transpose(1, 2) for part in qkv.split([HEADS, HEADS_KV, HEADS_KV], dim=2))
    return q, k, v


def mixed() -> tuple[Tensor, Tensor, Tensor]:
    return bhsd()[0], bshd()[1], sbhd()[2]


def sliced() -> tuple[Tensor, Tensor, Tensor]:
    cache = torch.randn(2, BATCH, HEADS_KV + 3, 2 * LENGTH, 2 * DIM)
    k, v = cache[:, :, 1 : 1 + HEADS_KV, 3 : 3 + LENGTH, :DIM]
    return torch.randn(BATCH, HEADS, 3 * LENGTH, DIM)[:, :, ::3], k, v


def expanded() -> tuple[Tensor, Tensor, Tensor]:
    k = torch.randn(1, HEADS_KV, LENGTH, DIM).expand(BATCH, -1, -1, -1)
    v = torch.randn(BATCH, 1, LENGTH, DIM).expand(-1, HEADS_KV, -1, -1)
    return torch.randn(BATCH, HEADS, LENGTH, DIM), k, v


def last_dimension_not_dense() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in bhsd())


LAYOUTS = [bhsd, bshd, sbhd, packed, mixed, sliced, expanded, last_dimension_not_dense]


@pytest.mark.parametrize("stride", [0, 1, 1000])
def test_gradients_of_head_dim_1_have_the_memory_order_of_their_inputs(stride):
    """The stride of a dimension of size 1 means nothing, also if it is 0."""
    x = torch.randn(2, 5, 3, 1).transpose(1, 2).as_strided((2, 3, 5, 1), (15, 1, 3, stride)).requires_grad_()
    with cudnn_sdpa.cpu_checks(None):
        out = sdpa(x, x.detach(), x.detach())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.stride()[:3] == out.stride()[:3] == (15, 1, 3)


def test_output_of_packed_heads_folds_back_without_a_copy():
    q, k, v = packed()
    out = sdpa(q, k, v).transpose(1, 2)
    assert out.is_contiguous()
    assert out.flatten(2).data_ptr() == out.data_ptr()


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_returned(layout, return_lse):
    q, k, v = layout()
    expected, expected_lse = sdpa(q, k, v, is_causal=True, return_lse=True)
    out = torch.full_like(expected, torch.nan)
    result = sdpa(q, k, v, is_causal=True, return_lse=return_lse, out=out)
    if return_lse:
        result, lse = result
        assert torch.equal(lse, expected_lse)
    assert result is out
    assert torch.equal(out, expected)


def test_out_may_have_strides_of_its_own_and_its_gaps_stay_untouched():
    q, k, v = bhsd()
    storage = torch.full((BATCH, LENGTH, HEADS + 1, 2 * DIM), torch.nan)
    out = storage[:, :, :HEADS, :DIM].transpose(1, 2)
    assert sdpa(q, k, v, out=out) is out
    assert torch.equal(out, sdpa(q, k, v))
    assert storage[:, :, HEADS].isnan().all()
    assert storage[..., DIM:].isnan().all()


def test_out_gets_zeros_in_fully_masked_rows():
    q, k, v = bhsd()
    out = torch.full_like(q, torch.nan)
    sdpa(q, k[:, :, :4], v[:, :, :4], is_causal=True, causal_alignment="bottom_right", out=out)
    assert torch.equal(out[:, :, : LENGTH - 4], torch.zeros(BATCH, HEADS, LENGTH - 4, DIM))
    out.fill_(torch.nan)
    sdpa(q, k[:, :, :0], v[:, :, :0], out=out)
    assert torch.equal(out, torch.zeros_like(q))
