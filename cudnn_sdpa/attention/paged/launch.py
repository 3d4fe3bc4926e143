"""Decode steps on a paged cache, bound to their plans."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Result
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense.launch import apply_sinks
from cudnn_sdpa.attention.dense.packed import sequence_bucket
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.decode_plans import DecodeSpec, right_bound
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.graph.layouts import canonical_stride, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

#: The attribute by which a `PagedKVCache` marks the tables and lengths that it made: valid for caches with as many
#: pages of this size. Its value is (pages, columns of the table, page size).
MARK = "_cudnn_sdpa_pages"

PREFILL = "prefill"

#: Slots of a launch's operands: the order of the inputs and outputs in `DecodeSpec.key`.
_Q, _K, _V, _SCALE, _SEQ_LEN_Q, _SEQ_LEN_KV, _TABLE_K, _TABLE_V, _OUT, _LSE = range(10)


class PagedCall:
    """A decode step bound to its plan.

    Attributes:
        decode: The spec of the step.
        plan: The plan.
        in_place: Whether cuDNN reads the call's tables, lengths and queries directly, without copies.
        last: What a `CallTable` resets.
    """

    __slots__ = (
        "_batch",
        "_can_launch_directly",
        "_has_several_gpus",
        "_is_exact",
        "_lse",
        "_out",
        "_prepare",
        "_scale",
        "_template",
        "decode",
        "in_place",
        "last",
        "plan",
    )

    def __init__(self, call: PagedArguments, decode: DecodeSpec, plan: Plan, *, in_place: bool) -> None:
        self.decode = decode
        self.plan = plan
        self.in_place = in_place
        self.last: Any = None
        self._batch = call.q.shape[0]
        self._is_exact = self._batch == decode.rows
        self._has_several_gpus = torch.cuda.device_count() > 1
        self._scale = array("f", [call.scale_value])
        fixed = {"scale": self._scale.buffer_info()[0], "seq_len_q": plan.constants["seq_len_q"].data_ptr()}
        names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        self._template = array("Q", [fixed.get(name, 0) for name in names])  # one copy of it per call saves 1 µs
        self._prepare = None if in_place else paging.PageTableKernel(call, decode.rows, decode.tables[0].shape[2])
        self._can_launch_directly = in_place and self._is_exact and not decode.with_lse
        self._out = (decode.out.shape, decode.out.stride, decode.out.dtype)
        rows, heads = decode.q.shape[:2]
        self._lse = ((rows, heads, 1), (heads, 1, 1), torch.float32)

    def __call__(self, call: PagedArguments) -> Result:
        """The results of a call whose arguments are checked."""
        outputs = self.run(
            q=call.q.data_ptr(),
            k=call.k.data_ptr(),
            v=call.v.data_ptr(),
            table_k=call.table_k.data_ptr(),
            table_v=call.table_v.data_ptr(),
            seq_lens_kv=call.seq_lens_kv.data_ptr(),
            seq_lens_q=0 if call.seq_lens_q is None else call.seq_lens_q.data_ptr(),
        )
        return _result(call, outputs)

    def run(
        self, *, q: int, k: int, v: int, table_k: int, table_v: int, seq_lens_kv: int, seq_lens_q: int = 0
    ) -> list[Tensor]:
        """The output (rows, Hq, 1, Dv) and, if the plan writes it, the log-sum-exp (rows, Hq, 1).

        Arguments are addresses; that of `seq_lens_q` is 0 if all queries are present.
        """
        if self._has_several_gpus and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run(
                    q=q, k=k, v=v, table_k=table_k, table_v=table_v, seq_lens_kv=seq_lens_kv, seq_lens_q=seq_lens_q
                )
        outputs = self.outputs()
        prepare, memory = self._prepare, None
        if prepare is not None:
            memory = prepare(q=q, table_k=table_k, table_v=table_v, seq_lens_kv=seq_lens_kv, seq_lens_q=seq_lens_q)
            q = memory.data_ptr()
            table_k, table_v = q + prepare.table_k_offset, q + prepare.table_v_offset
            seq_lens_kv = q + prepare.seq_lens_kv_offset
        self.plan.last_used = next_use()
        self.plan.launch(
            self.operands(q=q, k=k, v=v, table_k=table_k, table_v=table_v, seq_lens_kv=seq_lens_kv, outputs=outputs)
        )
        del memory  # only now: the allocator must not reuse it for the plan's workspace
        return outputs

    def run_plain(self, *, q: int, k: int, v: int, table: int, seq_lens_kv: int) -> list[Tensor]:
        """The results, as the caller gets them, of a call with one query per sequence and no further options.

        Arguments are addresses.
        """
        if not self._can_launch_directly or (self._has_several_gpus and current_device() != self.plan.device):
            outputs = self.run(q=q, k=k, v=v, table_k=table, table_v=table, seq_lens_kv=seq_lens_kv)
            return outputs if self._is_exact else [tensor[: self._batch] for tensor in outputs]
        # `run`, `outputs` and `operands` inlined: saves 1 µs.
        out = allocate(*self._out)
        operands, plan = self._template[:], self.plan
        operands[_Q], operands[_K], operands[_V] = q, k, v
        operands[_TABLE_K] = operands[_TABLE_V] = table
        operands[_SEQ_LEN_KV], operands[_OUT] = seq_lens_kv, out.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return [out]

    def outputs(self) -> list[Tensor]:
        """New memory for the output and the log-sum-exp, on the current device."""
        return [allocate(*self._out), allocate(*self._lse)] if self.decode.with_lse else [allocate(*self._out)]

    def operands(
        self, *, q: int, k: int, v: int, table_k: int, table_v: int, seq_lens_kv: int, outputs: list[Tensor]
    ) -> array[int]:
        """The operands of a launch, in the key's order; all but the outputs are given by address."""
        operands = self._template[:]
        operands[_Q], operands[_K], operands[_V] = q, k, v
        operands[_TABLE_K], operands[_TABLE_V] = table_k, table_v
        operands[_SEQ_LEN_KV], operands[_OUT] = seq_lens_kv, outputs[0].data_ptr()
        if len(outputs) > 1:
            operands[_LSE] = outputs[1].data_ptr()
        return operands


#: Bound calls, those of `paged.prefill` too, and the cached calls of `sdpa_paged`.
calls: CallTable[Any] = CallTable(None)


def run_decode(call: PagedArguments) -> Result:
    """A decode step whose arguments are checked.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
    """
    return find(call)(call)


def known(call: PagedArguments) -> Callable[[PagedArguments], Result] | None:
    """What runs a call, if there has been one with the same signature."""
    in_place = not reasons_against_in_place(call)
    name = signature(call, in_place=in_place)
    prepared = calls.get(name)
    if prepared is None:
        prepared = calls.get(prefill_signature(call) if in_place else (PREFILL, name))
    return prepared


def find(call: PagedArguments) -> PagedCall:
    """The bound decode call, with its plan built now if there has been no such call.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: The plan is missing and may not be built now.
    """
    in_place = not reasons_against_in_place(call)
    name = signature(call, in_place=in_place)
    prepared: PagedCall | None = calls.get(name)
    if prepared is None:
        device = call.q.get_device()
        decode = DecodeSpec.of(call, in_place=in_place)
        key = decode.key(live_target(device), device)
        plan = plan_cache.get(key, lambda key: build_plan(graphs.paged_decode, key))
        with torch.cuda.device(device):
            prepared = PagedCall(call, decode, plan, in_place=in_place)
        calls.add(name, prepared)
    return prepared


def signature(call: PagedArguments, *, in_place: bool) -> Hashable:
    """All that decides the plan of a call, and whether its arguments are valid."""
    shared = call.table_v is call.table_k
    tensors = map(describe, call.tensors)
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = (*call.options, call.with_lse)
    return (in_place, shared, deterministic, *tensors, *options, *map(type, options))


def prefill_signature(call: PagedArguments) -> Hashable:
    """The signature of a call that `paged.prefill` runs."""
    return PREFILL, signature(call, in_place=False)


def reasons_against_in_place(call: PagedArguments) -> list[str]:
    """Why cuDNN may not read the call's queries, tables and lengths without copies; empty if it may."""
    reasons = []
    batch, _, queries, _ = call.q.shape
    if queries != 1 or call.seq_lens_q is not None:
        reasons.append("each sequence must have one query")
    if sequence_bucket(batch) != batch:
        reasons.append(f"{batch} sequences are served by a plan for {sequence_bucket(batch)}")
    if right_bound(call) != UNBOUNDED and call.causal_alignment != BOTTOM_RIGHT:
        reasons.append("a mask aligned at the first key changes the lengths")
    if mark_of(call) is None:
        reasons.append("the tables and lengths are not those of a PagedKVCache, so they must be checked")
    return reasons


def mark_of(call: PagedArguments) -> tuple[int, int, int] | None:
    """The mark on the call's tables and lengths, if one `PagedKVCache` made both and they fit these pages."""
    mark: tuple[int, int, int] | None = getattr(call.table_k, MARK, None)
    if mark is None or call.table_v is not call.table_k or getattr(call.seq_lens_kv, MARK, None) != mark:
        return None
    return mark if mark[0] <= call.k.shape[0] and mark[2] == call.page_size else None


def _result(call: PagedArguments, outputs: list[Tensor]) -> Result:
    """The results in the shapes that the caller expects."""
    batch, heads, queries, _ = call.q.shape
    rows = batch * queries
    out = outputs[0][:rows].view(batch, queries, heads, -1).transpose(1, 2)
    lse = None
    if len(outputs) > 1:
        lse_rows = outputs[1][:rows]
        if call.sinks is not None:
            apply_sinks(outputs[0][:rows], lse_rows, call.sinks)
        lse = lse_rows.view(batch, queries, heads).transpose(1, 2).contiguous()
    out = as_requested(call, out)
    return (out, lse) if call.with_lse and lse is not None else out


def as_requested(call: PagedArguments, out: Tensor) -> Tensor:
    """A token-major output (B, Hq, Sq, Dv) in the caller's `out`, or in q's memory order."""
    if call.out is not None:
        return call.out.copy_(out)
    if has_memory_order_of_q(call):
        return out
    stride = dense_stride_like(out.shape, call.q.shape, call.q.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(out)


def has_memory_order_of_q(call: PagedArguments) -> bool:
    """Whether the token-major output of a decode plan has the memory order of `q`."""
    batch, heads, queries, _ = call.q.shape
    dim = call.v.shape[3]
    shape, token_major = (batch, heads, queries, dim), (queries * heads * dim, dim, heads * dim, 1)
    expected = dense_stride_like(shape, call.q.shape, call.q.stride())
    return canonical_stride(shape, expected) == canonical_stride(shape, token_major)
