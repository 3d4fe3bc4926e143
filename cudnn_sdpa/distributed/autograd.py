"""Saved state and refusals, common to the autograd functions of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.local_attention import Options
from cudnn_sdpa.engine import autograd_checks, fallback
from cudnn_sdpa.engine.call import Function

Gradients = tuple[Tensor | None, ...]


def save(ctx: Any, options: Options, tensors: tuple[Tensor | None, ...]) -> None:
    """Saves the state of the backward pass, which runs on autograd's threads, where no fallback is in force."""
    ctx.save_for_backward(*tensors)
    ctx.options, ctx.may_fall_back = options, fallback.is_in_force()
    ctx.set_materialize_grads(False)


def resumed(
    method: str,
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    gradients: Callable[[Options, Tensor, tuple[Any, ...]], Gradients],
) -> Gradients:
    """The results of a backward pass: None for options and offsets, then the gradients.

    Every rank runs the whole pass, whatever gradients it needs, because the others wait for its part.

    Raises:
        UnsupportedError: The LSE has a gradient, or there is a batch of gradients.
    """
    autograd_checks.refuse_gradient_of("lse", grad_lse)
    autograd_checks.refuse_batch(grad_out)
    saved = ctx.saved_tensors
    may_fall_back = fallback.fallback("torch" if ctx.may_fall_back else None)
    dtypes_stay = torch.autocast(saved[-2].device.type, enabled=False)  # as in a backward pass outside of autocast
    with torch.no_grad(), may_fall_back, dtypes_stay, collectives.settled():
        grad_out = torch.zeros_like(saved[-2]) if grad_out is None else grad_out
        grads = gradients(ctx.options, grad_out, saved)
    if torch.is_grad_enabled():  # create_graph: second gradients must raise, and not be zero
        present = [x for x in grads if x is not None]
        depended_on = [x for x in (grad_out, *saved) if x is not None and x.requires_grad]
        tied = iter(_NoSecondGradient.apply(method, len(present), *present, *depended_on))
        grads = tuple(None if x is None else next(tied) for x in grads)
    return None, None, *grads


class _NoSecondGradient(Function):
    """The identity, whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, method: str, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.method = method
        return tuple(x.view_as(x) for x in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> None:
        autograd_checks.refuse_second_gradient(f"context_parallel by {ctx.method}")


def refusing_gradients(lse: Tensor, out: Tensor) -> Tensor:
    """A copy of an LSE in the graph of the output; refuses its gradient."""
    return _NoGradientOfLSE.apply(lse, out)  # type: ignore[no-any-return]


class _NoGradientOfLSE(Function):
    """The LSE, given the output."""

    @staticmethod
    def forward(ctx: Any, lse: Tensor, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return lse.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(_: Any, grad_lse: Tensor | None) -> tuple[None, None]:
        autograd_checks.refuse_gradient_of("lse", grad_lse)
        return None, None
