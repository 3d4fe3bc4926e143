"""`rms_norm`: root-mean-square normalization in one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph_function import graph_op

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _forward_reference(x: Tensor, weight: Tensor, eps: float, *, with_scale: bool) -> Any:
    rows = x.float()
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = (rows * scale * weight.float()).to(x.dtype)
    return (out, scale) if with_scale else out


def _backward_reference(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    dy, rows = grad.float(), x.float() * scale
    of_rows = dy * weight.float()
    of_x = scale * (of_rows - rows * (of_rows * rows).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (dy * rows).sum((0, 1, 2), keepdim=True).to(weight.dtype)


@graph_op(reference=_backward_reference)
def rms_norm_gradients(g: Any, grad: Any, x: Any, weight: Any, scale: Any) -> Any:
    """The gradients of `rms_norm` by x and weight, of rows (rows, 1, 1, n)."""
    of_x, of_weight, _ = g.rmsnorm_backward(
        name="rms_norm_gradients", grad=grad, input=x, scale=weight, inv_variance=scale, has_dbias=False
    )
    return of_x, of_weight


def _backward(grads: tuple[Any, ...], operands: tuple[Any, ...], outputs: Any, *, with_scale: bool) -> Any:
    x, weight, _ = operands
    assert with_scale
    return (*rms_norm_gradients(grads[0].contiguous(), x, weight, outputs[1]), None)


@graph_op(reference=_forward_reference, backward=_backward)
def rms_norm_rows(g: Any, x: Any, weight: Any, eps: Any, *, with_scale: bool) -> Any:
    """Rows (rows, 1, 1, n) over their root mean square, times the weight; if wanted the factor of each row, too."""
    phases = g.types.norm_forward_phase
    phase = phases.TRAINING if with_scale else phases.INFERENCE
    out, scale = g.rmsnorm(name="rms_norm", norm_forward_phase=phase, input=x, scale=weight, epsilon=eps)
    return (out, scale) if with_scale else out


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32.

    Args:
        x: (..., n), float16, bfloat16 or float32. cuDNN reads dense rows; others are copied first.
        weight: (n,), in x's dtype or float32; ones if not given.
        eps: Added to the mean of the squares.
        zero_centered: Whether the weight is stored less 1, as Gemma does; 1 is added to it, by a kernel of its own.

    Returns:
        A dense tensor of x's shape and dtype.

    Raises:
        ArgumentError: They do not fit.
        UnsupportedError: cuDNN has no plan for it.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 5, 64), torch.rand(64)
        >>> expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
        >>> torch.allclose(cudnn_sdpa.rms_norm(x, weight), expected, atol=1e-6)
        True

    From "Root Mean Square Layer Normalization" (Zhang and Sennrich, 2019).
    """
    if x.dim() == 0 or x.dtype not in _DTYPES:
        raise DtypeError(
            "x", f"{x.dtype}, {x.dim()} dimensions", "float16, bfloat16 or float32 of one dimension or more"
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise OptionError("eps", repr(eps), "a number of at least 0")
    size = x.shape[-1]
    if weight is None:
        weight = torch.ones(size, dtype=x.dtype, device=x.device)
    elif tuple(weight.shape) != (size,):
        raise ShapeError("weight", f"shape {tuple(weight.shape)}", f"shape ({size},), the last dimension of x")
    elif weight.dtype not in (x.dtype, torch.float32):
        raise DtypeError("weight", str(weight.dtype), f"{x.dtype}, the dtype of x, or float32")
    if zero_centered:
        weight = weight + 1
    if 0 in x.shape:
        return torch.empty_like(x)
    rows = x.reshape(-1, 1, 1, size).contiguous()
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    found = rms_norm_rows(rows, weight.contiguous().view(1, 1, 1, size), float(eps), with_scale=trains)
    out: Tensor = found[0] if trains else found
    return out.view(x.shape)
