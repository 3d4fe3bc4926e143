"""The graphs of gated activations, forward and backward, with their references. All tensors are rows, (1, rows, n)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine.autograd_checks import no_second_gradient
from cudnn_sdpa.fused.activation_tiling import backward_form, forward_form
from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.graph_op import graph_op

_no_second_gradient = no_second_gradient("silu_mul")


def _silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


def _silu_mul_gradients_reference(grad: Tensor, gate: Tensor, up: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    x, one, dy = widened(gate), widened(up), widened(grad)
    share = torch.sigmoid(x)
    grad_gate, grad_up = dy * one * share * (1 + x * (1 - share)), dy * x * share
    if dense:
        return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()
    return _like(grad_gate, gate), _like(grad_up, up)


def _like(result: Tensor, model: Tensor) -> Tensor:
    """A result in a tensor's dtype that lies as it does, gaps between its rows included."""
    out = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device=model.device)
    return out.copy_(result)


@graph_op(reference=_silu_mul_gradients_reference, backward=_no_second_gradient, keeps_results=False)
def silu_mul_gradients(g: Any, grad: Any, gate: Any, up: Any, *, dense: bool) -> Any:
    """The gradients of `silu_mul` by gate and up, which are dense or lie as these do."""
    del dense  # the key has it
    grad_up = g.mul(a=g.swish(input=gate), b=grad)
    grad_gate = g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)
    return grad_gate, grad_up


def _grad_gate_reference(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return _silu_mul_gradients_reference(grad, gate, up, dense=True)[0]


@graph_op(reference=_grad_gate_reference, backward=_no_second_gradient, keeps_results=False)
def silu_mul_grad_gate(g: Any, grad: Any, gate: Any, up: Any) -> Any:
    """The gradient of `silu_mul` by gate alone, dense."""
    return g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)


@graph_op(
    reference=lambda grad, gate: _silu_mul_reference(gate, grad), backward=_no_second_gradient, keeps_results=False
)
def silu_mul_grad_up(g: Any, grad: Any, gate: Any) -> Any:
    """The gradient of `silu_mul` by up alone, dense."""
    return g.mul(a=g.swish(input=gate), b=grad)


def gradients_of(rows: Sequence[Tensor], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `silu_mul` that are wanted, dense, in one kernel, from those of its result, gate and up."""
    if all(needs):
        both: tuple[Tensor, ...] = silu_mul_gradients(*rows, dense=True)
        return both
    return silu_mul_grad_gate(*rows) if needs[0] else None, silu_mul_grad_up(*rows[:2]) if needs[1] else None


def _silu_mul_backward(grads: Any, operands: Any, outputs: Any, *, needs: tuple[bool, ...]) -> Any:
    del outputs
    return gradients_of((grads[0].contiguous(), *operands), needs)


@graph_op(reference=_silu_mul_reference, backward=_silu_mul_backward)
def silu_mul_rows(g: Any, gate: Any, up: Any) -> Any:
    """SiLU(gate) · up."""
    return g.mul(a=g.swish(input=gate), b=up)


def _gelu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


@graph_op(reference=_gelu_mul_reference)
def gelu_mul_rows(g: Any, gate: Any, up: Any) -> Any:
    """GELU(gate) · up, by the error function."""
    return g.mul(a=g.gelu(input=gate), b=up)


def _relu_squared_reference(x: Tensor) -> Tensor:
    return F.relu(widened(x)).square().to(x.dtype).contiguous()


@graph_op(reference=_relu_squared_reference)
def relu_squared_rows(g: Any, x: Any) -> Any:
    """max(x, 0)²."""
    y = g.relu(input=x)
    return g.mul(a=y, b=y)


for _function in (silu_mul_rows, gelu_mul_rows, relu_squared_rows):
    _function.form = forward_form
for _function in (silu_mul_gradients, silu_mul_grad_gate, silu_mul_grad_up):
    _function.form = backward_form
