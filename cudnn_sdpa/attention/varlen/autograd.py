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


class VarlenAttention(torch.autograd.Function):
    """`sdpa_varlen` for inputs that require grad, in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the forward pass; `inputs` are q, k, v and sinks, for autograd to see, and their call."""
        call: VarlenArguments = inputs[-1]
        out, lse = varlen_torch_ops.forward_runner(call.q)(call)
        save(ctx, call, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        """The gradients by the tensors, None for the call."""
        return (*gradients(ctx, *of_results), None)


class ReferenceVarlen(torch.autograd.Function):
    """The same in plain PyTorch on any device, for what cuDNN declines."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the reference."""
        out, lse = varlen_torch_ops.forward_cpu(inputs[-1])
        save(ctx, inputs[-1], out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        """The gradients by the tensors, None for the call."""
        return (*gradients(ctx, *of_results, by_reference=True), None)


def save(ctx: Any, call: VarlenArguments, out: Tensor, lse: Tensor) -> None:
    """Keeps what the backward pass needs."""
    ctx.save_for_backward(*call[:7], out, lse)
    ctx.options = call.options
    ctx.may_fall_back = fallback.is_in_force()
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *, by_reference: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients by q, k, v and sinks that are needed, of what `save` has kept."""
    autograd.refuse_gradient_of_lse(grad_lse)
    autograd.refuse_batch(grad_out)
    needs = ctx.needs_input_grad[:4]
    if grad_out is None or not any(needs):
        return (None,) * 4
    *tensors, out, lse = ctx.saved_tensors
    call = VarlenArguments._make((*tensors, *ctx.options, True, None))
    of = VarlenBackwardArguments(grad_out, out, lse, call, needs[3])
    if by_reference:
        found = varlen_torch_ops.backward_cpu(of)
    elif needs_operator(grad_out):
        found = torch.ops.cudnn_sdpa.varlen_backward(grad_out, out, lse, *call[:18], needs[3])
    else:
        run = varlen_torch_ops.backward_runner(out)
        found = fallback.or_else(
            lambda: run(of),
            lambda: varlen_torch_ops.backward_cpu(of),
            lambda: kind_of(call),
            ctx.may_fall_back,
        )
    return tuple(gradient if need else None for need, gradient in zip(needs, [*found, None][:4], strict=True))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, VarlenArguments(*inputs), *output)


def _gradients_of_operator(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return (*gradients(ctx, grad_out, grad_lse), *(None,) * 14)


_register = torch.library.register_autograd
_register("cudnn_sdpa::varlen_forward_lse", _gradients_of_operator, setup_context=_save_inputs, lib=library)
_register("cudnn_sdpa::varlen_forward", autograd.no_log_sum_exp, lib=library)
_register("cudnn_sdpa::varlen_backward", autograd.no_second_gradient, lib=library)
