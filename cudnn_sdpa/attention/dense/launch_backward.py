"""Backward calls bound to their plans."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.arguments import check as check_forward
from cudnn_sdpa.attention.bias import mask_gradient
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense.launch import SMALLEST, BoundCall, lengths
from cudnn_sdpa.attention.dense.plans import BackwardSpec, DenseSpec
from cudnn_sdpa.attention.memory import MISALIGNED
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device


class Needs(NamedTuple):
    """Whose gradients are wanted."""

    q: bool
    k: bool
    v: bool
    attn_mask: bool
    sinks: bool


class BackwardArguments(NamedTuple):
    """A backward call."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: ForwardArguments
    deterministic: bool
    needs: Needs


class BackwardCall(BoundCall):
    """A backward call bound to its plan."""

    __slots__ = ("__weakref__", "_gradients", "backward", "last")

    def __init__(self, backward: BackwardSpec, plan: Plan, scale: float, softcap: float | None) -> None:
        super().__init__(backward.problem, plan, scale=scale, softcap=softcap)
        self.backward = backward
        self.last = None  # what a `CallTable` resets; there is no short way to recognize a backward call
        problem = backward.problem
        whole = {"grad_q": dense_like(problem.q), "grad_k": dense_like(problem.k), "grad_v": dense_like(problem.v)}
        side = {operand.name: operand.layout for operand in backward.outputs()[3:]}
        self._gradients = {name: (x.shape, x.stride, x.dtype) for name, x in (whole | side).items()}

    def run_plain(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of a plain call, whose operands are these and constants; saves 6 µs of dictionaries."""
        first, second, third, fourth = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if (first | second | third | fourth) & MISALIGNED or not (first and second and third and fourth):
            memory.check_memory(q, k, v, out)
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run_plain(q, k, v, out, grad_out, lse)
        of_q, of_k, of_v = self._gradients.values()
        grad_q, grad_k, grad_v = allocate(*of_q), allocate(*of_k), allocate(*of_v)
        operands, plan = self._template[:], self.plan
        operands[0], operands[1], operands[2], operands[3] = first, second, third, fourth
        operands[4], operands[5] = grad_out.data_ptr(), lse.data_ptr()
        operands[-3], operands[-2], operands[-1] = grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return grad_q, grad_k, grad_v

    def __call__(self, arguments: BackwardArguments) -> list[Tensor]:
        """The wanted gradients, in the order of `Needs`."""
        call = arguments.call
        memory.check_memory(call.q, call.k, call.v, arguments.out)  # what a hook kept for autograd may lie anywhere
        result: list[Tensor] = self.on_device(self._run, arguments)
        return result

    def _run(self, arguments: BackwardArguments) -> list[Tensor]:
        call, needs = arguments.call, arguments.needs
        gradients = {name: allocate(*layout) for name, layout in self._gradients.items()}
        tensors, addresses = self.side_tensors(call)
        tensors |= {"q": call.q, "k": call.k, "v": call.v, "out": arguments.out, "grad_out": arguments.grad_out}
        tensors |= {"lse": arguments.lse, **gradients}
        self._zero_masked_rows(tensors)
        if self.problem.bias is not None or self.problem.softcap:
            # A row that sees nothing: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN.
            tensors["lse"] = tensors["lse"].masked_fill(tensors["lse"] == -torch.inf, torch.inf)
        tensors |= lengths(self.problem, call.seq_lens_q, call.seq_lens_kv)
        self.launch(tensors, addresses)
        wanted = [gradients[f"grad_{name}"] for name in ("q", "k", "v") if getattr(needs, name)]
        if needs.attn_mask and call.attn_mask is not None:
            wanted.append(mask_gradient(gradients["grad_bias"], call.attn_mask, self.problem.mask.masked_rows))
        if needs.sinks and call.sinks is not None:
            wanted.append(sink_gradient(arguments.grad_out, arguments.out, arguments.lse, call.sinks))
        return wanted

    def _zero_masked_rows(self, tensors: dict[str, Tensor]) -> None:
        blind = self.problem.mask.masked_rows
        if not blind:
            return
        tensors["grad_q"][:, :, :blind].zero_()
        for name in ("q", "out", "grad_out", "grad_q"):
            tensors[name] = tensors[name][:, :, blind:]
        tensors["lse"] = memory.aligned("lse", tensors["lse"][:, :, blind:])


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient by the sinks, in plain PyTorch: minus the sink's weight times grad_out · out, summed.

    cuDNN's own takes two and a half times as long, and with dropout is (1 - p) times too small (seen on 9.19).
    """
    mean = (grad_out.float() * out).sum(-1)
    weights = torch.exp(sinks.view(1, -1, 1) - lse.clamp_min(SMALLEST))  # of a sink of -inf too
    return -(weights * mean).sum((0, 2))


def is_readable(grad_out: Tensor) -> bool:
    """Whether cuDNN can read a gradient where it lies.

    Not one whose negative bit is set, whose memory has the other sign, nor one of zeros that has no memory.
    """
    address = grad_out.data_ptr()
    if address == 0 or address % ALIGNMENT != 0 or grad_out.is_neg():
        return False
    step = ALIGNMENT // grad_out.element_size()
    strides = [grad_out.stride(dim) for dim in range(3) if grad_out.shape[dim] != 1]
    dense = grad_out.stride(3) == 1 or grad_out.shape[3] == 1
    return dense and all(s % step == 0 and s != 0 for s in strides)


def readable(grad_out: Tensor, out: Tensor) -> Tensor:
    """`grad_out` itself if cuDNN can read it where it lies, otherwise a copy in the memory order of `out`."""
    if is_readable(grad_out):
        return grad_out
    stride = dense_stride_like(out.shape, out.shape, out.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(grad_out)


calls: CallTable[None] = CallTable(None)


def signature(arguments: BackwardArguments) -> Hashable:
    """All that decides a backward call; hooks of autograd may give saved tensors back in another layout."""
    call = arguments.call
    return (
        *map(describe, (*call.tensors, arguments.grad_out, arguments.out)),
        *call.options,
        arguments.deterministic,
        arguments.needs.attn_mask,
        arguments.needs.sinks,
    )


def find(arguments: BackwardArguments) -> BackwardCall | None:
    """The prepared call for these arguments, if there is one."""
    prepared: BackwardCall | None = calls.get(signature(arguments))
    return prepared


def prepare(arguments: BackwardArguments) -> BackwardCall:
    """The prepared call for these arguments, remembered."""
    call = arguments.call
    check_forward(call)
    memory.check_strides(call.q, call.k, call.v)
    backward = BackwardSpec(
        DenseSpec.of(call),
        TensorLayout.of(arguments.out),
        TensorLayout.of(arguments.grad_out),
        arguments.deterministic,
        arguments.needs.attn_mask,
        arguments.needs.sinks,
    )
    device = call.q.get_device()
    key = backward.key(live_target(device), device)
    plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_backward, key))
    prepared = BackwardCall(backward, plan, call.scale_value, call.softcap)
    calls.add(signature(arguments), prepared)
    return prepared
