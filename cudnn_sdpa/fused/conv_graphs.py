"""Graphs of convolution, forward and backward, with their checks and references.

All tensors have their channels innermost. cuDNN needs at least two dimensions, so its plans run 1-D convolutions as 2-D
ones on images of one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, sharding
from cudnn_sdpa.errors import LayoutError, OptionError, ShapeError
from cudnn_sdpa.fused.checks import check_activation, check_beside, check_dtype, shown, widened
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import GraphCall, Outputs, Views, graph_op
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.graph.scalars import as_index, check_known, is_compiling, is_integer, is_true

Sizes = tuple[int, ...]

#: Activations that can be fused after a convolution.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


#: Sizes are 32-bit integers in cuDNN and in PyTorch.
MAX_SIZE = 2**31 - 1


def check_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, groups: object, activation: object, **sizes: Sizes
) -> None:
    """Checks all arguments but the sizes themselves, which `sizes_of` has checked."""
    padding, dilation = sizes["padding"], sizes["dilation"]
    rank = len(padding)
    check_dtype("x", x)
    check_beside("weight", weight, "x", x)
    if bias is not None:
        check_beside("bias", bias, "x", x, shape=weight.shape[:1])
    check_known("groups", groups)
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise OptionError("groups", shown(groups), "an int of at least 1")
    if x.dim() != rank + 2:
        raise ShapeError("x", f"shape {tuple(x.shape)}", f"{rank + 2} dimensions: batch, channels, then {rank} more")
    if weight.dim() != rank + 2 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        got = f"shape {tuple(weight.shape)} with {shown(groups)} groups"
        expected = f"(filters, channels / groups, then {rank} filter sizes) for x of shape {tuple(x.shape)}"
        raise ShapeError("weight", got, expected)
    for name, tensor, shape in (("x", x, x.shape[1:]), ("weight", weight, weight.shape)):
        if 0 in shape:
            raise ShapeError(name, f"shape {tuple(tensor.shape)}", "sizes of at least 1")
    autograd_checks.refuse_transforms(f"conv{rank}d", x, weight, bias, loops=False)
    check_activation(activation, ACTIVATIONS)
    for length, size, zeros, spacing in zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if is_true(length + 2 * zeros > MAX_SIZE):
            raise OptionError("padding", str(zeros), f"no more than {MAX_SIZE} elements including padding")
        extent = (size - 1) * spacing + 1
        if is_true(length + 2 * zeros < extent):
            got = f"{length} with {zeros} padding on both sides"
            raise LayoutError("x", got, f"at least {extent}, the extent of the filter", "Pad x.")


def sizes_of(rank: int, stride: object, padding: object, dilation: object) -> dict[str, Sizes]:
    return {
        "stride": _sizes("stride", stride, rank, 1),
        "padding": _sizes("padding", padding, rank, 0),
        "dilation": _sizes("dilation", dilation, rank, 1),
    }


def _sizes(name: str, value: object, rank: int, minimum: int) -> Sizes:
    if type(value) is int and not is_compiling() and minimum <= value <= MAX_SIZE:
        return (value,) * rank
    value = as_index(value)
    if is_integer(value):
        value = (value,) * rank
    sizes = tuple([as_index(x) for x in value]) if isinstance(value, (tuple, list)) else ()
    if is_compiling() or any(isinstance(x, torch.SymInt) for x in sizes):
        for size in sizes:
            check_known(name, size)
    if len(sizes) != rank or any(not is_integer(x) or is_true(x < minimum) or is_true(x > MAX_SIZE) for x in sizes):
        raise OptionError(name, shown(value), f"an int of at least {minimum}, or {rank} of them, up to {MAX_SIZE}")
    return sizes


def channels_last(x: Tensor) -> Tensor:
    """The tensor with channels innermost in memory, as cuDNN reads it; copied if they are not."""
    if x.dim() == 3:
        return channels_last(x.unsqueeze(2)).squeeze(2)
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _channels_last(*operands: Tensor, **_: object) -> list[Tensor]:
    return [x if x is None else channels_last(x) if x.dim() > 1 else x.contiguous() for x in operands]


def _as_2d(operands: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """Convolutions in cuDNN's form: 1-D ones as images of one row, and a bias (K,) as (1, K, 1, …)."""
    rank = next(x.dim() for x in operands if isinstance(x, Tensor)) - 2

    def viewed(x: Value) -> Value:
        if not isinstance(x, Tensor):
            return x
        if x.dim() == 1:
            return x.view(1, -1, *(1,) * max(rank, 2))
        return x.unsqueeze(2) if rank == 1 else x

    if rank == 1:
        before = {"stride": 1, "padding": 0, "dilation": 1}
        options = {
            name: (before[name], *value) if name in before and isinstance(value, tuple) else value
            for name, value in options.items()
        }
        shape = options.get("shape")
        if isinstance(shape, tuple):  # of x without the batch, or of the weight
            *outer, length = shape
            options["shape"] = *outer, 1, length
    return [viewed(x) for x in operands], [x.unsqueeze(2) if rank == 1 else x for x in results], options


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, groups: int, activation: str | None, **sizes: Sizes
) -> Tensor:
    convolve = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    vector = None if bias is None else widened(bias.flatten())
    # Row-major copies: oneDNN misreads filters in channels_last_3d with strides of size-1 dimensions (PyTorch 2.13).
    x_copy, filters = (widened(tensor).clone(memory_format=torch.contiguous_format) for tensor in (x, weight))
    # Longer strides have the same result, but one of 2**31 - 1 breaks every later call of oneDNN (PyTorch 2.15, AVX2).
    steps = zip(sizes["stride"], x.shape[2:], sizes["padding"], strict=True)
    sizes["stride"] = tuple(min(step, size + 2 * pad) for step, size, pad in steps)
    y = convolve(x_copy, filters, vector, **sizes, groups=groups)
    return channels_last(ACTIVATIONS[activation](y).to(x.dtype))


# Gradients are computed in float64: in float32, oneDNN writes past the end of tensors if a filter is smaller than its
# stride (seen with PyTorch 2.13).


def _dgrad_reference(grad: Tensor, weight: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    channels, shape = shape[0], (grad.shape[0], *shape)
    conv_input = getattr(torch.nn.grad, f"conv{grad.dim() - 2}d_input")  # type: ignore[attr-defined]
    grad_x = conv_input(shape, weight.double(), grad.double(), **sizes, groups=channels // weight.shape[1])
    return channels_last(grad_x.to(grad.dtype))


def _wgrad_reference(grad: Tensor, x: Tensor, *, shape: Sizes, **sizes: Sizes) -> Tensor:
    conv_weight = getattr(torch.nn.grad, f"conv{grad.dim() - 2}d_weight")  # type: ignore[attr-defined]
    grad_weight = conv_weight(x.double(), shape, grad.double(), **sizes, groups=x.shape[1] // shape[1])
    return channels_last(grad_weight.to(grad.dtype))


def along_batch(*operands: str, result: int | str = 0) -> sharding.Strategies:
    return lambda _: [sharding.ShardingStrategy("the batch", dict.fromkeys(operands, 0), (result,))]


def _flops(y: Tensor, shape: Sizes) -> int:
    return 2 * y.numel() * math.prod(shape[1:])


def _forward_flops(*operands: Any, **options: Any) -> int:
    (y,) = convolution.outputs(operands, options)
    return _flops(y, operands[1].shape)


def _geometry(stride: Sizes, padding: Sizes, dilation: Sizes) -> dict[str, list[int]]:
    pads = list(padding)
    return {"pre_padding": pads, "post_padding": pads, "stride": list(stride), "dilation": list(dilation)}


def _derivative(of: str, tensors: Mapping[str, Any], sizes: Mapping[str, Sizes]) -> GraphCall | Tensor:
    """The derivative of sum((x * weight + bias) · grad), which is linear in each of the four, with respect to one.

    So a convolution and its two gradients have one another as gradients. Only the shape of that tensor is read.
    """
    x, weight, grad = (tensors[name] for name in ("x", "weight", "grad"))
    if of == "x":
        return conv_dgrad.call(grad, weight, shape=tuple(x.shape[1:]), **sizes).of(of)
    if of == "weight":
        return conv_wgrad.call(grad, x, shape=tuple(weight.shape), **sizes).of(of)
    if of == "grad":
        groups = x.shape[1] // weight.shape[1]
        return convolution.call(x, weight, **sizes, groups=groups, activation=None).of(of)
    of_bias: Tensor = grad.sum((0, *range(2, grad.dim())))
    return of_bias


def _backward(result: str, *operands: str) -> Callable[..., GraphCall | tuple[Tensor | None, ...]]:
    """The `backward` of the graph function that computes one of these tensors from the others."""

    def backward(
        grads: Sequence[Tensor], given: Sequence[Tensor], _: Outputs, *, needs: Sequence[bool], **options: Any
    ) -> GraphCall | tuple[Tensor | None, ...]:
        assert options.get("activation") is None
        tensors = {**dict(zip(operands, given, strict=True)), result: grads[0]}
        sizes = {name: options[name] for name in ("stride", "padding", "dilation")}
        found = {x: _derivative(x, tensors, sizes) for x, need in zip(operands, needs, strict=True) if need}
        if len(found) == 1 and isinstance(only := next(iter(found.values())), GraphCall):
            return only
        return tuple([x() if isinstance(x, GraphCall) else x for x in map(found.get, operands)])

    return backward


@graph_op(
    reference=_dgrad_reference,
    backward=_backward("x", "grad", "weight"),
    keeps_results=False,
    readable=_channels_last,
    views=_as_2d,
    shard=along_batch("grad"),
    flops=lambda grad, weight, **_: _flops(grad, weight.shape),
)
def conv_dgrad(
    g: GraphBuilder, grad: Symbol, weight: Symbol, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Symbol:
    """The gradient of a convolution's input; `shape` is the input's, without the batch."""
    del shape  # the key has it
    return g.conv_dgrad(loss=grad, filter=weight, **_geometry(stride, padding, dilation))


@graph_op(
    reference=_wgrad_reference,
    backward=_backward("weight", "grad", "x"),
    keeps_results=False,
    readable=_channels_last,
    views=_as_2d,
    shard=along_batch("grad", "x", result=sharding.SUM),
    flops=lambda grad, _, *, shape, **__: _flops(grad, shape),
)
def conv_wgrad(
    g: GraphBuilder, grad: Symbol, x: Symbol, *, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Symbol:
    """The gradient of a convolution's weight; `shape` is the weight's."""
    del shape  # the key has it
    return g.conv_wgrad(image=x, loss=grad, **_geometry(stride, padding, dilation))


@graph_op(
    reference=_reference,
    backward=_backward("grad", "x", "weight", "bias"),
    keeps_results=False,
    check=check_call,
    readable=_channels_last,
    views=_as_2d,
    reads=lambda _, needs: (needs[1], needs[0], False),  # the gradient of x reads the weight, the weight's reads x
    autocast=True,
    shard=along_batch("x"),
    flops=_forward_flops,
)
def convolution(
    g: GraphBuilder,
    x: Symbol,
    weight: Symbol,
    bias: Symbol | None = None,
    *,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    activation: str | None,
) -> Symbol:
    """activation(x * weight + bias)."""
    del groups  # the key has the channels of x and of the weight
    y = g.conv_fprop(image=x, weight=weight, **_geometry(stride, padding, dilation))
    if bias is not None:
        y = g.bias(input=y, bias=bias)
    if activation is None:
        return y
    return {"relu": g.relu, "silu": g.swish, "gelu": g.gelu}[activation](input=y)


for _function in (convolution, conv_dgrad, conv_wgrad):
    _function.channels_last = True
