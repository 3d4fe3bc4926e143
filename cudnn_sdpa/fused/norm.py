"""`rms_norm` and `layer_norm`: normalization of rows, one kernel per direction."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_deterministic, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, Layout, describe
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.checks import check_beside, check_dtype, check_kept, shown
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.fused.norm_graphs import (
    ACTIVATIONS,
    layer_norm_gradients,
    layer_norm_rows,
    of_wanted,
    rms_norm_gradients,
    rms_norm_rows,
)
from cudnn_sdpa.graph.layouts import ALIGNMENT, contiguous_stride
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_empty

#: The largest float32 value: eps is passed to cuDNN as float32.
MOST = torch.finfo(torch.float32).max


def check(x: Any, weights: dict[str, Any], eps: Any) -> None:
    """Checks of x, what has one dimension, and eps."""
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
        check_beside(name, weight, "x", x)
        if tuple(weight.shape) != (x.shape[-1],):
            raise ShapeError(name, f"shape {tuple(weight.shape)}", f"shape ({x.shape[-1]},), the last dimension of x")
        if weight.dtype not in (x.dtype, torch.float32):
            raise DtypeError(name, str(weight.dtype), f"{x.dtype}, the dtype of x, or float32")
    check_kept(x=x, **weights)


def check_eps(eps: Any) -> None:
    """A finite number of at least 0, which a float holds."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= MOST:
        hint = "There is no normalized_shape here: rows are the last dimension of x." if isinstance(eps, Tensor) else ""
        raise OptionError("eps", shown(eps), f"a number of at least 0, up to {MOST:.2g}", hint)


def check_residual(x: Tensor, residual: Tensor | None) -> None:
    """Checks of a residual."""
    if residual is None:
        return
    check_beside("residual", residual, "x", x)
    if residual.shape != x.shape:
        raise ShapeError("residual", f"shape {tuple(residual.shape)}", f"shape {tuple(x.shape)}, as x has")
    if residual.dtype != x.dtype:
        raise DtypeError("residual", str(residual.dtype), f"{x.dtype}, the dtype of x")
    check_kept(x=x, residual=residual)


def check_choices(activation: Any, zero_centered: Any) -> None:
    """Checks of what is chosen from a few."""
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise OptionError("activation", shown(activation), " or ".join(map(repr, ACTIVATIONS)))
    if not isinstance(zero_centered, bool):
        raise OptionError("zero_centered", shown(zero_centered), "True or False")


_rms_norm_calls, _layer_norm_calls = FastPath(), FastPath()

#: A call without a gradient and with a weight alone, as `_rms_norm_calls` knows it; and one whose weight is centered.
_PLAIN: Hashable = (False, False, True, False, None)
_CENTERED: Hashable = (False, True, True, False, None)


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
        x: (..., n), float16, bfloat16 or float32; on the CPU float64 as well, which is computed as such. cuDNN reads
            dense rows one after the other; an x that does not lie like this is copied first.
        weight: (n,), in x's dtype or float32; ones if not given.
        eps: Added to the mean of the squares; data, not part of the plan.
        residual: Of x's shape and dtype: added to x before, in the same kernel. For this cuDNN wants rows of a multiple
            of 64 elements, 32 in float32, and a weight in x's dtype; for `activation` the same.
        activation: "silu": applied to the result in the same kernel; with a gradient, in a kernel of its own.
        zero_centered: Whether the weight is stored less 1, as Gemma does; 1 is added to it in the same kernel.

    Returns:
        A dense tensor of x's shape and dtype; with `residual` the sum, too.

    Raises:
        ArgumentError: They do not fit.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 5, 64), torch.rand(64)
        >>> expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
        >>> torch.allclose(cudnn_sdpa.rms_norm(x, weight), expected, atol=1e-6)
        True

    From "Root Mean Square Layer Normalization" (Zhang and Sennrich, 2019).
    """
    if type(eps) is float and 0.0 <= eps <= MOST and type(zero_centered) is bool and not is_compiling():
        tensors: Sequence[Tensor]
        if weight is not None and residual is None and activation is None:
            # A plain call like one before? Saves checks, lists and views, 5 µs.
            call = _rms_norm_calls.again(x, weight, _CENTERED if zero_centered else _PLAIN)
            if call is not None:
                return call.of_two(x, weight, (eps, 1.0) if zero_centered else (eps,))
            tensors = x, weight
        else:
            tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
        try:
            trains = torch.is_grad_enabled() and (
                x.requires_grad
                or (weight is not None and weight.requires_grad)
                or (residual is not None and residual.requires_grad)
            )
        except AttributeError:  # no tensors: the checks will say so
            trains = False
        has = weight is not None, residual is not None
        call = _rms_norm_calls.find(tensors, (trains, zero_centered, *has, activation), trains=trains)
        if call is not None:
            return _served(call, tensors, _numbers(eps, weight, centered=zero_centered), has, trains=trains)  # type: ignore[no-any-return]
    return _rms_norm(x=x, weight=weight, eps=eps, residual=residual, activation=activation, centered=zero_centered)  # type: ignore[no-any-return]


def _numbers(eps: float, weight: Tensor | None, *, centered: bool) -> tuple[float, ...]:
    """The numbers that cuDNN reads at each launch: eps, and what is added to the weight."""
    return (float(eps), 1.0) if centered and weight is not None else (float(eps),)


def _served(
    call: GraphCall, tensors: Sequence[Tensor], numbers: tuple[float, ...], has: tuple[bool, bool], *, trains: bool
) -> Any:
    """The results of a call of `rms_norm` with its weight and residual, if it has them."""
    results = _RmsNorm.apply(call, numbers, has, *tensors) if trains else call(tensors, numbers)  # type: ignore[no-untyped-call]
    return (results[0], results[1]) if has[1] else results[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, computed in float32. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32, as `rms_norm` takes it.
        weight: (n,), in x's dtype or float32; ones, which each call makes, if not given.
        bias: (n,), in weight's dtype; zeros, which each call makes, if not given.
        eps: Added to the variance; data, not part of the plan.

    Returns:
        A dense tensor of x's shape and dtype.

    Raises:
        ArgumentError: They do not fit.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight, bias = torch.randn(2, 5, 64), torch.rand(64), torch.rand(64)
        >>> expected = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        >>> torch.allclose(cudnn_sdpa.layer_norm(x, weight, bias), expected, atol=1e-5)
        True

    From "Layer Normalization" (Ba et al., 2016).
    """
    if type(eps) is float and 0.0 <= eps <= MOST and not is_compiling():
        given: Any = (x, weight, bias)
        try:  # a call like one before? Saves checks, 10 µs
            trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)  # type: ignore[union-attr]
        except AttributeError:  # weight or bias is not given, or there is no tensor: the checks will say so
            trains = False
        call = _layer_norm_calls.find(given, trains, trains=trains)
        if call is not None:
            if trains:
                return _LayerNorm.apply(call, (eps,), *given)[0]  # type: ignore[no-any-return,no-untyped-call]
            return call(given, (eps,))[0]
    check(x, {"weight": weight, "bias": bias}, eps)
    if weight is None or bias is None:  # cuDNN wants both
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
        found = torch_ops.as_tuple(layer_norm_rows(*rows_of(x, weight, bias), float(eps), **static))
        return found[0].view(x.shape)
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    call = _layer_norm_calls.find(tensors, trains, trains=trains)
    if call is None:
        call = _learn(
            _layer_norm_calls, tensors, trains, layer_norm_rows, (*rows_of(x, weight, bias), float(eps)), static
        )
    if trains:
        return _LayerNorm.apply(call, (float(eps),), *tensors)[0]  # type: ignore[no-any-return,no-untyped-call]
    return call(tensors, (float(eps),))[0]


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, activation: str | None, centered: bool
) -> Any:
    """Any call of `rms_norm`, with its checks; what cuDNN does not fuse on this GPU says what works instead."""
    try:
        return _checked_rms_norm(x, weight, eps, residual, activation, centered)
    except UnsupportedError as error:
        if residual is None and activation is None:
            raise
        suggestion = "rows of a multiple of 64 elements and a weight in x's dtype, or the sum and SiLU in PyTorch"
        raise UnsupportedError("rms_norm with a residual or an activation", error.reasons, suggestion) from None


def _checked_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, activation: str | None, centered: bool
) -> Any:
    check(x, {"weight": weight}, eps)
    check_residual(x, residual)
    check_choices(activation, centered)
    trains = needs_gradient(x, weight, residual)
    if trains and activation is not None:
        found: Any = rms_norm(x, weight, eps, residual=residual, zero_centered=centered)
        act = ACTIVATIONS[activation]
        return act(found) if residual is None else (act(found[0]), found[1])
    if is_empty(x):  # nothing but what autograd wants to see
        total = x if residual is None else x + residual
        out = (total if weight is None else total * weight).to(x.dtype).clone(memory_format=torch.contiguous_format)
        return out if residual is None else (out, total)
    numbers = _numbers(eps, weight, centered=centered)
    static = {"with_scale": trains, "activation": activation}
    tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
    if is_compiling() or not x.is_cuda or not can_bypass_dispatcher(*tensors):
        given = (*rows_of(x, weight, residual), *numbers, *(None,) * (2 - len(numbers)))
        results: Sequence[Tensor] = torch_ops.as_tuple(rms_norm_rows(*given, **static))
        results = [result.view(x.shape) for result in results[: 1 if residual is None else 2]]
        return results[0] if residual is None else (results[0], results[1])
    tensors = [tensor.contiguous() for tensor in tensors]
    has = weight is not None, residual is not None
    options = (trains, centered, *has, activation)
    call = _rms_norm_calls.find(tensors, options, trains=trains)
    if call is None:
        given = (*rows_of(x, weight, residual), *numbers, *(None,) * (2 - len(numbers)))
        call = _learn(_rms_norm_calls, tensors, options, rms_norm_rows, given, static, 1 + has[1])
    return _served(call, tensors, numbers, has, trains=trains)


class _RmsNorm(torch.autograd.Function):
    """`rms_norm` where autograd follows, in eager mode: keeps the rows, the weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, numbers: tuple[float, ...], has: tuple[bool, bool], *tensors: Tensor) -> Any:
        has_weight, has_residual = has
        results = tuple(call(tensors, numbers))
        ctx.call, ctx.numbers, ctx.has_residual = call, numbers[1:], has_residual
        ctx.save_for_backward(results[1] if has_residual else tensors[0], *tensors[1 : 1 + has_weight], results[-1])
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)  # nobody needs zeros for the numbers of the rows
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> Any:
        x, *weights, scale = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad

        def given() -> tuple[Any, ...]:
            rows, weight, of_grad = rows_of(x, weights[0] if weights else None, grad)
            return of_grad, rows, weight, scale, *ctx.numbers

        found = _gradients(ctx.call, rms_norm_gradients, (grad, x, *weights, scale), ctx.numbers, given)
        if ctx.has_residual and rest[0] is not None:
            found[0] = found[0] + rest[0]
        found += [found[0]] if ctx.has_residual else []
        return None, None, None, *of_wanted(found, ctx.needs_input_grad[3:])


class _LayerNorm(torch.autograd.Function):
    """`layer_norm` where autograd follows, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, numbers: tuple[float, ...], *tensors: Tensor) -> Any:
        results = tuple(call(tensors, numbers))
        ctx.call = call
        ctx.save_for_backward(*tensors[:2], *results[1:])
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> Any:
        x, weight, *statistics = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad

        def given() -> tuple[Any, ...]:
            rows, weight_row, grad_rows = rows_of(x, weight, grad)
            return grad_rows, rows, weight_row, *statistics

        found = _gradients(ctx.call, layer_norm_gradients, (grad, x, weight, *statistics), (), given)
        return None, None, *of_wanted(found, ctx.needs_input_grad[2:])


def _gradients(
    call: GraphCall, function: GraphFunction, tensors: Sequence[Tensor], numbers: tuple[float, ...], given: Any
) -> list[Tensor]:
    """Gradients by x and the weights, in their shapes; `given` makes the operands of `function` of `tensors`.

    Whatever is like the forward call is like its gradients' call, which stays with it: saves a look-up, 5 µs. Hooks may
    have brought tensors back that lie otherwise, so that is compared.
    """
    grad, x = tensors[:2]
    if needs_operator(grad):
        found = torch_ops.as_tuple(function(*given()))
        return [found[0].view(x.shape), *(gradient.view(-1) for gradient in found[1:])]
    if not grad.is_contiguous() or grad.data_ptr() % ALIGNMENT:
        tensors = (grad.clone(memory_format=torch.contiguous_format), *tensors[1:])
    looks = [is_deterministic(), *map(describe, tensors)]
    known = call.gradient
    if known is not None and known[0] == looks and known[1].plan.held:
        return known[1](tensors, numbers)
    rows = given()
    weights = [torch.Size((x.shape[-1],))] * (len(function.outputs(_filled(function, rows), {})) - 1)
    gradient = _shaped(function, rows, {}, [x.shape, *weights])
    if all(tensor.is_contiguous() for tensor in tensors):
        call.gradient = looks, gradient
        return gradient(tensors, numbers)
    return gradient([row for row in rows if isinstance(row, Tensor)], numbers)


def _filled(function: GraphFunction, given: Sequence[Any]) -> tuple[Any, ...]:
    return (*given, *(None,) * (len(function.operands) - len(given)))


def rows_of(x: Tensor, one: Tensor | None, other: Tensor | None) -> tuple[Any, Any, Any]:
    """Everything as cuDNN reads it: rows (rows, 1, 1, n), and (1, 1, 1, n) of what has one dimension."""
    size = x.shape[-1]
    rows = [None if t is None else t.reshape(-1, 1, 1, size).contiguous() for t in (x, one, other)]
    return rows[0], rows[1], rows[2]


def _learn(
    shortcuts: FastPath,
    tensors: Sequence[Tensor],
    options: Hashable,
    function: GraphFunction,
    given: Sequence[Any],
    static: dict[str, Any],
    like_x: int = 1,
) -> GraphCall:
    """What runs a call whose arguments are checked and dense, and from now on all like it."""
    with torch.no_grad():
        call = _shaped(function, given, static, [tensors[0].shape] * like_x)
    shortcuts.add(tensors, options, call)
    return call


def _shaped(
    function: GraphFunction, given: Sequence[Any], static: dict[str, Any], shapes: Sequence[torch.Size]
) -> GraphCall:
    """A call of rows whose first results have these shapes, and the others those of the graph."""
    given = _filled(function, given)
    results = function.outputs(given, static)
    wanted = (*shapes, *(result.shape for result in results[len(shapes) :]))
    layouts: list[Layout] = [
        (tuple(shape), contiguous_stride(tuple(shape)), result.dtype)
        for shape, result in zip(wanted, results, strict=True)
    ]
    return torch_ops.prepared(function, given, static).shaped(*layouts)
