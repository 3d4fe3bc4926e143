"""Gated activations, one kernel per direction: `silu_mul`, `gelu_mul` and `relu_squared`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_deterministic, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, LastGradient, describe
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
from cudnn_sdpa.fused.checks import check_dtype, check_same_device, check_savable, check_strided
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.graph.layouts import ALIGNMENT, contiguous_stride
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_empty


@dataclass(frozen=True, slots=True)
class _Activation:
    """One of the functions here.

    Attributes:
        name: Its name.
        operands: Names of its arguments.
        rows: Its graph function.
        plain: The function in PyTorch, for empty tensors.
        calls: Its bound calls.
    """

    name: str
    operands: tuple[str, ...]
    rows: GraphFunction
    plain: Callable[..., Tensor]
    calls: FastPath = field(default_factory=FastPath)


_SILU = _Activation("silu_mul", ("gate", "up"), silu_mul_rows, lambda gate, up: F.silu(gate) * up)
_GELU = _Activation("gelu_mul", ("gate", "up"), gelu_mul_rows, lambda gate, up: F.gelu(gate) * up)
_RELU = _Activation("relu_squared", ("x",), relu_squared_rows, lambda x: F.relu(x).square())


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SiLU(gate) · up, the gated activation of SwiGLU, in one kernel; both gradients take one kernel, too.

    Args:
        gate: (..., n), float16, bfloat16 or float32, on the CPU also float64. The last dimension is dense; the halves
            of one projection, `x.chunk(2, dim=-1)`, are read in place.
        up: Of the same shape and dtype. If it is None, `gate` holds both, (..., 2n), gate first; the gradient is then
            one tensor, too, and autograd need not concatenate halves.

    Returns:
        A contiguous tensor (..., n) of the same dtype.

    Raises:
        ArgumentError: The tensors do not match, or have a layout that would need a copy.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> gate_up = torch.randn(2, 5, 32)
        >>> out = cudnn_sdpa.silu_mul(*gate_up.chunk(2, dim=-1))
        >>> torch.equal(out, cudnn_sdpa.silu_mul(gate_up)), out.shape
        (True, torch.Size([2, 5, 16]))

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """
    if up is not None and not is_compiling():
        call = _SILU.calls.find_last(gate, up, options=False)
        if call is not None:
            return call.run_binary(gate, up)
    tensors = (gate,) if up is None else (gate, up)
    if not is_compiling():  # a repeated call? Saves checks and views, 4 µs
        try:
            trains = torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad))
        except AttributeError:  # not tensors: the checks raise
            trains = False
        call = _SILU.calls.find(tensors, trains, trains=trains)
        if call is not None:
            try:
                if trains:
                    return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
                first, second = (gate, up) if up is not None else gate.chunk(2, dim=-1)
                return call.run_binary(first, second)
            except RuntimeError:
                check_dtype("gate", gate)  # names the cause: a tensor without memory has no halves
                raise
    return _run(_SILU, halves_of(gate) if up is None else (gate, up), tensors)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """GELU(gate) · up, the gated activation of GeGLU, in one kernel; exact GELU, with erf. For inference.

    Args:
        gate: As for `silu_mul`.
        up: Of the same shape and dtype.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: An argument requires a gradient.

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
        x: (..., n), float16, bfloat16 or float32, on the CPU also float64; the last dimension is dense.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: x requires a gradient.

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


#: The operands of `silu_mul_gradients`.
_GRADIENT_OPERANDS = ("grad", "gate", "up")


class _SiluMul(torch.autograd.Function):
    """`silu_mul` under autograd, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, *tensors: Tensor) -> Tensor:
        ctx.last_gradient = call.last_gradient
        ctx.save_for_backward(*tensors)
        return call(tensors if len(tensors) > 1 else tensors[0].chunk(2, dim=-1))[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad  # call, then the tensors
        goes_through_dispatcher = needs_operator(grad)
        if not goes_through_dispatcher and (not grad.is_contiguous() or grad.data_ptr() % ALIGNMENT):
            grad = grad.clone(memory_format=torch.contiguous_format)
        if goes_through_dispatcher or not all(needs):
            pair = tensors if len(tensors) > 1 else tensors[0].chunk(2, dim=-1)
            rows = as_rows([grad.contiguous(), *pair], _GRADIENT_OPERANDS)
            gradients = gradients_of(rows, tuple(needs) if len(tensors) > 1 else (True, True))
            viewed = [None if part is None else part.view(grad.shape) for part in gradients]
            return None, *(viewed if len(tensors) > 1 else (torch.cat(viewed, -1),))  # type: ignore[arg-type]
        if len(tensors) > 1:
            return None, *_gradients(ctx.last_gradient, grad, *tensors)
        return None, _packed_gradient(ctx.last_gradient, grad, *tensors)


def _gradients(last: LastGradient, grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The gradients of gate and up, contiguous."""
    tensors = (grad, gate, up)

    def bind() -> GraphCall:
        layout = tuple(grad.shape), contiguous_stride(tuple(grad.shape)), grad.dtype
        rows = as_rows(tensors, _GRADIENT_OPERANDS)
        return torch_ops.prepared(silu_mul_gradients, rows, {"dense": True}).shaped(layout, layout)

    return _gradient_call(last, tensors, bind, dense=True)(tensors)


def _packed_gradient(last: LastGradient, grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of a tensor that holds gate and up, each half written in place."""
    if not gate_up.data_ptr():
        check_strided("gate", gate_up)  # names it; `chunk` would raise an error of PyTorch's
    gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
    tensors = (grad, *gate_up.chunk(2, dim=-1))

    def bind() -> GraphCall:
        return torch_ops.prepared(silu_mul_gradients, as_rows(tensors, _GRADIENT_OPERANDS), {"dense": False})

    gradient_call = _gradient_call(last, tensors, bind, dense=False)
    gradient = torch.empty_like(gate_up)
    first = gradient.data_ptr()
    with torch.cuda.device(gate_up.device):
        gradient_call.write(tensors, (), (first, first + grad.shape[-1] * grad.element_size()))
    return gradient


def _gradient_call(
    last: LastGradient, tensors: Sequence[Tensor], bind: Callable[[], GraphCall], *, dense: bool
) -> GraphCall:
    """The bound call of the gradients, which `bind` makes if the last one had other operands.

    They are compared because saved-tensor hooks may have returned other layouts.
    """
    signature: Hashable = (silu_mul_gradients, dense, is_deterministic(), *map(describe, tensors))
    call = last.find(signature)
    if call is None:
        call = bind()
        last.add(signature, call)
    return call


def halves_of(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up as the halves of one tensor."""
    check_dtype("gate", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        expected = "an even last dimension, gate and up, if up is None"
        raise ShapeError("gate", f"shape {tuple(gate_up.shape)}", expected)
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def check(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Checks that the arguments are tensors of one shape and dtype."""
    first = tensors[0]
    check_dtype(names[0], first)
    for name, other in zip(names[1:], tensors[1:], strict=True):
        check_same_device(name, other, names[0], first)
        if other.dtype != first.dtype:
            raise DtypeError(name, str(other.dtype), f"{first.dtype}, the dtype of {names[0]}")
        if other.shape != first.shape:
            raise ShapeError(name, f"shape {tuple(other.shape)}", f"shape {tuple(first.shape)}, as {names[0]} has")
    check_savable(**dict(zip(names, tensors, strict=True)))


def no_gradient(name: str) -> UnsupportedError:
    """The error of a function for inference that is called with a gradient."""
    reasons = ["an argument requires grad, and there is no backward pass for it"]
    return UnsupportedError(f"the gradient of {name}", reasons, "torch.no_grad(), silu_mul, or PyTorch's own functions")


def _run(activation: _Activation, operands: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """An unchecked call; later calls like it take the fast path.

    Args:
        activation: The function.
        operands: The operands of its graph.
        tensors: The caller's tensors: one if it holds gate and up.
    """
    check(operands, activation.operands)
    trains = needs_gradient(*tensors)
    if trains and activation.rows.backward is None:
        raise no_gradient(activation.name)
    shape = operands[0].shape
    if is_empty(operands[0]):
        return activation.plain(*operands)
    rows = as_rows(operands, activation.operands)
    if is_compiling() or not rows[0].is_cuda or not can_bypass_dispatcher(*tensors):
        out: Tensor = activation.rows(*rows)
        return out.view(shape)
    layout = (tuple(shape), contiguous_stride(tuple(shape)), rows[0].dtype)
    with torch.no_grad():
        call = torch_ops.prepared(activation.rows, rows, {}).shaped(layout)
    activation.calls.add(tensors, trains, call)
    if trains:
        return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return call(operands)[0]
