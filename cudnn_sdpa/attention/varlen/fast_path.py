"""Calls over packed sequences that may go straight to their plans, past the checks and PyTorch's dispatcher.

Signatures, checks and descriptions of a call take some 70 µs on the host, and of its gradients as many again. A call
like the one before it, as the layers of a model make them, is recognized by a guard, one C call; any other by its
signature.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import memory, value_checks
from cudnn_sdpa.attention.arguments import Result
from cudnn_sdpa.attention.dense import large_backward
from cudnn_sdpa.attention.memory import MISALIGNED
from cudnn_sdpa.attention.varlen import autograd, launch
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.launch import VarlenBackwardArguments, VarlenCall
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.dispatch_state import (
    Guard,
    can_bypass_dispatcher,
    is_deterministic,
    is_profiling,
    needs_gradient,
    needs_operator,
    tensor_guard,
)
from cudnn_sdpa.engine.fast_path import describe

Run = Callable[[VarlenArguments], Result]


class CachedCall(NamedTuple):
    """The call that was served last.

    Attributes:
        options: What is no tensor.
        types: Types of the options: 1, 1.0 and True are equal, but not all are accepted.
        trains: Whether autograd follows it.
        has_sinks: Whether it has sinks.
        is_like: Whether tensors are like its.
        run: What runs it.
    """

    options: tuple[Any, ...]
    types: tuple[type, ...]
    trains: bool
    has_sinks: bool
    is_like: Guard
    run: Run


def find(call: VarlenArguments, deterministic: bool | None) -> Run | None:
    """What runs a call whose arguments have not been checked, if one like it has run and may skip the dispatcher."""
    if value_checks.enabled or call.out is not None or type(call.dropout_p) is not float or call.dropout_p:
        return None
    if deterministic is None:
        deterministic = is_deterministic()
    options = (*call[7:17], deterministic, call.with_lse)
    types = tuple(map(type, options))
    sinks = call.sinks
    try:
        trains = needs_gradient(*call[:4])
        last: CachedCall | None = launch.calls.last
        if (
            last is not None
            and last.types == types
            and last.options == options
            and last.trains is trains
            and last.has_sinks is (sinks is not None)
        ):
            tensors = _tensors(call)
            for tensor in tensors:
                if tensor.is_nested:  # a guard would end the process
                    return None
            if last.is_like(*tensors) and not is_profiling() and forward_ad._current_level < 0:
                return last.run
        return _find_by_signature(call, options, types, trains=trains)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, not hashable, nested: the checks will say so
        return None


def _tensors(call: VarlenArguments) -> list[Tensor]:
    ends = (call.cu_seqlens_q,) if call.shared_cu_seqlens else (call.cu_seqlens_q, call.cu_seqlens_kv)
    return [x for x in (*call[:4], *ends) if x is not None]


def _find_by_signature(
    call: VarlenArguments, options: tuple[Any, ...], types: tuple[type, ...], *, trains: bool
) -> Run | None:
    tensors = _tensors(call)
    if types[-2:] != (bool, bool) or not can_bypass_dispatcher(*tensors):
        return None
    if describe(call.cu_seqlens_q) != describe(call.cu_seqlens_kv):  # signatures tell of the former
        return None
    wanted = call._replace(deterministic=options[-2], with_lse=call.with_lse or trains)
    prepared = launch.find_forward(wanted)
    if prepared is None:
        return None
    run: Run = functools.partial(_infer, prepared)
    if trains:
        if not launch.is_known_to_be_differentiable(wanted) or large_backward.is_too_large(*call[:3]):
            return None
        run = functools.partial(_train, prepared, options[-2])
    requires_grad = any(tensor.requires_grad for tensor in tensors)
    if len({id(tensor) for tensor in tensors}) == len(tensors) and requires_grad is trains:
        # No guard takes one tensor twice, and none sees whether gradients are enabled.
        last = CachedCall(options, types, trains, call.sinks is not None, tensor_guard(*tensors), run)
        launch.calls.remember_last(last, prepared.plan)
    return run


def _infer(prepared: VarlenCall, call: VarlenArguments) -> Result:
    _check_memory(*call[:3])
    return launch.forward(prepared, call)


def _train(prepared: VarlenCall, deterministic: bool, call: VarlenArguments) -> Result:
    """The output, which autograd can differentiate, and if wanted the log-sum-exp."""
    _check_memory(*call[:3])
    of_both = call._replace(deterministic=deterministic, with_lse=True)
    try:
        if call.with_lse:
            result: Result = autograd.VarlenAttention.apply(*call[:4], of_both)  # type: ignore[no-untyped-call]
            return result
        out: Tensor = VarlenFunction.apply(*call[:4], of_both, prepared)  # type: ignore[no-untyped-call]
    except RuntimeError:
        autograd_checks.refuse_inference_tensors(call)
        raise
    return out


def _check_memory(q: Tensor, k: Tensor, v: Tensor) -> None:
    first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (first | second | third) & MISALIGNED or not (first and second and third):
        memory.check_memory(q, k, v, None)


class CachedTraining(NamedTuple):
    """The backward call that a call had last, and how to see whether it may have it again; see `training.Again`."""

    is_like_last: Guard
    deterministic: bool
    call: weakref.ref[VarlenCall]


class Gradients:
    """The backward passes of one call. Autograd's graph holds it, and with it no plan: see `Again`."""

    __slots__ = ("_again",)

    def __init__(self) -> None:
        self._again: CachedTraining | None = None

    def find(self, of: VarlenBackwardArguments) -> VarlenCall | None:
        """The prepared backward call, if there has been one like this."""
        again, tensors = self._again, (*of.call[:3], of.out, of.lse, of.grad_out)
        if again is None or again.deterministic is not of.call.deterministic or not again.is_like_last(*tensors):
            return None
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr() or MISALIGNED  # what has no memory is not read either
        return None if bits & MISALIGNED else again.call()

    def remember(self, of: VarlenBackwardArguments) -> None:
        """Remembers the backward call of what has been differentiated, if that was one launch on its own tensors."""
        tensors = (*of.call[:3], of.out, of.lse, of.grad_out)
        if len({id(tensor) for tensor in tensors}) != len(tensors) or not launch.is_readable(of):
            return
        prepared = launch.find_backward(of)
        if prepared is not None:
            self._again = CachedTraining(tensor_guard(*tensors), of.call.deterministic, weakref.ref(prepared))


class VarlenFunction(torch.autograd.Function):
    """A known call in eager mode: 100 µs less for a forward and a backward pass than `VarlenAttention`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Runs the forward pass; `inputs` are q, k, v and sinks, for autograd to see, their call, and that prepared."""
        call, prepared = inputs[-2:]
        out, lse = launch.forward(prepared, call)
        autograd.save(ctx, call, out, lse)
        if prepared.gradients is None:
            prepared.gradients = Gradients()
        ctx.gradients = prepared.gradients
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        """The gradients by the tensors."""
        if grad_out is None or needs_operator(grad_out):
            return (*autograd.gradients(ctx, grad_out, None), None, None)
        *tensors, out, lse = ctx.saved_tensors
        call = VarlenArguments._make((*tensors, *ctx.options, True, None))
        of = VarlenBackwardArguments(grad_out, out, lse, call, ctx.needs_input_grad[3])
        prepared = ctx.gradients.find(of)
        if prepared is None:
            found = autograd.gradients(ctx, grad_out, None)
            ctx.gradients.remember(of)
            return (*found, None, None)
        gradients = (*launch.backward(prepared, of), None)[:4]
        needs = ctx.needs_input_grad
        return (*(x if need else None for x, need in zip(gradients, needs, strict=False)), None, None)
