"""Calls that may go straight to their plans, past the checks and PyTorch's dispatcher.

Two ways lead there. The last plain call served is recognized by a guard, one C call of 0.4 µs; the layers of one model
mostly look alike. Any other is found by its signature.
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
from cudnn_sdpa.attention.memory import MISALIGNED
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

_ALL = Needs(True, True, True, False, False)


class CachedTraining(NamedTuple):
    """The backward call that a plain call had last, and how to see whether it may have it again.

    Attributes:
        is_like_last: Whether q, k, v, the output, the log-sum-exp and the gradient are like those of then. Hooks of
            autograd may give what was saved back in another layout.
        deterministic: Whether it was to be bit-exact.
        call: Refers to the backward call, and does not keep it: its plan goes when the cache lets it go.
    """

    is_like_last: Guard
    deterministic: bool
    call: weakref.ref[BackwardCall]


class Gradients:
    """The backward passes of one plain call. Autograd's graph holds it, and with it no plan: see `Again`.

    Attributes:
        options: What is no tensor, as `ForwardArguments.options` gives it, but for determinism.
    """

    __slots__ = ("_again", "_may_be_deterministic", "options")

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options
        self._again: CachedTraining | None = None
        self._may_be_deterministic = False

    def call(self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> ForwardArguments:
        """The call in full."""
        return ForwardArguments._make((q, k, v, *(None,) * 5, *self.options, deterministic, True, None))

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
        """The gradients by q, k and v."""
        q, k, v, out, lse = saved
        address = grad_out.data_ptr()
        if address & MISALIGNED or not address or grad_out.stride() != out.stride():
            grad_out = launch_backward.readable(grad_out, out)
        again = self._again
        if again is not None and again.deterministic is deterministic and again.is_like_last(*saved, grad_out):
            prepared = again.call()
            if prepared is not None:
                return prepared.run_plain(q, k, v, out, grad_out, lse)
        arguments = BackwardArguments(grad_out, out, lse, self.call(q, k, v, deterministic), deterministic, _ALL)
        result = autograd.run_backward(arguments, may_fall_back)
        prepared = launch_backward.find(arguments)
        distinct = len({id(tensor) for tensor in (*saved, grad_out)}) == 6  # no guard takes one tensor twice
        if prepared is not None and lse.is_contiguous() and distinct:
            self._again = CachedTraining(tensor_guard(*saved, grad_out), deterministic, weakref.ref(prepared))
        return result


class TrainingCall:
    """A plain call bound to the plans of its two passes.

    Attributes:
        forward: The forward call, with the log-sum-exp.
        gradients: Its backward passes.
        last: By what the look-up recognizes this call when it comes again.
    """

    __slots__ = ("forward", "gradients", "last")

    def __init__(self, forward: ForwardCall, options: tuple[Any, ...]) -> None:
        self.forward = forward
        self.gradients = Gradients(options)
        self.last: Any = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        """The output, which autograd can differentiate."""
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
        """Runs the forward pass and saves what the backward pass needs."""
        gradients = prepared.gradients
        deterministic = gradients.is_deterministic(q, k, v)
        out, lse = prepared.forward.run_plain(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.gradients, ctx.deterministic, ctx.may_fall_back = gradients, deterministic, fallback.is_in_force()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """The gradients by q, k and v."""
        if needs_operator(grad_out):
            return _watched(ctx, grad_out)
        grad_q, grad_k, grad_v = ctx.gradients.compute(
            grad_out, ctx.saved_tensors, ctx.deterministic, ctx.may_fall_back
        )
        return grad_q, grad_k, grad_v, None


def _watched(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients when somebody else has an interest in them."""
    autograd.refuse_batch(grad_out)
    q, k, v, out, lse = ctx.saved_tensors
    needs = Needs._make((*ctx.needs_input_grad[:3], False, False))
    call = ctx.gradients.call(q, k, v, ctx.deterministic)
    found = autograd.gradients_by_operator(BackwardArguments(grad_out, out, lse, call, ctx.deterministic, needs))
    return (*found[:3], None)


def prepare(forward: ForwardCall, options: tuple[Any, ...]) -> TrainingCall | None:
    """What serves plain calls that autograd follows, if `forward` is one launch and its backward pass another."""
    problem = forward.problem
    if problem.mask.masked_rows or problem.has_lengths or problem.needs_lengths or problem.is_single:
        return None
    if forward.training is None:
        if large_backward.is_too_large(problem.q, problem.k, problem.v, forward.forward.out):
            return None
        forward.training = TrainingCall(forward, options)
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
    """What runs a call with these plain arguments, without `seq_lens_q` and `out`, if it may skip the dispatcher."""
    if value_checks.enabled:
        return None
    try:
        may_differ = launch.may_differ(q)
        if may_differ and is_deterministic():
            return None  # `find_any` knows the plans that give the same bits in every run
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        with_lse = return_lse or trains
        call: ForwardCall | None = launch.calls.get(
            launch.plain_signature(q, k, v, None, seq_lens_kv, is_causal, causal_alignment, scale, with_lse, None)
        )
    except (AttributeError, IndexError, TypeError, RuntimeError):  # not tensors, nested: the checks will say so
        return None
    if call is None or (trains and (return_lse or seq_lens_kv is not None)):
        return None
    holder: Any = call
    if trains:
        holder = prepare(call, (is_causal, causal_alignment, -1, -1, scale, 0.0, None, False))
        if holder is None:
            return None
    run: Run = holder.run
    tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
    known: CachedCall | None = holder.last
    if known is None or not known.check(*tensors) or is_profiling() or forward_ad._current_level >= 0:
        if not can_bypass_dispatcher(q, k, v):
            return None
        if not _can_be_guarded(tensors, trains=trains):
            return run
        of_call = (is_causal, causal_alignment, scale, return_lse, seq_lens_kv is not None)
        guard = tensor_guard(*tensors)
        holder.last = known = CachedCall(run, _unless_deterministic(guard) if may_differ else guard, *of_call)
    launch.calls.remember_last(known, call.plan)
    if not call.plan.held:
        call.last = None  # it refers back to the call, and an evicted plan must not wait for the garbage collector
    return run


def find_any(call: ForwardArguments, deterministic: bool | None) -> Callable[[ForwardArguments], Result] | None:
    """What runs a call with any arguments, if it is known and may skip the checks and the dispatcher."""
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
    exactly = is_deterministic() if deterministic is None else deterministic
    try:
        signature = launch.signature(wanted._replace(deterministic=True) if exactly else wanted)
        prepared: ForwardCall | None = launch.calls.get(signature)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None
    if prepared is None or not trains:
        return None if deterministic and prepared is not None and prepared.may_be_replaced else prepared
    by_mask = call.attn_mask is not None and call.attn_mask.requires_grad
    if (signature, by_mask, exactly) not in launch.differentiable:
        return None
    return functools.partial(_train, prepared, exactly)


def _train(prepared: ForwardCall, deterministic: bool, call: ForwardArguments) -> Result:
    """A call that autograd follows and whose two passes are prepared."""
    of_both = call._replace(deterministic=deterministic, with_lse=True)
    try:
        out, lse = autograd.Attention.apply(*call[:5], of_both, prepared)  # type: ignore[no-untyped-call]
    except RuntimeError:
        autograd_checks.refuse_inference_tensors(call)
        raise
    return (out, lse) if call.with_lse else out


def _unless_deterministic(guard: Guard) -> Guard:
    """A guard for calls that the switch for determinism leads to another plan."""
    return lambda *tensors: guard(*tensors) and not is_deterministic()


def _can_be_guarded(tensors: tuple[Tensor, ...], *, trains: bool) -> bool:
    """Whether a guard may stand for these tensors.

    No guard takes one tensor twice, as with k is v. None sees whether gradients are enabled: what trains does no harm
    without them, but what does not train must not stand for calls that do.
    """
    return len(set(map(id, tensors))) == len(tensors) and (
        trains or not any(tensor.requires_grad for tensor in tensors)
    )
