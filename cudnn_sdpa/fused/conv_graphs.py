"""The graphs of convolution, forward and backward, with their references. All tensors have their channels innermost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.fused.checks import widened
from cudnn_sdpa.fused.graph_op import graph_op
from cudnn_sdpa.fused.torch_ops import Outputs
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol

Sizes = tuple[int, ...]

#: Activations that can be fused after a convolution.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


def channels_last(x: Tensor) -> Tensor:
    """The tensor with channels innermost in memory, as cuDNN reads it; copied if they are not."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def as_2d(
    rank: int, x: Tensor, weight: Tensor, sizes: dict[str, Sizes]
) -> tuple[tuple[Tensor, Tensor], dict[str, Sizes]]:
    """1-D convolutions as images of one row, since cuDNN needs at least 2-D; other ranks unchanged."""
    return (as_one_2d(rank, x), as_one_2d(rank, weight)), geometry_2d(rank, sizes)


def as_one_2d(rank: int, tensor: Tensor) -> Tensor:
    """`as_2d` for one tensor."""
    return tensor.unsqueeze(2) if rank == 1 else tensor


def geometry_2d(rank: int, sizes: dict[str, Sizes]) -> dict[str, Sizes]:
    """`as_2d` for stride, padding and dilation."""
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
    vector = None if bias is None else widened(bias.flatten())
    groups = x.shape[1] // weight.shape[1]
    # Row-major copies: oneDNN misreads filters in channels_last_3d with strides of size-1 dimensions (PyTorch 2.13).
    x_copy, filters = (widened(tensor).clone(memory_format=torch.contiguous_format) for tensor in (x, weight))
    y = convolve(x_copy, filters, vector, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return channels_last(ACTIVATIONS[activation](y).to(x.dtype))


# Gradients are computed in float64: in float32, oneDNN writes past the end of tensors if a filter is smaller than its
# stride (seen with PyTorch 2.13).


def _dgrad_reference(grad: Tensor, weight: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    conv_input = torch.nn.grad.conv2d_input if grad.dim() == 4 else torch.nn.grad.conv3d_input  # type: ignore[attr-defined]
    grad_x = conv_input(shape, weight.double(), grad.double(), **sizes, groups=shape[1] // weight.shape[1])
    return channels_last(grad_x.to(grad.dtype))


def _wgrad_reference(grad: Tensor, x: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    conv_weight = torch.nn.grad.conv2d_weight if grad.dim() == 4 else torch.nn.grad.conv3d_weight  # type: ignore[attr-defined]
    grad_weight = conv_weight(x.double(), shape, grad.double(), **sizes, groups=x.shape[1] // shape[1])
    return channels_last(grad_weight.to(grad.dtype))


def _geometry(stride: Sizes, padding: Sizes, dilation: Sizes) -> dict[str, list[int]]:
    pads = list(padding)
    return {"pre_padding": pads, "post_padding": pads, "stride": list(stride), "dilation": list(dilation)}


def _dgrad_backward(
    grads: Sequence[Tensor],
    operands: Sequence[Tensor],
    results: Outputs,
    *,
    needs: tuple[bool, bool],
    shape: Sizes,
    **sizes: Sizes,
) -> tuple[Tensor | None, Tensor | None]:
    del results, shape
    grad, weight = operands
    needs_grad_grad, needs_grad_weight = needs
    grad_grad = convolution(channels_last(grads[0]), weight, **sizes, activation=None) if needs_grad_grad else None
    if not needs_grad_weight:
        return grad_grad, None
    return grad_grad, conv_wgrad(grad, channels_last(grads[0]), shape=tuple(weight.shape), **sizes)


@graph_op(reference=_dgrad_reference, backward=_dgrad_backward, keeps_results=False)
def conv_dgrad(
    g: GraphBuilder, grad: Symbol, weight: Symbol, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Symbol:
    """The gradient of the input of a convolution; `shape` is its shape."""
    del shape  # the key has it
    return g.conv_dgrad(loss=grad, filter=weight, **_geometry(stride, padding, dilation))


def _wgrad_backward(
    grads: Sequence[Tensor],
    operands: Sequence[Tensor],
    results: Outputs,
    *,
    needs: tuple[bool, bool],
    shape: Sizes,
    **sizes: Sizes,
) -> tuple[Tensor | None, Tensor | None]:
    del results, shape
    grad, x = operands
    needs_grad_grad, needs_grad_x = needs
    grad_grad = convolution(x, channels_last(grads[0]), **sizes, activation=None) if needs_grad_grad else None
    if not needs_grad_x:
        return grad_grad, None
    return grad_grad, conv_dgrad(grad, channels_last(grads[0]), shape=tuple(x.shape), **sizes)


@graph_op(reference=_wgrad_reference, backward=_wgrad_backward, keeps_results=False)
def conv_wgrad(
    g: GraphBuilder, grad: Symbol, x: Symbol, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Symbol:
    """The gradient of the weight of a convolution; `shape` is its shape."""
    del shape  # the key has it
    return g.conv_wgrad(image=x, loss=grad, **_geometry(stride, padding, dilation))


def gradients_of(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    *,
    shapes: Sequence[Sizes],
    needs: tuple[bool, bool, bool],
    **sizes: Sizes,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The needed gradients of x, weight and bias; that of x does not read x, that of the weight not the weight.

    Args:
        grad: The gradient of the result.
        x: x, if the gradient of the weight is needed.
        weight: The weight, if the gradient of x is needed.
        shapes: Shapes of x and the weight.
        needs: Whether the gradients of x, weight and bias are needed.
        **sizes: Stride, padding and dilation.
    """
    grad_x = grad_weight = grad_bias = None
    needs_grad_x, needs_grad_weight, needs_grad_bias = needs
    shape_x, shape_weight = shapes
    if needs_grad_x:
        assert weight is not None
        grad_x = conv_dgrad(grad, channels_last(weight), shape=shape_x, **sizes)
    if needs_grad_weight:
        assert x is not None
        grad_weight = conv_wgrad(grad, channels_last(x), shape=shape_weight, **sizes)
    if needs_grad_bias:
        grad_bias = grad.sum((0, *range(2, grad.dim())), keepdim=True)
    return grad_x, grad_weight, grad_bias


def _backward(
    grads: Sequence[Tensor],
    operands: Sequence[Tensor],
    outputs: Outputs,
    *,
    needs: tuple[bool, bool, bool],
    activation: str | None,
    **sizes: Sizes,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    del outputs
    x, weight, _ = operands
    assert activation is None
    shapes = tuple(x.shape), tuple(weight.shape)
    return gradients_of(channels_last(grads[0]), x, weight, shapes=shapes, needs=needs, **sizes)


@graph_op(reference=_reference, backward=_backward, keeps_results=False)
def convolution(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol,
    bias: Symbol | None = None,
    *,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    activation: str | None,
) -> Symbol:
    """activation(x * weight + bias); the bias is (1, K, 1, 1) or (1, K, 1, 1, 1)."""
    y = g.conv_fprop(image=x, weight=weight, **_geometry(stride, padding, dilation))
    if bias is not None:
        y = g.bias(input=y, bias=bias)
    if activation is None:
        return y
    return {"relu": g.relu, "silu": g.swish, "gelu": g.gelu}[activation](input=y)


for _function in (convolution, conv_dgrad, conv_wgrad):
    _function.channels_last = True
