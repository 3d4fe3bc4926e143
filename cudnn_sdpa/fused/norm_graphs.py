"""The graphs of normalization, forward and backward, with their references. Rows are (rows, 1, 1, n)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine.autograd_checks import no_second_gradient
from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.graph_op import graph_op

#: What may be fused after a norm.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu}


def _weight(weight: Tensor | None, shift: float | None, rows: Tensor) -> Any:
    """The factor of the rows, in the dtype that they are computed in."""
    return 1.0 if weight is None else weight.to(rows.dtype) + (shift or 0.0)


def _rms_reference(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    shift: float | None = None,
    *,
    with_scale: bool,
    activation: str | None,
) -> Any:
    total = x if residual is None else (widened(x) + widened(residual)).to(x.dtype)
    rows = widened(x) if residual is None else widened(x) + widened(residual)
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = ACTIVATIONS[activation](rows * scale * _weight(weight, shift, rows)).to(x.dtype)
    return (out, *(() if residual is None else (total,)), *((scale,) if with_scale else ()))


def _rms_gradients_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None = None, scale: Any = None, shift: float | None = None
) -> Any:
    dy, rows = widened(grad), widened(x) * scale
    of_rows = dy * _weight(weight, shift, dy)
    grad_x = (scale * (of_rows - rows * (of_rows * rows).mean(-1, keepdim=True))).to(x.dtype)
    return grad_x if weight is None else (grad_x, (dy * rows).sum((0, 1, 2), keepdim=True).to(weight.dtype))


def of_wanted(gradients: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients by what requires one. cuDNN's kernels give all at once, and have no way to leave one out."""
    return tuple(gradient if is_needed else None for gradient, is_needed in zip(gradients, needs, strict=True))


@graph_op(reference=_rms_gradients_reference, backward=no_second_gradient("rms_norm"), keeps_results=False)
def rms_norm_gradients(g: Any, grad: Any, x: Any, weight: Any = None, scale: Any = None, shift: Any = None) -> Any:
    """The gradients of `rms_norm` by x and, if there is one, the weight."""
    shifted = weight if shift is None else g.add(a=weight, b=shift)
    grad_x, grad_weight, _ = g.rmsnorm_backward(
        name="rms_norm_gradients", grad=grad, input=x, scale=shifted, inv_variance=scale, has_dbias=False
    )
    return grad_x if weight is None else (grad_x, grad_weight)


def _rms_backward(
    grads: Any, operands: Any, outputs: Any, *, needs: tuple[bool, ...], with_scale: bool, activation: str | None
) -> Any:
    x, weight, residual, _, shift = operands
    assert with_scale
    assert activation is None
    total = x if residual is None else outputs[1]
    found = rms_norm_gradients(grads[0].contiguous(), total, weight, outputs[-1], shift)
    grad_x, grad_weight = (found, None) if weight is None else found
    if residual is not None and grads[1] is not None:
        grad_x = grad_x + grads[1]
    return of_wanted((grad_x, grad_weight, grad_x, None, None), needs)


@graph_op(reference=_rms_reference, backward=_rms_backward)
def rms_norm_rows(
    g: Any,
    x: Any,
    weight: Any = None,
    residual: Any = None,
    eps: Any = None,
    shift: Any = None,
    *,
    with_scale: bool,
    activation: str | None,
) -> Any:
    """Rows over their root mean square, times the weight; if wanted the sum and the factor of each row, too."""
    phases = g.types.norm_forward_phase
    total = x if residual is None else g.add(a=x, b=residual)
    out, scale = g.rmsnorm(
        name="rms_norm",
        norm_forward_phase=phases.TRAINING if with_scale else phases.INFERENCE,
        input=total,
        scale=weight if shift is None else g.add(a=weight, b=shift),
        epsilon=eps,
    )
    out = g.swish(input=out) if activation == "silu" else out
    return (out, *(() if residual is None else (total,)), *((scale,) if with_scale else ()))


def _layer_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, with_statistics: bool) -> Any:
    rows = widened(x)
    mean = rows.mean(-1, keepdim=True)
    scale = ((rows - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    out = ((rows - mean) * scale * widened(weight) + widened(bias)).to(x.dtype)
    return (out, mean, scale) if with_statistics else out


def _layer_gradients_reference(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Any:
    dy, rows = widened(grad), (widened(x) - mean) * scale
    of_rows = dy * widened(weight)
    grad_x = scale * (of_rows - of_rows.mean(-1, keepdim=True) - rows * (of_rows * rows).mean(-1, keepdim=True))
    sums = [(part).sum((0, 1, 2), keepdim=True).to(weight.dtype) for part in (dy * rows, dy)]
    return (grad_x.to(x.dtype), *sums)


@graph_op(reference=_layer_gradients_reference, backward=no_second_gradient("layer_norm"), keeps_results=False)
def layer_norm_gradients(g: Any, grad: Any, x: Any, weight: Any, mean: Any, scale: Any) -> Any:
    """The gradients of `layer_norm` by x, weight and bias."""
    found = g.layernorm_backward(
        name="layer_norm_gradients", grad=grad, input=x, scale=weight, mean=mean, inv_variance=scale
    )
    return tuple(found)


def _layer_backward(grads: Any, operands: Any, outputs: Any, *, needs: tuple[bool, ...], with_statistics: bool) -> Any:
    x, weight, _, _ = operands
    assert with_statistics
    return of_wanted((*layer_norm_gradients(grads[0].contiguous(), x, weight, outputs[1], outputs[2]), None), needs)


@graph_op(reference=_layer_reference, backward=_layer_backward)
def layer_norm_rows(g: Any, x: Any, weight: Any, bias: Any, eps: Any, *, with_statistics: bool) -> Any:
    """Rows less their mean over their deviation, times the weight, plus the bias; if wanted both of them, too."""
    phases = g.types.norm_forward_phase
    out, mean, scale = g.layernorm(
        name="layer_norm",
        norm_forward_phase=phases.TRAINING if with_statistics else phases.INFERENCE,
        input=x,
        scale=weight,
        bias=bias,
        epsilon=eps,
    )
    return (out, mean, scale) if with_statistics else out
