"""The graphs of convolution, forward and backward, with their references. All tensors have their channels innermost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.graphs.function import graph_op

Sizes = tuple[int, ...]

#: What may be fused after a convolution.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


def channels_last(x: Tensor) -> Tensor:
    """The tensor with its channels innermost, as cuDNN reads it; a copy if they are not."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    activation: str | None,
) -> Tensor:
    convolve = F.conv2d if x.dim() == 4 else F.conv3d
    of_bias = None if bias is None else bias.flatten().float()
    groups = x.shape[1] // weight.shape[1]
    y = convolve(x.float(), weight.float(), of_bias, stride, padding, dilation, groups)
    return channels_last(ACTIVATIONS[activation](y).to(x.dtype))


def _of_x_reference(grad: Tensor, weight: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    grad_of = torch.nn.grad.conv2d_input if grad.dim() == 4 else torch.nn.grad.conv3d_input  # type: ignore[attr-defined]
    found = grad_of(shape, weight.float(), grad.float(), **sizes, groups=shape[1] // weight.shape[1])
    return channels_last(found.to(grad.dtype))


def _of_weight_reference(grad: Tensor, x: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    grad_of = torch.nn.grad.conv2d_weight if grad.dim() == 4 else torch.nn.grad.conv3d_weight  # type: ignore[attr-defined]
    found = grad_of(x.float(), shape, grad.float(), **sizes, groups=x.shape[1] // shape[1])
    return channels_last(found.to(grad.dtype))


def _geometry(stride: Sizes, padding: Sizes, dilation: Sizes) -> dict[str, list[int]]:
    pads = list(padding)
    return {"pre_padding": pads, "post_padding": pads, "stride": list(stride), "dilation": list(dilation)}


@graph_op(reference=_of_x_reference)
def convolution_of_x(
    g: Any, grad: Any, weight: Any, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Any:
    """The gradient of a convolution by its input, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_dgrad(loss=grad, filter=weight, **_geometry(stride, padding, dilation))


@graph_op(reference=_of_weight_reference)
def convolution_of_weight(
    g: Any, grad: Any, x: Any, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Any:
    """The gradient of a convolution by its weight, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_wgrad(image=x, loss=grad, **_geometry(stride, padding, dilation))


def _backward(
    grads: Any, operands: Any, outputs: Any, *, needs: tuple[bool, ...], activation: str | None, **sizes: Sizes
) -> Any:
    del outputs
    x, weight, bias = operands
    assert activation is None
    grad = channels_last(grads[0])
    of_x = convolution_of_x(grad, weight, shape=tuple(x.shape), **sizes) if needs[0] else None
    of_weight = convolution_of_weight(grad, x, shape=tuple(weight.shape), **sizes) if needs[1] else None
    spatial = tuple(range(2, x.dim()))
    return of_x, of_weight, None if bias is None or not needs[2] else grad.sum((0, *spatial), keepdim=True)


@graph_op(reference=_reference, backward=_backward, keeps_results=False)
def convolution(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    activation: str | None,
) -> Any:
    """activation(x * weight + bias); the bias is (1, K, 1, 1) or (1, K, 1, 1, 1)."""
    y = g.conv_fprop(image=x, weight=weight, **_geometry(stride, padding, dilation))
    if bias is not None:
        y = g.bias(input=y, bias=bias)
    if activation is None:
        return y
    return {"relu": g.relu, "silu": g.swish, "gelu": g.gelu}[activation](input=y)
