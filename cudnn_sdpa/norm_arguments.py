"""Checks of what the user passed to a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.fused_dtypes import check_dtype
from cudnn_sdpa.norm_graphs import ACTIVATIONS

INFINITY = float("inf")


def check(x: Any, weights: dict[str, Tensor | None], eps: Any) -> None:
    """Checks of x, what has one dimension, and eps."""
    check_dtype("x", x)
    if x.dim() == 0:
        raise ShapeError("x", "no dimension", "one dimension or more")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < INFINITY:
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


def check_residual(x: Tensor, residual: Tensor | None) -> None:
    """Checks of a residual."""
    if residual is None:
        return
    if not isinstance(residual, Tensor):
        raise DtypeError("residual", type(residual).__name__, "a tensor")
    if residual.shape != x.shape:
        raise ShapeError("residual", f"shape {tuple(residual.shape)}", f"shape {tuple(x.shape)}, as x has")
    if residual.dtype != x.dtype:
        raise DtypeError("residual", str(residual.dtype), f"{x.dtype}, the dtype of x")


def check_choices(activation: Any, zero_centered: Any) -> None:
    """Checks of what is chosen from a few."""
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise OptionError("activation", repr(activation), " or ".join(map(repr, ACTIVATIONS)))
    if not isinstance(zero_centered, bool):
        raise OptionError("zero_centered", repr(zero_centered), "True or False")
