"""Calls on a paged cache with many queries, or with options that the decode kernels lack.

One kernel gathers keys and values into packed sequences, on which the call runs. cuDNN's own kernel for many queries on
pages takes about as long, and lets NaN from unused slots into the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Result
from cudnn_sdpa.attention.dense.packed import VarlenSpec, sequence_bucket
from cudnn_sdpa.attention.paged import launch as paged_launch
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.varlen import launch as varlen_launch
from cudnn_sdpa.attention.varlen import plans as varlen_plans
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.plans.plan import Plan, current_device

#: Maximum GPU memory for gathered keys and values; a batch that needs more is split.
MAX_GATHERED_BYTES = 1 << 30

#: Minimum number of queries, over all sequences, that a plan is built for.
MIN_ROWS = 128


class PrefillCall:
    """A call bound to its plan, on as many sequences as are gathered at a time.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_gather", "_has_several_gpus", "_is_as_requested", "_run_varlen", "last", "plan")

    def __init__(self, call: PagedArguments) -> None:
        self._has_several_gpus = torch.cuda.device_count() > 1
        self._is_as_requested = call.out is None and paged_launch.has_memory_order_of_q(call)
        self._gather = paging.GatherKernel(call)
        varlen_call = as_packed(call, self._gather(call))
        prepared = varlen_launch.prepare(varlen_call, packed(varlen_call, call.q.shape[0]))
        if prepared.plan is None:
            raise ValueError("an empty call has no plan")
        self._run_varlen: Callable[[VarlenArguments], Result] = prepared.run
        self.plan: Plan = prepared.plan
        self.last: Any = None

    def __call__(self, call: PagedArguments) -> Result:
        """The results of a call whose arguments are checked."""
        if self._has_several_gpus and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self(call)
        batch, heads, queries, _ = call.q.shape
        result = self._run_varlen(as_packed(call, self._gather(call)))
        packed_out, packed_lse = result if isinstance(result, tuple) else (result, None)
        out = packed_out.view(batch, queries, heads, -1).transpose(1, 2)
        if not self._is_as_requested:
            out = paged_launch.as_requested(call, out)
        if packed_lse is None:
            return out
        return out, packed_lse.view(batch, queries, heads).transpose(1, 2).contiguous()


def run_prefill(call: PagedArguments) -> Result:
    """The results of a call whose arguments are checked."""
    at_once = sequences_at_once(call)
    if call.q.shape[0] > at_once:
        return _in_parts(call, at_once)
    name = paged_launch.prefill_signature(call)
    prepared = paged_launch.calls.get(name)
    if prepared is None:
        with torch.cuda.device(call.q.device):
            prepared = PrefillCall(call)
        paged_launch.calls.add(name, prepared)
    result: Result = prepared(call)
    return result


def sequences_at_once(call: PagedArguments) -> int:
    """How many sequences' keys and values are gathered at a time."""
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
        result = run_prefill(_batch_entries(call, part))
        out[part], part_lse = result if isinstance(result, tuple) else (result, None)
        if lse is not None and part_lse is not None:
            lse[part] = part_lse
    return out if lse is None else (out, lse)


def _batch_entries(call: PagedArguments, part: slice) -> PagedArguments:
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
    """The same call on packed sequences. Queries are copied unless they are token-major."""
    batch, heads, queries, dim = call.q.shape
    rows: Tensor = call.q.transpose(1, 2).reshape(batch * queries, heads, dim)
    if heads > 1 and rows.stride(1) > rows.stride(0):  # a head-major sequence would need a plan per number of queries
        rows = rows.contiguous()
    return VarlenArguments(
        q=rows,
        k=gathered.k,
        v=gathered.v,
        sinks=call.sinks,
        cu_seqlens_q=gathered.cu_seqlens_q,
        cu_seqlens_kv=gathered.cu_seqlens_kv,
        rng=None,
        max_seqlen_q=queries,
        max_seqlen_kv=call.max_kv_len,
        is_causal=call.is_causal,
        causal_alignment=call.causal_alignment,
        window_left=call.window_left,
        window_right=call.window_right,
        scale=call.scale,
        dropout_p=0.0,
        softcap=call.softcap,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        with_lse=call.with_lse,
    )


def prefill_spec(call: PagedArguments) -> tuple[VarlenSpec, TensorLayout]:
    """The spec and output layout of a call, or of its first part if the batch is split; reads no memory."""
    call = call._replace(q=call.q[: sequences_at_once(call)])
    batch = call.q.shape[0]
    k, v = (
        torch.empty(batch * call.max_kv_len, pages.shape[1], pages.shape[3], dtype=pages.dtype, device="meta")
        for pages in (call.k, call.v)
    )
    cu_seqlens = torch.empty(batch * (1 if call.seq_lens_q is None else 2) + 1, dtype=torch.int32, device="meta")
    q = torch.empty_strided(call.q.shape, call.q.stride(), dtype=call.q.dtype, device="meta")
    varlen_call = as_packed(call._replace(q=q), paging.Gathered(k, v, cu_seqlens, cu_seqlens))
    return packed(varlen_call, batch), varlen_plans.output_layout(varlen_call)


def packed(call: VarlenArguments, batch: int) -> VarlenSpec:
    """The spec of a call, its sizes rounded up so that few plans serve many calls; `plans_of_steps` knows the sizes."""
    rows, max_kv_len = call.q.shape[0], call.max_seqlen_kv
    return varlen_plans.spec_of(call, (row_bucket(rows), sequence_bucket(batch) * max_kv_len))


def row_bucket(rows: int) -> int:
    """The number of queries that the plan for so many is built for."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())
