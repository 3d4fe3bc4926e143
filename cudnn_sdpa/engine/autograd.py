"""The autograd function of all calls in Python: what it runs, saves and differentiates is their own.

Calls that the native module launches have a node of its own in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]  #: the results of a call: alone if it is one


class Tracked(Protocol):
    """A call that autograd follows."""

    def forward(self, ctx: Any, inputs: tuple[object, ...], /) -> Result:
        """Runs the call. Saves what its gradients need, and sets `ctx.tracked` to what computes them.

        Autograd's graph holds that, so it must hold no plan.
        """


class TrackedGradient(Protocol):
    """What computes the gradients of a call."""

    def gradients(self, ctx: Any, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """The gradient of each input, given those of the results, and which are needed."""


class Differentiable(torch.autograd.Function):
    """A call that autograd follows, in eager mode. It saves the two passes through PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, tracked: Tracked, *inputs: object) -> Result:
        """Runs the call; the inputs are those that autograd tracks."""
        return tracked.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, None for the call."""
        tracked: TrackedGradient = ctx.tracked
        _, *needs = ctx.needs_input_grad
        return None, *tracked.gradients(ctx, grads, tuple(needs))
