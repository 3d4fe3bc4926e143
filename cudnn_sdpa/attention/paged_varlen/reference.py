"""Attention of packed queries on a paged cache in plain PyTorch, one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ReferenceArguments, results
from cudnn_sdpa.attention.dense.reference import flops_of_forward
from cudnn_sdpa.attention.paged.arguments import as_bits
from cudnn_sdpa.attention.paged.reference import dequantized
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments, as_dense, first_keys
from cudnn_sdpa.engine.launch import new_tensor


def attention(call: PagedVarlenArguments, lse_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The output (T, Hq, Dv) and the LSE (T, Hq); tokens of no sequence get zeros and minus infinity."""
    out, lse = _without_tokens(call)
    lse = lse.to(lse_dtype)
    for rows, one in sequences(call):
        out_one, lse_one = reference.attention(one)
        out[rows] = out_one[0].transpose(0, 1).to(out.dtype)
        lse[rows] = lse_one[0].transpose(0, 1).to(lse_dtype)
    return out, lse


def sequences(call: PagedVarlenArguments) -> Iterator[tuple[slice, ReferenceArguments]]:
    """The rows of each sequence that has new tokens, and the dense call that it is; no other key is read."""
    ends = call.cu_seqlens_q.clamp(0, call.q.shape[0]).tolist()
    lengths = call.seq_lens_kv.clamp(0, call.max_kv_len).tolist()
    pages = (call.k, call.k_scale), (call.v, call.v_scale)
    for number, (length, first) in enumerate(zip(lengths, first_keys(call).tolist(), strict=True)):
        rows = slice(ends[number], ends[number + 1])
        if rows.stop <= rows.start:
            continue
        keys = slice(min(first, length), length)
        k, v = (
            dequantized(gathered(x, table[number], keys), scale, like=call.q)
            for (x, scale), table in zip(pages, call.tables, strict=True)
        )
        one = ReferenceArguments(as_dense(call.q[rows]), k, v, sinks=call.sinks, softmax=call.softmax)
        if call.tree_mask is not None:
            mask = tree_among_keys(call.tree_mask[rows], length)
            one = one._replace(attn_mask=mask, softmax=call.softmax._replace(is_causal=False))
        yield rows, one


def gathered(pages: Tensor, row: Tensor, keys: slice) -> Tensor:
    """The keys or values of one sequence, (1, Hkv, keys, D)."""
    size = pages.shape[2]
    begin = keys.start // size
    within = slice(keys.start - begin * size, keys.stop - begin * size)
    ids = row[begin : -(-keys.stop // size)].clamp(0, pages.shape[0] - 1).long()
    return as_bits(pages)[ids].transpose(0, 1).flatten(1, 2)[None, :, within].view(pages.dtype)


def tree_among_keys(tree: Tensor, length: int) -> Tensor:
    """The mask (1, 1, new tokens, keys) of one sequence, whose last keys are those of its new tokens."""
    new = tree.shape[0]
    before = tree.new_ones(new, max(0, length - new))
    among = tree[:, max(0, new - length) : new]
    return torch.cat([before, among], dim=1)[None, None]


def without_keys(call: PagedVarlenArguments) -> Tensor | tuple[Tensor, Tensor]:
    """The results where there is no token, or where none can see a key: zeros, and the LSE of the sinks alone."""
    out, lse = _without_tokens(call)
    if not call.with_lse:
        return out
    if call.sinks is not None:
        ends, token = call.cu_seqlens_q, torch.arange(lse.shape[0], device=lse.device).unsqueeze(1)
        lse.copy_(torch.where((token >= ends[0]) & (token < ends[-1]), call.sinks, lse))
    return out, lse


def _without_tokens(call: PagedVarlenArguments) -> tuple[Tensor, Tensor]:
    out, lse = (new_tensor(layout, call.q.device) for layout in results(call))
    return (out if call.out is None else call.out).zero_(), lse.fill_(-torch.inf)


def flops(call: PagedVarlenArguments) -> tuple[int, int]:
    """Floating-point operations, as if all tables were full: lengths are not read. There is no backward pass."""
    tokens, heads, dim = call.q.shape
    return flops_of_forward(tokens * heads * call.max_kv_len, dim, call.v.shape[3]), 0
