"""`conv2d`: convolution with bias and activation in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph_function import graph_op

Pair = tuple[int, int]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


def channels_last(x: Tensor) -> Tensor:
    """The tensor with its channels innermost, as cuDNN reads it; a copy if they are not."""
    return x.contiguous(memory_format=torch.channels_last)


def _forward_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    activation: str | None,
) -> Tensor:
    groups = x.shape[1] // weight.shape[1]
    of_bias = None if bias is None else bias.flatten().float()
    y = F.conv2d(x.float(), weight.float(), of_bias, stride, padding, dilation, groups)
    return channels_last(_ACTIVATIONS[activation](y).to(x.dtype))


def _of_x_reference(
    grad: Tensor, weight: Tensor, *, shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    groups = shape[1] // weight.shape[1]
    found = torch.nn.grad.conv2d_input(  # type: ignore[attr-defined]
        shape, weight.float(), grad.float(), stride, padding, dilation, groups
    )
    return channels_last(found.to(grad.dtype))


def _of_weight_reference(
    grad: Tensor, x: Tensor, *, shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    groups = x.shape[1] // shape[1]
    found = torch.nn.grad.conv2d_weight(  # type: ignore[attr-defined]
        x.float(), shape, grad.float(), stride, padding, dilation, groups
    )
    return channels_last(found.to(grad.dtype))


def _geometry(stride: Pair, padding: Pair, dilation: Pair) -> dict[str, list[int]]:
    pads = list(padding)
    return {"pre_padding": pads, "post_padding": pads, "stride": list(stride), "dilation": list(dilation)}


@graph_op(reference=_of_x_reference)
def conv2d_of_x(
    g: Any, grad: Any, weight: Any, *, shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> Any:
    """The gradient of a convolution by its input, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_dgrad(loss=grad, filter=weight, **_geometry(stride, padding, dilation))


@graph_op(reference=_of_weight_reference)
def conv2d_of_weight(
    g: Any, grad: Any, x: Any, *, shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> Any:
    """The gradient of a convolution by its weight, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_wgrad(image=x, loss=grad, **_geometry(stride, padding, dilation))


def _backward(
    grads: tuple[Any, ...], operands: tuple[Any, ...], outputs: Any, *, activation: Any, **of_conv: Any
) -> Any:
    del outputs
    x, weight, bias = operands
    assert activation is None
    grad = channels_last(grads[0])
    of_x = conv2d_of_x(grad, weight, shape=tuple(x.shape), **of_conv)
    of_weight = conv2d_of_weight(grad, x, shape=tuple(weight.shape), **of_conv)
    return of_x, of_weight, None if bias is None else grad.sum((0, 2, 3), keepdim=True)


@graph_op(reference=_forward_reference, backward=_backward)
def conv2d_rows(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    activation: str | None,
) -> Any:
    """activation(x * weight + bias); the bias is (1, C, 1, 1)."""
    y = g.conv_fprop(image=x, weight=weight, **_geometry(stride, padding, dilation))
    if bias is not None:
        y = g.bias(input=y, bias=bias)
    if activation is None:
        return y
    return {"relu": g.relu, "silu": g.swish, "gelu": g.gelu}[activation](input=y)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """A convolution, its bias and its activation in one kernel.

    Args:
        x: (N, C, H, W), float16, bfloat16 or float32. cuDNN reads channels last; other inputs are copied first, which
            takes as long as writing and reading x once.
        weight: (K, C / groups, R, S), likewise.
        bias: (K,).
        stride: Steps, one for both dimensions or one for each.
        padding: Zeros around x.
        dilation: Distances within the filter.
        groups: Groups of channels.
        activation: None, "relu", "silu" or "gelu" (exact). With a gradient it is a kernel of its own.

    Returns:
        (N, K, P, Q), channels last.

    Raises:
        ArgumentError: They do not fit.
        UnsupportedError: cuDNN has no plan for it.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 8, 16, 16), torch.randn(4, 8, 3, 3)
        >>> cudnn_sdpa.conv2d(x, weight, padding=1, activation="silu").shape
        torch.Size([2, 4, 16, 16])
    """
    if x.dtype not in _DTYPES or x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise DtypeError("weight", f"{weight.dtype} beside {x.dtype}", "float16, bfloat16 or float32, the same for all")
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        got = f"shape {tuple(weight.shape)} with {groups} groups"
        raise ShapeError("weight", got, f"(K, C / groups, R, S) for x of shape {tuple(x.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError("bias", f"shape {tuple(bias.shape)}", f"shape ({weight.shape[0]},)")
    if activation not in _ACTIVATIONS:
        raise OptionError("activation", repr(activation), " or ".join(map(repr, _ACTIVATIONS)))
    of_conv = {
        "stride": _pair("stride", stride, least=1),
        "padding": _pair("padding", padding, least=0),
        "dilation": _pair("dilation", dilation, least=1),
    }
    tensors = (x, weight) if bias is None else (x, weight, bias)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    fused = None if trains else activation
    rows = None if bias is None else bias.view(1, -1, 1, 1)
    y: Tensor = conv2d_rows(channels_last(x), channels_last(weight), rows, **of_conv, activation=fused)
    return _ACTIVATIONS[activation](y) if trains else y


def _pair(name: str, value: Any, least: int) -> Pair:
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < least for x in pair):
        raise OptionError(name, repr(value), f"an int of at least {least}, or two")
    return pair
