"""`rms_norm` and `layer_norm`: normalization of rows, one kernel per direction; also in FP8."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.launch import NOT_A_CALL
from cudnn_sdpa.engine.native.calls import MISSED
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.checks import check_activation, checked_flag
from cudnn_sdpa.fused.encoding import Value
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.fused.norm_graphs import (
    ACTIVATIONS,
    MAX_EPS,
    check,
    check_operands,
    checked_eps,
    default_eps,
    fuses,
    layer_norm_fp8_rows,
    layer_norm_rows,
    rms_norm_fp8_rows,
    rms_norm_rows,
)
from cudnn_sdpa.graph.scalars import is_compiling, is_empty, is_known


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: None = ...,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: Tensor,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32; float64, computed in float64, if `cpu_checks` accepts any dtype.
            Kernels read dense rows; an x that is not contiguous is copied first.
        weight: (n,), in x's dtype or float32; None is ones.
        eps: Added to the mean of the squares; data, not part of the plan. The default is not that of PyTorch's
            `rms_norm`. None is: the machine epsilon of float64 for float64, of float32 (1.19e-7) for other dtypes.
        residual: Of x's shape and dtype: added to x first, in the same kernel. Under `providers("cudnn")` that is so if
            rows have a multiple of 64 elements, 32 in float32, and the weight x's dtype; elsewhere each step is
            rounded to x's dtype.
        activation: "silu": applied to the result, in the same kernel; by cuDNN in that of the same calls, if there is
            no gradient.
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
    compiles = is_compiling()
    if eps is None:
        eps = default_eps(x)
    if compiles or type(eps) is not float or not 0.0 <= eps <= MAX_EPS:  # checked in each call: eps is data
        eps = checked_eps(eps)
    if zero_centered is not False:
        zero_centered = checked_flag("zero_centered", zero_centered)
    elif residual is None and activation is None and not compiles:
        find = rms_norm_rows.calls.find
        if find is not None:
            known = find(x, weight, eps)
            if known is not MISSED:
                return known  # type: ignore[no-any-return]
    return _normalized(  # type: ignore[no-any-return]
        rms_norm_rows, (x, weight), eps, residual=residual, activation=activation, zero_centered=zero_centered
    )


def _normalized(
    rows: GraphFunction,
    tensors: tuple[Any, ...],
    eps: float,
    *,
    residual: Tensor | None,
    activation: str | None,
    zero_centered: bool,
) -> Any:
    """A norm of x with a weight, or with a weight and a bias, in one kernel or in separate steps."""
    x, weight, *_ = tensors
    if residual is not None or activation is not None:
        has_sum, has_activation = separate_steps((*tensors, eps, None, residual), activation)
        if has_sum or has_activation:
            norm = partial(_normalized, rows, eps=eps, zero_centered=zero_centered)
            if has_sum:
                total = (x + residual).contiguous()
                return norm((total, *tensors[1:]), residual=None, activation=activation), total
            normalized, activate = norm(tensors, residual=residual, activation=None), ACTIVATIONS[activation]
            return activate(normalized) if residual is None else (activate(normalized[0]), normalized[1])
    shift = 1.0 if zero_centered and weight is not None else None
    is_plain = shift is None and residual is None
    operands: tuple[Value, ...] = (*tensors, eps) if is_plain else (*tensors, eps, shift, residual)
    return rows.run(operands, {} if activation is None else {"activation": activation})


def separate_steps(operands: tuple[Any, ...], activation: str | None) -> tuple[bool, bool]:
    """Whether the sum with a residual and the activation run in kernels of their own: then they are checked here.

    The operands are those of the norm's graph; a LayerNorm has a bias, or None, and cuDNN cannot add before it.
    """
    x, weight, *bias, _, _, residual = operands
    try:
        is_fused = fuses(x, weight)
    except NOT_A_CALL:  # the checks name the wrong argument
        is_fused = True
    has_sum = residual is not None and not own.may_serve() and (not is_fused or bool(bias))
    if has_sum:
        check_operands(*operands)
    tensors = [tensor for tensor in operands if isinstance(tensor, Tensor)]
    has_activation = activation is not None and (not is_fused or (needs_gradient(*tensors) and not own.may_serve()))
    if has_activation:
        check_activation(activation, ACTIVATIONS)
    return has_sum, has_activation


class NormInFp8(NamedTuple):
    """A norm in FP8; its values are `out` times `scale`.

    Attributes:
        out: The norm divided by the scale, of x's shape, contiguous, float8_e4m3fn.
        scale: That of each row, (..., 1) float32; or the given one.
        amax: The largest absolute value of the norm, () float32; None without a given scale.
        total: The sum of x and the residual, in x's dtype; None without a residual.
    """

    out: Tensor
    scale: Tensor
    amax: Tensor | None
    total: Tensor | None


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    zero_centered: bool = False,
) -> NormInFp8:
    """`rms_norm` in E4M3 for an FP8 linear layer, in one kernel of this library. For inference.

    Without `scale` each row gets a scale of its own, its amax over 448, as `torch._scaled_mm` reads them. A given scale
    serves all rows (delayed scaling), and larger values saturate at 448 times it. Values are rounded to the nearest
    number, ties to even; NaN stays NaN.

    Args:
        x: (..., n), float16, bfloat16 or float32. Kernels read dense rows; an x that is not contiguous is copied first.
        weight: (n,), in x's dtype or float32; None is ones.
        eps: As for `rms_norm`.
        scale: () or (1,), float32; None is one for each row.
        residual: Of x's shape and dtype: added to x first, in the same kernel.
        zero_centered: Whether the weight is stored minus 1.

    Returns:
        The norm, its scale, its amax if a scale is given (one more small kernel, unless there is one row), and the sum
        with a residual.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: A tensor requires grad, or the GPU has no FP8 (before compute capability 8.9).

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 5, 64), torch.rand(64)
        >>> found = cudnn_sdpa.rms_norm_fp8(x, weight)
        >>> torch.allclose(found.out.float() * found.scale, cudnn_sdpa.rms_norm(x, weight), atol=0.2)
        True
    """
    eps = checked_eps(default_eps(x) if eps is None else eps)
    shift = 1.0 if checked_flag("zero_centered", zero_centered) and weight is not None else None
    return _in_fp8(rms_norm_fp8_rows(x, weight, eps, shift=shift, residual=residual, scale=scale), scale)


def layer_norm_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> NormInFp8:
    """`layer_norm` in E4M3 for an FP8 linear layer, in one kernel of this library. For inference.

    Scales and rounding are those of `rms_norm_fp8`.

    Args:
        x: (..., n), float16, bfloat16 or float32. Kernels read dense rows; an x that is not contiguous is copied first.
        weight: (n,), in x's dtype or float32; None is ones.
        bias: (n,), likewise, in weight's dtype; None is zeros.
        eps: As for `layer_norm`.
        scale: () or (1,), float32; None is one for each row.
        residual: Of x's shape and dtype: added to x first, in the same kernel.

    Returns:
        The norm, its scale, its amax if a scale is given (one more small kernel, unless there is one row), and the sum
        with a residual.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: A tensor requires grad, or the GPU has no FP8 (before compute capability 8.9).

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight, bias = torch.randn(2, 5, 64), torch.rand(64), torch.rand(64)
        >>> found = cudnn_sdpa.layer_norm_fp8(x, weight, bias)
        >>> torch.allclose(found.out.float() * found.scale, cudnn_sdpa.layer_norm(x, weight, bias), atol=0.2)
        True
    """
    return _in_fp8(layer_norm_fp8_rows(x, weight, bias, checked_eps(eps), residual=residual, scale=scale), scale)


def _largest(of_rows: Tensor) -> Tensor:
    if all(is_known(size == 1) for size in of_rows.shape):
        return of_rows.reshape(())
    if is_empty(of_rows):  # which has no largest value
        return of_rows.sum()
    if is_compiling():  # PyTorch 2.9 asks for it where the number of rows depends on data
        torch._check(of_rows.numel() != 0)  # type: ignore[no-untyped-call]
    return of_rows.amax()


def _in_fp8(results: tuple[Tensor, ...], scale: Tensor | None) -> NormInFp8:
    out, of_rows, *total = results
    amax = None if scale is None else _largest(of_rows)
    return NormInFp8(out, of_rows if scale is None else scale, amax, total[0] if total else None)


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = ...,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor,
    activation: str | None = ...,
    zero_centered: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension, computed in float32. Differentiable.

    With a residual x is x + residual, and with `zero_centered` the weight is 1 + weight.

    Args:
        x: (..., n), float16, bfloat16 or float32, as for `rms_norm`.
        weight: (n,), in x's dtype or float32; None is ones.
        bias: (n,), in weight's dtype; None is zeros. Each call creates what is None under `providers("cudnn")`, and a
            weight beside a bias.
        eps: Added to the variance; data, not part of the plan.
        residual: Of x's shape and dtype: added to x first, in the same kernel; by another under `providers("cudnn")`.
            The norm is that of the sum rounded to x's dtype.
        activation: "silu": applied to the result, in the same kernel, as for `rms_norm`.
        zero_centered: Whether the weight is stored minus 1; 1 is added to it in the same kernel.

    Returns:
        A contiguous tensor of x's shape and dtype; with `residual` also the sum.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight, bias = torch.randn(2, 5, 64), torch.rand(64), torch.rand(64)
        >>> expected = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        >>> torch.allclose(cudnn_sdpa.layer_norm(x, weight, bias), expected, atol=1e-5)
        True
        >>> out, total = cudnn_sdpa.layer_norm(x, weight, bias, residual=2 * x)
        >>> torch.allclose(out, cudnn_sdpa.layer_norm(3 * x, weight, bias), atol=1e-5)
        True

    From "Layer Normalization" (Ba et al., 2016).
    """
    compiles = is_compiling()
    if compiles or type(eps) is not float or not 0.0 <= eps <= MAX_EPS:  # checked in each call: eps is data
        eps = checked_eps(eps)
    if zero_centered is not False:
        zero_centered = checked_flag("zero_centered", zero_centered)
    elif residual is None and activation is None and not compiles:
        find = layer_norm_rows.calls.find
        if find is not None:
            known = find(x, weight, bias, eps)
            if known is not MISSED:
                return known  # type: ignore[no-any-return]
    is_centered = zero_centered and weight is not None
    created = created_operands(weight, bias)
    if created:
        check(x, {"weight": weight, "bias": bias}, eps)
        like = next((tensor for tensor in (weight, bias) if tensor is not None), x)
        n = x.shape[-1]
        weight = torch.ones(n, dtype=like.dtype, device=x.device) if "weight" in created else weight
        bias = torch.zeros(n, dtype=like.dtype, device=x.device) if "bias" in created else bias
    return _normalized(  # type: ignore[no-any-return]
        layer_norm_rows, (x, weight, bias), eps, residual=residual, activation=activation, zero_centered=is_centered
    )


def created_operands(weight: Tensor | None, bias: Tensor | None) -> list[str]:
    """Names of operands to create: cuDNN's engines need weight and bias, and the gradient of a bias needs a weight."""
    names = [name for name, tensor in (("weight", weight), ("bias", bias)) if tensor is None]
    return names if names == ["weight"] or not own.may_serve() else []
