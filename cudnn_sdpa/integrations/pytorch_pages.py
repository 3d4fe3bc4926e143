"""`varlen_attn` on pages, and on a part of each sequence's keys.

Offsets are on the GPU alone, and are not read back: rows are gathered by positions that are computed there, and no size
depends on a length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import check_lengths
from cudnn_sdpa.attention.paged.arguments import NHD
from cudnn_sdpa.attention.paged.call import PagedCall
from cudnn_sdpa.attention.paged.plans import MAX_DECODED, MAX_GATHERED_BYTES
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.varlen import plans as varlen_plans
from cudnn_sdpa.attention.varlen.arguments import check_cumulative
from cudnn_sdpa.attention.varlen.call import VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.native.calls import NativeCalls
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.integrations.pytorch_kernels import launch, undisturbed

_calls = NativeCalls()


def attention(call: VarlenCall, block_table: Tensor, seqused_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output (T, Hq, Dv) and the LSE (T, Hq) of packed queries on keys in pages.

    With up to 8 queries in a sequence, each sequence gets rows of its own for `sdpa_paged`, which reads the pages in
    place. With more, keys and values are gathered into packed sequences, up to 1 GiB at a time, at least one sequence.

    Args:
        call: The call, with pages (pages, page size, Hkv, D) in place of keys and values.
        block_table: The pages of each sequence, (B, max_pages) int32.
        seqused_k: The number of keys of each sequence, (B,) int32.
    """
    if seqused_k is None:
        raise OptionError("seqused_k", "None", "the number of keys of each sequence, as there is a block_table")
    _check(call, block_table, seqused_k)
    (shape, stride, dtype), (rows, _, _) = varlen_plans.results(call._replace(v=call.v[:, 0], out=None))
    out = call.out
    if out is None:
        out = torch.empty_strided(shape, stride, dtype=dtype, device=call.q.device)
    if call.q.numel() == 0 or block_table.numel() == 0:
        return out.zero_(), torch.full(rows, -torch.inf, dtype=torch.float32, device=call.q.device)
    with undisturbed(call.q):
        run = _decode if call.max_seqlen_q <= MAX_DECODED else _prefill
        result, lse = run(call, block_table, seqused_k)
        return result if call.out is None and result.stride() == stride else out.copy_(result), lse


def _check(call: VarlenCall, block_table: Tensor, seqused_k: Tensor) -> None:
    query = call.q
    if query.dim() != 3:
        raise ShapeError("query", f"shape {tuple(query.shape)}", "rank 3: (tokens, heads, head dim)")
    check_cumulative("cu_seqlens_q", call.cu_seqlens_q, query)
    batch = call.cu_seqlens_q.shape[0] - 1
    paged = PagedCall(
        q=query.new_empty((batch, query.shape[1], 1, query.shape[2])),
        k_pages=call.k,
        v_pages=call.v,
        page_table=block_table,
        page_table_v=None,
        seq_lens_kv=seqused_k,
        seq_lens_q=None,
        sinks=None,
        page_layout=NHD,
        softmax=call.softmax,
    )
    paged.check_types()
    paged.check()
    paged.check_values()
    value_checks.check_offsets("cu_seqlens_q", call.cu_seqlens_q, query.shape[0], call.max_seqlen_q)


def _decode(call: VarlenCall, block_table: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with each sequence's queries in rows of their own, (B, max_q), of which the last may be unused."""
    tokens, batch, width = call.q.shape[0], call.cu_seqlens_q.shape[0] - 1, call.max_seqlen_q
    device, begins = call.q.device, call.cu_seqlens_q[:-1]
    rows = (begins.unsqueeze(1) + torch.arange(width, dtype=torch.int32, device=device)).clamp_(0, tokens - 1)
    out, lse = sdpa_paged(
        call.q[rows].transpose(1, 2),
        k_pages=call.k,
        v_pages=call.v,
        page_table=block_table,
        seq_lens_kv=seqused_k,
        seq_lens_q=call.cu_seqlens_q.diff().clamp_(0, width),
        page_layout=NHD,
        is_causal=call.softmax.is_causal,
        window_size=(call.softmax.window_left, call.softmax.window_right),
        scale=call.softmax.scale,
        return_lse=True,
    )
    sequence, position = _positions(call.cu_seqlens_q, tokens)
    row = torch.add(position, sequence, alpha=width).clamp_(0, batch * width - 1)
    is_of_none = torch.arange(tokens, device=device) >= call.cu_seqlens_q[-1]
    result = out.transpose(1, 2).flatten(0, 1)[row]
    result_lse = lse.transpose(1, 2).flatten(0, 1)[row]
    return result.masked_fill_(is_of_none[:, None, None], 0.0), result_lse.masked_fill_(is_of_none[:, None], -torch.inf)


def _prefill(call: VarlenCall, block_table: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    """Attention on gathered keys and values, of as many sequences at a time as `MAX_GATHERED_BYTES` allows."""
    batch, (_, page_size, heads, dim) = block_table.shape[0], call.k.shape
    max_seqlen = min(call.max_seqlen_kv, block_table.shape[1] * page_size)
    a_sequence = max_seqlen * heads * (dim + call.v.shape[3]) * call.k.element_size()
    at_once = max(1, MAX_GATHERED_BYTES // max(1, a_sequence))
    if at_once >= batch:
        return _on_gathered(call, block_table, seqused_k, max_seqlen)
    parts = (slice(first, min(first + at_once, batch)) for first in range(0, batch, at_once))
    out, lse = _on_gathered_part(call, block_table, seqused_k, max_seqlen, part=next(parts))
    for part in parts:
        more, lse_of_more = _on_gathered_part(call, block_table, seqused_k, max_seqlen, part=part)
        out += more  # rows of other sequences are zeros
        torch.maximum(lse, lse_of_more, out=lse)
    return out, lse


def _on_gathered_part(
    call: VarlenCall, block_table: Tensor, seqused_k: Tensor, max_seqlen: int, part: slice
) -> tuple[Tensor, Tensor]:
    """Attention of some sequences. Earlier queries become a sequence without keys, later ones belong to none."""
    ends = call.cu_seqlens_q[part.start : part.stop + 1]
    of_part = call._replace(
        cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)),
        max_seqlen_q=call.q.shape[0],
        out=None,
    )
    used = torch.nn.functional.pad(seqused_k[part], (1, 0))
    table = torch.nn.functional.pad(block_table[part], (0, 0, 1, 0))
    return _on_gathered(of_part, table, used, max_seqlen)


def _on_gathered(call: VarlenCall, block_table: Tensor, seqused_k: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    pages, page_size = call.k.shape[:2]
    offsets = _offsets_of(seqused_k.clamp(0, block_table.shape[1] * page_size))
    sequence, position = _positions(offsets, block_table.shape[0] * max_seqlen)
    column = (position // page_size).clamp_(0, block_table.shape[1] - 1)
    page, slot = block_table[sequence, column].clamp(0, pages - 1), position % page_size
    packed = call._replace(
        k=call.k[page, slot],
        v=call.v[page, slot],
        cu_seqlens_kv=offsets,
        max_seqlen_kv=max_seqlen,
    )
    result: tuple[Tensor, Tensor] = launch(VARLEN, packed, _calls, VARLEN.flat(packed))
    return result


def with_used_keys(call: VarlenCall, seqused_k: Tensor) -> VarlenCall:
    """A call on the first `seqused_k` keys of each sequence, (B,) int32, gathered into packed sequences.

    Keys and values behind them may hold anything.
    """
    call.check()
    offsets, tokens = call.offsets[1], call.k.shape[0]
    slots = offsets.diff()
    check_lengths("seqused_k", seqused_k, slots, "cu_seq_k")
    value_checks.check_offsets("cu_seqlens_kv", offsets, tokens, tokens)
    if seqused_k.device.type == "cpu" and bool(((seqused_k < 0) | (seqused_k > slots)).any()):
        expected = f"from 0 to the number of keys of each sequence, {slots.tolist()}"
        raise ShapeError("seqused_k", f"lengths {seqused_k.tolist()}", expected)
    if tokens == 0 or slots.shape[0] == 0:
        return call
    with undisturbed(call.q):
        used = _offsets_of(torch.minimum(seqused_k.clamp_min(0), slots))
        sequence, position = _positions(used, tokens)
        row = (offsets[sequence] + position).clamp_(0, tokens - 1)
        return call._replace(k=call.k[row], v=call.v[row], cu_seqlens_kv=used)


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _positions(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sequence index and position within it of each packed row; rows past the end repeat the last."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    row = torch.minimum(row, (offsets[-1] - 1).clamp_min(0))
    sequence = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=offsets.shape[0] - 2)
    return sequence, row - offsets[sequence]
