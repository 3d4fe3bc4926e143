"""Graphs of normalization, forward and backward, with their checks and references.

Callers pass x as (..., n), weight and bias as (n,). The graphs read and write them as (rows, 1, 1, n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import sharding
from cudnn_sdpa.engine.autograd_checks import no_second_gradient
from cudnn_sdpa.engine.tensor_checks import dtype_name
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.checks import check_activation, check_beside, check_dtype, check_savable, shown, widened
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import GraphCall, GraphFunction, Views, as_tuple, graph_op
from cudnn_sdpa.fused.norm_kernels import own_norm, own_norm_gradients
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.scalars import as_float, check_known, is_true
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.providers import CUDNN, OWN

#: Activations that can be fused after a norm.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu}

#: The largest float32 value: eps is passed to cuDNN as float32.
MAX_EPS = torch.finfo(torch.float32).max

#: The largest number of E4M3.
_LARGEST = torch.finfo(torch.float8_e4m3fn).max

#: For arguments in the order of PyTorch's norms.
_HINT = "There is no normalized_shape here: rows are the last dimension of x."

#: Machine epsilons of the dtypes of a norm's computation.
_EPS, _EPS_OF_DOUBLE = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))


def default_eps(x: Tensor) -> float:
    return _EPS_OF_DOUBLE if getattr(x, "dtype", None) is torch.float64 else _EPS


def check(x: Tensor, weights: Mapping[str, Any], eps: object, residual: Tensor | None = None) -> None:
    check_dtype("x", x)
    if x.dim() == 0:
        raise ShapeError("x", "no dimension", "one dimension or more")
    checked_eps(eps)
    dtypes, meaning = (x.dtype, torch.float32), "the last dimension of x"
    for name, weight in weights.items():
        if weight is not None:
            hint = _HINT if isinstance(weight, (int, tuple, list)) else ""
            check_beside(name, weight, "x", x, dtype=dtypes, shape=x.shape[-1:], meaning=meaning, hint=hint)
    weight, bias = weights.get("weight"), weights.get("bias")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise DtypeError("bias", dtype_name(bias.dtype), f"{dtype_name(weight.dtype)}, the dtype of weight")
    if residual is not None:
        check_beside("residual", residual, "x", x, shape=x.shape, meaning="that of x")
        check_savable(x=x, residual=residual)


def checked_eps(eps: object) -> float:
    """eps as a Python number, checked: finite, at least 0, and such that float32 can represent it."""
    check_known("eps", eps)
    eps = as_float(eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= MAX_EPS:
        expected, hint = f"a number of at least 0, up to {MAX_EPS:.2g}", _HINT if isinstance(eps, Tensor) else ""
        raise OptionError("eps", shown(eps), expected, hint)
    return eps


def _contiguous(*operands: Value, **_: object) -> list[Value]:
    return [x.contiguous() if isinstance(x, Tensor) else x for x in operands]


def _readable(x: Tensor, weight: Tensor | None, *others: Value, trains: bool, **_: object) -> list[Value]:
    """Operands with dense rows; a weight of ones for rows of one element, where cuDNN's training needs one."""
    if weight is None and trains and is_true(x.shape[-1] == 1):
        weight = x.new_ones(1)
    return _contiguous(x, weight, *others)


def _as_rows(operands: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """Tensors (..., n) in cuDNN's form, (rows, 1, 1, n), and (n,) as (1, 1, 1, n)."""

    def rows(x: Tensor) -> Tensor:
        return x.view(-1, 1, 1, x.shape[-1])

    return [rows(x) if isinstance(x, Tensor) else x for x in operands], [rows(x) for x in results], options


def _factor(weight: Tensor | None, shift: float | None, rows: Tensor) -> Tensor | float:
    return 1.0 if weight is None else weight.to(rows.dtype) + (shift or 0.0)


def _sum(x: Tensor, residual: Tensor | None) -> Tensor:
    return widened(x) if residual is None else widened(x) + widened(residual)


def _normalized(rows: Tensor, weights: Sequence[Tensor | None], eps: float, shift: float | None) -> tuple[Tensor, ...]:
    """The norm, the mean of each row if it is a LayerNorm, which has a bias or None in its place, and its factor."""
    weight, *biases = weights
    means = [rows.mean(-1, keepdim=True)] if biases else []
    rows = rows - means[0] if biases else rows
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = rows * scale * _factor(weight, shift, rows)
    return (sum((widened(bias) for bias in biases if bias is not None), out), *means, scale)


def _reference(*operands: Any, trains: bool, activation: str | None) -> tuple[Tensor, ...]:
    """Of both norms, whose last operands are eps, what is added to the weight, and the residual."""
    x, *weights, eps, shift, residual = operands
    rows = _sum(x, residual)
    rows = widened(rows.to(x.dtype)) if len(weights) > 1 else rows  # a LayerNorm's: see `layer_norm_rows`
    out, *statistics = _normalized(rows, weights, eps, shift)
    out = ACTIVATIONS[activation](out).to(x.dtype)
    return (out, *(() if residual is None else (rows.to(x.dtype),)), *(statistics if trains else ()))


def _gradients_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, *others: Any, activation: str | None
) -> tuple[Tensor, ...]:
    *of_layer, scale, shift, grad_total = others
    bias, mean = of_layer or (None, 0.0)
    dy, rows = widened(grad), (widened(x) - mean) * scale
    factor = _factor(weight, shift, dy)
    if activation == "silu":
        y = rows * factor if bias is None else rows * factor + widened(bias)
        sigmoid = torch.sigmoid(y)
        dy = dy * (sigmoid + y * sigmoid * (1 - sigmoid))
    grad_rows = dy * factor
    wide = grad_rows - rows * (grad_rows * rows).mean(-1, keepdim=True)
    wide = scale * (wide - grad_rows.mean(-1, keepdim=True) if of_layer else wide)
    grad_x = (wide if grad_total is None else wide + widened(grad_total)).to(x.dtype)
    if weight is None:
        return (grad_x,)
    parts = [dy * rows, dy] if of_layer else [dy * rows]
    # A copy: the sum over one row is the gradient of the result itself, which may be expanded.
    return (grad_x, *(part.sum_to_size(weight.shape).to(weight.dtype, copy=True) for part in parts))


@graph_op(
    reference=_gradients_reference,
    backward=no_second_gradient("rms_norm"),
    keeps_results=False,
    readable=_contiguous,
    views=_as_rows,
    shard=sharding.along({"grad": 1, "x": 1, "scale": 1, "grad_total": 1}, sums=1),
)
def rms_norm_gradients(
    g: GraphBuilder,
    grad: Symbol,
    x: Symbol,
    weight: Symbol | None = None,
    scale: Symbol | None = None,
    shift: Symbol | None = None,
    grad_total: Symbol | None = None,
    *,
    activation: str | None = None,
) -> Symbol | tuple[Symbol, Symbol]:
    """Gradients of x and of the weight; own kernels alone add another gradient of x, and undo an activation."""
    assert grad_total is None
    assert activation is None
    shifted = weight if shift is None else g.add(a=weight, b=shift)
    grad_x, grad_weight, _ = g.rmsnorm_backward(
        name="rms_norm_gradients", grad=grad, input=x, scale=shifted, inv_variance=scale, has_dbias=False
    )
    return grad_x if weight is None else (grad_x, grad_weight)


def _backward(function: GraphFunction) -> Callable[..., GraphCall | tuple[Tensor | None, ...]]:
    """The gradients of a norm by this function."""

    def backward(
        grads: Sequence[Tensor | None],
        operands: Sequence[Any],
        results: Sequence[Tensor],
        *,
        needs: tuple[bool, ...],
        activation: str | None,
        **_: object,
    ) -> GraphCall | tuple[Tensor | None, ...]:
        x, weight, *bias, _, shift, _ = operands
        total, *statistics = (x, *results)[-2 - len(bias) :]
        grad_out, grad_total = (*grads, None)[:2]
        grad_out = torch.zeros_like(total) if grad_out is None else grad_out
        added = grad_total if grad_total is not None and own.may_serve() else None
        read = bias if activation else [None for _ in bias]
        given = (grad_out, total, weight, *read, *statistics, shift, added)
        call = function.call(*given, activation=activation)
        if grad_total is None and not needs[-1]:  # which is the residual's
            return call
        grad_x, *of_weights = as_tuple(call())
        if added is None and grad_total is not None:
            grad_x = grad_x + grad_total
        return grad_x, *of_weights, *[None] * (len(operands) - len(of_weights) - 2), grad_x

    return backward


def _read_backward(operands: Sequence[Value], _: object, *, activation: str | None) -> list[bool]:
    """x, or the sum with a residual; the weight; behind an activation also the bias."""
    x_and_weights = [operands[-1] is None, True, activation is not None][: len(operands) - 3]
    return [*x_and_weights, False, False, False]


def check_operands(*operands: Any, trains: bool = False, activation: object = None) -> None:
    """Checks the operands of a norm's graph."""
    x, *weights, eps, _, residual = operands
    names = ("weight", "bias")[: len(weights)]  # as Dynamo of PyTorch 2.9 zips no tuples of different lengths in `dict`
    check(x, dict(zip(names, weights, strict=True)), eps, residual)
    check_activation(activation, ACTIVATIONS)
    if trains and activation is not None and not own.may_serve():
        raise OptionError("activation", shown(activation), "None, where a gradient is wanted")


def fuses(x: Tensor, weight: Tensor | None) -> bool:
    """Whether a residual and an activation run in the kernel of the norm."""
    return own.may_serve() or _has_engine(x, weight)


def _has_engine(x: Value, weight: Value) -> bool:
    """Whether cuDNN surely has an engine for a norm, with all that is fused: for rows of a multiple of 128 bytes."""
    # That holds for 1 to 65,536 columns on 9.19 with an H100, and on 9.28 with an A100, H200 and B200.
    assert isinstance(x, Tensor)
    has_kernel = is_true(x.shape[-1] * x.element_size() % 128 == 0)
    return has_kernel and (not isinstance(weight, Tensor) or weight.dtype == x.dtype)


@graph_op(
    reference=_reference,
    backward=_backward(rms_norm_gradients),
    keeps_results=slice(1, None),
    auxiliary=1,
    check=check_operands,
    readable=_readable,
    views=_as_rows,
    reads=_read_backward,
    materialize_grads=False,
    shard={"x": 1, "residual": 1},
)
def rms_norm_rows(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    residual: Symbol | None = None,
    *,
    trains: bool,
    activation: str | None = None,
) -> tuple[Symbol, ...]:
    """Rows divided by their root mean square, times the weight; with a residual also the sum; each row's factor."""
    phases = g.types.norm_forward_phase
    total = x if residual is None else g.add(a=x, b=residual)
    out, scale = g.rmsnorm(
        name="rms_norm",
        norm_forward_phase=phases.TRAINING if trains else phases.INFERENCE,
        input=total,
        scale=weight if shift is None else g.add(a=weight, b=shift),
        epsilon=eps,
    )
    out = g.swish(input=out) if activation == "silu" else out
    return (out, *(() if residual is None else (total,)), *((scale,) if trains else ()))


def in_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def _quantized(out: Tensor, scale: Tensor | None, total: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    amax = out.abs().amax(-1, keepdim=True)
    used = (amax / _LARGEST).clamp_min(2.0**-100) if scale is None else scale
    return (in_e4m3(out, used), (used if scale is None else amax).float(), *total)


def _fp8_reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    shift: float | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rows = _sum(x, residual)
    out, _ = _normalized(rows, [weight], eps, shift)
    return _quantized(out, scale, () if residual is None else (rows.to(x.dtype),))


def _fp8_outputs(x: Tensor, *others: Value) -> list[Tensor]:
    """Of both norms, whose last two operands are the residual and the scale."""
    *_, residual, _ = others
    of_rows = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    quantized = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return [quantized, of_rows, *([] if residual is None else [torch.empty(x.shape, dtype=x.dtype, device=x.device)])]


def _check_fp8(
    x: Tensor,
    weight: Tensor | None,
    eps: object,
    _shift: float | None,
    residual: Tensor | None,
    scale: Tensor | None,
) -> None:
    check(x, {"weight": weight}, eps, residual)
    _check_scale(scale, x)


def _check_scale(scale: Tensor | None, x: Tensor) -> None:
    if scale is not None:
        check_beside("scale", scale, "x", x, dtype=torch.float32)
        if scale.numel() != 1:
            raise ShapeError("scale", f"shape {tuple(scale.shape)}", "one number, () or (1,)")


@graph_op(
    reference=_fp8_reference,
    outputs=_fp8_outputs,
    check=_check_fp8,
    readable=_contiguous,
    shard={"x": 1, "residual": 1},
)
def rms_norm_fp8_rows(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    residual: Symbol | None = None,
    scale: Symbol | None = None,
) -> NoReturn:
    """Normalized rows in E4M3, and the scale of each, or its amax if one scale is given; the sum with a residual."""
    raise NotImplementedError("own kernels alone write norms in FP8")


@graph_op(
    reference=_gradients_reference,
    backward=no_second_gradient("layer_norm"),
    keeps_results=False,
    readable=_contiguous,
    views=_as_rows,
    shard=sharding.along({"grad": 1, "x": 1, "mean": 1, "scale": 1, "grad_total": 1}, sums=2),
)
def layer_norm_gradients(
    g: GraphBuilder,
    grad: Symbol,
    x: Symbol,
    weight: Symbol | None = None,
    bias: Symbol | None = None,
    mean: Symbol | None = None,
    scale: Symbol | None = None,
    shift: Symbol | None = None,
    grad_total: Symbol | None = None,
    *,
    activation: str | None = None,
) -> tuple[Symbol, ...]:
    """Gradients of x, of the weight and the bias, as `rms_norm_gradients`; the bias is read behind an activation."""
    assert grad_total is None
    assert bias is None
    assert activation is None
    shifted = weight if shift is None else g.add(a=weight, b=shift)
    gradients = g.layernorm_backward(
        name="layer_norm_gradients", grad=grad, input=x, scale=shifted, mean=mean, inv_variance=scale
    )
    return tuple(gradients)


@graph_op(
    reference=_reference,
    backward=_backward(layer_norm_gradients),
    keeps_results=slice(1, None),
    auxiliary=2,
    check=check_operands,
    readable=_contiguous,
    views=_as_rows,
    reads=_read_backward,
    materialize_grads=False,
    shard={"x": 1, "residual": 1},
)
def layer_norm_rows(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol | None = None,
    bias: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    residual: Symbol | None = None,
    *,
    trains: bool,
    activation: str | None = None,
) -> tuple[Symbol, ...]:
    """Normalized rows, times the weight, plus the bias; each row's mean and factor.

    With a residual the sum is rounded, and its mean is that of the rounded one, as gradients need. cuDNN's engines do
    not round it, and own kernels alone add one.
    """
    assert residual is None
    phases = g.types.norm_forward_phase
    out, mean, scale = g.layernorm(
        name="layer_norm",
        norm_forward_phase=phases.TRAINING if trains else phases.INFERENCE,
        input=x,
        scale=weight if shift is None else g.add(a=weight, b=shift),
        bias=bias,
        epsilon=eps,
    )
    out = g.swish(input=out) if activation == "silu" else out
    return (out, mean, scale) if trains else (out,)


def _layer_fp8_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rows = _sum(x, residual)
    out, *_ = _normalized(rows, [weight, bias], eps, None)
    return _quantized(out, scale, () if residual is None else (rows.to(x.dtype),))


def _check_layer_fp8(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: object,
    residual: Tensor | None,
    scale: Tensor | None,
) -> None:
    check(x, {"weight": weight, "bias": bias}, eps, residual)
    _check_scale(scale, x)


@graph_op(
    reference=_layer_fp8_reference,
    outputs=_fp8_outputs,
    check=_check_layer_fp8,
    readable=_contiguous,
    shard={"x": 1, "residual": 1},
)
def layer_norm_fp8_rows(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol | None = None,
    bias: Symbol | None = None,
    eps: Symbol | None = None,
    residual: Symbol | None = None,
    scale: Symbol | None = None,
) -> NoReturn:
    """Rows of a LayerNorm in E4M3, and the rest as `rms_norm_fp8_rows` gives it."""
    raise NotImplementedError("own kernels alone write norms in FP8")


def _by_own_kernels(
    operation: KernelOp, names: Sequence[str], given: Views, *, target: Target, device: int | None
) -> tuple[Views, PlanKey | None, str]:
    """The key of a norm's plan by own kernels, or of its gradients', and why; the key is None where cuDNN serves."""
    values, results, static = given
    named = dict(zip(names, values, strict=True))
    activation, is_backward, is_layer = static.get("activation"), operation is own_norm_gradients, "bias" in names
    # cuDNN's engines of training have no activation, and add no other gradient. Those of a LayerNorm need a weight,
    # and forward a bias, and round no sum.
    is_plain = named.get("grad_total") is None and not (activation and (is_backward or static["trains"]))
    if is_layer:
        is_plain &= named["weight"] is not None and (is_backward or named["bias"] is not None)
        is_plain &= named.get("residual") is None
    has_engine = is_plain and _has_engine(named["x"], named["weight"])
    kernel, why = own.choice("norm", target, results[0].shape, is_backward=is_backward, has_engine=has_engine)
    if not is_plain and (is_backward or kernel == CUDNN):  # the providers may be others than where it was traced
        kernel, why = OWN, own.LACKED
    if kernel == CUDNN or results[0].dtype not in own.DTYPES:
        return given, None, why if kernel == CUDNN else ""
    options = {"layer": is_layer, "activation": activation}
    trains = {name: static[name] for name in ("trains",) if name in static}
    key = own.key_of(operation, named, results, options | trains, target=target, device=device)
    return given, *own.unless_known_wrong(key, why, has_engine=has_engine)


def _in_fp8(
    names: Sequence[str], given: Views, *, target: Target, device: int | None
) -> tuple[Views, PlanKey | None, str]:
    values, results, _ = given
    named = dict(zip(names, values, strict=True))
    options = {"layer": "bias" in names, "activation": None, "fp8": 1 if named["scale"] is None else 2}
    key = own.key_of(own_norm, named, results, options, target=target, device=device)
    return given, key, "own kernels: cuDNN's engines of norms write no FP8 of a scale for each row"


rms_norm_fp8_rows.own = layer_norm_fp8_rows.own = _in_fp8

for _function, _operation in (
    (rms_norm_rows, own_norm),
    (layer_norm_rows, own_norm),
    (rms_norm_gradients, own_norm_gradients),
    (layer_norm_gradients, own_norm_gradients),
):
    _function.own = partial(_by_own_kernels, _operation)
