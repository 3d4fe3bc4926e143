"""`rms_norm` and `layer_norm`: normalization of rows, one kernel per direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_deterministic, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, LastGradient, Layout, describe
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.checks import check_dtype, check_same_device, check_savable, shown
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.fused.norm_graphs import (
    ACTIVATIONS,
    layer_norm_gradients,
    layer_norm_rows,
    needed_only,
    rms_norm_gradients,
    rms_norm_rows,
)
from cudnn_sdpa.fused.torch_ops import Options, Value
from cudnn_sdpa.graph.layouts import ALIGNMENT, contiguous_stride
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_empty

#: The largest float32 value: eps is passed to cuDNN as float32.
MAX_EPS = torch.finfo(torch.float32).max


def check(x: Tensor, weights: dict[str, Any], eps: object) -> None:
    """Checks x, eps, and the weight and bias."""
    check_dtype("x", x)
    if x.dim() == 0:
        raise ShapeError("x", "no dimension", "one dimension or more")
    check_eps(eps)
    for name, weight in weights.items():
        if weight is None:
            continue
        if isinstance(weight, (int, tuple, list)):
            hint = "There is no normalized_shape here: rows are the last dimension of x."
            raise OptionError(name, type(weight).__name__, "a torch.Tensor", hint)
        check_same_device(name, weight, "x", x)
        if tuple(weight.shape) != (x.shape[-1],):
            raise ShapeError(name, f"shape {tuple(weight.shape)}", f"shape ({x.shape[-1]},), the last dimension of x")
        if weight.dtype not in (x.dtype, torch.float32):
            raise DtypeError(name, str(weight.dtype), f"{x.dtype}, the dtype of x, or float32")
    check_savable(x=x, **weights)


def check_eps(eps: object) -> None:
    """Checks that eps is a finite number of at least 0 that float32 can represent."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= MAX_EPS:
        hint = "There is no normalized_shape here: rows are the last dimension of x." if isinstance(eps, Tensor) else ""
        raise OptionError("eps", shown(eps), f"a number of at least 0, up to {MAX_EPS:.2g}", hint)


def check_residual(x: Tensor, residual: Tensor | None) -> None:
    if residual is None:
        return
    check_same_device("residual", residual, "x", x)
    if residual.shape != x.shape:
        raise ShapeError("residual", f"shape {tuple(residual.shape)}", f"shape {tuple(x.shape)}, as x has")
    if residual.dtype != x.dtype:
        raise DtypeError("residual", str(residual.dtype), f"{x.dtype}, the dtype of x")
    check_savable(x=x, residual=residual)


def check_choices(activation: object, zero_centered: object) -> None:
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise OptionError("activation", shown(activation), " or ".join(map(repr, ACTIVATIONS)))
    if not isinstance(zero_centered, bool):
        raise OptionError("zero_centered", shown(zero_centered), "True or False")


class _RmsOptions(NamedTuple):
    """Everything except tensors and numbers that determines a call of `rms_norm`."""

    trains: bool
    zero_centered: bool
    has_weight: bool
    has_residual: bool
    activation: str | None


_rms_norm_calls, _layer_norm_calls = FastPath(), FastPath()

#: Calls without gradient and with a weight only.
_PLAIN = _RmsOptions(trains=False, zero_centered=False, has_weight=True, has_residual=False, activation=None)
_CENTERED = _PLAIN._replace(zero_centered=True)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = ...,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor | None,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32; on the CPU also float64, which is computed in float64. cuDNN reads
            dense rows; an x that is not contiguous is copied first.
        weight: (n,), in x's dtype or float32; None is ones.
        eps: Added to the mean of the squares; data, not part of the plan.
        residual: Of x's shape and dtype: added to x first, in the same kernel. This needs rows of a multiple of 64
            elements, 32 in float32, and a weight in x's dtype; so does `activation`.
        activation: "silu": applied to the result in the same kernel; with a gradient, in a separate kernel.
        zero_centered: Whether the weight is stored minus 1, as in Gemma; 1 is added to it in the same kernel.

    Returns:
        A contiguous tensor of x's shape and dtype; with `residual` also the sum.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 5, 64), torch.rand(64)
        >>> expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
        >>> torch.allclose(cudnn_sdpa.rms_norm(x, weight), expected, atol=1e-6)
        True

    From "Root Mean Square Layer Normalization" (Zhang and Sennrich, 2019).
    """
    if type(eps) is float and 0.0 <= eps <= MAX_EPS and type(zero_centered) is bool and not is_compiling():
        tensors: Sequence[Tensor]
        if weight is not None and residual is None and activation is None:
            # Like the last call, and plain? Saves checks, lists and views, 5 µs.
            call = _rms_norm_calls.find_last(x, weight, _CENTERED if zero_centered else _PLAIN)
            if call is not None:
                return call.run_binary(x, weight, (eps, 1.0) if zero_centered else (eps,))
            tensors = x, weight
        else:
            tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
        try:
            trains = torch.is_grad_enabled() and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (residual is not None and residual.requires_grad)
            )
        except AttributeError:  # not tensors: the checks raise
            trains = False
        has_weight, has_residual = weight is not None, residual is not None
        # Equal to an `_RmsOptions`, and 0.5 µs faster to make.
        options = (trains, zero_centered, has_weight, has_residual, activation)
        call = _rms_norm_calls.find(tensors, options, trains=trains)
        if call is not None:
            numbers = _numbers(eps, has_shift=zero_centered and has_weight)
            return _run(call, tensors, numbers, trains=trains, has_weight=has_weight, has_residual=has_residual)
    try:
        return _checked_rms_norm(
            x=x, weight=weight, eps=eps, residual=residual, activation=activation, zero_centered=zero_centered
        )
    except UnsupportedError as error:
        if residual is None and activation is None:
            raise
        suggestion = "rows of a multiple of 64 elements and a weight in x's dtype, or the sum and SiLU in PyTorch"
        raise UnsupportedError("rms_norm with a residual or an activation", error.reasons, suggestion) from None


def _numbers(eps: float, *, has_shift: bool) -> tuple[float, ...]:
    """The numbers that cuDNN reads at each launch: eps, and the shift of a zero-centered weight."""
    return (float(eps), 1.0) if has_shift else (float(eps),)


def _run(
    call: GraphCall,
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    *,
    trains: bool,
    has_weight: bool,
    has_residual: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The results of a call of `rms_norm`; `tensors` are x, and the weight and the residual if it has them."""
    if trains:
        results: Sequence[Tensor] = _RmsNorm.apply(call, numbers, has_weight, has_residual, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = call(tensors, numbers)
    return (results[0], results[1]) if has_residual else results[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, computed in float32. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32, as for `rms_norm`.
        weight: (n,), in x's dtype or float32; None is ones, which each call creates.
        bias: (n,), in weight's dtype; None is zeros, which each call creates.
        eps: Added to the variance; data, not part of the plan.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight, bias = torch.randn(2, 5, 64), torch.rand(64), torch.rand(64)
        >>> expected = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        >>> torch.allclose(cudnn_sdpa.layer_norm(x, weight, bias), expected, atol=1e-5)
        True

    From "Layer Normalization" (Ba et al., 2016).
    """
    if type(eps) is float and 0.0 <= eps <= MAX_EPS and not is_compiling():
        arguments: Any = (x, weight, bias)
        try:  # a repeated call? Saves checks, 10 µs
            trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)  # type: ignore[union-attr]
        except AttributeError:  # weight or bias is None, or an argument is not a tensor: the checks raise
            trains = False
        call = _layer_norm_calls.find(arguments, trains, trains=trains)
        if call is not None:
            if trains:
                return _LayerNorm.apply(call, (eps,), *arguments)[0]  # type: ignore[no-any-return,no-untyped-call]
            return call(arguments, (eps,))[0]
    check(x, {"weight": weight, "bias": bias}, eps)
    if weight is None or bias is None:  # cuDNN needs both
        like = next((tensor for tensor in (weight, bias) if tensor is not None), x)
        weight = torch.ones(x.shape[-1], dtype=like.dtype, device=x.device) if weight is None else weight
        bias = torch.zeros(x.shape[-1], dtype=like.dtype, device=x.device) if bias is None else bias
    if weight.dtype != bias.dtype:
        raise DtypeError("bias", str(bias.dtype), f"{weight.dtype}, the dtype of weight")
    if is_empty(x):
        return (x * weight + bias).to(x.dtype).clone(memory_format=torch.contiguous_format)
    tensors: Sequence[Tensor] = (x, weight, bias)
    trains = needs_gradient(*tensors)
    static = {"with_statistics": trains}
    if is_compiling() or not x.is_cuda or not can_bypass_dispatcher(*tensors):
        results = torch_ops.as_tuple(layer_norm_rows(*rows_of(x, weight, bias), float(eps), **static))
        return results[0].view(x.shape)
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    call = _layer_norm_calls.find(tensors, trains, trains=trains)
    if call is None:
        with torch.no_grad():
            rows = (*rows_of(x, weight, bias), float(eps))
            call = _bind(layer_norm_rows, rows, static=static, shapes=[x.shape])
        _layer_norm_calls.add(tensors, trains, call)
    if trains:
        return _LayerNorm.apply(call, (float(eps),), *tensors)[0]  # type: ignore[no-any-return,no-untyped-call]
    return call(tensors, (float(eps),))[0]


def _checked_rms_norm(
    *,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: str | None,
    zero_centered: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call of `rms_norm` that is not on the fast path."""
    check(x, {"weight": weight}, eps)
    check_residual(x, residual)
    check_choices(activation, zero_centered)
    trains = needs_gradient(x, weight, residual)
    if trains and activation is not None:
        normalized = rms_norm(x, weight, eps, residual=residual, zero_centered=zero_centered)
        activate = ACTIVATIONS[activation]
        return activate(normalized) if isinstance(normalized, Tensor) else (activate(normalized[0]), normalized[1])
    if is_empty(x):  # only autograd has something to do
        total = x if residual is None else x + residual
        out = (total if weight is None else total * weight).to(x.dtype).clone(memory_format=torch.contiguous_format)
        return out if residual is None else (out, total)
    has_weight, has_residual = weight is not None, residual is not None
    numbers = _numbers(eps, has_shift=zero_centered and has_weight)
    static = {"with_scale": trains, "activation": activation}
    tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
    if is_compiling() or not x.is_cuda or not can_bypass_dispatcher(*tensors):
        values = (*rows_of(x, weight, residual), *numbers, *(None,) * (2 - len(numbers)))
        results: Sequence[Tensor] = torch_ops.as_tuple(rms_norm_rows(*values, **static))
        results = [result.view(x.shape) for result in results[: 1 if residual is None else 2]]
        return results[0] if residual is None else (results[0], results[1])
    tensors = [tensor.contiguous() for tensor in tensors]
    options = _RmsOptions(
        trains=trains,
        zero_centered=zero_centered,
        has_weight=has_weight,
        has_residual=has_residual,
        activation=activation,
    )
    call = _rms_norm_calls.find(tensors, options, trains=trains)
    if call is None:
        with torch.no_grad():
            values = (*rows_of(x, weight, residual), *numbers, *(None,) * (2 - len(numbers)))
            call = _bind(rms_norm_rows, values, static=static, shapes=[x.shape] * (1 + has_residual))
        _rms_norm_calls.add(tensors, options, call)
    return _run(call, tensors, numbers, trains=trains, has_weight=has_weight, has_residual=has_residual)


class _RmsNorm(torch.autograd.Function):
    """`rms_norm` under autograd, in eager mode: saves the rows, the weight, and one factor for each row."""

    @staticmethod
    def forward(
        ctx: Any,
        call: GraphCall,
        numbers: tuple[float, ...],
        has_weight: bool,
        has_residual: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        results = tuple(call(tensors, numbers))
        ctx.last_gradient, ctx.has_residual = call.last_gradient, has_residual
        _, *shift = numbers  # eps
        ctx.shift = tuple(shift)
        x, *rest = tensors
        weights, scale = rest[:has_weight], results[-1]
        ctx.save_for_backward(results[1] if has_residual else x, *weights, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)  # the scale needs no gradient of zeros
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *other_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights, scale = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad

        def operands() -> tuple[Value, ...]:
            rows, weight_row, grad_rows = rows_of(x, weights[0] if weights else None, grad)
            return grad_rows, rows, weight_row, scale, *ctx.shift

        tensors = (grad, x, *weights, scale)
        grad_x, *grad_weights = _gradients(
            ctx.last_gradient, rms_norm_gradients, tensors, operands=operands, numbers=ctx.shift
        )
        _, _, _, _, *needs = ctx.needs_input_grad  # call, numbers, has_weight, has_residual, then the tensors
        if not ctx.has_residual:
            return None, None, None, None, *needed_only((grad_x, *grad_weights), needs)
        grad_sum, _ = other_grads  # of the sum and of the scale
        grad_x = grad_x if grad_sum is None else grad_x + grad_sum
        return None, None, None, None, *needed_only((grad_x, *grad_weights, grad_x), needs)


class _LayerNorm(torch.autograd.Function):
    """`layer_norm` under autograd, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, numbers: tuple[float, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        x, weight, _bias = tensors
        out, *statistics = call(tensors, numbers)
        ctx.last_gradient = call.last_gradient
        ctx.save_for_backward(x, weight, *statistics)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad

        def operands() -> tuple[Value, ...]:
            rows, weight_row, grad_rows = rows_of(x, weight, grad)
            return grad_rows, rows, weight_row, *statistics

        tensors = (grad, x, weight, *statistics)
        gradients = _gradients(ctx.last_gradient, layer_norm_gradients, tensors, operands=operands)
        _, _, *needs = ctx.needs_input_grad  # call, numbers, then the tensors
        return None, None, *needed_only(gradients, needs)


def _gradients(
    last: LastGradient,
    function: GraphFunction,
    tensors: Sequence[Tensor],
    *,
    operands: Callable[[], tuple[Value, ...]],
    numbers: tuple[float, ...] = (),
) -> list[Tensor]:
    """Gradients of x and the weights, in their shapes.

    The last bound call is recognized by its operands, which saves views and keys, 5 µs. They are compared because
    saved-tensor hooks may have returned other layouts.

    Args:
        last: Finds the last backward call of the forward call.
        function: The graph function of the gradients.
        tensors: The gradient of the result, x, and all other tensors of `function`, in its order.
        operands: Returns the operands of `function`: `tensors` as rows, and the numbers.
        numbers: The numbers of `function`.
    """
    grad, x, *_ = tensors
    if needs_operator(grad):
        grad_x, *grad_weights = torch_ops.as_tuple(function(*operands()))
        return [grad_x.view(x.shape), *(gradient.view(-1) for gradient in grad_weights)]
    if not grad.is_contiguous() or grad.data_ptr() % ALIGNMENT:
        tensors = (grad.clone(memory_format=torch.contiguous_format), *tensors[1:])
    signature = (function, len(numbers), is_deterministic(), *map(describe, tensors))
    gradient = last.find(signature)
    if gradient is not None:
        return gradient(tensors, numbers)
    values = operands()
    weights = [torch.Size((x.shape[-1],))] * (len(function.outputs(_padded(function, values), {})) - 1)
    gradient = _bind(function, values, static={}, shapes=[x.shape, *weights])
    if all(tensor.is_contiguous() for tensor in tensors):
        last.add(signature, gradient)
        return gradient(tensors, numbers)
    return gradient([value for value in values if isinstance(value, Tensor)], numbers)


def _padded(function: GraphFunction, values: Sequence[Value]) -> tuple[Value, ...]:
    """All operands of a function, None for those that are left out at the end."""
    return (*values, *(None,) * (len(function.operands) - len(values)))


def rows_of(x: Tensor, one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensors as cuDNN reads them: (rows, 1, 1, n), and (1, 1, 1, n) for 1-D ones."""
    size = x.shape[-1]
    others = [None if t is None else t.reshape(-1, 1, 1, size).contiguous() for t in (one, other)]
    return x.reshape(-1, 1, 1, size).contiguous(), others[0], others[1]


def _bind(
    function: GraphFunction, values: Sequence[Value], *, static: Options, shapes: Sequence[torch.Size]
) -> GraphCall:
    """A bound call whose first results have these shapes; the others have those of the graph."""
    values = _padded(function, values)
    results = function.outputs(values, static)
    all_shapes = (*shapes, *(result.shape for result in results[len(shapes) :]))
    layouts: list[Layout] = [
        (tuple(shape), contiguous_stride(tuple(shape)), result.dtype)
        for shape, result in zip(all_shapes, results, strict=True)
    ]
    return torch_ops.prepared(function, values, static).shaped(*layouts)
