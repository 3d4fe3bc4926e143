"""Gradients of dense attention: one rule, for eager mode and for PyTorch's operators.

In eager mode `Attention` is called straight, which saves the dispatcher's share of two calls; everything that wants to
see operators (torch.compile, dispatch modes, functorch) gets `cudnn_sdpa::sdpa_forward_lse` and its registered rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments, Result, kind_of
from cudnn_sdpa.attention.dense import torch_ops
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.engine import fallback
from cudnn_sdpa.engine.dispatch_state import is_batch, needs_operator
from cudnn_sdpa.engine.torch_ops import library
from cudnn_sdpa.errors import UnsupportedError

_DIFFERENTIABLE = 5  #: q, k, v, attn_mask and sinks come first


class Attention(torch.autograd.Function):
    """`sdpa` for inputs that require grad, in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the forward pass and saves what the backward pass needs.

        `inputs` are q, k, v, attn_mask and sinks, for autograd to see, the call that they belong to, and what is
        prepared for it if it is known.
        """
        *_, call, prepared = inputs
        out, lse = (prepared or torch_ops.forward_runner(call.q))(call)
        _save(ctx, call, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients by the tensors, None for the rest."""
        return (*_gradients(ctx, *gradients), None, None)


class ReferenceAttention(torch.autograd.Function):
    """The same in plain PyTorch on any device, for what cuDNN declines."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Result:
        """Runs the reference."""
        out, lse = torch_ops.run_cpu(inputs[-1])
        _save(ctx, inputs[-1], out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients by the tensors, None for the call."""
        return (*_gradients(ctx, *gradients, by_reference=True), None)


def refuse_gradient_of_lse(grad_lse: Tensor | None) -> None:
    """A log-sum-exp can be returned, but no loss may depend on it."""
    if grad_lse is not None:
        raise UnsupportedError(
            "a gradient of the log-sum-exp",
            ["cuDNN's backward pass takes the gradient of the output alone"],
            "lse.detach() in the loss",
        )


def refuse_batch(grad_out: Tensor | None) -> None:
    """`is_grads_batched` gives a batch of gradients at once, in tensors that have no memory of their own."""
    if grad_out is not None and is_batch(grad_out):
        raise UnsupportedError(
            "a batch of gradients (is_grads_batched, or jacobian with vectorize)",
            ["cuDNN's backward pass takes one gradient of the output"],
            "one call of torch.autograd.grad for each of them",
        )


def _save(ctx: Any, call: ForwardArguments, out: Tensor, lse: Tensor) -> None:
    ctx.save_for_backward(*call[:8], out, lse)
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
    call = ForwardArguments._make((*tensors, *ctx.options, True, None))
    of = BackwardArguments(grad_out, out, lse, call, call.deterministic, needs)
    if by_reference:
        return _in_place(torch_ops.run_backward_cpu(of), needs)
    if needs_operator(grad_out):
        return gradients_by_operator(of)
    return _in_place(run_backward(of, ctx.may_fall_back), needs)


def run_backward(of: BackwardArguments, may_fall_back: bool) -> list[Tensor]:
    """The wanted gradients; by the reference if cuDNN declines them and a fallback was in force in the forward pass."""
    run = torch_ops.backward_runner(of.out)
    return fallback.or_else(
        lambda: run(of), lambda: torch_ops.run_backward_cpu(of), lambda: kind_of(of.call), may_fall_back
    )


def gradients_by_operator(of: BackwardArguments) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's operator, for when somebody may want to differentiate them again."""
    found = torch.ops.cudnn_sdpa.sdpa_backward(of.grad_out, of.out, of.lse, *of.call[:17], list(of.needs))
    return _in_place(found, of.needs)


def _in_place(found: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
    """The wanted gradients, each in its own place."""
    result = iter(found)
    return tuple(next(result) if need else None for need in needs)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, ForwardArguments(*inputs), *output)


def _gradients_of_operator(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    return (*_gradients(ctx, grad_out, grad_lse), *(None,) * (17 - _DIFFERENTIABLE))


def no_log_sum_exp(*_: Any) -> None:
    """Refuses the gradient of an operator that keeps nothing for it."""
    raise UnsupportedError(
        "a gradient of an operator that does not keep the log-sum-exp",
        ["it is what the backward pass starts from; under torch.vmap no gradient can be had"],
        "cudnn_sdpa.sdpa or sdpa_varlen, or the operator with _lse in its name",
    )


def no_second_gradient(*_: Any) -> None:
    """Refuses the gradient of a gradient."""
    raise UnsupportedError(
        "a gradient of attention's gradient (double backward)",
        ["cuDNN has no kernel for it"],
        "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH",
    )


torch.library.register_autograd(
    "cudnn_sdpa::sdpa_forward_lse", _gradients_of_operator, setup_context=_save_inputs, lib=library
)
torch.library.register_autograd("cudnn_sdpa::sdpa_forward", no_log_sum_exp, lib=library)
torch.library.register_autograd("cudnn_sdpa::sdpa_backward", no_second_gradient, lib=library)
