"""FLOPs counted by `FlopCounterMode`, against PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cudnn_sdpa import (
    Fp8BackwardScales,
    Fp8Scales,
    scaled_dot_product_attention,
    sdpa,
    sdpa_fp8,
    sdpa_fp8_backward,
    sdpa_varlen,
)

SHAPES = {
    "square": ((2, 4, 6, 16), (2, 4, 6, 16), 16),
    "grouped": ((2, 4, 6, 16), (2, 2, 10, 16), 24),
    "single query": ((3, 6, 1, 8), (3, 1, 9, 8), 8),
}


def qkv(case, *, requires_grad=False):
    of_q, of_k, dim_v = SHAPES[case]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in (of_q, of_k, (*of_k[:3], dim_v))]


def counted(function, *args, **options):
    with FlopCounterMode(display=False) as counter:
        function(*args, **options)
    return counter.get_total_flops()


def shapes(*tensors):
    """With equal head counts: the formulas of older PyTorch need them, newer ones ignore them."""
    heads = tensors[0].shape[1]
    return [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in tensors]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"is_causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("with_out", [False, True])
def test_forward_flops_match_pytorch(case, options, with_out):
    q, k, v = qkv(case)
    out = torch.empty(*q.shape[:3], v.shape[3]) if with_out else None
    assert counted(sdpa, q, k, v, **options, out=out) == sdpa_flop_count(*shapes(q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        assert counted(F.scaled_dot_product_attention, q, k, v, enable_gqa=True) == sdpa_flop_count(*shapes(q, k, v))


@pytest.mark.parametrize("case", SHAPES)
def test_training_flops_match_pytorch(case):
    q, k, v = qkv(case, requires_grad=True)
    forward = sdpa_flop_count(*shapes(q, k, v))
    out_shape = (*q.shape[:3], v.shape[3])
    backward = sdpa_backward_flop_count(out_shape, *shapes(q, k, v))
    found = counted(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert found == forward + backward
    if q.shape[3] == v.shape[3]:
        assert backward == 2.5 * forward


def test_the_backward_operator_has_flops():
    q, k, v = qkv("grouped")
    options = (None, None, None, None, None, False, "top_left", -1, -1, None, 0.0, None, False, False)
    out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(q, k, v, *options)
    needs = [True, True, True, False, False]
    found = counted(torch.ops.cudnn_sdpa.sdpa_backward, out, out, lse, q, k, v, *options, needs)
    assert found == sdpa_backward_flop_count(*shapes(out, q, k, v))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
def test_packed_flops_follow_the_lengths(return_lse, with_out):
    q, k, v = torch.randn(10, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 24)
    ends, ends_kv = (torch.tensor(x, dtype=torch.int32) for x in ((0, 3, 3, 10), (0, 5, 8, 12)))
    pairs = ((3, 5), (0, 3), (7, 4))
    expected = sum(sdpa_flop_count((1, 4, a, 16), (1, 4, b, 16), (1, 4, b, 24)) for a, b in pairs)
    out = torch.empty(10, 4, 24) if with_out else None
    assert counted(sdpa_varlen, q, k, v, ends, ends_kv, 7, 5, return_lse=return_lse, out=out) == expected


def test_packed_training_flops_follow_the_lengths():
    q, k, v = (torch.randn(10, 2, 16, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    forward = sum(sdpa_flop_count(*[(1, 2, n, 16)] * 3) for n in (3, 7))
    found = counted(lambda: sdpa_varlen(q, k, v, ends, ends, 7, 7).sum().backward())
    assert found == 3.5 * forward
    options = (None, ends, None, None, 7, 7, False, "top_left", -1, -1, None, 0.0, None, False)
    out, lse = torch.ops.cudnn_sdpa.varlen_forward_lse(q, k, v, *options)
    with torch.no_grad():
        found = counted(torch.ops.cudnn_sdpa.varlen_backward, out, out, lse, q, k, v, *options, [True] * 3 + [False])
    assert found == 2.5 * forward


def test_unreadable_lengths_count_as_max_seqlen():
    with FakeTensorMode():
        q, ends = torch.empty(10, 2, 16), torch.empty(4, dtype=torch.int32)
        assert counted(sdpa_varlen, q, q, q, ends, ends, 7, 5) == 3 * sdpa_flop_count(
            (1, 2, 7, 16), *[(1, 2, 5, 16)] * 2
        )
        x = torch.empty(2, 4, 6, 16)
        assert counted(sdpa, x, x, x) == sdpa_flop_count(*shapes(x, x, x))


@pytest.mark.usefixtures("reference_alone")
def test_fp8_flops_match_other_dtypes():
    q, k, v = (torch.randn(2, heads, 48, 32).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    two = torch.tensor([2.0])
    made = sdpa_fp8(q, k, v, Fp8Scales(*[two] * 6), return_lse=True)
    assert counted(sdpa_fp8, q, k, v, Fp8Scales(*[two] * 6)) == sdpa_flop_count(*shapes(q, k, v))
    found = counted(sdpa_fp8_backward, made.out, q, k, v, made.out, made.lse, Fp8BackwardScales(*[two] * 12))
    assert found == sdpa_backward_flop_count(*shapes(made.out, q, k, v))
