"""Gradients of dense attention, for eager mode and for PyTorch's operators.

Eager mode calls `Attention` directly, which saves two passes through the dispatcher; torch.compile, dispatch modes and
functorch get `cudnn_sdpa::sdpa_forward_lse` and its registered gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments, Result, kind_of
from cudnn_sdpa.attention.dense import torch_ops
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.engine import fallback
from cudnn_sdpa.engine.autograd_checks import (
    no_gradient_of_gradient,
    no_log_sum_exp,
    refuse_batch,
    refuse_gradient_of_lse,
)
from cudnn_sdpa.engine.dispatch_state import needs_operator
from cudnn_sdpa.engine.torch_ops import library

_DIFFERENTIABLE = 5  #: q, k, v, attn_mask and sinks are the first inputs
_OPERATOR_INPUTS = len(ForwardArguments._fields) - 2  #: all but with_lse and out


class Attention(torch.autograd.Function):
    """`sdpa` for inputs that require grad, in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the forward pass and saves tensors for the backward pass.

        `inputs` are q, k, v, attn_mask and sinks, which autograd tracks, their call, and its cached call or None.
        """
        *_, call, prepared = inputs
        out, lse = (prepared or torch_ops.forward_runner(call.q))(call)
        _save(ctx, call, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, None for the other inputs."""
        return (*_gradients(ctx, *gradients), None, None)


class ReferenceAttention(torch.autograd.Function):
    """The same by the PyTorch reference on any device, for calls that cuDNN declines."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the reference."""
        out, lse = torch_ops.run_cpu(inputs[-1])
        _save(ctx, inputs[-1], out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, None for the call."""
        return (*_gradients(ctx, *gradients, by_reference=True), None)


def _save(ctx: Any, call: ForwardArguments, out: Tensor, lse: Tensor) -> None:
    ctx.save_for_backward(*call.saved_tensors, out, lse)
    ctx.options = call.options
    ctx.may_fall_back = fallback.is_in_force()
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *, by_reference: bool = False
) -> tuple[Tensor | None, ...]:
    refuse_gradient_of_lse(grad_lse)
    refuse_batch(grad_out)
    needs = Needs(*ctx.needs_input_grad[:_DIFFERENTIABLE])
    if grad_out is None or not any(needs):
        return (None,) * _DIFFERENTIABLE
    *tensors, out, lse = ctx.saved_tensors
    call = ForwardArguments.of_operator((*tensors, *ctx.options), with_lse=True)
    args = BackwardArguments(
        grad_out=grad_out, out=out, lse=lse, call=call, deterministic=call.deterministic, needs=needs
    )
    if by_reference:
        return _spread(torch_ops.run_backward_cpu(args), needs)
    if needs_operator(grad_out):
        return gradients_by_operator(args)
    return _spread(run_backward(args, ctx.may_fall_back), needs)


def run_backward(args: BackwardArguments, may_fall_back: bool) -> list[Tensor]:
    """The needed gradients; by the reference if cuDNN declines and a fallback was active in the forward pass."""
    run = torch_ops.backward_runner(args.out)
    return fallback.or_else(
        lambda: run(args), lambda: torch_ops.run_backward_cpu(args), lambda: kind_of(args.call), may_fall_back
    )


def gradients_by_operator(args: BackwardArguments) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's operator, for dispatch modes and double backward."""
    inputs = (*args.call.operator_inputs, list(args.needs))
    return _spread(torch.ops.cudnn_sdpa.sdpa_backward(args.grad_out, args.out, args.lse, *inputs), args.needs)


def _spread(gradients: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
    """One entry per differentiable input: its gradient, None if it is not needed."""
    remaining = iter(gradients)
    return tuple(next(remaining) if need else None for need in needs)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, ForwardArguments(*inputs), *output)


def _gradients_of_operator(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_gradients(ctx, grad_out, grad_lse), *(None,) * (_OPERATOR_INPUTS - _DIFFERENTIABLE))


torch.library.register_autograd(
    "cudnn_sdpa::sdpa_forward_lse", _gradients_of_operator, setup_context=_save_inputs, lib=library
)
torch.library.register_autograd("cudnn_sdpa::sdpa_forward", no_log_sum_exp, lib=library)
torch.library.register_autograd("cudnn_sdpa::sdpa_backward", no_gradient_of_gradient, lib=library)
