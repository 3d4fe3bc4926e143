"""Gradients of attention over packed sequences, for eager mode and for PyTorch's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Result, kind_of
from cudnn_sdpa.attention.dense import autograd
from cudnn_sdpa.attention.varlen import torch_ops as varlen_torch_ops
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.launch import VarlenBackwardArguments
from cudnn_sdpa.engine import fallback
from cudnn_sdpa.engine.dispatch_state import needs_operator
from cudnn_sdpa.engine.torch_ops import library

_DIFFERENTIABLE = 4  #: q, k, v and sinks are the first inputs
_OPERATOR_INPUTS = len(VarlenArguments._fields) - 2  #: all but with_lse and out


class VarlenAttention(torch.autograd.Function):
    """`sdpa_varlen` for inputs that require grad, in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the forward pass; `inputs` are q, k, v and sinks, which autograd tracks, and their call."""
        call: VarlenArguments = inputs[-1]
        out, lse = varlen_torch_ops.forward_runner(call.q)(call)
        save(ctx, call, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """The gradients of the tensors, None for the call."""
        return (*gradients(ctx, *grad_outputs), None)


class ReferenceVarlen(torch.autograd.Function):
    """The same by the PyTorch reference on any device, for calls that cuDNN declines."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the reference."""
        out, lse = varlen_torch_ops.forward_cpu(inputs[-1])
        save(ctx, inputs[-1], out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """The gradients of the tensors, None for the call."""
        return (*gradients(ctx, *grad_outputs, by_reference=True), None)


def save(ctx: Any, call: VarlenArguments, out: Tensor, lse: Tensor) -> None:
    """Saves tensors and options for the backward pass."""
    ctx.save_for_backward(*call.saved_tensors, out, lse)
    ctx.options = call.options
    ctx.may_fall_back = fallback.is_in_force()
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *, by_reference: bool = False
) -> tuple[Tensor | None, ...]:
    """The needed gradients of q, k, v and sinks, from what `save` saved."""
    autograd.refuse_gradient_of_lse(grad_lse)
    autograd.refuse_batch(grad_out)
    needs = ctx.needs_input_grad[:_DIFFERENTIABLE]
    needs_sinks = needs[-1]
    if grad_out is None or not any(needs):
        return (None,) * _DIFFERENTIABLE
    *tensors, out, lse = ctx.saved_tensors
    call = VarlenArguments.of_operator((*tensors, *ctx.options), with_lse=True)
    args = VarlenBackwardArguments(grad_out=grad_out, out=out, lse=lse, call=call, sink_gradient=needs_sinks)
    if by_reference:
        results = varlen_torch_ops.backward_cpu(args)
    elif needs_operator(grad_out):
        results = torch.ops.cudnn_sdpa.varlen_backward(grad_out, out, lse, *call.operator_inputs, needs_sinks)
    else:
        run = varlen_torch_ops.backward_runner(out)
        results = fallback.or_else(
            lambda: run(args),
            lambda: varlen_torch_ops.backward_cpu(args),
            lambda: kind_of(call),
            ctx.may_fall_back,
        )
    gradients = results if needs_sinks else (*results, None)
    return tuple(gradient if need else None for need, gradient in zip(needs, gradients, strict=True))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, VarlenArguments(*inputs), *output)


def _gradients_of_operator(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return (*gradients(ctx, grad_out, grad_lse), *(None,) * (_OPERATOR_INPUTS - _DIFFERENTIABLE))


_register = torch.library.register_autograd
_register("cudnn_sdpa::varlen_forward_lse", _gradients_of_operator, setup_context=_save_inputs, lib=library)
_register("cudnn_sdpa::varlen_forward", autograd.no_log_sum_exp, lib=library)
_register("cudnn_sdpa::varlen_backward", autograd.no_second_gradient, lib=library)
