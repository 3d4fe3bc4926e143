"""The graphs of convolution, forward and backward, with their references. All tensors have their channels innermost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.graph_op import graph_op

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


def as_2d(
    rank: int, x: Tensor, weight: Tensor, sizes: dict[str, Sizes]
) -> tuple[tuple[Tensor, Tensor], dict[str, Sizes]]:
    """The rank that cuDNN reads: 1-D convolutions as images of one row."""
    return (as_one_2d(rank, x), as_one_2d(rank, weight)), geometry_2d(rank, sizes)


def as_one_2d(rank: int, tensor: Tensor) -> Tensor:
    """A tensor as cuDNN reads it."""
    return tensor.unsqueeze(2) if rank == 1 else tensor


def geometry_2d(rank: int, sizes: dict[str, Sizes]) -> dict[str, Sizes]:
    """Stride, padding and dilation as cuDNN reads them."""
    if rank > 1:
        return sizes
    return {name: (0 if name == "padding" else 1, *pair) for name, pair in sizes.items()}


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
    of_bias = None if bias is None else widened(bias.flatten())
    groups = x.shape[1] // weight.shape[1]
    # Row-major copies: oneDNN misreads filters in channels_last_3d by the strides of their sizes of 1 (PyTorch 2.13).
    x_copy, filters = (widened(tensor).clone(memory_format=torch.contiguous_format) for tensor in (x, weight))
    y = convolve(x_copy, filters, of_bias, stride, padding, dilation, groups)
    return channels_last(ACTIVATIONS[activation](y).to(x.dtype))


# Gradients are computed in float64: of float32 oneDNN writes beyond the ends of tensors where filters are smaller than
# their steps (seen with PyTorch 2.13).


def _dgrad_reference(grad: Tensor, weight: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    grad_of = torch.nn.grad.conv2d_input if grad.dim() == 4 else torch.nn.grad.conv3d_input  # type: ignore[attr-defined]
    found = grad_of(shape, weight.double(), grad.double(), **sizes, groups=shape[1] // weight.shape[1])
    return channels_last(found.to(grad.dtype))


def _wgrad_reference(grad: Tensor, x: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    grad_of = torch.nn.grad.conv2d_weight if grad.dim() == 4 else torch.nn.grad.conv3d_weight  # type: ignore[attr-defined]
    found = grad_of(x.double(), shape, grad.double(), **sizes, groups=x.shape[1] // shape[1])
    return channels_last(found.to(grad.dtype))


def _geometry(stride: Sizes, padding: Sizes, dilation: Sizes) -> dict[str, list[int]]:
    pads = list(padding)
    return {"pre_padding": pads, "post_padding": pads, "stride": list(stride), "dilation": list(dilation)}


def _dgrad_backward(
    grads: Any, operands: Any, results: Any, *, needs: tuple[bool, ...], shape: Sizes, **sizes: Sizes
) -> Any:
    del results, shape
    grad, weight = operands
    of_grad = convolution(channels_last(grads[0]), weight, **sizes, activation=None) if needs[0] else None
    if not needs[1]:
        return of_grad, None
    return of_grad, conv_wgrad(grad, channels_last(grads[0]), shape=tuple(weight.shape), **sizes)


@graph_op(reference=_dgrad_reference, backward=_dgrad_backward, keeps_results=False)
def conv_dgrad(g: Any, grad: Any, weight: Any, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Any:
    """The gradient of a convolution by its input, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_dgrad(loss=grad, filter=weight, **_geometry(stride, padding, dilation))


def _wgrad_backward(
    grads: Any, operands: Any, results: Any, *, needs: tuple[bool, ...], shape: Sizes, **sizes: Sizes
) -> Any:
    del results, shape
    grad, x = operands
    of_grad = convolution(x, channels_last(grads[0]), **sizes, activation=None) if needs[0] else None
    if not needs[1]:
        return of_grad, None
    return of_grad, conv_dgrad(grad, channels_last(grads[0]), shape=tuple(x.shape), **sizes)


@graph_op(reference=_wgrad_reference, backward=_wgrad_backward, keeps_results=False)
def conv_wgrad(g: Any, grad: Any, x: Any, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Any:
    """The gradient of a convolution by its weight, whose shape is `shape`."""
    del shape  # the key has it
    return g.conv_wgrad(image=x, loss=grad, **_geometry(stride, padding, dilation))


def gradients_of(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    *,
    shapes: Sequence[Sizes],
    needs: tuple[bool, ...],
    **sizes: Sizes,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by x, weight and bias that are wanted; that by x needs no x, and that by the weight no weight."""
    grad_x = grad_weight = None
    if needs[0]:
        assert weight is not None
        grad_x = conv_dgrad(grad, channels_last(weight), shape=shapes[0], **sizes)
    if needs[1]:
        assert x is not None
        grad_weight = conv_wgrad(grad, channels_last(x), shape=shapes[1], **sizes)
    return grad_x, grad_weight, grad.sum((0, *range(2, grad.dim())), keepdim=True) if needs[2] else None


def _backward(
    grads: Any, operands: Any, outputs: Any, *, needs: tuple[bool, ...], activation: str | None, **sizes: Sizes
) -> Any:
    del outputs
    x, weight, _ = operands
    assert activation is None
    shapes = tuple(x.shape), tuple(weight.shape)
    return gradients_of(channels_last(grads[0]), x, weight, shapes=shapes, needs=needs, **sizes)


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


for _function in (convolution, conv_dgrad, conv_wgrad):
    _function.channels_last = True
