"""`conv1d`, `conv2d` and `conv3d`: convolution with bias and activation in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import cast_tensor
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, readable
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.checks import check_dtype, check_same_device, check_savable, shown
from cudnn_sdpa.fused.conv_graphs import (
    ACTIVATIONS,
    Sizes,
    as_2d,
    as_one_2d,
    channels_last,
    convolution,
    geometry_2d,
    gradients_of,
)
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.torch_ops import Options
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_true

#: Sizes are 32-bit integers in cuDNN and in PyTorch.
MAX_SIZE = 2**31 - 1


def check(rank: int, *, x: Tensor, weight: Tensor, bias: Tensor | None, groups: object) -> None:
    """Checks everything except stride, padding and dilation."""
    check_dtype("x", x)
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, tensor in others.items():
        check_same_device(name, tensor, "x", x)
        if tensor.dtype != x.dtype:
            raise DtypeError(name, str(tensor.dtype), f"{x.dtype}, the dtype of x")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise OptionError("groups", shown(groups), "an int of at least 1")
    if x.dim() != rank + 2:
        raise ShapeError("x", f"shape {tuple(x.shape)}", f"{rank + 2} dimensions: batch, channels, then {rank} more")
    if weight.dim() != rank + 2 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        got = f"shape {tuple(weight.shape)} with {shown(groups)} groups"
        expected = f"(filters, channels / groups, then {rank} filter sizes) for x of shape {tuple(x.shape)}"
        raise ShapeError("weight", got, expected)
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError("bias", f"shape {tuple(bias.shape)}", f"shape ({weight.shape[0]},)")
    for name, tensor, shape in (("x", x, x.shape[1:]), ("weight", weight, weight.shape)):
        if 0 in shape:
            raise ShapeError(name, f"shape {tuple(tensor.shape)}", "sizes of at least 1")
    check_savable(x=x, weight=weight, bias=bias)
    autograd_checks.refuse_transforms(f"conv{rank}d", x, weight, bias, loops=False)


def check_extent(x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes) -> None:
    """Checks that the filter is not larger than the padded x."""
    del stride
    for length, size, zeros, spacing in zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if is_true(length + 2 * zeros > MAX_SIZE):
            raise OptionError("padding", str(zeros), f"no more than {MAX_SIZE} elements including padding")
        extent = (size - 1) * spacing + 1
        if is_true(length + 2 * zeros < extent):
            got = f"{length} with {zeros} padding on both sides"
            raise LayoutError("x", got, f"at least {extent}, the extent of the filter", "Pad x.")


def sizes_of(rank: int, *, stride: object, padding: object, dilation: object) -> dict[str, Sizes]:
    """Stride, padding and dilation, one value per dimension."""
    return {
        "stride": _sizes("stride", stride, rank, minimum=1),
        "padding": _sizes("padding", padding, rank, minimum=0),
        "dilation": _sizes("dilation", dilation, rank, minimum=1),
    }


def _sizes(name: str, value: object, rank: int, *, minimum: int) -> Sizes:
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value,) * rank
    sizes = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(sizes) != rank or any(
        isinstance(x, bool) or not isinstance(x, int) or not minimum <= x <= MAX_SIZE for x in sizes
    ):
        raise OptionError(name, shown(value), f"an int of at least {minimum}, or {rank} of them, up to {MAX_SIZE}")
    return sizes


def check_activation(activation: object) -> None:
    if not isinstance(activation, (str, type(None))) or activation not in ACTIVATIONS:
        raise OptionError("activation", shown(activation), " or ".join(map(repr, ACTIVATIONS)))


_SIZE_TYPES = (int, tuple)

#: Channels in 16 bytes of bfloat16.
_CHANNELS_PER_LOAD = 8

#: trains, rank, stride, padding, dilation, groups, activation: a plain tuple, 0.5 µs faster to make than a named one.
_Options: TypeAlias = tuple[bool, int, object, object, object, int, str | None]

_calls = FastPath()


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """activation(x * weight + bias), a convolution with bias and activation in one kernel. Differentiable.

    cuDNN reads and writes channels-last tensors. Others are copied in every call, which takes as long as reading and
    writing them once: keep x and weight in `torch.channels_last`, a module with
    `module.to(memory_format=torch.channels_last)`.

    If the stride equals the filter size, as in the patch embedding of a vision transformer, the convolution is a matrix
    product: one copy gathers the patches, and PyTorch multiplies them.

    Args:
        x: (N, C, H, W), float16, bfloat16 or float32. cuDNN multiplies float32 in TF32, as PyTorch does by default; if
            `torch.backends.cudnn.allow_tf32` is False, float32 raises. On the CPU also float64.
        weight: (K, C / groups, R, S), of x's dtype.
        bias: (K,), of x's dtype.
        stride: Stride, one for both dimensions or one for each.
        padding: Zero padding around x.
        dilation: Spacing of the filter's elements.
        groups: Groups of channels.
        activation: None, "relu", "silu" or "gelu" (with erf). It runs as a separate kernel if a tensor requires a
            gradient. Except for ReLU after a bias, it also does if every channel is a group, or if there is only one
            filter.

    Returns:
        (N, K, P, Q), channels last.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> x, weight = torch.randn(2, 8, 16, 16), torch.randn(4, 8, 3, 3)
        >>> cudnn_sdpa.conv2d(x, weight, padding=1, activation="silu").shape
        torch.Size([2, 4, 16, 16])
    """
    return _convolve(
        rank=2,
        x=x,
        weight=weight,
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=activation,
    )


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """`conv2d` in one dimension.

    Args:
        x: (N, C, L). It is not copied if channels are innermost, as in `y.transpose(1, 2)` of y (N, L, C).
        weight: (K, C / groups, R).
        bias: (K,).
        stride: Stride.
        padding: Zero padding around x.
        dilation: Spacing of the filter's elements.
        groups: Groups of channels.
        activation: As for `conv2d`.

    Returns:
        (N, K, P), channels innermost in memory.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.conv1d(torch.randn(2, 8, 30), torch.randn(4, 8, 3), padding=1).shape
        torch.Size([2, 4, 30])
    """
    return _convolve(
        rank=1,
        x=x,
        weight=weight,
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=activation,
    )


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int, int] = 1,
    padding: int | tuple[int, int, int] = 0,
    dilation: int | tuple[int, int, int] = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """`conv2d` in three dimensions.

    Args:
        x: (N, C, D, H, W).
        weight: (K, C / groups, Q, R, S).
        bias: (K,).
        stride: Stride, one for all dimensions or one for each.
        padding: Zero padding around x.
        dilation: Spacing of the filter's elements.
        groups: Groups of channels.
        activation: As for `conv2d`.

    Returns:
        (N, K, O, P, Q), channels innermost in memory.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it on this GPU.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.conv3d(torch.randn(1, 8, 4, 6, 6), torch.randn(4, 8, 3, 3, 3)).shape
        torch.Size([1, 4, 2, 4, 4])
    """
    return _convolve(
        rank=3,
        x=x,
        weight=weight,
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=activation,
    )


def _convolve(
    *,
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: object,
    padding: object,
    dilation: object,
    groups: int,
    activation: str | None,
) -> Tensor:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    stride, padding, dilation = (
        tuple(size) if isinstance(size, list) else size for size in (stride, padding, dilation)
    )
    is_hashable = (
        type(stride) in _SIZE_TYPES
        and type(padding) in _SIZE_TYPES
        and type(dilation) in _SIZE_TYPES
        and type(groups) is int
    )
    options: _Options | None = None
    if is_hashable and not is_compiling():  # a repeated call? Saves checks and views, 30 µs
        try:
            trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        except AttributeError:  # not tensors: the checks raise
            trains = False
        options = (trains, rank, stride, padding, dilation, groups, activation)
        call = _calls.find(tensors, options, trains=trains)
        if call is not None and _may_be_tf32(x):
            return _run(call, tensors, options)
    return _checked(
        tensors,
        rank=rank,
        geometry={"stride": stride, "padding": padding, "dilation": dilation},
        groups=groups,
        activation=activation,
        options=options,
    )


def _checked(
    tensors: Sequence[Tensor],
    *,
    rank: int,
    geometry: dict[str, object],
    groups: int,
    activation: str | None,
    options: _Options | None,
) -> Tensor:
    """An unchecked call; with `options`, later calls like it take the fast path."""
    x, weight, *rest = _cast_for_autocast(*tensors)
    bias = rest[0] if rest else None
    check(rank, x=x, weight=weight, bias=bias, groups=groups)
    if x.is_cuda and not _may_be_tf32(x):
        reasons = ["cuDNN multiplies float32 in TF32 here, and torch.backends.cudnn.allow_tf32 is False"]
        raise UnsupportedError("a convolution of float32", reasons, "bfloat16 or float16, or PyTorch's own functions")
    check_activation(activation)
    sizes = sizes_of(rank, **geometry)
    check_extent(x, weight, **sizes)
    if not torch.compiler.is_compiling() and x.shape[0] == 0:  # only autograd has something to do
        torch_conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        return ACTIVATIONS[activation](torch_conv(x, weight, bias, **sizes, groups=groups))
    if rank == 2 and groups == 1 and is_patch_embedding(x, weight, **sizes):
        return ACTIVATIONS[activation](_patch_embedding(x, weight, bias))
    (x, weight), sizes = as_2d(rank, x, weight, sizes)
    column = None if bias is None else bias.contiguous().view(1, -1, *(1,) * (x.dim() - 2))
    operands = channels_last(x), channels_last(weight), column
    is_separate = needs_gradient(*tensors) or has_separate_activation(tensors, groups, activation)
    static = {**sizes, "activation": None if is_separate else activation}
    in_place = operands[0] is x and operands[1] is weight and (bias is None or bias.is_contiguous())
    if options is not None and x.is_cuda and in_place and can_bypass_dispatcher(*tensors):
        call = _bind(rank, operands, static)
        _calls.add(tensors, options, call)
        return _run(call, tensors, options)
    y: Tensor = convolution(*operands, **static)
    y = y.squeeze(2) if rank == 1 else y
    return ACTIVATIONS[activation](y) if is_separate else y


def _bind(rank: int, operands: Sequence[Tensor | None], static: Options) -> GraphCall:
    """The bound call, for tensors of the user's rank."""
    call = torch_ops.prepared(convolution, operands, static)
    if rank > 1:
        return call
    with torch.no_grad():
        line = convolution.outputs(operands, static)[0].squeeze(2)
    return call.shaped((tuple(line.shape), line.stride(), line.dtype))


def _run(call: GraphCall, tensors: Sequence[Tensor], options: _Options) -> Tensor:
    """A call whose arguments are checked and have the layouts that cuDNN reads."""
    trains, rank, stride, padding, dilation, groups, activation = options
    if trains:
        geometry = {"stride": stride, "padding": padding, "dilation": dilation}
        y: Tensor = _Convolution.apply(call, rank, geometry, *tensors)  # type: ignore[no-untyped-call]
    else:
        x, weight, *biases = tensors
        y = call(tensors)[0] if biases else call.run_binary(x, weight)
    return ACTIVATIONS[activation](y) if trains or has_separate_activation(tensors, groups, activation) else y


class _Convolution(torch.autograd.Function):
    """A convolution under autograd, in eager mode: saves only what the needed gradients read."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, rank: int, geometry: dict[str, object], *tensors: Tensor) -> Tensor:
        x, weight, *_ = tensors
        _, _, _, needs_grad_x, needs_grad_weight, *_ = ctx.needs_input_grad  # call, rank, geometry, then the tensors
        ctx.save_for_backward(x if needs_grad_weight else None, weight if needs_grad_x else None)
        ctx.rank, ctx.geometry, ctx.shapes = rank, geometry, (x.shape, weight.shape)
        return call(tensors)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, shapes = ctx.rank, ctx.shapes
        x, weight = (None if part is None else as_one_2d(rank, part) for part in ctx.saved_tensors)
        sizes = geometry_2d(rank, sizes_of(rank, **ctx.geometry))
        shapes = [(*shape[:2], 1, *shape[2:]) if rank == 1 else tuple(shape) for shape in shapes]
        _, _, _, needs_grad_x, needs_grad_weight, *needs_grad_bias = ctx.needs_input_grad
        needs = (needs_grad_x, needs_grad_weight, any(needs_grad_bias))
        goes_through_dispatcher = needs_operator(grad)
        grad = channels_last(as_one_2d(rank, grad))
        grad = grad if goes_through_dispatcher else readable(grad)
        grad_x, grad_weight, grad_bias = gradients_of(grad, x, weight, shapes=shapes, needs=needs, **sizes)
        if rank == 1:
            grad_x, grad_weight = (None if part is None else part.squeeze(2) for part in (grad_x, grad_weight))
        grad_biases = [None if grad_bias is None else grad_bias.flatten() for _ in needs_grad_bias]
        return None, None, None, grad_x, grad_weight, *grad_biases


def _cast_for_autocast(*tensors: object) -> tuple[Any, ...]:
    """Tensors as autocast, if it is on, casts them for PyTorch's convolutions."""
    first = tensors[0]
    if not isinstance(first, Tensor):  # the checks raise
        return tensors
    return tuple([cast_tensor(x, first) if isinstance(x, Tensor) else x for x in tensors])


def _may_be_tf32(x: Tensor) -> bool:
    if x.dtype is not torch.float32:
        return True
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # PyTorch's newer setting is in use, and the older one may no longer be read
        return str(torch.backends.cudnn.conv.fp32_precision) != "ieee"  # type: ignore[attr-defined]


def has_separate_activation(tensors: Sequence[Tensor], groups: int, activation: str | None) -> bool:
    """Whether cuDNN may lack a kernel that fuses the activation, according to plans for five generations of GPUs.

    cuDNN 9.19 has none on an H200 for groups of channels that do not fill one 16-byte load.
    """
    if activation is None:
        return False
    x, weight, *biases = tensors
    if activation == "relu" and biases:
        return False
    if weight.shape[0] == 1 or 1 < groups == x.shape[1]:
        return True
    return groups > 1 and weight.shape[1] % _CHANNELS_PER_LOAD != 0


def is_patch_embedding(x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes) -> bool:
    """Whether every element of x is in exactly one patch."""
    size = tuple(weight.shape[2:])
    if stride != size or size == (1, 1) or any(padding) or dilation != (1, 1):
        return False  # before the lengths of x are compared, which would make torch.compile guard on them
    return all(length % patch == 0 for length, patch in zip(x.shape[2:], size, strict=True))


def _patch_embedding(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride equals its filter size, as a matrix product of patches and filters."""
    batch, channels, height, width = x.shape
    filters, _, r, s = weight.shape
    rows, columns = height // r, width // s
    if x.is_contiguous():  # patches in the weight's order: channels outermost
        split = x.view(batch, channels, rows, r, columns, s)
        patches = split.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, columns, channels * r * s)
        matrix = weight.reshape(filters, -1)
    else:
        split = channels_last(x).permute(0, 2, 3, 1).reshape(batch, rows, r, columns, s * channels)
        patches = split.transpose(2, 3).reshape(batch, rows, columns, channels * r * s)
        matrix = weight.permute(0, 2, 3, 1).reshape(filters, -1)
    return F.linear(patches, matrix, bias).permute(0, 3, 1, 2)
