"""The shortest way for plain calls that autograd follows: no options but causal mask and scale, no lengths.

It does what `autograd.Attention` does without descriptions, signatures and dictionaries: 60 µs less for a forward and a
backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import autograd, backward, fallback, operators, pieces, tracking
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.backward import BackwardArguments, BackwardCall, Needs
from cudnn_sdpa.attention.calls import MISALIGNED, ForwardCall
from cudnn_sdpa.runtime.eager import Guard, is_deterministic, is_watched, tensor_guard

_ALL = Needs(True, True, True, False, False)


class Again(NamedTuple):
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
        self._again: Again | None = None
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
            operators.check_gradient(self.call(q, k, v, wanted))
            self._may_be_deterministic = True
        return wanted

    def compute(
        self, grad_out: Tensor, saved: tuple[Tensor, ...], deterministic: bool, may_fall_back: bool
    ) -> Sequence[Tensor]:
        """The gradients by q, k and v."""
        q, k, v, out, lse = saved
        address = grad_out.data_ptr()
        if address & MISALIGNED or not address or grad_out.stride() != out.stride():
            grad_out = backward.readable(grad_out, out)
        again = self._again
        if again is not None and again.deterministic is deterministic and again.is_like_last(*saved, grad_out):
            prepared = again.call()
            if prepared is not None:
                return prepared.run_plain(q, k, v, out, grad_out, lse)
        arguments = BackwardArguments(grad_out, out, lse, self.call(q, k, v, deterministic), deterministic, _ALL)
        result = autograd.run_backward(arguments, may_fall_back)
        prepared = backward.find(arguments)
        distinct = len({id(tensor) for tensor in (*saved, grad_out)}) == 6  # no guard takes one tensor twice
        if prepared is not None and lse.is_contiguous() and distinct:
            self._again = Again(tensor_guard(*saved, grad_out), deterministic, weakref.ref(prepared))
        return result


class PlainTraining:
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
            out: Tensor = PlainAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        except RuntimeError:
            tracking.refuse_inference_tensors(ForwardArguments(q, k, v))
            raise
        return out


class PlainAttention(torch.autograd.Function):
    """A plain call in eager mode."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: PlainTraining) -> Tensor:
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
        if is_watched(grad_out):
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


def prepare(forward: ForwardCall, options: tuple[Any, ...]) -> PlainTraining | None:
    """What serves plain calls that autograd follows, if `forward` is one launch and its backward pass another."""
    problem = forward.problem
    if problem.mask.blind_rows or problem.has_lengths or problem.needs_lengths or problem.is_single:
        return None
    if forward.training is None:
        if pieces.is_too_large(problem.q, problem.k, problem.v, forward.forward.out):
            return None
        forward.training = PlainTraining(forward, options)
    prepared: PlainTraining = forward.training
    return prepared
