"""Calls of attention in FP8 bound to their plans, on a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import debug, fp8_arguments, fp8_graphs, fp8_repairs, memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.backward import is_readable
from cudnn_sdpa.attention.calls import BoundCall
from cudnn_sdpa.attention.fp8_arguments import Fp8Backward, Fp8Forward, Fp8Gradients, Fp8Output
from cudnn_sdpa.attention.fp8_passes import Backward, Forward
from cudnn_sdpa.attention.lookup import describe
from cudnn_sdpa.runtime.building import build_plan
from cudnn_sdpa.runtime.cache import plan_cache
from cudnn_sdpa.runtime.call_table import CallTable
from cudnn_sdpa.runtime.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.runtime.plan import Plan, allocate
from cudnn_sdpa.runtime.target import live_target

calls: CallTable[None] = CallTable(None)


class Call(BoundCall):
    """What both passes have in common."""

    __slots__ = ("_is_hopper", "last")

    def __init__(self, problem: Any, plan: Plan, scale: float) -> None:
        super().__init__(problem, plan, scale=scale)
        self._is_hopper = plan.key.target.sm // 10 == 9
        self.last = None  # what a `CallTable` resets

    def largest(self, device: torch.device) -> Tensor:
        """Memory for a largest value, which Hopper's plans overwrite; others are taken to raise what is there."""
        return allocate((1,), (1,), torch.float32) if self._is_hopper else no_largest(device)

    def inputs(self, call: ForwardArguments, scales: Any) -> dict[str, Tensor]:
        """Queries that see a key, keys, values, scales and lengths."""
        blind = self.problem.mask.blind_rows
        q = call.q[:, :, blind:] if blind else call.q
        return {"q": q, "k": call.k, "v": call.v, **scales._asdict(), **fp8_repairs.lengths(call)}


class ForwardCall(Call):
    """A forward call bound to its plan."""

    __slots__ = ("forward",)

    def __init__(self, forward: Forward, plan: Plan, scale: float) -> None:
        super().__init__(forward.problem, plan, scale)
        self.forward = forward

    def __call__(self, of: Fp8Forward) -> Fp8Output:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v)
        result: Fp8Output = self.on_device(self._run, of)
        return result

    def _run(self, of: Fp8Forward) -> Fp8Output:
        blind, device = self.problem.mask.blind_rows, of.call.q.device
        out = allocate(*as_layout(self.forward.out))
        amax_s, amax_o = (self.largest(device) for _ in range(2))
        tensors = self.inputs(of.call, of.scales)
        tensors |= {"out": out[:, :, blind:] if blind else out, "amax_s": amax_s, "amax_o": amax_o}
        lse = None
        if self.forward.with_lse:
            lse = out.new_empty(out.shape[:3], dtype=torch.float32)
            tensors["lse"] = lse.new_empty((*lse.shape[:2], lse.shape[2] - blind)) if blind else lse
        self.launch(tensors)
        if blind:
            out[:, :, :blind].zero_()
            if lse is not None:
                lse[:, :, :blind] = -torch.inf
                lse[:, :, blind:] = tensors["lse"]
        if self.problem.lengths_q:
            fp8_repairs.hide_absent_rows(of.call, out, lse)
            amax_o = fp8_repairs.largest_of(out, of.scales.scale_o)
        return Fp8Output(out, amax_s, amax_o, lse)


class BackwardCall(Call):
    """A backward call bound to its plan."""

    __slots__ = ("_rows", "backward")

    def __init__(self, backward: Backward, plan: Plan, scale: float) -> None:
        super().__init__(backward.problem, plan, scale)
        self.backward = backward
        self._rows = backward.rows_made(plan.key.target)

    def __call__(self, of: Fp8Backward) -> Fp8Gradients:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        result: Fp8Gradients = self.on_device(self._run, of)
        return result

    def _run(self, of: Fp8Backward) -> Fp8Gradients:
        problem, blind = self.problem, self.problem.mask.blind_rows
        wholes = [self.backward.whole(layout) for layout in (problem.q, problem.k, problem.v)]
        grad_q, grad_k, grad_v = (allocate(*as_layout(layout)) for layout in wholes)
        largest = [self.largest(of.call.q.device) for _ in range(4)]
        tensors = self.inputs(of.call, of.scales)
        tensors |= {"out": of.out, "grad_out": of.grad_out, "lse": of.lse, "grad_q": grad_q}
        if blind:
            grad_q[:, :, :blind].zero_()
            for name in ("out", "grad_out", "lse", "grad_q"):
                tensors[name] = tensors[name][:, :, blind:]
            tensors["lse"] = tensors["lse"].contiguous()
        of_rows = tensors["grad_q"]
        if self._rows != problem.rows:
            for name in ("q", "out", "grad_out", "lse"):
                tensors[name] = fp8_repairs.with_rows(tensors[name], self._rows)
            tensors["grad_q"] = torch.empty_like(tensors["q"], dtype=grad_q.dtype)
        tensors |= {"grad_k": grad_k, "grad_v": grad_v}
        tensors |= zip(("amax_dq", "amax_dk", "amax_dv", "amax_dp"), largest, strict=True)
        self.launch(tensors)
        if self._rows != problem.rows:
            of_rows.copy_(tensors["grad_q"][:, :, : problem.rows])
        return Fp8Gradients(grad_q, grad_k, grad_v, *largest)


def as_layout(layout: TensorLayout) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What `allocate` takes."""
    return layout.shape, layout.stride, layout.dtype


def no_largest(device: torch.device) -> Tensor:
    """What a kernel raises to the largest value of each of its blocks, so that it has to start at 0."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def readable(of: Fp8Backward) -> Fp8Backward:
    """The call with a gradient that cuDNN can read where it lies: a copy in the memory order of `out` if need be."""
    grad_out = of.grad_out
    if not is_readable(grad_out):
        stride = dense_stride_like(of.out.shape, of.out.shape, of.out.stride())
        grad_out = torch.empty_strided(of.out.shape, stride, dtype=grad_out.dtype, device=grad_out.device)
        grad_out.copy_(of.grad_out)
    return of._replace(grad_out=grad_out, lse=of.lse.contiguous())


def run_forward(of: Fp8Forward) -> Fp8Output:
    """A forward pass on the GPU that its tensors are on."""
    check_lengths(of.call)
    signature = ("forward", of.out_dtype, *_signature(of.call, of.scales))
    prepared: ForwardCall | None = calls.get(signature)
    if prepared is None:
        fp8_arguments.check_forward(of)
        memory.check_strides(*of.call[:3])
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v)
        forward = Forward.of(of)
        if forward.problem.is_empty:
            return nothing(of)
        device = of.call.q.get_device()
        key = forward.key(live_target(device), device)
        plan = plan_cache.get(key, lambda key: build_plan(fp8_graphs.sdpa_fp8_forward, key))
        prepared = ForwardCall(forward, plan, of.call.scale_value)
        calls.add(signature, prepared)
    return prepared(of)


def run_backward(of: Fp8Backward) -> Fp8Gradients:
    """A backward pass on the GPU that its tensors are on."""
    check_lengths(of.call)
    if of.grad_out.dim() == of.out.dim() == 4 and of.grad_out.shape == of.out.shape:
        of = readable(of)  # what has another shape is refused below
    own = map(describe, (of.grad_out, of.out, of.lse))
    signature = ("backward", *own, *_signature(of.call, of.scales))
    prepared: BackwardCall | None = calls.get(signature)
    if prepared is None:
        fp8_arguments.check_backward(of)
        memory.check_strides(*of.call[:3])
        memory.check_strides_of("out", of.out)
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        backward = Backward.of(of)
        if backward.problem.is_empty:
            return no_gradients(of)
        device = of.call.q.get_device()
        key = backward.key(live_target(device), device)
        plan = plan_cache.get(key, lambda key: build_plan(fp8_graphs.sdpa_fp8_backward, key))
        prepared = BackwardCall(backward, plan, of.call.scale_value)
        calls.add(signature, prepared)
    return prepared(of)


def nothing(of: Fp8Forward) -> Fp8Output:
    """The results where there is no query or no key."""
    out = new_output(of).zero_()
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device) if of.call.with_lse else None
    return Fp8Output(out, no_largest(out.device), no_largest(out.device), lse)


def no_gradients(of: Fp8Backward) -> Fp8Gradients:
    """The same of a backward pass."""
    gradients = [new_gradient(x, of.grad_out.dtype).zero_() for x in of.call[:3]]
    return Fp8Gradients(*gradients, *(no_largest(of.call.q.device) for _ in range(4)))


def new_output(of: Fp8Forward) -> Tensor:
    """An output: dense, its dimensions in memory in the order of q."""
    q = of.call.q
    shape = (*q.shape[:3], of.call.v.shape[3])
    return torch.empty_strided(
        shape, dense_stride_like(shape, q.shape, q.stride()), dtype=of.out_dtype, device=q.device
    )


def new_gradient(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of a tensor: dense, in its memory order."""
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)


def check_lengths(call: ForwardArguments) -> None:
    """Under `CUDNN_SDPA_DEBUG`, whether lengths fit their tensors."""
    if debug.enabled:
        debug.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
        debug.check_lengths("seq_lens_kv", call.seq_lens_kv, call.k.shape[2])


def _signature(call: ForwardArguments, scales: Any) -> tuple[Hashable, ...]:
    """All that decides a call, beside the dtype of its output or the tensors of its gradient."""
    options = (*call.options, call.with_lse)
    tensors = (*call.tensors, *scales)
    return (*map(describe, tensors), *options, *map(type, options))
