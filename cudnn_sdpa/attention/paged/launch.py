"""Calls on a paged cache bound to their plans: decode steps, and prefill on gathered keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts, sink_scores
from cudnn_sdpa.attention.arguments import MIN_SCALE, query_factor, results, scale_of
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.paged import paging, specs
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.specs import DecodeSpec
from cudnn_sdpa.attention.paged_varlen import launch as own_kernel
from cudnn_sdpa.attention.paged_varlen.preferences import runs_own_kernel
from cudnn_sdpa.attention.parts import Part
from cudnn_sdpa.attention.reference import fill_without_keys
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.varlen import launch as varlen_launch
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.engine.launch import (
    Address,
    BoundPlan,
    LaunchExtras,
    Layout,
    Prepared,
    Result,
    SingleLaunch,
    items_by_name,
    new_tensor,
)
from cudnn_sdpa.engine.operation import OPERATIONS
from cudnn_sdpa.engine.tensor_checks import check_address, check_present, multiplied
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.plan import current_device

#: Keys of decode plans that cuDNN could not build: such steps run as prefill does.
_declined: set[PlanKey] = set()
MAX_DECLINED = 1000


def prepare(call: PagedArguments) -> Prepared:
    """A call bound to its plan."""
    if call.is_empty:
        return Prepared(lambda call: fill_without_keys(call, results(call)), None)
    if runs_own_kernel(call, live_target(call.q.get_device())):
        return own_kernel.bind(call)
    factor = query_factor(call)
    if factor is not None:
        return _prepare_multiplied(call, factor)
    if specs.is_decode(call):
        if specs.split_decode(call):
            return Prepared(partial(_run_in_parts, split=specs.split_decode), None)
        try:
            bound = bind_decode(call, in_place=not specs.reasons_against_in_place(call))
        except UnsupportedError:
            pass
        else:
            return Prepared(SingleLaunch(bound) if _is_direct(call, bound) else _Decode(bound), bound.plan)
    if specs.split_prefill(call):
        return Prepared(partial(_run_in_parts, split=specs.split_prefill), None)
    return _prepare_prefill(call)


def _prepare_multiplied(call: PagedArguments, factor: float) -> Prepared:
    """The call with queries multiplied by `factor`, and with results in the memory order of the caller's queries."""
    layout, _ = results(call._replace(out=None))
    scale = max(-scale_of(call), MIN_SCALE)

    def launched(call: PagedArguments) -> PagedArguments:
        out = new_tensor(layout, call.q.device) if call.out is None else call.out
        return call._replace(q=multiplied(call.q, factor), softmax=call.softmax._replace(scale=scale), out=out)

    prepared = prepare(launched(call))
    return Prepared(lambda call: prepared.run(launched(call)), prepared.plan)


# Decode steps.


def bind_decode(call: PagedArguments, *, in_place: bool) -> BoundPlan:
    """The decode plan of a call. Its results are (rows, Hq, 1, Dv) and, for the LSE, (rows, Hq, 1).

    Args:
        call: The call.
        in_place: Whether cuDNN reads the call's tables, lengths and queries directly, without copies.
    """
    device = call.q.get_device()
    decode = DecodeSpec.of(call, in_place=in_place)
    key = decode.key(live_target(device), device)
    if key in _declined:
        raise UnsupportedError("a decode step on a paged cache", ["cuDNN could not build its plan"])
    try:
        plan = plan_cache.get(key, partial(build_plan, graphs.paged_decode))
    except UnsupportedError:
        if len(_declined) >= MAX_DECLINED:
            _declined.clear()
        _declined.add(key)
        raise
    rows, heads = decode.q.shape[:2]
    layouts: list[Layout] = [(decode.out.shape, decode.out.stride, decode.out.dtype)]
    if decode.with_lse:
        layouts.append(((rows, heads, 1), (heads, 1, 1), torch.float32))
    optional = [name for name in ("page_table_v", "seq_lens_q") if getattr(call, name) is not None]
    tables = ("page_table", "seq_lens_kv", *optional)
    table_v = "page_table" if call.page_table_v is None else "page_table_v"
    addresses = {"k": Address("k_pages"), "v": Address("v_pages")}
    kernels: tuple[paging.PageTableKernel, ...] = ()
    if in_place:
        addresses |= {"table_k": Address("page_table"), "table_v": Address(table_v)}
        addresses["seq_len_kv"] = Address("seq_lens_kv")
    else:
        with torch.cuda.device(device):
            kernels = (paging.PageTableKernel(call, rows, decode.tables[0].shape[2]),)
        addresses |= kernels[0].operands
    return BoundPlan(
        plan=plan,
        operands=("q", "k_pages", "v_pages"),
        results=layouts,
        numbers={"scale": scale_of(call)},
        extras=LaunchExtras(operands=tables, unaligned_ok=tables, kernels=kernels, addresses=addresses),
    )


def _is_direct(call: PagedArguments, bound: BoundPlan) -> bool:
    batch, _, queries, _ = call.q.shape
    rows = bound.plan.key.outputs[0].layout.shape[0]
    is_as_requested = specs.has_memory_order_of_q(call) and not call.has_sinks and call.out is None
    return queries == 1 and batch == rows and is_as_requested


class _Decode:
    """A decode step bound to its plan, with results as the caller expects them."""

    __slots__ = ("_bound", "_tensors_of")

    def __init__(self, bound: BoundPlan) -> None:
        self._bound = bound
        self._tensors_of = items_by_name(bound.operands)

    def __call__(self, call: PagedArguments) -> Result:
        outputs = self._bound(self._tensors_of(call))
        batch, heads, queries, _ = call.q.shape
        out, *lse = [output[: batch * queries] for output in outputs]
        if call.has_sinks:
            sink_scores.complete(call, out, lse[0], SinkUse.AFTER_PLAN)
        out = as_requested(call, out.view(batch, queries, heads, -1).transpose(1, 2))
        if not call.with_lse:
            return out
        return out, lse[0].view(batch, queries, heads).transpose(1, 2).contiguous()


def as_requested(call: PagedArguments, out: Tensor) -> Tensor:
    """A token-major output (B, Hq, Sq, Dv) in the caller's `out`, or in q's memory order."""
    if call.out is not None:
        return call.out.copy_(out)
    if specs.has_memory_order_of_q(call):
        return out
    stride = dense_stride_like(out.shape, call.q.shape, call.q.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(out)


# Prefill.


class _Prefill:
    """A call bound to its plan, on as many sequences as are gathered at a time."""

    __slots__ = ("_gather", "_has_several_gpus", "_is_as_requested", "_run_varlen", "plan")

    def __init__(self, call: PagedArguments) -> None:
        self._has_several_gpus = torch.cuda.device_count() > 1
        self._is_as_requested = call.out is None and specs.has_memory_order_of_q(call)
        self._gather = paging.GatherKernel(call)
        varlen_call = specs.as_packed(call, self._gather(call))
        prepared = varlen_launch.prepare(varlen_call, specs.packed_spec(varlen_call, call.q.shape[0]))
        if prepared.plan is None:
            raise ValueError("an empty call has no plan")
        self._run_varlen: Callable[[VarlenArguments], Result] = prepared.run
        self.plan = prepared.plan

    def __call__(self, call: PagedArguments) -> Result:
        if self._has_several_gpus and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self(call)
        for name in ("q", "k_pages", "v_pages"):  # read by our kernel, or copied by PyTorch's
            check_address(name, getattr(call, name))
        for name, tensor in zip(call._fields[3:], call[3:], strict=True):  # tables, lengths and options
            if isinstance(tensor, Tensor):
                check_present(name, tensor)
        batch, heads, queries, _ = call.q.shape
        result = self._run_varlen(specs.as_packed(call, self._gather(call)))
        packed_out, *packed_lse = result if isinstance(result, tuple) else (result,)
        out = packed_out.view(batch, queries, heads, -1).transpose(1, 2)
        if not self._is_as_requested:
            out = as_requested(call, out)
        if not packed_lse:
            return out
        return out, packed_lse[0].view(batch, queries, heads).transpose(1, 2).contiguous()


def _prepare_prefill(call: PagedArguments) -> Prepared:
    with torch.cuda.device(call.q.get_device()):
        prefill = _Prefill(call)
    return Prepared(prefill, prefill.plan)


def _run_in_parts(call: PagedArguments, split: Callable[[PagedArguments], list[Part]]) -> Result:
    def run(part: Part, out: Tensor) -> Result:
        of_part = specs.batch_entries(call, part.entries)._replace(out=out)
        result: Result = OPERATIONS["paged"].on_gpu(of_part)  # which remembers its binding
        return result

    return parts.attend(split(call), run, call=call, results=results(call))
