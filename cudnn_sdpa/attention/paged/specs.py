"""The spec of decode steps on a paged cache (`DecodeSpec`): sizes and options without data, and the keys of its plans.

Sizes are rounded up, so that few plans serve many calls.

cuDNN's decode kernels read the pages. For many queries, and for options that these kernels lack, one kernel of our own
gathers keys and values into packed sequences, on which the call runs: prefill. cuDNN's kernel for many queries on pages
takes about as long, and lets NaN from unused slots into the results.

cuDNN decodes fast only where every sequence has one query. In speculative decoding each query therefore becomes a
sequence, which sees the keys up to its own. That reads the keys once per query, but from the L2 cache: 2, 4 and 8
queries took 1.4, 2.4 and 4.7 times as long as one on an H200 (`python -m benchmarks decode`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import as_launched, output_layout
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.step import MARK, Mark
from cudnn_sdpa.attention.paged_varlen import plans as own_kernel
from cudnn_sdpa.attention.paged_varlen.preferences import runs_own_kernel
from cudnn_sdpa.attention.parts import Part
from cudnn_sdpa.attention.spec import SCALE
from cudnn_sdpa.attention.support.rules import FORWARD, Configuration, refuse
from cudnn_sdpa.attention.varlen import specs as varlen_specs
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.specs import VarlenSpec, sequence_bucket
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout, canonical_stride, dense_stride_like
from cudnn_sdpa.graph.target import Target

#: Maximum number of queries per sequence that the decode kernels serve.
MAX_DECODED = 8

#: Maximum GPU memory for gathered keys and values; a batch that needs more is split.
MAX_GATHERED_BYTES = 1 << 30

#: Minimum number of queries, over all sequences, that a plan for gathered keys is built for.
MIN_ROWS = 128


def has_memory_order_of_q(call: PagedArguments) -> bool:
    """Whether an output (B, Sq, Hq, Dv), as plans write it, has the memory order of `q`."""
    shape = _, heads, queries, dim = (*call.q.shape[:3], call.v_pages.shape[3])
    stride = dense_stride_like(shape, call.q.shape, call.q.stride())
    token_major = (queries * heads * dim, dim, heads * dim, 1)
    return canonical_stride(shape, stride) == canonical_stride(shape, token_major)


def keys(call: PagedArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a call: one, or those of the parts that a large batch is split into."""
    if call.is_empty:
        return
    if runs_own_kernel(call, target):
        yield own_kernel.key_of(call, target, device)
        return
    call = as_launched(call)
    if is_decode(call):
        calls = [batch_entries(call, part.entries) for part in split_decode(call)] or [call]
        try:
            found = [
                DecodeSpec.of(part, in_place=not reasons_against_in_place(part)).key(target, device) for part in calls
            ]
        except UnsupportedError:
            pass
        else:
            yield from dict.fromkeys(found)
            return
    sizes = [part.entries.stop - part.entries.start for part in split_prefill(call)] or [call.q.shape[0]]
    for size in dict.fromkeys(sizes):
        packed, out = prefill_spec(batch_entries(call, slice(0, size)))
        yield packed.forward_key(out, call.with_lse, target, device)


def split_decode(call: PagedArguments) -> list[Part]:
    """The parts of a decode step, some sequences each; none if one launch computes it."""
    return _split(call, known_issues.MAX_GRID // call.q.shape[2])


def split_prefill(call: PagedArguments) -> list[Part]:
    """The parts of prefill whose gathered keys and values would take too much memory; none if they fit."""
    return _split(call, sequences_at_once(call))


def _split(call: PagedArguments, at_once: int) -> list[Part]:
    batch, everything = call.q.shape[0], slice(None)
    if batch <= at_once:
        return []
    firsts = range(0, batch, at_once)  # unequal parts: the last is rounded up, too, and its extra sequences take time
    return [Part(slice(first, min(first + at_once, batch)), everything, everything) for first in firsts]


# Decode steps.


def is_decode(call: PagedArguments) -> bool:
    queries = call.q.shape[2]
    if queries > MAX_DECODED or call.softmax.is_capped or call.k.shape[1] > known_issues.MAX_GRID:
        return False
    if call.softmax.window_left == UNBOUNDED:
        return True
    # cuDNN counts the window from the last key that a row sees, which must then be the key on its diagonal.
    return call.softmax.causal_alignment == BOTTOM_RIGHT and (right_bound(call) == 0 or queries == 1)


def marks_of(call: PagedArguments) -> tuple[Mark | None, Mark | None]:
    """The marks on the call's table and lengths: with its layouts, they decide whether cuDNN may read both in place."""
    return getattr(call.page_table, MARK, None), getattr(call.seq_lens_kv, MARK, None)


def is_of_a_cache(call: PagedArguments) -> bool:
    """Whether one `PagedKVCache` made the call's tables and lengths, or they are trusted, and they fit these pages."""
    mark, other = marks_of(call)
    if mark is None or call.page_table_v is not None or other != mark:
        return False
    pages, *sizes = mark
    return bool(pages <= call.k_pages.shape[0] and sizes == [call.page_table.shape[1], call.page_size])


def reasons_against_in_place(call: PagedArguments) -> list[str]:
    """Why cuDNN may not read the call's queries, tables and lengths without copies; empty if it may."""
    reasons = []
    batch, _, queries, _ = call.q.shape
    if queries != 1 or call.seq_lens_q is not None:
        reasons.append("each sequence must have one query")
    if sequence_bucket(batch) != batch:
        reasons.append(f"{batch} sequences are served by a plan for {sequence_bucket(batch)}")
    if right_bound(call) != UNBOUNDED and call.softmax.causal_alignment != BOTTOM_RIGHT:
        reasons.append("a mask aligned at the first key changes the lengths")
    if not is_of_a_cache(call):
        reasons.append(
            "the tables and lengths are not those of a PagedKVCache, nor trusted_pages, so they must be checked"
        )
    return reasons


def right_bound(call: PagedArguments) -> int:
    """The last key that a query sees, relative to the diagonal; -1 if unbounded."""
    return 0 if call.softmax.is_causal else call.softmax.window_right


def table_width(columns: int) -> int:
    """The pages per sequence of a plan: 64 times a power of eight. Unused columns cost nothing."""
    width = 64
    while width < columns:
        width *= 8
    return width


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """A decode step without its data.

    Attributes:
        q: Queries (rows, Hq, 1, D), with as many rows as the plan has.
        k: Keys (pages, Hkv, page size, D). The number of pages is rounded up to a power of two, and page ids stay below
            the true number: servers derive it from free memory, and two starts of one are to share their plans.
        v: Values (pages, Hkv, page size, Dv).
        out: The output (rows, Hq, 1, Dv).
        tables: The page tables of keys and of values (rows, 1, width, 1).
        left: The window's left bound, or None.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    out: TensorLayout
    tables: tuple[TensorLayout, TensorLayout]
    left: int | None
    with_lse: bool
    deterministic: bool

    @classmethod
    def of(cls, call: PagedArguments, *, in_place: bool) -> DecodeSpec:
        """The spec of a call.

        Args:
            call: The call.
            in_place: Whether cuDNN reads the call's tables and queries directly, without copies.
        """
        (batch, heads, queries, dim), k, v, has_sinks = call.q.shape, call.k, call.v, call.has_sinks
        rows = sequence_bucket(batch * queries)
        width, pages = table_width(call.page_table.shape[1]), 1 << (k.shape[0] - 1).bit_length()
        row_q, head_q = (heads * dim, dim) if not in_place else (call.q.stride(0), call.q.stride(1))
        shape_q, shape_out = (rows, heads, 1, dim), (rows, heads, 1, v.shape[3])
        strides = [t.stride(0) if in_place and rows > 1 else width for t in call.tables]
        table_k, table_v = (TensorLayout((rows, 1, width, 1), (x, x, 1, 1), torch.int32) for x in strides)
        return cls(
            q=TensorLayout(shape_q, canonical_stride(shape_q, (row_q, head_q, head_q, 1)), call.q.dtype),
            k=TensorLayout.with_first(k, pages),
            v=TensorLayout.with_first(v, pages),
            out=TensorLayout.contiguous(shape_out, call.q.dtype),
            tables=(table_k, table_v),
            left=None if call.softmax.window_left == UNBOUNDED else call.softmax.window_left,
            with_lse=call.with_lse or has_sinks,
            deterministic=call.softmax.deterministic,
        )

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of its plan."""
        configuration = Configuration(
            operation=FORWARD,
            dtype=self.q.dtype,
            head_dim=self.q.shape[3],
            head_dim_v=self.v.shape[3],
            sq=1,
            skv=self.tables[0].shape[2] * self.k.shape[2],
            sm=target.sm,
            cudnn=target.cudnn,
            gpu=target,
            lengths=True,
        )
        refuse(configuration, "sdpa_paged")
        lengths = TensorLayout.contiguous((self.rows, 1, 1, 1), torch.int32)
        inputs = [
            Operand("q", self.q),
            Operand("k", self.k),
            Operand("v", self.v),
            SCALE,
            Operand("seq_len_q", lengths, Role.FILL, 1),
            Operand("seq_len_kv", lengths),
            Operand("table_k", self.tables[0]),
            Operand("table_v", self.tables[1]),
        ]
        outputs = [Operand("out", self.out)]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*self.q.shape[:2], 1, 1), torch.float32)))
        options: dict[str, object] = {"left": self.left, "with_lse": self.with_lse}
        if self.deterministic:
            options["deterministic"] = True
        key = graphs.paged_decode.key(inputs=inputs, outputs=outputs, options=options, target=target, device=device)
        known_issues.check(key)  # now and not at build time, so that the call can run as prefill
        return key


# Prefill.


class Gathered(NamedTuple):
    """Keys and values gathered from their pages into packed sequences.

    Attributes:
        k: Keys (tokens, Hkv, D), those of all sequences first.
        v: Values (tokens, Hkv, Dv).
        cu_seqlens_q: Offsets of the sequences of queries, (sequences + 1,) int32.
    """

    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor


def sequences_at_once(call: PagedArguments) -> int:
    _, heads, _, dim = call.k.shape
    of_token = heads * (dim + call.v.shape[3]) * call.k.element_size()
    return max(1, MAX_GATHERED_BYTES // max(1, call.max_kv_len * of_token))


def batch_entries(call: PagedArguments, part: slice) -> PagedArguments:
    """The call of some sequences, without `out`."""
    names = ("q", "page_table", "page_table_v", "seq_lens_kv", "seq_lens_q")
    parts = {name: x[part] for name in names if (x := getattr(call, name)) is not None}
    return call._replace(**parts, out=None)


def as_packed(call: PagedArguments, gathered: Gathered) -> VarlenArguments:
    """The call on packed sequences. Queries are copied unless they are token-major."""
    batch, heads, queries, dim = call.q.shape
    rows: Tensor = call.q.transpose(1, 2).reshape(batch * queries, heads, dim)
    if heads > 1 and rows.stride(1) > rows.stride(0):  # a head-major sequence would need a plan per number of queries
        rows = rows.contiguous()
    return VarlenArguments(
        q=rows,
        k=gathered.k,
        v=gathered.v,
        cu_seqlens_q=gathered.cu_seqlens_q,
        cu_seqlens_kv=gathered.cu_seqlens_kv,
        rng=None,
        max_seqlen_q=queries,
        max_seqlen_kv=call.max_kv_len,
        with_lse=call.with_lse,
        **call.of_softmax,
    )


def prefill_spec(call: PagedArguments) -> tuple[VarlenSpec, TensorLayout]:
    """The spec and output layout of a call whose sequences are gathered at a time; reads no memory."""
    batch = call.q.shape[0]
    k, v = (
        torch.empty(batch * call.max_kv_len, pages.shape[1], pages.shape[3], dtype=pages.dtype, device="meta")
        for pages in (call.k, call.v)
    )
    cu_seqlens = torch.empty(batch * (1 if call.seq_lens_q is None else 2) + 1, dtype=torch.int32, device="meta")
    q = torch.empty_strided(call.q.shape, call.q.stride(), dtype=call.q.dtype, device="meta")
    varlen_call = as_packed(call._replace(q=q), Gathered(k, v, cu_seqlens, cu_seqlens))
    return packed_spec(varlen_call, batch), output_layout(varlen_call)


def packed_spec(call: VarlenArguments, batch: int) -> VarlenSpec:
    """The spec of a call, its sizes rounded up so that few plans serve many calls."""
    rows, max_kv_len = call.q.shape[0], call.max_seqlen_kv
    return varlen_specs.spec_of(call, (row_bucket(rows), sequence_bucket(batch) * max_kv_len))


def row_bucket(rows: int) -> int:
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())
