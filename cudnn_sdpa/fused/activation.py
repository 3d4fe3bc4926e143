"""Gated activations, one kernel per direction: `silu_mul`, `gelu_mul` and `relu_squared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_deterministic, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, describe
from cudnn_sdpa.errors import DtypeError, ShapeError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.activation_graphs import (
    gelu_mul_rows,
    gradients_of,
    relu_squared_rows,
    silu_mul_gradients,
    silu_mul_rows,
)
from cudnn_sdpa.fused.activation_tiling import as_rows
from cudnn_sdpa.fused.checks import check_beside, check_dtype, check_kept
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.graph.layouts import ALIGNMENT, contiguous_stride
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_empty


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the functions here.

    Attributes:
        name: Its name.
        operands: Names of its arguments.
        rows: Its graph.
        plain: The same in PyTorch, for empty tensors.
        calls: Calls that are known.
    """

    name: str
    operands: tuple[str, ...]
    rows: GraphFunction
    plain: Callable[..., Tensor]
    calls: FastPath = field(default_factory=FastPath)


_SILU = _Kind("silu_mul", ("gate", "up"), silu_mul_rows, lambda gate, up: F.silu(gate) * up)
_GELU = _Kind("gelu_mul", ("gate", "up"), gelu_mul_rows, lambda gate, up: F.gelu(gate) * up)
_RELU = _Kind("relu_squared", ("x",), relu_squared_rows, lambda x: F.relu(x).square())


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SiLU(gate) · up, the gate of SwiGLU, in one kernel; so are both gradients.

    Args:
        gate: (..., n), float16, bfloat16 or float32, on the CPU float64 too. Its last dimension is dense; both halves
            of one projection, `x.chunk(2, dim=-1)`, are read in place.
        up: Of the same shape and dtype. If it is not given, `gate` holds both, (..., 2n), the gate first: its gradient
            is then written as one tensor, where autograd would concatenate two halves.

    Returns:
        A dense tensor (..., n) of the same dtype.

    Raises:
        ArgumentError: They do not match, or have a layout that would need a copy.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> both = torch.randn(2, 5, 32)
        >>> out = cudnn_sdpa.silu_mul(*both.chunk(2, dim=-1))
        >>> torch.equal(out, cudnn_sdpa.silu_mul(both)), out.shape
        (True, torch.Size([2, 5, 16]))

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """
    if up is not None and not is_compiling():
        call = _SILU.calls.again(gate, up, options=False)
        if call is not None:
            return call.of_two(gate, up)
    tensors = (gate,) if up is None else (gate, up)
    if not is_compiling():  # a call like one before? Saves checks and views, 4 µs
        try:
            trains = torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad))
        except AttributeError:  # no tensors: the checks will say so
            trains = False
        call = _SILU.calls.find(tensors, trains, trains=trains)
        if call is not None:
            try:
                if trains:
                    return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
                first, second = (gate, up) if up is not None else gate.chunk(2, dim=-1)
                return call.of_two(first, second)
            except RuntimeError:
                check_dtype("gate", gate)  # without memory it has no halves
                raise
    return _run(_SILU, halves_of(gate) if up is None else (gate, up), tensors)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """GELU(gate) · up, the gate of GeGLU, in one kernel, by the error function. For inference.

    Args:
        gate: As `silu_mul` takes it.
        up: Of the same shape and dtype.

    Returns:
        A dense tensor of the same shape and dtype.

    Raises:
        ArgumentError: They do not fit.
        UnsupportedError: One of them requires a gradient.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.gelu_mul(torch.randn(2, 5, 16), torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """
    call = None if is_compiling() else _GELU.calls.find((gate, up), options=False)
    if call is not None:
        return call((gate, up))[0]
    return _run(_GELU, (gate, up), (gate, up))


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)², the activation of Primer, in one kernel. For inference.

    Args:
        x: (..., n), float16, bfloat16 or float32, on the CPU float64 too; its last dimension dense.

    Returns:
        A dense tensor of the same shape and dtype.

    Raises:
        ArgumentError: It does not fit.
        UnsupportedError: It requires a gradient.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.relu_squared(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])

    From "Primer: Searching for Efficient Transformers for Language Modeling" (So et al., 2021).
    """
    call = None if is_compiling() else _RELU.calls.find((x,), options=False)
    if call is not None:
        return call((x,))[0]
    return _run(_RELU, (x,), (x,))


_OF_GRADIENTS = ("grad", "gate", "up")


class _SiluMul(torch.autograd.Function):
    """`silu_mul` under autograd, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call(tensors if len(tensors) > 1 else tensors[0].chunk(2, dim=-1))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        watched = needs_operator(grad)
        if not watched and (not grad.is_contiguous() or grad.data_ptr() % ALIGNMENT):
            grad = grad.clone(memory_format=torch.contiguous_format)
        if watched or not all(needs):
            pair = tensors if len(tensors) > 1 else tensors[0].chunk(2, dim=-1)
            rows = as_rows([grad.contiguous(), *pair], _OF_GRADIENTS)
            found = gradients_of(rows, needs if len(tensors) > 1 else (True, True))
            seen = [None if part is None else part.view(grad.shape) for part in found]
            return None, *(seen if len(tensors) > 1 else (torch.cat(seen, -1),))  # type: ignore[arg-type]
        return None, *(_gradients(ctx.call, grad, *tensors) if len(tensors) > 1 else _of_both(ctx.call, grad, *tensors))


def _gradients(call: GraphCall, grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The gradients of gate and up, dense; the forward call keeps their call, which saves a lookup.

    Saved-tensor hooks may have returned other layouts, so these are compared.
    """
    tensors = (grad, gate, up)
    looks = [is_deterministic(), *map(describe, tensors)]
    known = call.gradient
    if known is None or known[0] != looks or not known[1].plan.held:
        layout = tuple(grad.shape), contiguous_stride(tuple(grad.shape)), grad.dtype
        of_rows = torch_ops.prepared(silu_mul_gradients, as_rows(tensors, _OF_GRADIENTS), {"dense": True})
        call.gradient = known = looks, of_rows.shaped(layout, layout)
    return known[1](tensors)


def _of_both(call: GraphCall, grad: Tensor, both: Tensor) -> list[Tensor]:
    """The gradient of a tensor that holds gate and up, each half written in place."""
    both = both if both.is_contiguous() else both.contiguous()
    given = (grad, *both.chunk(2, dim=-1))
    looks = [is_deterministic(), *map(describe, given)]
    known = call.gradient
    if known is None or known[0] != looks or not known[1].plan.held:
        rows = as_rows(given, _OF_GRADIENTS)
        call.gradient = known = looks, torch_ops.prepared(silu_mul_gradients, rows, {"dense": False})
    found = torch.empty_like(both)
    first = found.data_ptr()
    with torch.cuda.device(both.device):
        known[1].write(given, (), (first, first + grad.shape[-1] * grad.element_size()))
    return [found]


def halves_of(both: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of a tensor that is both."""
    check_dtype("gate", both)
    if both.dim() == 0 or both.shape[-1] % 2:
        expected = "an even last dimension, gate and up, where up is not given"
        raise ShapeError("gate", f"shape {tuple(both.shape)}", expected)
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def check(tensors: Sequence[Any], names: Sequence[str]) -> None:
    """Tensors of one shape and dtype."""
    first = tensors[0]
    check_dtype(names[0], first)
    for name, other in zip(names[1:], tensors[1:], strict=True):
        check_beside(name, other, names[0], first)
        if other.dtype != first.dtype:
            raise DtypeError(name, str(other.dtype), f"{first.dtype}, the dtype of {names[0]}")
        if other.shape != first.shape:
            raise ShapeError(name, f"shape {tuple(other.shape)}", f"shape {tuple(first.shape)}, as {names[0]} has")
    check_kept(**dict(zip(names, tensors, strict=True)))


def no_gradient(name: str) -> UnsupportedError:
    """Why a function has no gradient."""
    reasons = ["an argument requires grad, and there is no backward pass for it"]
    return UnsupportedError(f"the gradient of {name}", reasons, "torch.no_grad(), silu_mul, or PyTorch's own functions")


def _run(kind: _Kind, operands: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """An unchecked call; later calls like it take the fast path.

    Args:
        kind: Which function.
        operands: What its graph reads.
        tensors: The same as the caller gave them.
    """
    check(operands, kind.operands)
    trains = needs_gradient(*tensors)
    if trains and kind.rows.backward is None:
        raise no_gradient(kind.name)
    shape = operands[0].shape
    if is_empty(operands[0]):
        return kind.plain(*operands)
    rows = as_rows(operands, kind.operands)
    if is_compiling() or not rows[0].is_cuda or not can_bypass_dispatcher(*tensors):
        out: Tensor = kind.rows(*rows)
        return out.view(shape)
    layout = (tuple(shape), contiguous_stride(tuple(shape)), rows[0].dtype)
    with torch.no_grad():
        call = torch_ops.prepared(kind.rows, rows, {}).shaped(layout)
    kind.calls.add(tensors, trains, call)
    if trains:
        return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return call(operands)[0]
