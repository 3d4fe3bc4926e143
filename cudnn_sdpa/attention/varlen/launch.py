"""Calls over packed sequences bound to their plans."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import Result
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense import launch_backward as backward_calls
from cudnn_sdpa.attention.dense.launch_backward import readable, sink_gradient
from cudnn_sdpa.attention.dense.packed import VarlenSpec, length_bucket, sequence_bucket
from cudnn_sdpa.attention.mask import TOP_LEFT, normalize_mask
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.packing import PackingKernel, is_of_keys, row_limits
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device


class VarlenCall:
    """A call, forward or backward, bound to its plan.

    Attributes:
        packed: The call without its data.
        plan: The plan.
        last: What a `CallTable` resets; the look-up keeps elsewhere by what it recognizes a call.
        gradients: What `varlen.fast_path` keeps of its backward passes.
        written: Shape, stride and dtype of the outputs as cuDNN writes them.
        moved: The same of gradients as the caller gets them, where that is in another memory order; by number.
    """

    __slots__ = (
        *("__weakref__", "_elsewhere", "_numbers", "_of_outputs", "_of_packing", "_of_tensors", "_pack"),
        *("_template", "gradients", "last", "moved", "packed", "plan", "written"),
    )

    def __init__(self, packed: VarlenSpec, plan: Plan, call: VarlenArguments, tensors: tuple[str, ...]) -> None:
        """Binds it.

        Args:
            packed: The call without its data.
            plan: The plan.
            call: The call, or one like it.
            tensors: Names of the operands that `launch` gets, in its order.
        """
        self.packed = packed
        self.plan = plan
        self.last: Any = None
        self.gradients: Any = None
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._numbers = {"scale": array("f", [call.scale_value])}
        if call.softcap is not None:
            self._numbers["softcap"] = array("f", [call.softcap])
        self._pack = PackingKernel(packed, plan, call)
        operands = (*plan.key.inputs, *plan.key.outputs)
        names = [operand.name for operand in operands]
        place = {name: number for number, name in enumerate(names)}
        fixed = {name: number.buffer_info()[0] for name, number in self._numbers.items()}
        self._template = [fixed.get(name, 0) for name in names]
        self._of_packing = [(place[name], offset) for name, offset in self._pack.offsets.items() if name in place]
        self._of_tensors = [place[name] for name in tensors]
        self._of_outputs = [place[output.name] for output in plan.key.outputs]
        self.written = [_unpacked(output, call) for output in plan.key.outputs]
        wanted = {"grad_q": packed.q, "grad_k": packed.k, "grad_v": packed.v}
        self.moved: dict[int, Any] = {}
        for number, output in enumerate(plan.key.outputs):
            if output.name in wanted:
                layout = dense_like(wanted[output.name])
                if layout.stride != self.written[number][1]:
                    self.moved[number] = (layout.shape, layout.stride, layout.dtype)

    def launch(self, call: VarlenArguments, tensors: tuple[Tensor, ...], outputs: list[Tensor]) -> None:
        """Launches the plan; rows of the outputs that belong to nobody, or see no key, are written, too."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                self.launch(call, tensors, outputs)
            return
        addresses = [output.data_ptr() for output in outputs]
        ends = call.cu_seqlens_q.data_ptr()
        ends_kv = ends if call.shared_cu_seqlens else call.cu_seqlens_kv.data_ptr()
        if not (ends and ends_kv):
            memory.check_present("cu_seqlens_q", call.cu_seqlens_q)
            memory.check_present("cu_seqlens_kv", call.cu_seqlens_kv)
        packing = self._pack(ends, ends_kv, addresses)
        start, pointers = packing.data_ptr(), self._template.copy()
        for place, offset in self._of_packing:
            pointers[place] = start + offset
        for place, tensor in zip(self._of_tensors, tensors, strict=True):
            pointers[place] = tensor.data_ptr()
        for place, address in zip(self._of_outputs, addresses, strict=True):
            pointers[place] = address
        kept = self._add_sides(call, packing, pointers)
        self.plan.last_used = next_use()
        self.plan.launch(pointers)
        del kept  # until now: their memory must not go to the plan's workspace

    def _add_sides(self, call: VarlenArguments, packing: Tensor, pointers: list[int]) -> Any:
        """Adds the pointers of what only some calls have, and gives what they point to."""
        if call.sinks is None and call.rng is None and not self.packed.softcap:
            return None
        names = [operand.name for operand in self.plan.key.inputs]
        sinks = None if call.sinks is None else memory.aligned("sinks", call.sinks)
        if sinks is not None and "sink" in names:
            pointers[names.index("sink")] = sinks.data_ptr()
        if call.rng is not None:
            pointers[names.index("seed")] = call.rng.data_ptr()
            pointers[names.index("offset")] = call.rng.data_ptr() + call.rng.element_size()
        limits = row_limits(self.packed, self._pack.lengths(packing)) if self.packed.softcap else {}
        for name, tensor in limits.items():
            pointers[names.index(name)] = tensor.data_ptr()
        return sinks, limits

    def outputs(self) -> list[Tensor]:
        """New memory for the outputs, on the plan's device."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.outputs()
        return [allocate(*layout) for layout in self.written]


def _unpacked(output: Operand, call: VarlenArguments) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, stride and dtype of an output, as the caller sees it."""
    _, heads, _, dim = output.layout.shape
    _, head, row, _ = output.layout.stride
    rows = (call.k if is_of_keys(output) else call.q).shape[0]
    of_lse = output.name == "lse"
    return (
        (rows, heads) if of_lse else (rows, heads, dim),
        (row, head) if of_lse else (row, head, 1),
        output.layout.dtype,
    )


class VarlenBackwardArguments(NamedTuple):
    """A backward call over packed sequences."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: VarlenArguments
    sink_gradient: bool


def packed(call: VarlenArguments, rows: tuple[int, int] | None = None) -> VarlenSpec:
    """Describes a call, its numbers rounded up; the rows of queries and of keys to `rows`, if these are given."""
    tight = call.deterministic or call.softcap is not None
    q, k, v = (TensorLayout.of(tensor) for tensor in call[:3])
    if rows is not None:
        of_q, of_kv = rows
        q, k, v = (replace(x, shape=(n, *x.shape[1:])) for x, n in ((q, of_q), (k, of_kv), (v, of_kv)))
    max_seqlen_q = length_bucket(call.max_seqlen_q, q.shape[0], tight=tight)
    max_seqlen_kv = length_bucket(call.max_seqlen_kv, k.shape[0], tight=tight)
    longest = min(call.max_seqlen_q, call.q.shape[0]), min(call.max_seqlen_kv, call.k.shape[0])
    alignment = TOP_LEFT if call.shared_cu_seqlens else call.causal_alignment
    window_size = (call.window_left, call.window_right)
    return VarlenSpec(
        *(q, k, v),
        sequence_bucket(call.cu_seqlens_q.shape[0] - 1),
        max_seqlen_q,
        max_seqlen_kv,
        normalize_mask(call.is_causal, alignment, window_size, *longest, has_lengths=True),
        call.shared_cu_seqlens,
        call.sinks is not None,
        float(call.dropout_p),
        call.softcap is not None,
        call.deterministic,
    )


#: Prepared calls, and what `varlen.fast_path` keeps of the one served last.
calls: CallTable[Any] = CallTable(None)

MAX_REMEMBERED = 8192

_differentiable: set[Hashable] = set()


def is_known_to_be_differentiable(call: VarlenArguments) -> bool:
    """Whether `check_gradient` has found nothing against it."""
    return _signature(call) in _differentiable


def check_gradient(call: VarlenArguments) -> None:
    """Refuses a call whose backward pass is known to have no kernel: now, and not when the loss is differentiated.

    Raises:
        UnsupportedError: With every reason.
    """
    name = _signature(call)
    if name in _differentiable:
        return
    refused = packed(call).refusal(live_target(call.q.get_device()), deterministic=call.deterministic)
    if refused is not None:
        raise refused
    if len(_differentiable) > MAX_REMEMBERED:
        _differentiable.clear()
    _differentiable.add(name)


def find_forward(call: VarlenArguments) -> VarlenCall | None:
    """The prepared forward call, if there has been one like this."""
    return calls.get(("forward", _signature(call), describe(call.out), call.with_lse))


def run_forward(call: VarlenArguments) -> Result:
    """The output, and if wanted the log-sum-exp (Tq, Hq)."""
    prepared = find_forward(call)
    if prepared is None:
        prepared = prepare_forward(call, packed(call))
        calls.add(("forward", _signature(call), describe(call.out), call.with_lse), prepared)
    return forward(prepared, call)


def prepare_forward(call: VarlenArguments, problem: VarlenSpec) -> VarlenCall:
    """A forward call bound to the plan for it as `problem` describes it; not remembered."""
    device = call.q.get_device()
    key = problem.forward_key(output_layout(call), call.with_lse, live_target(device), device)
    return _bind(problem, key, call, graphs.sdpa_forward, ("q", "k", "v"))


def output_layout(call: VarlenArguments) -> TensorLayout:
    """How the output of a call lies in memory: dense, its dimensions in the order of those of `q`."""
    if call.out is not None:
        return TensorLayout.of(call.out)
    q, shape = call.q, (*call.q.shape[:2], call.v.shape[2])
    return TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride()), q.dtype)


def new_output(call: VarlenArguments) -> Tensor:
    """An output for a call."""
    layout = output_layout(call)
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=call.q.device)


def forward(prepared: VarlenCall, call: VarlenArguments) -> Result:
    """The same of a prepared call whose arguments are checked."""
    outputs = prepared.outputs() if call.out is None else [call.out]
    if call.out is not None and call.with_lse:
        outputs.append(torch.empty(call.q.shape[:2], dtype=torch.float32, device=call.q.device))
    prepared.launch(call, (call.q, call.k, call.v), outputs)
    if not call.with_lse:
        return outputs[0]
    out, lse = outputs
    if call.sinks is not None:  # queries without keys see the sink alone
        torch.maximum(lse, call.sinks, out=lse)
    return out, lse


def run_backward(args: VarlenBackwardArguments) -> list[Tensor]:
    """The gradients by q, k and v, and if wanted by the sinks."""
    args = readable_arguments(args)
    memory.check_memory(
        args.call.q, args.call.k, args.call.v, args.out
    )  # what a hook kept for autograd may lie anywhere
    return backward(prepare_backward(args), args)


def readable_arguments(args: VarlenBackwardArguments) -> VarlenBackwardArguments:
    """The call with what cuDNN cannot read copied."""
    grad_out, call = readable(args.grad_out.unsqueeze(0), args.out.unsqueeze(0)).squeeze(0), args.call
    if TensorLayout.of(call.q) != (dense := dense_like(TensorLayout.of(call.q))):
        # cuDNN 9.19 cannot launch gradients of packed queries that lie among other tensors.
        q = torch.empty_strided(dense.shape, dense.stride, dtype=dense.dtype, device=call.q.device)
        call = call._replace(q=q.copy_(call.q))
    return args._replace(grad_out=grad_out, lse=memory.aligned("lse", args.lse), call=call)


def is_readable(args: VarlenBackwardArguments) -> bool:
    """Whether cuDNN can read all of a backward call where it lies."""
    layout = TensorLayout.of(args.call.q)
    return layout == dense_like(layout) and backward_calls.is_readable(args.grad_out.unsqueeze(0))


def find_backward(args: VarlenBackwardArguments) -> VarlenCall | None:
    """The prepared backward call of what cuDNN can read, if there has been one like it."""
    return calls.get(_name_of_backward(args))


def _name_of_backward(args: VarlenBackwardArguments) -> Hashable:
    return "backward", _signature(args.call), args.grad_out.stride(), args.out.stride()


def prepare_backward(args: VarlenBackwardArguments) -> VarlenCall:
    """The same, prepared now if there has been none."""
    call = args.call
    prepared = find_backward(args)
    if prepared is None:
        problem = packed(call)
        layouts = (TensorLayout.of(args.out), TensorLayout.of(args.grad_out))
        device = call.q.get_device()
        key = problem.backward_key(*layouts, call.deterministic, live_target(device), device)
        prepared = _bind(problem, key, call, graphs.sdpa_backward, ("q", "k", "v", "out", "grad_out", "lse"))
        calls.add(_name_of_backward(args), prepared)
    return prepared


def backward(prepared: VarlenCall, args: VarlenBackwardArguments) -> list[Tensor]:
    """The gradients of a prepared call."""
    call, lse = args.call, args.lse
    gradients = prepared.outputs()
    if prepared.packed.softcap:  # a row that sees nothing: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
        lse = args.lse.masked_fill(args.lse == -torch.inf, torch.inf)
    prepared.launch(call, (call.q, call.k, call.v, args.out, args.grad_out, lse), gradients)
    for number, (shape, stride, dtype) in prepared.moved.items():
        moved = torch.empty_strided(shape, stride, dtype=dtype, device=call.q.device)
        gradients[number] = moved.copy_(gradients[number])
    if args.sink_gradient and call.sinks is not None:
        grad_out, out, of_rows = (x.transpose(0, 1).unsqueeze(0) for x in (args.grad_out, args.out, args.lse))
        gradients.append(sink_gradient(grad_out, out, of_rows, call.sinks))
    return gradients


def _bind(
    problem: VarlenSpec, key: PlanKey, call: VarlenArguments, operation: Any, tensors: tuple[str, ...]
) -> VarlenCall:
    plan = plan_cache.get(key, lambda key: build_plan(operation, key))
    with torch.cuda.device(plan.device):
        return VarlenCall(problem, plan, call, tensors)


def _signature(call: VarlenArguments) -> Hashable:
    """All that decides a call."""
    return (*map(describe, (*call[:4], call.cu_seqlens_q)), *call.options, *map(type, call.options))
