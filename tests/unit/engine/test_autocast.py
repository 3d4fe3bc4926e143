"""`torch.autocast`: the dtypes of PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cudnn_sdpa import DtypeError, scaled_dot_product_attention, sdpa, sdpa_paged


def qkv(dtype=torch.float32):
    return [torch.randn(2, 4, 7, 16, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_results_have_pytorchs_dtypes(to, dtype):
    tensors = qkv(dtype)
    with torch.autocast("cpu", dtype=to):
        expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
        out = scaled_dot_product_attention(*tensors, is_causal=True)
        same = sdpa(*tensors, is_causal=True)
    assert out.dtype == same.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
    assert torch.equal(out, same)


def test_mixed_dtypes_are_cast_as_in_pytorch():
    q, k, v = qkv()
    mask = torch.randn(7, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q.bfloat16(), k, v, attn_mask=mask)
        out = scaled_dot_product_attention(q.bfloat16(), k, v, attn_mask=mask)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
    with pytest.raises(DtypeError, match="key: got float32"):
        scaled_dot_product_attention(q.bfloat16(), k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mask_of_another_dtype_is_cast_even_if_nothing_else_is(dtype):
    q, k, v = qkv(torch.bfloat16)
    mask = torch.randn(7, 7).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = sdpa(q, k, v, attn_mask=mask)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)


def test_queries_are_cast_to_the_dtype_of_pages():
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 3, 2, 8, 16).bfloat16()
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    wanted = sdpa_paged(q.bfloat16(), k, v, table, lengths, page_layout="HND")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sdpa_paged(q, k, v, table, lengths, page_layout="HND"), wanted)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(DtypeError, match="float32"):
        sdpa_paged(q, k, v, table, lengths, page_layout="HND")
    with pytest.raises(DtypeError, match="float32"):
        sdpa_paged(q, k, v, table, lengths, page_layout="HND")
