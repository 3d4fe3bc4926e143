"""`rms_norm` and `layer_norm`: normalization of rows, in one kernel each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.graphs import operator
from cudnn_sdpa.graphs.function import GraphFunction
from cudnn_sdpa.graphs.shortcuts import Shortcuts
from cudnn_sdpa.norm_graphs import ACTIVATIONS, layer_norm_gradients, layer_norm_rows, rms_norm_gradients, rms_norm_rows
from cudnn_sdpa.runtime.eager import is_compiling
from cudnn_sdpa.runtime.graph_call import GraphCall, Layout
from cudnn_sdpa.runtime.layouts import contiguous_stride

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_rms_norm_calls, _layer_norm_calls = Shortcuts(), Shortcuts()


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Any:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32. cuDNN reads dense rows one after the other; an x that does not lie
            like this is copied first.
        weight: (n,), in x's dtype or float32; ones if not given.
        eps: Added to the mean of the squares; data, not part of the plan.
        residual: Of x's shape and dtype: added to x before. cuDNN has kernels for it before Hopper alone.
        activation: "silu": applied to the result in the same kernel. cuDNN has kernels for it before Hopper alone. With
            a gradient it is a kernel of its own.
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
    tensors = [tensor for tensor in (x, weight, residual) if tensor is not None]
    options = (weight is not None, residual is not None, activation, zero_centered)
    trains, shift = _trains(tensors), 1.0 if zero_centered and weight is not None else None
    if not is_compiling() and type(eps) is float and eps >= 0:
        call = _rms_norm_calls.find(tensors, (trains, *options), trains=trains)
        if call is not None:
            numbers = (eps,) if shift is None else (eps, shift)
            found = _RmsNorm.apply(call, numbers, options, *tensors) if trains else call(tensors, numbers)  # type: ignore[no-untyped-call]
            return found[:2] if residual is not None else found[0]
    _check(x, {"weight": weight}, eps)
    _check_residual(x, residual)
    if activation not in ACTIVATIONS:
        raise OptionError("activation", repr(activation), " or ".join(map(repr, ACTIVATIONS)))
    if trains and activation is not None:
        found = rms_norm(x, weight, eps, residual=residual, zero_centered=zero_centered)
        act = ACTIVATIONS[activation]
        return act(found) if residual is None else (act(found[0]), found[1])
    if 0 in x.shape:
        return torch.empty_like(x) if residual is None else (torch.empty_like(x), torch.empty_like(x))
    given, static = (*_rows(x, weight, residual), float(eps), shift), {"with_scale": trains, "activation": activation}
    results = _run(rms_norm_rows, given, static)
    if x.is_contiguous() and (residual is None or residual.is_contiguous()):
        _learn(_rms_norm_calls, tensors, (trains, *options), rms_norm_rows, given, static, x)
    out = results[0].view(x.shape)
    return out if residual is None else (out, results[1].view(x.shape))


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
    if isinstance(x, Tensor) and x.dim() and (weight is None or bias is None):  # cuDNN wants both
        like = next((tensor for tensor in (weight, bias) if tensor is not None), x)
        weight = torch.ones(x.shape[-1], dtype=like.dtype, device=x.device) if weight is None else weight
        bias = torch.zeros(x.shape[-1], dtype=like.dtype, device=x.device) if bias is None else bias
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    trains = _trains(tensors)
    if not is_compiling() and type(eps) is float and eps >= 0:
        call = _layer_norm_calls.find(tensors, trains, trains=trains)
        if call is not None:
            found = _LayerNorm.apply(call, (eps,), *tensors) if trains else call(tensors, (eps,))  # type: ignore[no-untyped-call]
            result: Tensor = found[0]
            return result
    _check(x, {"weight": weight, "bias": bias}, eps)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise DtypeError("bias", str(bias.dtype), f"{weight.dtype}, the dtype of weight")
    if 0 in x.shape:
        return torch.empty_like(x)
    given, static = (*_rows(x, weight, bias), float(eps)), {"with_statistics": trains}
    out: Tensor = _run(layer_norm_rows, given, static)[0]
    if x.is_contiguous():
        _learn(_layer_norm_calls, tensors, trains, layer_norm_rows, given, static, x)
    return out.view(x.shape)


class _RmsNorm(torch.autograd.Function):
    """`rms_norm` where autograd follows, in eager mode: keeps the rows, the weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, numbers: Sequence[float], options: Any, *tensors: Tensor) -> Any:
        has_weight, has_residual, *_ = options
        results = call(tensors, numbers)
        ctx.options, ctx.shift = options, numbers[1] if len(numbers) > 1 else None
        weights = tensors[1:2] if has_weight else ()
        ctx.save_for_backward(results[1] if has_residual else tensors[0], results[-1], *weights)
        ctx.mark_non_differentiable(results[-1])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *rest: Tensor) -> Any:
        has_weight, has_residual, *_ = ctx.options
        x, scale, *weights = ctx.saved_tensors
        rows, weight, _ = _rows(x, weights[0] if has_weight else None, None)
        found = rms_norm_gradients(grad.contiguous().view(rows.shape), rows, weight, scale, ctx.shift)
        of_x = (found[0] if has_weight else found).view(x.shape)
        if has_residual:
            of_x = of_x + rest[0]
        gradients = [of_x, found[1].view(-1)] if has_weight else [of_x]
        return None, None, None, *gradients, *([of_x] if has_residual else [])


class _LayerNorm(torch.autograd.Function):
    """`layer_norm` where autograd follows, in eager mode."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, numbers: Sequence[float], *tensors: Tensor) -> Any:
        results = call(tensors, numbers)
        ctx.save_for_backward(*tensors[:2], *results[1:])
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        rows, of_weight = _rows(x, weight, None)[:2]
        of_x, *rest = layer_norm_gradients(grad.contiguous().view(rows.shape), rows, of_weight, mean, scale)
        return None, None, of_x.view(x.shape), *(gradient.view(-1) for gradient in rest)


def _trains(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _rows(x: Tensor, one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Everything as cuDNN reads it: rows (rows, 1, 1, n), and (1, 1, 1, n) of what has one dimension."""
    size = x.shape[-1]
    rows, *rest = (None if t is None else t.reshape(-1, 1, 1, size).contiguous() for t in (x, one, other))
    assert rows is not None
    return rows, rest[0], rest[1]


def _run(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> tuple[Tensor, ...]:
    return operator.as_tuple(function(*given, **static))


def _learn(
    shortcuts: Shortcuts,
    tensors: Sequence[Tensor],
    options: Any,
    function: GraphFunction,
    given: Sequence[Any],
    static: dict[str, Any],
    x: Tensor,
) -> None:
    """Has the next call like this one go straight to its plan, with results in x's shape."""
    if is_compiling() or not x.is_cuda:
        return
    like: Callable[[Tensor], Layout] = lambda result: (  # noqa: E731
        (tuple(x.shape), contiguous_stride(tuple(x.shape)), result.dtype)
        if result.numel() == x.numel() and result.shape[-1] == x.shape[-1]
        else (tuple(result.shape), result.stride(), result.dtype)
    )
    layouts = [like(result) for result in function.outputs(given, static)]
    shortcuts.add(tensors, options, operator.prepared(function, given, static).shaped(*layouts))


def _check(x: Any, weights: dict[str, Tensor | None], eps: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() == 0 or x.dtype not in _DTYPES:
        got = f"{x.dtype}, {x.dim()} dimensions" if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError("x", got, "float16, bfloat16 or float32 of one dimension or more")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise OptionError("eps", repr(eps), "a number of at least 0")
    for name, weight in weights.items():
        if weight is None:
            continue
        if not isinstance(weight, Tensor):
            raise DtypeError(name, type(weight).__name__, "a tensor")
        if tuple(weight.shape) != (x.shape[-1],):
            raise ShapeError(name, f"shape {tuple(weight.shape)}", f"shape ({x.shape[-1]},), the last dimension of x")
        if weight.dtype not in (x.dtype, torch.float32):
            raise DtypeError(name, str(weight.dtype), f"{x.dtype}, the dtype of x, or float32")


def _check_residual(x: Tensor, residual: Tensor | None) -> None:
    if residual is None:
        return
    if residual.shape != x.shape:
        raise ShapeError("residual", f"shape {tuple(residual.shape)}", f"shape {tuple(x.shape)}, as x has")
    if residual.dtype != x.dtype:
        raise DtypeError("residual", str(residual.dtype), f"{x.dtype}, the dtype of x")
