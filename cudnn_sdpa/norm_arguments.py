"""Checks of what the user passed to a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.fused_dtypes import check_beside, check_dtype, check_kept, shown
from cudnn_sdpa.norm_graphs import ACTIVATIONS

#: The largest number that float32 holds, which is what cuDNN is given.
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
