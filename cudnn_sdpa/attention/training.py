"""The shortest way for plain calls that autograd follows: no options but causal mask and scale, no lengths.

It does what `autograd.Attention` does without descriptions, signatures and dictionaries: 60 µs less for a forward and a
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import autograd, backward
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.backward import BackwardArguments, BackwardCall, Needs
from cudnn_sdpa.attention.calls import MISALIGNED, ForwardCall

_ALL = Needs(True, True, True, False, False)


class PlainTraining:
    """A plain call bound to the plans of its two passes.

    Attributes:
        forward: The forward call, with the log-sum-exp.
        options: What is no tensor, as `ForwardArguments.options` gives it.
        last: By what the look-up recognizes this call when it comes again.
    """

    __slots__ = ("_backward", "forward", "last", "options")

    def __init__(self, forward: ForwardCall, options: tuple[Any, ...]) -> None:
        self.forward = forward
        self.options = options
        self.last: Any = None
        self._backward: dict[Any, BackwardCall] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        """The output, which autograd can differentiate."""
        out: Tensor = PlainAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def gradients(self, grad_out: Tensor, saved: tuple[Tensor, ...], deterministic: bool) -> tuple[Tensor, ...]:
        """The gradients by q, k and v."""
        q, k, v, out, lse = saved
        stride, name = grad_out.stride(), (grad_out.stride(), deterministic)
        prepared = self._backward.get(name)
        if prepared is None or not prepared.plan.held or stride != out.stride() or grad_out.data_ptr() & MISALIGNED:
            grad_out = backward.readable(grad_out, out)
            name = (grad_out.stride(), deterministic)
            prepared = self._backward.get(name)
        if prepared is None or not prepared.plan.held:
            call = ForwardArguments._make((q, k, v, None, None, None, None, None, *self.options, True, None))
            arguments = BackwardArguments(grad_out, out, lse, call, deterministic, _ALL)
            self._backward[name] = prepared = backward.find(arguments) or backward.prepare(arguments)
        return prepared.run_plain(q, k, v, out, grad_out, lse)


class PlainAttention(torch.autograd.Function):
    """A plain call in eager mode."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: PlainTraining) -> Tensor:
        """Runs the forward pass and saves what the backward pass needs."""
        out, lse = prepared.forward.run_plain(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prepared = prepared
        ctx.deterministic = torch.are_deterministic_algorithms_enabled()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """The gradients by q, k and v."""
        if torch.is_grad_enabled() or type(grad_out) is not Tensor:
            return _watched(ctx, grad_out)
        grad_q, grad_k, grad_v = ctx.prepared.gradients(grad_out, ctx.saved_tensors, ctx.deterministic)
        return grad_q, grad_k, grad_v, None


def _watched(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients when somebody may want to differentiate them again."""
    q, k, v, out, lse = ctx.saved_tensors
    options = (*ctx.prepared.options[:-1], ctx.deterministic)
    needs = Needs._make((*ctx.needs_input_grad[:3], False, False))
    call = ForwardArguments._make((q, k, v, None, None, None, None, None, *options, True, None))
    found = autograd.gradients_by_operator(BackwardArguments(grad_out, out, lse, call, ctx.deterministic, needs))
    return (*found[:3], None)


def prepare(forward: ForwardCall, options: tuple[Any, ...]) -> PlainTraining | None:
    """What serves plain calls that autograd follows, if `forward` is one launch and its backward pass another."""
    problem = forward.problem
    if problem.mask.blind_rows or problem.has_lengths or problem.needs_lengths or problem.is_single:
        return None
    if forward.training is None:
        forward.training = PlainTraining(forward, options)
    prepared: PlainTraining = forward.training
    return prepared
