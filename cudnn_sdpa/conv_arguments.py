"""Checks of what the user passed to a convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_sdpa.attention import tracking
from cudnn_sdpa.conv_graphs import ACTIVATIONS, Sizes
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.fused_dtypes import check_beside, check_dtype, check_kept, shown
from cudnn_sdpa.runtime.symbols import is_true

#: Sizes are 32-bit numbers in cuDNN and in PyTorch.
MOST = 2**31 - 1


def check(rank: int, x: Any, weight: Any, bias: Any, groups: Any) -> None:
    """Checks of all but steps, zeros and distances."""
    check_dtype("x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if name == "bias" and tensor is None:
            continue
        check_beside(name, tensor, "x", x)
        if tensor.dtype != x.dtype:
            raise DtypeError(name, str(tensor.dtype), f"{x.dtype}, the dtype of x")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise OptionError("groups", shown(groups), "an int of at least 1")
    if x.dim() != rank + 2:
        raise ShapeError("x", f"shape {tuple(x.shape)}", f"{rank + 2} dimensions: batch, channels, then {rank} more")
    if weight.dim() != rank + 2 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        got = f"shape {tuple(weight.shape)} with {shown(groups)} groups"
        expected = f"(filters, channels / groups, then {rank} sizes) for x of shape {tuple(x.shape)}"
        raise ShapeError("weight", got, expected)
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError("bias", f"shape {tuple(bias.shape)}", f"shape ({weight.shape[0]},)")
    for name, tensor, shape in (("x", x, x.shape[1:]), ("weight", weight, weight.shape)):
        if 0 in shape:
            raise ShapeError(name, f"shape {tuple(tensor.shape)}", "sizes of at least 1")
    check_kept(x=x, weight=weight, bias=bias)
    tracking.refuse_transforms(f"conv{rank}d", x, weight, bias, loops=False)


def check_extent(x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes) -> None:
    """The filter is not larger than x with its zeros."""
    del stride
    for length, size, zeros, step in zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if is_true(length + 2 * zeros > MOST):
            raise OptionError("padding", str(zeros), f"no more than {MOST} numbers with the zeros on both sides")
        if is_true(length + 2 * zeros < (size - 1) * step + 1):
            got = f"{length} with {zeros} zeros on both sides"
            raise LayoutError("x", got, f"at least {(size - 1) * step + 1}, the extent of the filter", "Pad x.")


def sizes_of(rank: int, stride: Any, padding: Any, dilation: Any) -> dict[str, Sizes]:
    """Steps, zeros and distances, one for each dimension."""
    return {
        "stride": _sizes("stride", stride, rank, least=1),
        "padding": _sizes("padding", padding, rank, least=0),
        "dilation": _sizes("dilation", dilation, rank, least=1),
    }


def _sizes(name: str, value: Any, rank: int, least: int) -> Sizes:
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,) * rank
    sizes = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(sizes) != rank or any(
        isinstance(x, bool) or not isinstance(x, int) or not least <= x <= MOST for x in sizes
    ):
        raise OptionError(name, shown(value), f"an int of at least {least}, or {rank} of them, up to {MOST}")
    return sizes


def check_activation(activation: Any) -> None:
    """One that cuDNN fuses."""
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise OptionError("activation", shown(activation), " or ".join(map(repr, ACTIVATIONS)))
