"""The graphs of gated activations, forward and backward, with their references. All tensors are rows, (1, rows, n)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine.autograd_checks import no_second_gradient
from cudnn_sdpa.fused.activation_tiling import backward_form, forward_form
from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.graph_op import graph_op
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol

_no_second_gradient = no_second_gradient("silu_mul")


def _silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


def _silu_mul_gradients_reference(grad: Tensor, gate: Tensor, up: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    x, factor, dy = widened(gate), widened(up), widened(grad)
    sigmoid = torch.sigmoid(x)
    grad_gate, grad_up = dy * factor * sigmoid * (1 + x * (1 - sigmoid)), dy * x * sigmoid
    if dense:
        return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()
    return _like(grad_gate, gate), _like(grad_up, up)


def _like(result: Tensor, model: Tensor) -> Tensor:
    """A result with the dtype and strides of `model`, including gaps between rows."""
    out = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device=model.device)
    return out.copy_(result)


@graph_op(reference=_silu_mul_gradients_reference, backward=_no_second_gradient, keeps_results=False)
def silu_mul_gradients(
    g: GraphBuilder, grad: Symbol, gate: Symbol, up: Symbol, *, dense: bool
) -> tuple[Symbol, Symbol]:
    """The gradients of gate and up, contiguous or with their strides."""
    del dense  # the key has it
    grad_up = g.mul(a=g.swish(input=gate), b=grad)
    grad_gate = g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)
    return grad_gate, grad_up


def _grad_gate_reference(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return _silu_mul_gradients_reference(grad, gate, up, dense=True)[0]


@graph_op(reference=_grad_gate_reference, backward=_no_second_gradient, keeps_results=False)
def silu_mul_grad_gate(g: GraphBuilder, grad: Symbol, gate: Symbol, up: Symbol) -> Symbol:
    """The gradient of gate only, contiguous."""
    return g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)


@graph_op(
    reference=lambda grad, gate: _silu_mul_reference(gate, grad), backward=_no_second_gradient, keeps_results=False
)
def silu_mul_grad_up(g: GraphBuilder, grad: Symbol, gate: Symbol) -> Symbol:
    """The gradient of up only, contiguous."""
    return g.mul(a=g.swish(input=gate), b=grad)


def gradients_of(rows: Sequence[Tensor], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `silu_mul` that are needed, contiguous, in one kernel, from grad, gate and up."""
    grad, gate, up = rows
    needs_grad_gate, needs_grad_up = needs
    if needs_grad_gate and needs_grad_up:
        gradients: tuple[Tensor, ...] = silu_mul_gradients(grad, gate, up, dense=True)
        return gradients
    return (
        silu_mul_grad_gate(grad, gate, up) if needs_grad_gate else None,
        silu_mul_grad_up(grad, gate) if needs_grad_up else None,
    )


def _silu_mul_backward(
    grads: Sequence[Tensor], operands: Sequence[Tensor], outputs: Sequence[Tensor], *, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    del outputs
    return gradients_of((grads[0].contiguous(), *operands), needs)


@graph_op(reference=_silu_mul_reference, backward=_silu_mul_backward)
def silu_mul_rows(g: GraphBuilder, gate: Symbol, up: Symbol) -> Symbol:
    """SiLU(gate) · up."""
    return g.mul(a=g.swish(input=gate), b=up)


def _gelu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(widened(gate)) * widened(up)).to(gate.dtype).contiguous()


@graph_op(reference=_gelu_mul_reference)
def gelu_mul_rows(g: GraphBuilder, gate: Symbol, up: Symbol) -> Symbol:
    """GELU(gate) · up, with erf."""
    return g.mul(a=g.gelu(input=gate), b=up)


def _relu_squared_reference(x: Tensor) -> Tensor:
    return F.relu(widened(x)).square().to(x.dtype).contiguous()


@graph_op(reference=_relu_squared_reference)
def relu_squared_rows(g: GraphBuilder, x: Symbol) -> Symbol:
    """max(x, 0)²."""
    y = g.relu(input=x)
    return g.mul(a=y, b=y)


for _function in (silu_mul_rows, gelu_mul_rows, relu_squared_rows):
    _function.form = forward_form
for _function in (silu_mul_gradients, silu_mul_grad_gate, silu_mul_grad_up):
    _function.form = backward_form
