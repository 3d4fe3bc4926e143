"""Gated activations in one kernel each way: `silu_mul`, and what else cuDNN fuses like it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from cudnn_sdpa.errors import DtypeError, LayoutError, ShapeError
from cudnn_sdpa.graph_function import graph_op

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


def _silu_mul_gradients_reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    x, one, dy = gate.float(), up.float(), grad.float()
    share = torch.sigmoid(x)
    of_gate = dy * one * share * (1 + x * (1 - share))
    return of_gate.to(gate.dtype).contiguous(), (dy * x * share).to(up.dtype).contiguous()


@graph_op(reference=_silu_mul_gradients_reference)
def silu_mul_gradients(g: Any, grad: Any, gate: Any, up: Any) -> Any:
    """The gradients of `silu_mul` by gate and up."""
    of_up = g.mul(a=g.swish(input=gate), b=grad)
    of_gate = g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)
    return of_gate, of_up


def _silu_mul_backward(grads: tuple[Any, ...], operands: tuple[Any, ...], outputs: Any) -> Any:  # noqa: ARG001
    grad = grads[0] if grads[0].is_contiguous() else grads[0].contiguous()
    return silu_mul_gradients(grad, *operands)


@graph_op(reference=_silu_mul_reference, backward=_silu_mul_backward)
def silu_mul_rows(g: Any, gate: Any, up: Any) -> Any:
    """SiLU(gate) · up of rows (1, rows, n)."""
    return g.mul(a=g.swish(input=gate), b=up)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) · up, the gate of SwiGLU, in one kernel; so are both gradients.

    Args:
        gate: (..., n), float16, bfloat16 or float32. Its last dimension is dense; both halves of one projection,
            `x.chunk(2, dim=-1)`, are read where they lie.
        up: Of the same shape and dtype.

    Returns:
        A dense tensor of the same shape and dtype.

    Raises:
        ArgumentError: They do not fit, or lie so that they would have to be copied.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> gate, up = torch.randn(2, 5, 32).chunk(2, dim=-1)
        >>> cudnn_sdpa.silu_mul(gate, up).shape
        torch.Size([2, 5, 16])

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """
    if gate.shape != up.shape:
        raise ShapeError("up", f"shape {tuple(up.shape)}", f"shape {tuple(gate.shape)}, as gate has")
    if gate.dtype != up.dtype or gate.dtype not in _DTYPES:
        expected = "float16, bfloat16 or float32, the same for gate and up"
        raise DtypeError("up" if gate.dtype in _DTYPES else "gate", str(up.dtype), expected)
    if 0 in gate.shape:
        return torch.empty_like(gate)
    out: Tensor = silu_mul_rows(as_rows("gate", gate), as_rows("up", up))
    return out.view(gate.shape)


def as_rows(name: str, x: Tensor) -> Tensor:
    """A tensor (..., n) as rows (1, rows, n), without a copy."""
    if x.dim() == 0 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        raise LayoutError(name, f"strides {x.stride()}", "a dense last dimension", f"Use {name}.contiguous().")
    try:
        return x.view(1, -1, x.shape[-1])
    except RuntimeError:
        expected = "rows at one distance from each other"
        raise LayoutError(
            name, f"shape {tuple(x.shape)}, strides {x.stride()}", expected, f"Use {name}.contiguous()."
        ) from None
