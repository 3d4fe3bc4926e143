"""The fast path of packed calls: a cached call is launched without checks and PyTorch's dispatcher.

Signatures, checks and specs of a call take about 70 µs of CPU time, those of its gradients as much again. A guard, one
C call, recognizes a call like the last one, as the layers of a model make them; others are looked up by signature.
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
    """The last call, and what recognizes another like it.

    Attributes:
        options: The options.
        types: Types of the options: 1, 1.0 and True are equal, but not all are valid.
        trains: Whether it is differentiated.
        has_sinks: Whether it has sinks.
        is_like: Guard for its tensors.
        run: The function that runs it.
    """

    options: tuple[Any, ...]
    types: tuple[type, ...]
    trains: bool
    has_sinks: bool
    is_like: Guard
    run: Run


def find(call: VarlenArguments, deterministic: bool | None) -> Run | None:
    """The function that runs an unchecked call, if it is cached and may skip the dispatcher."""
    if value_checks.enabled or call.out is not None or type(call.dropout_p) is not float or call.dropout_p:
        return None
    if deterministic is None:
        deterministic = is_deterministic()
    options = (
        call.max_seqlen_q,
        call.max_seqlen_kv,
        call.is_causal,
        call.causal_alignment,
        call.window_left,
        call.window_right,
        call.scale,
        call.dropout_p,
        call.softcap,
        call.shared_cu_seqlens,
        deterministic,
        call.with_lse,
    )
    types = tuple(map(type, options))
    sinks = call.sinks
    try:
        trains = needs_gradient(call.q, call.k, call.v, call.sinks)
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
                if tensor.is_nested:  # a guard would abort the process
                    return None
            if last.is_like(*tensors) and not is_profiling() and forward_ad._current_level < 0:
                return last.run
        return _find_by_signature(call, options, types, trains=trains)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, not hashable, nested: the checks report it
        return None


def _tensors(call: VarlenArguments) -> list[Tensor]:
    ends = (call.cu_seqlens_q,) if call.shared_cu_seqlens else (call.cu_seqlens_q, call.cu_seqlens_kv)
    return [x for x in (call.q, call.k, call.v, call.sinks, *ends) if x is not None]


def _find_by_signature(
    call: VarlenArguments, options: tuple[Any, ...], types: tuple[type, ...], *, trains: bool
) -> Run | None:
    tensors = _tensors(call)
    if types[-2:] != (bool, bool) or not can_bypass_dispatcher(*tensors):
        return None
    if describe(call.cu_seqlens_q) != describe(call.cu_seqlens_kv):  # signatures contain only the former
        return None
    wanted = call._replace(deterministic=options[-2], with_lse=call.with_lse or trains)
    prepared = launch.find_forward(wanted)
    if prepared is None:
        return None
    run: Run = functools.partial(_infer, prepared)
    if trains:
        if not launch.is_known_to_be_differentiable(wanted) or large_backward.is_too_large(*call.qkv):
            return None
        run = functools.partial(_train, prepared, options[-2])
    requires_grad = any(tensor.requires_grad for tensor in tensors)
    if len({id(tensor) for tensor in tensors}) == len(tensors) and requires_grad is trains:
        # A guard takes no tensor twice, and does not see grad mode.
        last = CachedCall(
            options=options,
            types=types,
            trains=trains,
            has_sinks=call.sinks is not None,
            is_like=tensor_guard(*tensors),
            run=run,
        )
        launch.calls.remember_last(last, prepared.plan)
    return run


def _infer(prepared: VarlenCall, call: VarlenArguments) -> Result:
    _check_memory(call.q, call.k, call.v)
    return launch.forward(prepared, call)


def _train(prepared: VarlenCall, deterministic: bool, call: VarlenArguments) -> Result:
    """The output, differentiable by autograd, and the LSE if requested."""
    _check_memory(call.q, call.k, call.v)
    both_passes = call._replace(deterministic=deterministic, with_lse=True)
    try:
        if call.with_lse:
            result: Result = autograd.VarlenAttention.apply(call.q, call.k, call.v, call.sinks, both_passes)  # type: ignore[no-untyped-call]
            return result
        out: Tensor = VarlenFunction.apply(call.q, call.k, call.v, call.sinks, both_passes, prepared)  # type: ignore[no-untyped-call]
    except RuntimeError:
        autograd_checks.refuse_inference_tensors(call)
        raise
    return out


def _check_memory(q: Tensor, k: Tensor, v: Tensor) -> None:
    first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (first | second | third) & MISALIGNED or not (first and second and third):
        memory.check_memory(q, k, v, None)


class CachedTraining(NamedTuple):
    """The last backward call, and the guard that recognizes another like it, as in `dense.fast_path`."""

    is_like_last: Guard
    deterministic: bool
    call: weakref.ref[VarlenCall]


class Gradients:
    """The backward passes of one call. Autograd's graph holds it; it holds no plan: see `CachedTraining`."""

    __slots__ = ("_cached",)

    def __init__(self) -> None:
        self._cached: CachedTraining | None = None

    def find(self, args: VarlenBackwardArguments) -> VarlenCall | None:
        """The cached backward call, if the last one was like this."""
        call = args.call
        cached, tensors = self._cached, (call.q, call.k, call.v, args.out, args.lse, args.grad_out)
        if cached is None or cached.deterministic is not call.deterministic or not cached.is_like_last(*tensors):
            return None
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr() or MISALIGNED  # a tensor without memory counts as misaligned
        return None if bits & MISALIGNED else cached.call()

    def remember(self, args: VarlenBackwardArguments) -> None:
        """Caches the backward call that has just run, if it read its tensors without a copy."""
        tensors = (*args.call.qkv, args.out, args.lse, args.grad_out)
        if len({id(tensor) for tensor in tensors}) != len(tensors) or not launch.is_readable(args):
            return
        prepared = launch.find_backward(args)
        if prepared is not None:
            self._cached = CachedTraining(tensor_guard(*tensors), args.call.deterministic, weakref.ref(prepared))


class VarlenFunction(torch.autograd.Function):
    """A cached call in eager mode: saves 100 µs per forward and backward pass over `VarlenAttention`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Runs the forward pass; `inputs` are q, k, v and sinks for autograd, their call and its cached call."""
        *_, call, prepared = inputs
        out, lse = launch.forward(prepared, call)
        autograd.save(ctx, call, out, lse)
        if prepared.gradients is None:
            prepared.gradients = Gradients()
        ctx.gradients = prepared.gradients
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        """The gradients of the tensors, None for the other inputs."""
        if grad_out is None or needs_operator(grad_out):
            return (*autograd.gradients(ctx, grad_out, None), None, None)
        *tensors, out, lse = ctx.saved_tensors
        needs_q, needs_k, needs_v, needs_sinks, *_ = ctx.needs_input_grad
        call = VarlenArguments._make((*tensors, *ctx.options, True, None))  # with_lse and out; by name 0.4 µs more
        args = VarlenBackwardArguments(grad_out, out, lse, call, needs_sinks)
        prepared = ctx.gradients.find(args)
        if prepared is None:
            results = autograd.gradients(ctx, grad_out, None)
            ctx.gradients.remember(args)
            return (*results, None, None)
        grad_q, grad_k, grad_v, *grad_sinks = launch.backward(prepared, args)
        return (
            grad_q if needs_q else None,
            grad_k if needs_k else None,
            grad_v if needs_v else None,
            grad_sinks[0] if needs_sinks else None,
            None,
            None,
        )
