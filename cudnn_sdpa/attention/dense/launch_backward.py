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
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.engine.memory import MISALIGNED
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

# Positions of operands in a plain backward call's pointers; the gradients are the last three.
Q, K, V, OUT, GRAD_OUT, LSE = range(6)
GRAD_Q, GRAD_K, GRAD_V = -3, -2, -1


class Needs(NamedTuple):
    """Which gradients are needed."""

    q: bool
    k: bool
    v: bool
    attn_mask: bool
    sinks: bool


class BackwardArguments(NamedTuple):
    """The arguments of a backward call."""

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
        self.last = None  # `CallTable` resets it; backward calls are found by signature alone
        problem = backward.problem
        gradients = {"grad_q": dense_like(problem.q), "grad_k": dense_like(problem.k), "grad_v": dense_like(problem.v)}
        if backward.bias_gradient:
            gradients["grad_bias"] = backward.grad_bias
        self._gradients = {name: (x.shape, x.stride, x.dtype) for name, x in gradients.items()}

    def run_plain(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of a plain call, which has no other operands but constants; saves 6 µs of dictionaries."""
        first, second, third, fourth = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if (first | second | third | fourth) & MISALIGNED or not (first and second and third and fourth):
            memory.check_memory(q, k, v, out)
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run_plain(q, k, v, out, grad_out, lse)
        layout_q, layout_k, layout_v = self._gradients.values()
        grad_q, grad_k, grad_v = allocate(*layout_q), allocate(*layout_k), allocate(*layout_v)
        operands, plan = self._template[:], self.plan
        operands[Q], operands[K], operands[V], operands[OUT] = first, second, third, fourth
        operands[GRAD_OUT], operands[LSE] = grad_out.data_ptr(), lse.data_ptr()
        operands[GRAD_Q], operands[GRAD_K], operands[GRAD_V] = grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return grad_q, grad_k, grad_v

    def __call__(self, args: BackwardArguments) -> list[Tensor]:
        """The needed gradients, in the order of `Needs`."""
        call = args.call
        memory.check_memory(call.q, call.k, call.v, args.out)  # a saved-tensor hook may have moved them
        result: list[Tensor] = self.on_device(self._run, args)
        return result

    def _run(self, args: BackwardArguments) -> list[Tensor]:
        call, needs = args.call, args.needs
        gradients = {name: allocate(*layout) for name, layout in self._gradients.items()}
        tensors, addresses = self.side_tensors(call)
        tensors |= {"q": call.q, "k": call.k, "v": call.v, "out": args.out, "grad_out": args.grad_out}
        tensors |= {"lse": args.lse, **gradients}
        self._zero_masked_rows(tensors)
        if self.problem.bias is not None or self.problem.softcap:
            # Fully masked rows: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN.
            tensors["lse"] = tensors["lse"].masked_fill(tensors["lse"] == -torch.inf, torch.inf)
        tensors |= lengths(self.problem, call.seq_lens_q, call.seq_lens_kv)
        self.launch(tensors, addresses)
        wanted = [gradients[f"grad_{name}"] for name in ("q", "k", "v") if getattr(needs, name)]
        if needs.attn_mask and call.attn_mask is not None:
            wanted.append(mask_gradient(gradients["grad_bias"], call.attn_mask, self.problem.mask.masked_rows))
        if needs.sinks and call.sinks is not None:
            wanted.append(sink_gradient(args.grad_out, args.out, args.lse, call.sinks))
        return wanted

    def _zero_masked_rows(self, tensors: dict[str, Tensor]) -> None:
        masked_rows = self.problem.mask.masked_rows
        if not masked_rows:
            return
        tensors["grad_q"][:, :, :masked_rows].zero_()
        for name in ("q", "out", "grad_out", "grad_q"):
            tensors[name] = tensors[name][:, :, masked_rows:]
        tensors["lse"] = memory.aligned("lse", tensors["lse"][:, :, masked_rows:])


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, in PyTorch: minus the sum of the sink's weight times grad_out · out.

    cuDNN's own takes 2.5 times as long, and with dropout it is too small by a factor of (1 - p) (seen on 9.19).
    """
    mean = (grad_out.float() * out).sum(-1)
    weights = torch.exp(sinks.view(1, -1, 1) - lse.clamp_min(SMALLEST))  # also right for a sink of -inf
    return -(weights * mean).sum((0, 2))


def is_readable(grad_out: Tensor) -> bool:
    """Whether cuDNN can read a gradient without a copy.

    It cannot if the negative bit is set, so that memory has the other sign, or for a ZeroTensor, which has no memory.
    """
    address = grad_out.data_ptr()
    if address == 0 or address % ALIGNMENT != 0 or grad_out.is_neg():
        return False
    step = ALIGNMENT // grad_out.element_size()
    strides = [grad_out.stride(dim) for dim in range(3) if grad_out.shape[dim] != 1]
    dense = grad_out.stride(3) == 1 or grad_out.shape[3] == 1
    return dense and all(s % step == 0 and s != 0 for s in strides)


def readable(grad_out: Tensor, out: Tensor) -> Tensor:
    """`grad_out` itself if cuDNN can read it, otherwise a copy in the memory order of `out`."""
    if is_readable(grad_out):
        return grad_out
    stride = dense_stride_like(out.shape, out.shape, out.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(grad_out)


calls: CallTable[None] = CallTable(None)


def signature(args: BackwardArguments) -> Hashable:
    """Everything that decides the plan of a backward call; saved-tensor hooks may have changed layouts."""
    call = args.call
    return (
        *map(describe, (*call.tensors, args.grad_out, args.out)),
        *call.options,
        args.deterministic,
        args.needs.attn_mask,
        args.needs.sinks,
    )


def find(args: BackwardArguments) -> BackwardCall | None:
    """The cached call for these arguments, if there is one."""
    prepared: BackwardCall | None = calls.get(signature(args))
    return prepared


def prepare(args: BackwardArguments) -> BackwardCall:
    """Prepares the call for these arguments and caches it."""
    call = args.call
    check_forward(call)
    memory.check_strides(call.q, call.k, call.v)
    backward = BackwardSpec(
        problem=DenseSpec.of(call),
        out=TensorLayout.of(args.out),
        grad_out=TensorLayout.of(args.grad_out),
        deterministic=args.deterministic,
        bias_gradient=args.needs.attn_mask,
        sink_gradient=args.needs.sinks,
    )
    device = call.q.get_device()
    key = backward.key(live_target(device), device)
    plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_backward, key))
    prepared = BackwardCall(backward, plan, call.scale_value, call.softcap)
    calls.add(signature(args), prepared)
    return prepared
