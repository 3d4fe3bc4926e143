"""`conv1d`, `conv2d` and `conv3d`: convolution with bias and activation in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import cast_tensor
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import GraphCall, readable
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.checks import check_beside, check_dtype, check_kept, shown
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
from cudnn_sdpa.graph.symbolic_shapes import is_compiling, is_true

#: Sizes are 32-bit numbers in cuDNN and in PyTorch.
MOST = 2**31 - 1


def check(rank: int, x: Any, weight: Any, bias: Any, groups: Any) -> None:
    """Checks of everything except stride, padding and dilation."""
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
    autograd_checks.refuse_transforms(f"conv{rank}d", x, weight, bias, loops=False)


def check_extent(x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes) -> None:
    """Checks that the filter is not larger than the padded x."""
    del stride
    for length, size, zeros, step in zip(x.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if is_true(length + 2 * zeros > MOST):
            raise OptionError("padding", str(zeros), f"no more than {MOST} elements including padding")
        if is_true(length + 2 * zeros < (size - 1) * step + 1):
            got = f"{length} with {zeros} padding on both sides"
            raise LayoutError("x", got, f"at least {(size - 1) * step + 1}, the extent of the filter", "Pad x.")


def sizes_of(rank: int, stride: Any, padding: Any, dilation: Any) -> dict[str, Sizes]:
    """Stride, padding and dilation, one value per dimension."""
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


_SIZES = (int, tuple)

#: Channels in 16 bytes of bfloat16.
_CHANNELS_OF_A_GROUP = 8

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
    """activation(x * weight + bias), a convolution with its bias and its activation in one kernel. Differentiable.

    cuDNN reads and writes channels-last tensors. Others are copied first in every call, which takes as long as reading
    and writing them once: keep both in `torch.channels_last`, a module with
    `module.to(memory_format=torch.channels_last)`.

    If the stride equals the filter size, as in the patch embedding of a vision transformer, the convolution is a matrix
    product: one copy gathers the patches, and PyTorch multiplies.

    Args:
        x: (N, C, H, W), float16, bfloat16 or float32, which cuDNN multiplies in TF32, as PyTorch does by default; where
            `torch.backends.cudnn.allow_tf32` forbids that, it raises. On the CPU float64, too.
        weight: (K, C / groups, R, S), of x's dtype.
        bias: (K,), of x's dtype.
        stride: Stride, one for both dimensions or one for each.
        padding: Zero padding around x.
        dilation: Spacing of the filter's elements.
        groups: Groups of channels.
        activation: None, "relu", "silu" or "gelu" (by the error function). A kernel of its own with a gradient; where
            every channel is a group or there is but one filter, too, unless it is ReLU behind a bias.

    Returns:
        (N, K, P, Q), channels last.

    Raises:
        ArgumentError: They do not fit.
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
    """The same in one dimension.

    Args:
        x: (N, C, L). Without a copy if its channels lie together, as in `y.transpose(1, 2)` of y (N, L, C).
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
        ArgumentError: They do not fit.
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
    """The same in three dimensions.

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
        ArgumentError: They do not fit.
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
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    activation: str | None,
) -> Tensor:
    given = (x, weight) if bias is None else (x, weight, bias)
    stride, padding, dilation = (
        tuple(size) if isinstance(size, list) else size for size in (stride, padding, dilation)
    )
    exact = type(stride) in _SIZES and type(padding) in _SIZES and type(dilation) in _SIZES and type(groups) is int
    options: Any = None
    if exact and not is_compiling():  # a call like one before? Saves checks and views, 30 µs
        try:
            trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        except AttributeError:  # no tensors: the checks will say so
            trains = False
        options = (trains, rank, stride, padding, dilation, groups, activation)
        call = _calls.find(given, options, trains=trains)
        if call is not None and _may_be_tf32(x):
            return _straight(call, given, options)
    return _checked(
        rank=rank,
        given=given,
        of_user=(stride, padding, dilation),
        groups=groups,
        activation=activation,
        options=options,
    )


def _checked(rank: int, given: Any, of_user: tuple[Any, ...], groups: Any, activation: Any, options: Any) -> Tensor:
    """An unchecked call; with `options`, later calls like it take the fast path."""
    x, weight, *rest = _cast_for_autocast(*given)
    bias = rest[0] if rest else None
    check(rank, x, weight, bias, groups)
    if x.is_cuda and not _may_be_tf32(x):
        reasons = ["cuDNN multiplies float32 in TF32 here, and torch.backends.cudnn.allow_tf32 is False"]
        raise UnsupportedError("a convolution of float32", reasons, "bfloat16 or float16, or PyTorch's own functions")
    check_activation(activation)
    sizes = sizes_of(rank, *of_user)
    check_extent(x, weight, **sizes)
    if not torch.compiler.is_compiling() and x.shape[0] == 0:  # nothing but what autograd wants to see
        of_torch = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        return ACTIVATIONS[activation](of_torch(x, weight, bias, **sizes, groups=groups))
    if rank == 2 and groups == 1 and cuts_patches(x, weight, **sizes):
        return ACTIVATIONS[activation](_of_patches(x, weight, bias))
    (x, weight), sizes = as_2d(rank, x, weight, sizes)
    column = None if bias is None else bias.contiguous().view(1, -1, *(1,) * (x.dim() - 2))
    operands = channels_last(x), channels_last(weight), column
    apart = needs_gradient(*given) or is_apart(given, groups, activation)
    static = {**sizes, "activation": None if apart else activation}
    in_place = operands[0] is x and operands[1] is weight and (bias is None or bias.is_contiguous())
    if options is not None and x.is_cuda and in_place and can_bypass_dispatcher(*given):
        call = _call_of(rank, operands, static)
        _calls.add(given, options, call)
        return _straight(call, given, options)
    y: Tensor = convolution(*operands, **static)
    y = y.squeeze(2) if rank == 1 else y
    return ACTIVATIONS[activation](y) if apart else y


def _call_of(rank: int, operands: Sequence[Tensor | None], static: dict[str, Any]) -> GraphCall:
    """What runs it, on tensors of the rank that the user gave them."""
    call = torch_ops.prepared(convolution, operands, static)
    if rank > 1:
        return call
    with torch.no_grad():
        line = convolution.outputs(operands, static)[0].squeeze(2)
    return call.shaped((tuple(line.shape), line.stride(), line.dtype))


def _straight(call: GraphCall, given: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor:
    """A call whose arguments are checked and lie as cuDNN reads them."""
    trains, rank, *sizes, groups, activation = options
    if trains:
        y: Tensor = _Convolution.apply(call, rank, tuple(sizes), *given)  # type: ignore[no-untyped-call]
    else:
        y = call.of_two(given[0], given[1]) if len(given) == 2 else call(given)[0]
    return ACTIVATIONS[activation](y) if trains or is_apart(given, groups, activation) else y


class _Convolution(torch.autograd.Function):
    """A convolution under autograd, in eager mode: saves only what the requested gradients need."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, rank: int, sizes: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        x, weight = tensors[:2]
        needs_grad_x, needs_grad_weight = ctx.needs_input_grad[3:5]
        ctx.save_for_backward(x if needs_grad_weight else None, weight if needs_grad_x else None)
        ctx.rest = rank, sizes, x.shape, weight.shape
        return call(tensors)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank, of_user, *shapes = ctx.rest
        x, weight = (None if part is None else as_one_2d(rank, part) for part in ctx.saved_tensors)
        sizes = geometry_2d(rank, sizes_of(rank, *of_user))
        shapes = [(*shape[:2], 1, *shape[2:]) if rank == 1 else tuple(shape) for shape in shapes]
        needs = ctx.needs_input_grad[3:]
        watched = needs_operator(grad)
        grad = channels_last(as_one_2d(rank, grad))
        grad = grad if watched else readable(grad)
        found = gradients_of(grad, x, weight, shapes=shapes, needs=(*needs, False)[:3], **sizes)
        grad_x, grad_weight = (part.squeeze(2) if part is not None and rank == 1 else part for part in found[:2])
        of_bias = None if found[2] is None else found[2].flatten()
        return None, None, None, *(grad_x, grad_weight, of_bias)[: len(needs)]


def _cast_for_autocast(*given: Any) -> tuple[Any, ...]:
    """Tensors as autocast, if it is on, casts them for PyTorch's convolutions."""
    if not isinstance(given[0], Tensor):  # the checks will say so
        return given
    return tuple([cast_tensor(part, given[0]) if isinstance(part, Tensor) else part for part in given])


def _may_be_tf32(x: Tensor) -> bool:
    if x.dtype is not torch.float32:
        return True
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # PyTorch's newer setting is in use, and the older one may not be read any more
        return str(torch.backends.cudnn.conv.fp32_precision) != "ieee"  # type: ignore[attr-defined]


def is_apart(given: Sequence[Tensor], groups: int, activation: str | None) -> bool:
    """Whether cuDNN may lack a kernel that fuses the activation: found by planning for five generations of GPUs.

    cuDNN 9.19 has none on an H200 for groups of channels that do not fill one load of memory.
    """
    if activation is None or (activation == "relu" and len(given) > 2):
        return False
    if given[1].shape[0] == 1 or 1 < groups == given[0].shape[1]:
        return True
    return groups > 1 and given[1].shape[1] % _CHANNELS_OF_A_GROUP != 0


def cuts_patches(x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes) -> bool:
    """Whether every element of x is in exactly one patch."""
    size = tuple(weight.shape[2:])
    if stride != size or size == (1, 1) or any(padding) or dilation != (1, 1):
        return False  # before lengths are looked at: torch.compile makes another graph for what was asked of them
    return all(length % step == 0 for length, step in zip(x.shape[2:], size, strict=True))


def _of_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride equals its filter size: a matrix product of patches and filters."""
    batch, channels, height, width = x.shape
    filters, _, r, s = weight.shape
    rows, columns = height // r, width // s
    cut = x.view(batch, channels, rows, r, columns, s) if x.is_contiguous() else None
    if cut is not None:  # channel after channel, as the weight lies
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, columns, channels * r * s)
        flat = weight.reshape(filters, -1)
    else:
        by_line = channels_last(x).permute(0, 2, 3, 1).reshape(batch, rows, r, columns, s * channels)
        patches = by_line.transpose(2, 3).reshape(batch, rows, columns, channels * r * s)
        flat = weight.permute(0, 2, 3, 1).reshape(filters, -1)
    return F.linear(patches, flat, bias).permute(0, 3, 1, 2)
