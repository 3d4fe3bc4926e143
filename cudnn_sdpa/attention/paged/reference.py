"""Attention on a paged cache in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments, results
from cudnn_sdpa.attention.dense.reference import flops_of_forward
from cudnn_sdpa.attention.paged.arguments import PagedArguments, as_bits


def gathered(pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The keys or values of pages (pages, Hkv, page size, D) as contiguous sequences, with zeros past the lengths."""
    rows = as_bits(pages)[table.clamp(0, pages.shape[0] - 1).long()].transpose(1, 2).flatten(2, 3)
    is_past = torch.arange(rows.shape[2], device=lengths.device) >= lengths.unsqueeze(1)
    return rows.masked_fill(is_past[:, None, :, None], 0).view(pages.dtype)


def dequantized(stored: Tensor, scale: Tensor | None, like: Tensor) -> Tensor:
    """The keys or values (B, Hkv, S, D) that stored numbers stand for, in the precision of results if these are FP8."""
    if stored.element_size() > 1:
        return stored
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    return stored.to(exact) if scale is None else stored.to(exact) * scale.to(exact).view(-1, 1, 1)


def as_dense(call: PagedArguments) -> ForwardArguments:
    """The call on contiguous keys and values, with zeros in unused slots; on any device."""
    lengths = call.seq_lens_kv.clamp(0, call.max_kv_len)
    pages = (call.k, call.k_scale), (call.v, call.v_scale)
    rows = [
        dequantized(gathered(x, table, lengths), scale, like=call.q)
        for (x, scale), table in zip(pages, call.tables, strict=True)
    ]
    present = None if call.seq_lens_q is None else call.seq_lens_q.clamp(0, call.q.shape[2])
    return call.as_dense(call.q, *rows, seq_lens_q=present, seq_lens_kv=lengths, with_lse=True)


def attention(call: PagedArguments) -> tuple[Tensor, Tensor]:
    new = call._replace(out=None, with_lse=True)
    out, lse = reference.fill_without_keys(new, results(new))
    if not call.is_empty:
        of_keys = reference.attention(as_dense(call))
        out, lse = out.copy_(of_keys[0]), lse.copy_(of_keys[1])
    return out, lse


def flops(call: PagedArguments) -> tuple[int, int]:
    """Floating-point operations, as if all tables were full: lengths are not read. There is no backward pass."""
    batch, heads, queries, dim = call.q.shape
    return flops_of_forward(batch * heads * queries * call.max_kv_len, dim, call.v.shape[3]), 0
