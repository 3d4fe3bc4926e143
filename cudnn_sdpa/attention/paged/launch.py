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

#: The name under which a `PagedKVCache` marks the tables and lengths that it has made: they are right for caches of as
#: many pages of this size. (pages, columns of the table, page size).
MARK = "_cudnn_sdpa_pages"

PREFILL = "long"


class PagedCall:
    """A decode step bound to its plan.

    Attributes:
        decode: The step without its data.
        plan: The plan.
        in_place: Whether cuDNN reads the call's own tables, lengths and queries.
        last: What a `CallTable` resets.
    """

    __slots__ = (
        "_batch",
        "_elsewhere",
        "_is_shortest",
        "_is_whole",
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
        self._is_whole = self._batch == decode.rows
        self._elsewhere = torch.cuda.device_count() > 1
        self._scale = array("f", [call.scale_value])
        fixed = {"scale": self._scale.buffer_info()[0], "seq_len_q": plan.constants["seq_len_q"].data_ptr()}
        names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        self._template = array("Q", [fixed.get(name, 0) for name in names])
        self._prepare = None if in_place else paging.PageTableKernel(call, decode.rows, decode.tables[0].shape[2])
        self._is_shortest = in_place and self._is_whole and not decode.with_lse
        self._out = (decode.out.shape, decode.out.stride, decode.out.dtype)
        rows, heads = decode.q.shape[:2]
        self._lse = ((rows, heads, 1), (heads, 1, 1), torch.float32)

    def __call__(self, call: PagedArguments) -> Result:
        """The results of a call whose arguments are checked."""
        present = 0 if call.seq_lens_q is None else call.seq_lens_q.data_ptr()
        return _result(call, self.run(*call.addresses, present))

    def run(self, q: int, k: int, v: int, table_k: int, table_v: int, lengths: int, present: int = 0) -> list[Tensor]:
        """The output (rows, Hq, 1, Dv), and if there is one the log-sum-exp (rows, Hq, 1); arguments are addresses."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run(q, k, v, table_k, table_v, lengths, present)
        outputs = self.outputs()
        prepare, memory = self._prepare, None
        if prepare is not None:
            memory = prepare(q, (table_k, table_v), lengths, present)
            start = memory.data_ptr()
            of_q, of_lengths, of_k, of_v = prepare.places
            q, lengths, table_k, table_v = start + of_q, start + of_lengths, start + of_k, start + of_v
        self.plan.last_used = next_use()
        self.plan.launch(self.operands(q, k, v, table_k, table_v, lengths, outputs))
        del memory  # until now: its place must not go to the plan's workspace
        return outputs

    def run_plain(self, q: int, k: int, v: int, table: int, lengths: int) -> list[Tensor]:
        """The results of a call with one query of each sequence and nothing else, as the caller gets them."""
        if not self._is_shortest or (self._elsewhere and current_device() != self.plan.device):
            found = self.run(q, k, v, table, table, lengths)
            return found if self._is_whole else [tensor[: self._batch] for tensor in found]
        # `run`, `outputs` and `operands` in one: saves 1 µs.
        out = allocate(*self._out)
        operands, plan = self._template[:], self.plan
        operands[0], operands[1], operands[2], operands[5], operands[6] = q, k, v, lengths, table
        operands[7], operands[8] = table, out.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return [out]

    def outputs(self) -> list[Tensor]:
        """New memory for the output and the log-sum-exp, on the current device."""
        return [allocate(*self._out), allocate(*self._lse)] if self.decode.with_lse else [allocate(*self._out)]

    def operands(
        self, q: int, k: int, v: int, table_k: int, table_v: int, lengths: int, outputs: list[Tensor]
    ) -> array[int]:
        """The operands of a launch, in the key's order; a copy with some places filled in saves 1 µs."""
        result = self._template[:]
        result[0], result[1], result[2], result[5], result[6], result[7] = q, k, v, lengths, table_k, table_v
        result[8] = outputs[0].data_ptr()
        if len(outputs) > 1:
            result[9] = outputs[1].data_ptr()
        return result


#: Prepared calls, those of `paged.prefill` too, and what `paged` keeps of the ones served last.
calls: CallTable[Any] = CallTable(None)


def run_decode(call: PagedArguments) -> Result:
    """A decode step whose arguments are checked.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
    """
    return find(call)(call)


def known(call: PagedArguments) -> Callable[[PagedArguments], Result] | None:
    """What runs a call, if there has been one like it."""
    in_place = not reasons_against_in_place(call)
    name = signature(call, in_place=in_place)
    found = calls.get(name)
    if found is None:
        found = calls.get(signature_of_prefill(call) if in_place else (PREFILL, name))
    return found


def find(call: PagedArguments) -> PagedCall:
    """The same, prepared now if there has been none.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: It is missing and may not be built now.
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
    """All that decides a call, and whether its arguments are right."""
    shared = call.table_v is call.table_k
    tensors = map(describe, (*call[:8], call.out))
    exactly = torch.are_deterministic_algorithms_enabled()
    return (in_place, shared, exactly, *tensors, *call.options, *map(type, call.options))


def signature_of_prefill(call: PagedArguments) -> Hashable:
    """The same of a call that `paged.prefill` runs."""
    return PREFILL, signature(call, in_place=False)


def reasons_against_in_place(call: PagedArguments) -> list[str]:
    """Why cuDNN may not read the call's own queries, tables and lengths; empty if it may."""
    reasons = []
    batch, _, queries, _ = call.q.shape
    if queries != 1 or call.seq_lens_q is not None:
        reasons.append("each sequence must have one query")
    if sequence_bucket(batch) != batch:
        reasons.append(f"{batch} sequences are served by a plan for {sequence_bucket(batch)}")
    if right_bound(call) != UNBOUNDED and call.causal_alignment != BOTTOM_RIGHT:
        reasons.append("a mask aligned at the first key changes the lengths")
    if mark_of(call) is None:
        reasons.append("the tables and lengths are not those of a PagedKVCache, and may hold anything")
    return reasons


def mark_of(call: PagedArguments) -> tuple[int, int, int] | None:
    """The mark of a `PagedKVCache` that vouches for the tables and lengths of a call, if one does."""
    mark: tuple[int, int, int] | None = getattr(call.table_k, MARK, None)
    if mark is None or call.table_v is not call.table_k or getattr(call.seq_lens_kv, MARK, None) != mark:
        return None
    return mark if mark[0] <= call.k.shape[0] and mark[2] == call.page_size else None


def _result(call: PagedArguments, found: list[Tensor]) -> Result:
    """The results in the shapes that the caller expects."""
    batch, heads, queries, _ = call.q.shape
    rows = batch * queries
    out = found[0][:rows].view(batch, queries, heads, -1).transpose(1, 2)
    lse = None
    if len(found) > 1:
        of_rows = found[1][:rows]
        if call.sinks is not None:
            apply_sinks(found[0][:rows], of_rows, call.sinks)
        lse = of_rows.view(batch, queries, heads).transpose(1, 2).contiguous()
    out = in_place_of(call, out)
    return (out, lse) if call.with_lse and lse is not None else out


def in_place_of(call: PagedArguments, out: Tensor) -> Tensor:
    """An output (B, Hq, Sq, Dv), token after token in memory, where and in which order the caller wants it."""
    if call.out is not None:
        return call.out.copy_(out)
    if is_in_order(call):
        return out
    stride = dense_stride_like(out.shape, call.q.shape, call.q.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(out)


def is_in_order(call: PagedArguments) -> bool:
    """Whether the output of a plan for decode steps, token after token, lies in the memory order of `q`."""
    batch, heads, queries, _ = call.q.shape
    dim = call.v.shape[3]
    shape, tokens = (batch, heads, queries, dim), (queries * heads * dim, dim, heads * dim, 1)
    wanted = dense_stride_like(shape, call.q.shape, call.q.stride())
    return canonical_stride(shape, wanted) == canonical_stride(shape, tokens)
