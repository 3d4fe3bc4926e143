"""The fast path of dense calls: a cached call is launched without checks and PyTorch's dispatcher.

A guard, one C call of 0.4 µs, recognizes a call like the last plain one, as the layers of a model make them. Others are
looked up by signature.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import value_checks
from cudnn_sdpa.attention.arguments import ForwardArguments, Result
from cudnn_sdpa.attention.dense import autograd, large_backward, launch, launch_backward, torch_ops
from cudnn_sdpa.attention.dense.launch import CachedCall, ForwardCall, Run
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, BackwardCall, Needs
from cudnn_sdpa.engine import autograd_checks, fallback
from cudnn_sdpa.engine.dispatch_state import (
    Guard,
    can_bypass_dispatcher,
    is_deterministic,
    is_profiling,
    needs_gradient,
    needs_operator,
    tensor_guard,
)
from cudnn_sdpa.engine.memory import MISALIGNED

_QKV = Needs(q=True, k=True, v=True, attn_mask=False, sinks=False)


class PlainOptions(NamedTuple):
    """The options of a plain call; the others have their defaults."""

    is_causal: bool
    causal_alignment: str
    scale: float | None


class CachedTraining(NamedTuple):
    """The last backward call of a plain call, and the guard that recognizes another like it.

    Attributes:
        is_like_last: Guard for q, k, v, the output, the LSE and the gradient. Saved-tensor hooks may change layouts.
        deterministic: Whether it had to be bit-exact.
        call: Weak reference to the backward call, so that its plan is freed when the cache evicts it.
    """

    is_like_last: Guard
    deterministic: bool
    call: weakref.ref[BackwardCall]


class Gradients:
    """The backward passes of one plain call. Autograd's graph holds it; it holds no plan: see `CachedTraining`.

    Attributes:
        options: The options of the call without `deterministic`.
    """

    __slots__ = ("_cached", "_may_be_deterministic", "options")

    def __init__(self, options: PlainOptions) -> None:
        self.options = options
        self._cached: CachedTraining | None = None
        self._may_be_deterministic = False

    def call(self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> ForwardArguments:
        """The call with all arguments."""
        return ForwardArguments(q, k, v, **self.options._asdict(), deterministic=deterministic, with_lse=True)

    def is_deterministic(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether gradients must be bit-exact now.

        Raises:
            UnsupportedError: They must, and cannot be.
        """
        wanted = is_deterministic()
        if wanted and not self._may_be_deterministic:
            torch_ops.check_gradient(self.call(q, k, v, wanted))
            self._may_be_deterministic = True
        return wanted

    def compute(
        self, grad_out: Tensor, saved: tuple[Tensor, ...], deterministic: bool, may_fall_back: bool
    ) -> Sequence[Tensor]:
        """The gradients of q, k and v."""
        q, k, v, out, lse = saved
        address = grad_out.data_ptr()
        if address & MISALIGNED or not address or grad_out.stride() != out.stride():
            grad_out = launch_backward.readable(grad_out, out)
        cached = self._cached
        if cached is not None and cached.deterministic is deterministic and cached.is_like_last(*saved, grad_out):
            prepared = cached.call()
            if prepared is not None:
                return prepared.run_plain(q, k, v, out, grad_out, lse)
        call = self.call(q, k, v, deterministic)
        args = BackwardArguments(
            grad_out=grad_out, out=out, lse=lse, call=call, deterministic=deterministic, needs=_QKV
        )
        result = autograd.run_backward(args, may_fall_back)
        prepared = launch_backward.find(args)
        distinct = len({id(tensor) for tensor in (*saved, grad_out)}) == 6  # a guard takes no tensor twice
        if prepared is not None and lse.is_contiguous() and distinct:
            self._cached = CachedTraining(tensor_guard(*saved, grad_out), deterministic, weakref.ref(prepared))
        return result


class TrainingCall:
    """A plain call bound to the plans of its two passes.

    Attributes:
        forward: The forward call, with the log-sum-exp.
        gradients: Its backward passes.
        last: The `CachedCall` that recognizes this call.
    """

    __slots__ = ("forward", "gradients", "last")

    def __init__(self, forward: ForwardCall, options: PlainOptions) -> None:
        self.forward = forward
        self.gradients = Gradients(options)
        self.last: CachedCall | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        """The output, differentiable by autograd."""
        try:
            out: Tensor = AttentionFunction.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(ForwardArguments(q, k, v))
            raise
        return out


class AttentionFunction(torch.autograd.Function):
    """A plain call in eager mode."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: TrainingCall) -> Tensor:
        """Runs the forward pass and saves tensors for the backward pass."""
        gradients = prepared.gradients
        deterministic = gradients.is_deterministic(q, k, v)
        out, lse = prepared.forward.run_plain(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gradients, ctx.deterministic, ctx.may_fall_back = gradients, deterministic, fallback.is_in_force()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k and v."""
        if needs_operator(grad_out):
            return _by_operator(ctx, grad_out)
        grad_q, grad_k, grad_v = ctx.gradients.compute(
            grad_out, ctx.saved_tensors, ctx.deterministic, ctx.may_fall_back
        )
        return grad_q, grad_k, grad_v, None


def _by_operator(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's operator, for dispatch modes and double backward."""
    autograd_checks.refuse_batch(grad_out)
    q, k, v, out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
    needs = Needs(q=needs_q, k=needs_k, v=needs_v, attn_mask=False, sinks=False)
    call = ctx.gradients.call(q, k, v, ctx.deterministic)
    args = BackwardArguments(
        grad_out=grad_out, out=out, lse=lse, call=call, deterministic=ctx.deterministic, needs=needs
    )
    grad_q, grad_k, grad_v, *_ = autograd.gradients_by_operator(args)
    return grad_q, grad_k, grad_v, None


def prepare(forward: ForwardCall, is_causal: bool, causal_alignment: str, scale: float | None) -> TrainingCall | None:
    """The training call of `forward` if both passes are a single launch each, otherwise None."""
    problem = forward.problem
    if problem.mask.masked_rows or problem.has_lengths or problem.needs_lengths or problem.is_single:
        return None
    if forward.training is None:
        if large_backward.is_too_large(problem.q, problem.k, problem.v, forward.forward.out):
            return None
        forward.training = TrainingCall(forward, PlainOptions(is_causal, causal_alignment, scale))
    prepared: TrainingCall = forward.training
    return prepared


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
) -> Run | None:
    """The function that runs a plain call (no `seq_lens_q`, no `out`), if it is cached and may skip the dispatcher."""
    if value_checks.enabled:
        return None
    try:
        may_differ = launch.may_differ(q)
        if may_differ and is_deterministic():
            return None  # `find_any` knows the deterministic plans
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        with_lse = return_lse or trains
        call: ForwardCall | None = launch.calls.get(
            launch.plain_signature(q, k, v, None, seq_lens_kv, is_causal, causal_alignment, scale, with_lse, None)
        )
    except (AttributeError, IndexError, TypeError, RuntimeError):  # not tensors, nested: the checks report it
        return None
    if call is None or (trains and (return_lse or seq_lens_kv is not None)):
        return None
    holder: ForwardCall | TrainingCall = call
    if trains:
        training = prepare(call, is_causal, causal_alignment, scale)
        if training is None:
            return None
        holder = training
    run: Run = holder.run
    tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
    known: CachedCall | None = holder.last
    if known is None or not known.check(*tensors) or is_profiling() or forward_ad._current_level >= 0:
        if not can_bypass_dispatcher(q, k, v):
            return None
        if not _can_be_guarded(tensors, trains=trains):
            return run
        guard = tensor_guard(*tensors)
        holder.last = known = CachedCall(
            run=run,
            check=_unless_deterministic(guard) if may_differ else guard,
            is_causal=is_causal,
            alignment=causal_alignment,
            scale=scale,
            with_lse=return_lse,
            has_lengths=seq_lens_kv is not None,
        )
    launch.calls.remember_last(known, call.plan)
    if not call.plan.held:
        call.last = None  # it refers back to the call: an evicted plan must be freed before the next garbage collection
    return run


def find_any(call: ForwardArguments, deterministic: bool | None) -> Callable[[ForwardArguments], Result] | None:
    """The function that runs a call, if it is cached and may skip the checks and the dispatcher."""
    tensors = (*call.tensors, call.out)
    if (
        value_checks.enabled
        or type(call.dropout_p) is not float
        or call.dropout_p
        or not can_bypass_dispatcher(*tensors)
    ):
        return None
    trains = needs_gradient(*tensors)
    if (trains and call.out is not None) or not (deterministic is None or type(deterministic) is bool):
        return None
    wanted = call if call.with_lse or not trains else call._replace(with_lse=True)
    exact = is_deterministic() if deterministic is None else deterministic
    try:
        signature = launch.signature(wanted._replace(deterministic=True) if exact else wanted)
        prepared: ForwardCall | None = launch.calls.get(signature)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None
    if prepared is None or not trains:
        return None if deterministic and prepared is not None and prepared.may_be_replaced else prepared
    mask_gradient = call.attn_mask is not None and call.attn_mask.requires_grad
    if (signature, mask_gradient, exact) not in launch.differentiable:
        return None
    return functools.partial(_train, prepared, exact)


def _train(prepared: ForwardCall, deterministic: bool, call: ForwardArguments) -> Result:
    """Runs a differentiable call whose two passes are cached."""
    both_passes = call._replace(deterministic=deterministic, with_lse=True)
    inputs = (call.q, call.k, call.v, call.attn_mask, call.sinks)
    try:
        out, lse = autograd.Attention.apply(*inputs, both_passes, prepared)  # type: ignore[no-untyped-call]
    except RuntimeError:
        autograd_checks.refuse_inference_tensors(call)
        raise
    return (out, lse) if call.with_lse else out


def _unless_deterministic(guard: Guard) -> Guard:
    """A guard for calls that get another plan under `torch.use_deterministic_algorithms`."""
    return lambda *tensors: guard(*tensors) and not is_deterministic()


def _can_be_guarded(tensors: tuple[Tensor, ...], *, trains: bool) -> bool:
    """Whether a guard can recognize these tensors.

    A guard takes no tensor twice (k is v), and does not see grad mode: a training call may serve calls without
    gradients, but not the reverse.
    """
    return len(set(map(id, tensors))) == len(tensors) and (
        trains or not any(tensor.requires_grad for tensor in tensors)
    )
