"""Gated activations in one kernel each way: `silu_mul`, and what else cuDNN fuses like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cudnn_sdpa.errors import DtypeError, LayoutError, ShapeError
from cudnn_sdpa.graphs import operator
from cudnn_sdpa.graphs.function import GraphFunction, graph_op
from cudnn_sdpa.graphs.shortcuts import Shortcuts
from cudnn_sdpa.runtime.eager import is_bare, is_compiling, is_watched, needs_gradient
from cudnn_sdpa.runtime.graph_call import GraphCall
from cudnn_sdpa.runtime.layouts import contiguous_stride

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: How long the rows are as cuDNN sees them. Its kernels work on tiles of a few rows; measured on an H200, dense tensors
#: are quickest in rows of 64, whatever their shape, and halves of rows in pieces of 128.
DENSE_ROW, PIECE = 64, 128

#: More would not fit into a grid's third dimension.
MOST_PIECED_ROWS = 65535


def _silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype).contiguous()


def _silu_mul_gradients_reference(grad: Tensor, gate: Tensor, up: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    x, one, dy = gate.float(), up.float(), grad.float()
    share = torch.sigmoid(x)
    of_gate, of_up = dy * one * share * (1 + x * (1 - share)), dy * x * share
    if dense:
        return of_gate.to(gate.dtype).contiguous(), of_up.to(up.dtype).contiguous()
    return _like(of_gate, gate), _like(of_up, up)


def _like(result: Tensor, model: Tensor) -> Tensor:
    """A result in a tensor's dtype that lies as it does, gaps between its rows included."""
    out = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device=model.device)
    return out.copy_(result)


@graph_op(reference=_silu_mul_gradients_reference)
def silu_mul_gradients(g: Any, grad: Any, gate: Any, up: Any, *, dense: bool) -> Any:
    """The gradients of `silu_mul` by gate and up, which are dense or lie as these do."""
    del dense  # the key has it
    of_up = g.mul(a=g.swish(input=gate), b=grad)
    of_gate = g.swish_backward(loss=g.mul(a=grad, b=up), input=gate)
    return of_gate, of_up


def _silu_mul_backward(grads: tuple[Any, ...], operands: tuple[Any, ...], outputs: Any) -> Any:  # noqa: ARG001
    return silu_mul_gradients(grads[0].contiguous(), *operands, dense=True)


@graph_op(reference=_silu_mul_reference, backward=_silu_mul_backward)
def silu_mul_rows(g: Any, gate: Any, up: Any) -> Any:
    """SiLU(gate) · up of rows of three dimensions."""
    return g.mul(a=g.swish(input=gate), b=up)


def _gelu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(gate.float()) * up.float()).to(gate.dtype).contiguous()


@graph_op(reference=_gelu_mul_reference)
def gelu_mul_rows(g: Any, gate: Any, up: Any) -> Any:
    """GELU(gate) · up, by the error function."""
    return g.mul(a=g.gelu(input=gate), b=up)


def _relu_squared_reference(x: Tensor) -> Tensor:
    return F.relu(x.float()).square().to(x.dtype).contiguous()


@graph_op(reference=_relu_squared_reference)
def relu_squared_rows(g: Any, x: Any) -> Any:
    """max(x, 0)²."""
    y = g.relu(input=x)
    return g.mul(a=y, b=y)


_silu_mul_calls, _gelu_mul_calls, _relu_squared_calls = Shortcuts(), Shortcuts(), Shortcuts()


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SiLU(gate) · up, the gate of SwiGLU, in one kernel; so are both gradients.

    Args:
        gate: (..., n), float16, bfloat16 or float32. Its last dimension is dense; both halves of one projection,
            `x.chunk(2, dim=-1)`, are read where they lie.
        up: Of the same shape and dtype. If it is not given, `gate` is both, (..., 2n), the gate first: its gradient is
            written in one piece then, where autograd would put two halves together.

    Returns:
        A dense tensor (..., n) of the same dtype.

    Raises:
        ArgumentError: They do not fit, or lie so that they would have to be copied.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> both = torch.randn(2, 5, 32)
        >>> out = cudnn_sdpa.silu_mul(*both.chunk(2, dim=-1))
        >>> torch.equal(out, cudnn_sdpa.silu_mul(both)), out.shape
        (True, torch.Size([2, 5, 16]))

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """
    tensors = (gate,) if up is None else (gate, up)
    if not is_compiling():  # a call like one before? Saves checks and views, 4 µs
        try:
            trains = torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad))
        except AttributeError:  # no tensors: the checks will say so
            trains = False
        call = _silu_mul_calls.find(tensors, trains, trains=trains)
        if call is not None:
            if trains:
                return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
            return call(tensors if up is not None else _halves(gate))[0]
    halves = _halves(gate) if up is None else (gate, up)
    _check(halves)
    return _run(silu_mul_rows, halves, _silu_mul_calls, tensors)


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
    call = None if is_compiling() else _gelu_mul_calls.find((gate, up), False)
    if call is not None:
        return call((gate, up))[0]
    _check((gate, up))
    return _run(gelu_mul_rows, (gate, up), _gelu_mul_calls, (gate, up))


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)², the activation of Primer, in one kernel. For inference.

    Args:
        x: (..., n), float16, bfloat16 or float32, its last dimension dense.

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
    call = None if is_compiling() else _relu_squared_calls.find((x,), False)
    if call is not None:
        return call((x,))[0]
    _check((x,))
    return _run(relu_squared_rows, (x,), _relu_squared_calls, (x,))


class _SiluMul(torch.autograd.Function):
    """`silu_mul` where autograd follows, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call(tensors if len(tensors) > 1 else _halves(tensors[0]))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors = ctx.saved_tensors
        if is_watched(grad):
            gate, up = tensors if len(tensors) > 1 else _halves(tensors[0])
            found = silu_mul_gradients(*_as_rows([grad.contiguous(), gate, up]), dense=True)
            of_gate, of_up = (part.view(grad.shape) for part in found)
            return None, *((of_gate, of_up) if len(tensors) > 1 else (torch.cat([of_gate, of_up], -1),))
        grad = grad if grad.is_contiguous() else grad.contiguous()
        return None, *(_gradients(ctx.call, grad, *tensors) if len(tensors) > 1 else _of_both(ctx.call, grad, *tensors))


def _gradients(call: GraphCall, grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The gradients by gate and up, dense; their call stays with the forward call: saves a look-up."""
    gradient = call.gradient
    if gradient is None or not gradient.plan.held:
        layout = tuple(grad.shape), contiguous_stride(tuple(grad.shape)), grad.dtype
        call_of_rows = operator.prepared(silu_mul_gradients, _as_rows((grad, gate, up)), {"dense": True})
        gradient = call_of_rows.shaped(layout, layout)
        call.gradient = gradient
    return gradient((grad, gate, up))


def _of_both(call: GraphCall, grad: Tensor, both: Tensor) -> list[Tensor]:
    """The gradient by a tensor that holds gate and up, each half written to its place."""
    both = both if both.is_contiguous() else both.contiguous()
    given = (grad, *_halves(both))
    gradient = call.gradient
    if gradient is None or not gradient.plan.held:
        gradient = call.gradient = operator.prepared(silu_mul_gradients, _as_rows(given), {"dense": False})
    found = torch.empty_like(both)
    first = found.data_ptr()
    with torch.cuda.device(both.device):
        gradient.write(given, (), (first, first + grad.shape[-1] * grad.element_size()))
    return [found]


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(both, Tensor) or both.dim() == 0 or both.shape[-1] % 2:
        got = f"shape {tuple(both.shape)}" if isinstance(both, Tensor) else type(both).__name__
        raise ShapeError("gate", got, "an even last dimension, gate and up, where up is not given")
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def _check(tensors: Sequence[Any]) -> None:
    first = tensors[0]
    if not isinstance(first, Tensor) or first.dtype not in _DTYPES:
        got = str(first.dtype) if isinstance(first, Tensor) else type(first).__name__
        raise DtypeError("gate", got, "float16, bfloat16 or float32")
    for other in tensors[1:]:
        if not isinstance(other, Tensor) or other.dtype != first.dtype:
            got = str(other.dtype) if isinstance(other, Tensor) else type(other).__name__
            raise DtypeError("up", got, f"{first.dtype}, the dtype of gate")
        if other.shape != first.shape:
            raise ShapeError("up", f"shape {tuple(other.shape)}", f"shape {tuple(first.shape)}, as gate has")


def _run(
    function: GraphFunction, operands: Sequence[Tensor], shortcuts: Shortcuts, tensors: Sequence[Tensor]
) -> Tensor:
    """A call whose arguments are checked; the next one like it goes straight to its plan."""
    shape = operands[0].shape
    if 0 in shape:
        return torch.empty_like(operands[0], memory_format=torch.contiguous_format)
    trains = needs_gradient(*tensors)
    if is_compiling() or not operands[0].is_cuda or not is_bare(*tensors) or (trains and function.backward is None):
        out: Tensor = function(*_as_rows(operands))
        return out.view(shape)
    layout = (tuple(shape), contiguous_stride(tuple(shape)), operands[0].dtype)
    with torch.no_grad():
        call = operator.prepared(function, _as_rows(operands), {}).shaped(layout)
    shortcuts.add(tensors, trains, call)
    if trains:
        return _SiluMul.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    return call(operands)[0]


def _as_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one shape in three dimensions, in the form that cuDNN is quickest in, without a copy."""
    size, count = tensors[0].shape[-1] if tensors[0].dim() else 1, tensors[0].numel()
    if all(x.is_contiguous() for x in tensors):
        length = DENSE_ROW if count % DENSE_ROW == 0 else size
        return [x.view(1, -1, length) for x in tensors]
    rows = [_of_two("gate" if number == 0 else "up", x) for number, x in enumerate(tensors)]
    if size % PIECE == 0 and count // size <= MOST_PIECED_ROWS:
        return [x.view(x.shape[0], -1, PIECE) for x in rows]
    return [x.unsqueeze(0) for x in rows]


def _of_two(name: str, x: Tensor) -> Tensor:
    """A tensor (..., n) as rows (rows, n), without a copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise LayoutError(name, f"strides {x.stride()}", "a dense last dimension", f"Use {name}.contiguous().")
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        got = f"shape {tuple(x.shape)}, strides {x.stride()}"
        raise LayoutError(name, got, "rows at one distance from each other", f"Use {name}.contiguous().") from None
