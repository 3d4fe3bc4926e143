"""Calls over packed sequences bound to their plans."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import graphs
from cudnn_sdpa.attention.backward import readable, sink_gradient
from cudnn_sdpa.attention.calls import Result, _current_device
from cudnn_sdpa.attention.lookup import describe
from cudnn_sdpa.attention.options import TOP_LEFT, normalize_mask
from cudnn_sdpa.attention.packed import Packed, fills_output, length_bucket, sequence_bucket
from cudnn_sdpa.attention.passes import dense_like
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.runtime.cache import next_use, plan_cache
from cudnn_sdpa.runtime.call_table import CallTable
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.runtime.plan import Plan, allocate, build_plan
from cudnn_sdpa.runtime.target import live_target


class VarlenBackwardArguments(NamedTuple):
    """A backward call over packed sequences."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: VarlenArguments
    sink_gradient: bool


def packed(call: VarlenArguments) -> Packed:
    """Describes a call, its numbers rounded up."""
    closely = call.deterministic or call.softcap is not None
    longest_q = length_bucket(call.max_seqlen_q, call.q.shape[0], closely=closely)
    longest_kv = length_bucket(call.max_seqlen_kv, call.k.shape[0], closely=closely)
    longest = min(call.max_seqlen_q, call.q.shape[0]), min(call.max_seqlen_kv, call.k.shape[0])
    alignment = TOP_LEFT if call.one_packing else call.causal_alignment
    window = (call.window_left, call.window_right)
    return Packed(
        TensorLayout.of(call.q),
        TensorLayout.of(call.k),
        TensorLayout.of(call.v),
        sequence_bucket(call.cu_seqlens_q.shape[0] - 1),
        longest_q,
        longest_kv,
        normalize_mask(call.is_causal, alignment, window, *longest, has_lengths=True),
        call.one_packing,
        call.sinks is not None,
        float(call.dropout_p),
        call.softcap is not None,
    )


@functools.cache
def device_constant(values: tuple[int, ...], device: int) -> Tensor:
    """Numbers on the GPU. They live as long as the process: a CUDA graph may read them."""
    return torch.tensor(values, dtype=torch.int64, device=f"cuda:{device}")


class Packing:
    """What cuDNN reads of where the sequences lie.

    Attributes:
        lengths_q: Queries of each sequence, (sequences,) int32.
        lengths_kv: Keys of each sequence.
        addresses: Of the operands that say where the sequences of a tensor begin.
    """

    def __init__(self, call: VarlenArguments, sequences: int, steps: dict[str, int]) -> None:
        """Computes them on the GPU.

        Args:
            call: The call.
            sequences: Sequences that the plan is made for; those that are not there get no rows.
            steps: By tensor, how far apart in memory its rows are.
        """
        ends = _padded(call.cu_seqlens_q, sequences, call.q.shape[0])
        ends_kv = ends if call.one_packing else _padded(call.cu_seqlens_kv, sequences, call.k.shape[0])
        self.lengths_q = ends.diff().clamp_min_(0)  # offsets that decrease make no length below 0
        self.lengths_kv = self.lengths_q if call.one_packing else ends_kv.diff().clamp_min_(0)
        self.addresses: dict[str, int] = {}
        self._begins = [
            self._multiply(ends, {name: step for name, step in steps.items() if not _is_of_keys(name)}),
            self._multiply(ends_kv, {name: step for name, step in steps.items() if _is_of_keys(name)}),
        ]

    def _multiply(self, ends: Tensor, steps: dict[str, int]) -> Tensor:
        """Where each sequence begins, in elements: one row for each distance of rows."""
        distinct = tuple(dict.fromkeys(steps.values()))
        begins = device_constant(distinct, ends.get_device()).unsqueeze(1) * ends  # int64: no overflow
        first, row = begins.data_ptr(), begins.element_size() * ends.shape[0]
        self.addresses |= {f"offsets_{name}": first + row * distinct.index(step) for name, step in steps.items()}
        return begins


def _padded(offsets: Tensor, sequences: int, rows: int) -> Tensor:
    """The offsets, kept within the tensor, with sequences of no rows after the last one."""
    offsets = offsets.clamp(0, rows)
    missing = sequences + 1 - offsets.shape[0]
    return offsets if missing == 0 else torch.cat([offsets, offsets[-1:].expand(missing)])


def _is_of_keys(name: str) -> bool:
    return name.removeprefix("grad_") in ("k", "v")


class VarlenCall:
    """A call, forward or backward, bound to its plan.

    Attributes:
        packed: The call without its data.
        plan: The plan.
        written: Shape, stride and dtype of the gradients by q, k and v as cuDNN writes them.
        wanted: The same as the caller gets them.
    """

    __slots__ = ("_fixed", "_names", "_numbers", "_steps", "last", "packed", "plan", "wanted", "written")

    def __init__(self, packed: Packed, plan: Plan, call: VarlenArguments) -> None:
        self.packed = packed
        self.plan = plan
        self.last: Any = None
        self._numbers = {"scale": array("f", [call.scale_value])}
        if call.softcap is not None:
            self._numbers["softcap"] = array("f", [call.softcap])
        self._fixed = {name: number.buffer_info()[0] for name, number in self._numbers.items()}
        operands = (*plan.key.inputs, *plan.key.outputs)
        self._names = [operand.name for operand in operands]
        inputs = (packed.q, packed.k, packed.v)
        self.written = [(x.shape, x.stride, x.dtype) for x in packed.gradients()]
        self.wanted = [(x.shape, x.stride, x.dtype) for x in map(dense_like, inputs)]
        self._steps = {operand.name: operand.layout.stride[2] for operand in operands if operand.ragged}

    def launch(self, call: VarlenArguments, tensors: dict[str, Tensor]) -> None:
        """Launches the plan."""
        packing = Packing(call, self.packed.sequences, self._steps)
        tensors = {**tensors, "seq_len_q": packing.lengths_q, "seq_len_kv": packing.lengths_kv}
        if self.packed.softcap:
            tensors |= row_limits(self.packed, packing)
        known = {**self._fixed, **packing.addresses}
        if call.sinks is not None:
            known["sink"] = call.sinks.data_ptr()
        if call.rng is not None:
            known["seed"] = call.rng.data_ptr()
            known["offset"] = known["seed"] + call.rng.element_size()
        known.update((name, tensor.data_ptr()) for name, tensor in tensors.items())
        self.plan.last_used = next_use()
        self.plan.launch([known[name] for name in self._names])


def row_limits(packed: Packed, packing: Packing) -> dict[str, Tensor]:
    """The first and the last key that each query sees: what a soft cap's graph reads in place of lengths."""
    of_q, of_kv = packing.lengths_q.unsqueeze(1), packing.lengths_kv.unsqueeze(1)
    rows = torch.arange(packed.longest_q, dtype=torch.int32, device=of_q.device).expand(packed.sequences, -1)
    left, right, bottom_right = packed.mask.band or (None, None, False)
    diagonal = rows + (of_kv - of_q) if bottom_right else rows
    last = (of_kv - 1).expand_as(rows) if right is None else torch.minimum(diagonal + right, of_kv - 1)
    first = torch.zeros_like(rows) if left is None else (diagonal - left).clamp_min(0)
    return {"lowest": first.contiguous(), "highest": last.masked_fill(rows >= of_q, -1)}


calls: CallTable[None] = CallTable(None)


_differentiable: set[Hashable] = set()


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
    if len(_differentiable) > MOST_REMEMBERED:
        _differentiable.clear()
    _differentiable.add(name)


MOST_REMEMBERED = 8192


def run_forward(call: VarlenArguments) -> Result:
    """The output, and if wanted the log-sum-exp (Tq, Hq)."""
    name = ("forward", _signature(call), describe(call.out), call.with_lse)
    prepared: VarlenCall | None = calls.get(name)
    if prepared is None:
        problem = packed(call)
        out = output_layout(call)
        device = call.q.get_device()
        key = problem.forward_key(out, call.with_lse, live_target(device), device)
        prepared = _bind(problem, key, call, graphs.sdpa_forward)
        calls.add(name, prepared)
    if _current_device() != prepared.plan.device:
        with torch.cuda.device(prepared.plan.device):
            return _forward(prepared, call)
    return _forward(prepared, call)


def new_output(call: VarlenArguments) -> Tensor:
    """An output for a call: dense, its dimensions in memory in the order of `q`."""
    q, shape = call.q, (*call.q.shape[:2], call.v.shape[2])
    return torch.empty_strided(shape, dense_stride_like(shape, q.shape, q.stride()), dtype=q.dtype, device=q.device)


def output_layout(call: VarlenArguments) -> TensorLayout:
    """How the output of a call lies in memory."""
    if call.out is not None:
        return TensorLayout.of(call.out)
    q, shape = call.q, (*call.q.shape[:2], call.v.shape[2])
    return TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride()), q.dtype)


def _forward(prepared: VarlenCall, call: VarlenArguments) -> Result:
    q, out = call.q, new_output(call) if call.out is None else call.out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if call.with_lse else None
    if fills_output(prepared.packed, with_lse=lse is not None):
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    prepared.launch(call, {"q": q, "k": call.k, "v": call.v, "out": out} | ({} if lse is None else {"lse": lse}))
    if lse is None:
        return out
    if call.sinks is not None:  # queries without keys see the sink alone
        torch.maximum(lse, call.sinks, out=lse)
    return out, lse


def run_backward(of: VarlenBackwardArguments) -> list[Tensor]:
    """The gradients by q, k and v, and if wanted by the sinks."""
    of = of._replace(grad_out=readable(of.grad_out.unsqueeze(0), of.out.unsqueeze(0)).squeeze(0))
    call = of.call
    if TensorLayout.of(call.q) != (dense := dense_like(TensorLayout.of(call.q))):
        # cuDNN 9.19 cannot launch gradients of packed queries that lie among other tensors.
        call = call._replace(q=allocate(dense.shape, dense.stride, dense.dtype).copy_(call.q))
        of = of._replace(call=call)
    name = ("backward", _signature(call), of.grad_out.stride(), of.out.stride())
    prepared: VarlenCall | None = calls.get(name)
    if prepared is None:
        problem = packed(call)
        layouts = (TensorLayout.of(of.out), TensorLayout.of(of.grad_out))
        device = call.q.get_device()
        key = problem.backward_key(*layouts, call.deterministic, live_target(device), device)
        prepared = _bind(problem, key, call, graphs.sdpa_backward)
        calls.add(name, prepared)
    if _current_device() != prepared.plan.device:
        with torch.cuda.device(prepared.plan.device):
            return _backward(prepared, of)
    return _backward(prepared, of)


def _backward(prepared: VarlenCall, of: VarlenBackwardArguments) -> list[Tensor]:
    call = of.call
    # cuDNN writes nothing for a sequence without queries or keys, nor past the last one.
    gradients = [allocate(*layout).zero_() for layout in prepared.written]
    tensors = {"q": call.q, "k": call.k, "v": call.v, "out": of.out, "grad_out": of.grad_out, "lse": of.lse}
    if prepared.packed.softcap:  # a row that sees nothing: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
        tensors["lse"] = of.lse.masked_fill(of.lse == -torch.inf, torch.inf)
    prepared.launch(call, tensors | dict(zip(("grad_q", "grad_k", "grad_v"), gradients, strict=True)))
    for number, (layout, written) in enumerate(zip(prepared.wanted, prepared.written, strict=True)):
        if layout != written:
            gradients[number] = allocate(*layout).copy_(gradients[number])
    if of.sink_gradient and call.sinks is not None:
        grad_out, out, lse = (x.transpose(0, 1).unsqueeze(0) for x in (of.grad_out, of.out, of.lse))
        gradients.append(sink_gradient(grad_out, out, lse, call.sinks))
    return gradients


def _bind(problem: Packed, key: PlanKey, call: VarlenArguments, operation: Any) -> VarlenCall:
    return VarlenCall(problem, plan_cache.get(key, lambda key: build_plan(operation, key)), call)


def _signature(call: VarlenArguments) -> Hashable:
    """All that decides a call."""
    return (*map(describe, (*call[:4], call.cu_seqlens_q)), *call.options, *map(type, call.options))
