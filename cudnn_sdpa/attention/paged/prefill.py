"""Calls on a paged cache with many queries, or with what the kernels for decode steps lack.

Keys and values are put in a row, by one kernel, and the call becomes one over packed sequences. cuDNN's own kernel for
many queries on pages takes about as long, and lets NaN of slots that no sequence owns into the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Result
from cudnn_sdpa.attention.dense.packed import VarlenSpec, sequence_bucket
from cudnn_sdpa.attention.paged import launch as paged_launch
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.varlen import launch as varlen_launch
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.plans.plan import current_device

#: What keys and values in a row may take of the GPU's memory; a batch that would take more goes in parts.
MAX_GATHERED_BYTES = 1 << 30

#: Queries of all sequences that a plan for many of them is made for, at least.
MIN_ROWS = 128


class PrefillCall:
    """A call bound to its plan, of as many sequences as are put in a row at a time.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_elsewhere", "_gather", "_is_as_wanted", "_varlen", "last", "plan")

    def __init__(self, call: PagedArguments) -> None:
        self._elsewhere = torch.cuda.device_count() > 1
        self._is_as_wanted = call.out is None and paged_launch.is_in_order(call)
        self._gather = paging.GatherKernel(call)
        of_rows = as_packed(call, self._gather(call))
        self._varlen = varlen_launch.prepare_forward(of_rows, packed(of_rows, call.q.shape[0]))
        self.plan = self._varlen.plan
        self.last: Any = None

    def __call__(self, call: PagedArguments) -> Result:
        """The results of a call whose arguments are checked."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self(call)
        batch, heads, queries, _ = call.q.shape
        found = varlen_launch.forward(self._varlen, as_packed(call, self._gather(call)))
        of_rows, of_lse = found if isinstance(found, tuple) else (found, None)
        out = of_rows.view(batch, queries, heads, -1).transpose(1, 2)
        if not self._is_as_wanted:
            out = paged_launch.in_place_of(call, out)
        return out if of_lse is None else (out, of_lse.view(batch, queries, heads).transpose(1, 2).contiguous())


def run_prefill(call: PagedArguments) -> Result:
    """The results of a call whose arguments are checked."""
    at_once = sequences_at_once(call)
    if call.q.shape[0] > at_once:
        return _in_parts(call, at_once)
    name = paged_launch.signature_of_prefill(call)
    prepared = paged_launch.calls.get(name)
    if prepared is None:
        with torch.cuda.device(call.q.device):
            prepared = PrefillCall(call)
        paged_launch.calls.add(name, prepared)
    result: Result = prepared(call)
    return result


def sequences_at_once(call: PagedArguments) -> int:
    """Of how many sequences keys and values are put in a row at a time."""
    heads, dims = call.k.shape[1], call.k.shape[3] + call.v.shape[3]
    return max(1, MAX_GATHERED_BYTES // max(1, call.max_kv_len * heads * dims * call.k.element_size()))


def _in_parts(call: PagedArguments, at_once: int) -> Result:
    out = call.out
    if out is None:
        shape = (*call.q.shape[:3], call.v.shape[3])
        stride = dense_stride_like(shape, call.q.shape, call.q.stride())
        out = torch.empty_strided(shape, stride, dtype=call.q.dtype, device=call.q.device)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) if call.with_lse else None
    for first in range(0, call.q.shape[0], at_once):
        part = slice(first, first + at_once)
        found = run_prefill(_of_batch(call, part))
        out[part], of_lse = found if isinstance(found, tuple) else (found, None)
        if lse is not None and of_lse is not None:
            lse[part] = of_lse
    return out if lse is None else (out, lse)


def _of_batch(call: PagedArguments, part: slice) -> PagedArguments:
    shared = call.table_v is call.table_k
    table = call.table_k[part]
    return call._replace(
        q=call.q[part],
        table_k=table,
        table_v=table if shared else call.table_v[part],
        seq_lens_kv=call.seq_lens_kv[part],
        seq_lens_q=None if call.seq_lens_q is None else call.seq_lens_q[part],
        out=None,
    )


def as_packed(call: PagedArguments, gathered: paging.Gathered) -> VarlenArguments:
    """The same call over packed sequences. Queries are copied unless tokens follow each other."""
    batch, heads, queries, dim = call.q.shape
    rows: Tensor = call.q.transpose(1, 2).reshape(batch * queries, heads, dim)
    if heads > 1 and rows.stride(1) > rows.stride(0):  # of one sequence: every number of queries would have a plan
        rows = rows.contiguous()
    return VarlenArguments(
        *(rows, gathered.k, gathered.v, call.sinks, gathered.ends_q, gathered.ends_kv, None),
        *(queries, call.max_kv_len, call.is_causal, call.causal_alignment, call.window_left, call.window_right),
        *(call.scale, 0.0, call.softcap),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        with_lse=call.with_lse,
    )


def without_data(call: PagedArguments) -> tuple[VarlenSpec, TensorLayout]:
    """The plan of a call, of its first part if it goes in several, and the layout of its output; reads no memory."""
    call = call._replace(q=call.q[: sequences_at_once(call)])
    batch = call.q.shape[0]
    k, v = (
        torch.empty(batch * call.max_kv_len, pages.shape[1], pages.shape[3], dtype=pages.dtype, device="meta")
        for pages in (call.k, call.v)
    )
    ends = torch.empty(batch * (1 if call.seq_lens_q is None else 2) + 1, dtype=torch.int32, device="meta")
    q = torch.empty_strided(call.q.shape, call.q.stride(), dtype=call.q.dtype, device="meta")
    of_rows = as_packed(call._replace(q=q), paging.Gathered(k, v, ends, ends))
    return packed(of_rows, batch), varlen_launch.output_layout(of_rows)


def packed(of_rows: VarlenArguments, batch: int) -> VarlenSpec:
    """Describes it, with rows rounded up so that few plans serve many: as many as `plans_of_steps` tells apart."""
    rows, max_kv_len = of_rows.q.shape[0], of_rows.max_seqlen_kv
    return varlen_launch.packed(of_rows, (rows_made(rows), sequence_bucket(batch) * max_kv_len))


def rows_made(rows: int) -> int:
    """For how many queries a plan for so many is made."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())
