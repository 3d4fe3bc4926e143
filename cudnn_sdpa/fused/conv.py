"""`conv1d`, `conv2d` and `conv3d`: convolution with bias and activation in one kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import sharding
from cudnn_sdpa.engine.dispatch_state import could_cast, needs_gradient
from cudnn_sdpa.engine.launch import NOT_A_CALL
from cudnn_sdpa.engine.native.calls import MISSED
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused.checks import check_activation
from cudnn_sdpa.fused.conv_graphs import ACTIVATIONS, Sizes, along_batch, channels_last, convolution, sizes_of
from cudnn_sdpa.fused.encoding import Options
from cudnn_sdpa.graph.scalars import as_index, is_compiling
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.manifest import target_of
from cudnn_sdpa.plans.preferences import rows_of

#: Channels in 16 bytes of bfloat16.
_CHANNELS_PER_LOAD = 8


class Preference(NamedTuple):
    """A measured convolution in half precision whose activation is faster in a kernel of its own.

    Times are in microseconds, of the call `of` of `benchmarks conv`; `pixels` are the least and the most of all images.
    """

    sm: int
    activation: str
    weight: tuple[int, ...]
    pixels: tuple[int, int]
    fused_us: float
    separate_us: float
    of: str

    def __str__(self) -> str:
        fused = f"within the convolution, {self.fused_us} µs ({self.of}; preferences.json)"
        return f"{self.activation} in a kernel of its own: measured {self.separate_us} µs; {fused}"


@functools.cache
def preferences() -> list[Preference]:
    return [Preference(**row) for row in rows_of("convolutions")]


def preference(
    x: Tensor,
    weight: Tensor,
    sizes: dict[str, Sizes],
    *,
    groups: int,
    activation: str | None,
    target: Target | None = None,
) -> Preference | None:
    """The measurement by which an activation that could be fused is not, if there is one for the call on its GPU."""
    if is_compiling():  # Dynamo cannot ask which GPU it is
        return None
    try:
        for row in preferences():
            if (
                row.weight == weight.shape
                and row.activation == activation
                and groups == 1
                and {*sizes["stride"], *sizes["dilation"]} == {1}
                and x.dtype.itemsize == 2
                and row.pixels[0] <= x.numel() // row.weight[1] <= row.pixels[1]
                and not {providers.DEFAULT, providers.FASTEST}.isdisjoint(providers.active())
                and (gpu := target or target_of(x)) is not None
                and row.sm == gpu.sm
            ):
                return row
    except NOT_A_CALL:  # the checks name the wrong argument
        pass
    return None


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
            `torch.backends.cudnn.allow_tf32` is False, float32 raises. float64 if `cpu_checks` accepts any dtype.
        weight: (K, C / groups, R, S), of x's dtype.
        bias: (K,), of x's dtype.
        stride: Stride, one for both dimensions or one for each.
        padding: Zero padding around x.
        dilation: Spacing of the filter's elements.
        groups: Groups of channels.
        activation: None, "relu", "silu" or "gelu" (with erf). It runs as a separate kernel if a tensor requires a
            gradient. Except for ReLU after a bias, it also does if every channel is a group, or if there is only one
            filter; and, outside `torch.compile`, for sizes for which that was measured to be faster.

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
    return _convolve((x, weight, bias), (2, stride, padding, dilation), groups, activation)


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
    return _convolve((x, weight, bias), (1, stride, padding, dilation), groups, activation)


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
    return _convolve((x, weight, bias), (3, stride, padding, dilation), groups, activation)


def _convolve(
    operands: tuple[Tensor, Tensor, Tensor | None],
    given: tuple[int, object, object, object],
    groups: int,
    activation: str | None,
) -> Tensor:
    """A convolution of a rank with a stride, a padding and a dilation, as given."""
    known = _known(operands, given, groups, activation)
    if known is not MISSED:
        return known  # type: ignore[no-any-return]
    x, weight, bias = operands
    sizes = sizes_of(*given)
    groups = as_index(groups)
    # Checked in known calls, too: the setting may change between calls.
    is_float32 = isinstance(x, Tensor) and x.dtype is torch.float32 and x.is_cuda
    if is_float32 and not _may_be_tf32() and not could_cast((x,)):
        reasons = ["cuDNN multiplies float32 in TF32 here, and torch.backends.cudnn.allow_tf32 is False"]
        raise UnsupportedError("a convolution of float32", reasons, "bfloat16 or float16, or PyTorch's own functions")
    is_separate = activation is not None and (
        has_separate_activation(x, weight, bias, groups=groups, activation=activation)
        or preference(x, weight, sizes, groups=groups, activation=activation) is not None
    )
    fused = None if is_separate else activation
    options: Options = {**sizes, "groups": groups, "activation": fused}
    tensors = (x, weight) if bias is None else (x, weight, bias)
    strides = sizes["stride"]
    if len(strides) == 2 and strides != (1, 1) and is_patch_embedding(x, weight, **sizes, groups=groups):
        cast: Any = convolution.arguments(tensors, options)[0]
        embed = _patches_of_dtensors if sharding.has_dtensor(*tensors) else _patch_embedding
        return ACTIVATIONS[activation](embed(*cast))
    y: Tensor = convolution.run(tensors, options)
    return y if fused is activation else ACTIVATIONS[activation](y)


def _known(operands: tuple[Any, ...], given: tuple[Any, ...], groups: object, activation: object) -> Any:
    """The result of a call that is known natively, or MISSED.

    That saves 1.5 µs, which reading the sizes takes, and 3.5 with an activation, whose kernel is not chosen again. With
    the activation among its options a call is known only if the convolution's kernel has computed it before.
    """
    x, find = operands[0], None if is_compiling() else convolution.calls.find
    if find is None or type(x) is not Tensor or x.dtype is torch.float32:  # whether TF32 is allowed may change
        return MISSED
    _, stride, padding, dilation = given
    if not type(stride) is type(padding) is type(dilation) is type(groups) is int:
        return MISSED
    if activation is not None and type(activation) is not str:
        return MISSED
    options = _options(given, groups, activation)
    return find(*operands, **options) if operands[2] is not None else find(*operands[:2], **options)


@functools.lru_cache(maxsize=1024)
def _options(given: tuple[int, int, int, int], groups: int, activation: str | None) -> Options:
    return {**sizes_of(*given), "groups": groups, "activation": activation}


def has_separate_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, groups: int, activation: str | None
) -> bool:
    """Whether the activation is a separate kernel; False for wrong arguments, which the checks name.

    cuDNN has kernels that fuse it by plans for five generations of GPUs. 9.19 has none on an H200 for groups of
    channels that do not fill one 16-byte load.
    """
    check_activation(activation, ACTIVATIONS)
    try:
        filters, channels, *_ = weight.shape
        is_fused = filters > 1 and (groups <= 1 or (groups != x.shape[1] and channels % _CHANNELS_PER_LOAD == 0))
        is_fused = is_fused or (activation == "relu" and bias is not None)
        return activation is not None and (not is_fused or needs_gradient(x, weight, bias))
    except NOT_A_CALL:
        return False


def _may_be_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # PyTorch forbids reading the older setting once the newer one is in use
        return str(torch.backends.cudnn.conv.fp32_precision) != "ieee"  # type: ignore[attr-defined]


def is_patch_embedding(
    x: Tensor, weight: Tensor, *, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> bool:
    """Whether a 2-D convolution gathers patches side by side; False for wrong arguments, which the checks name."""
    if any(not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() != 4 for tensor in (x, weight)):
        return False
    if type(groups) is not int or groups != 1 or weight.shape[2:] != stride or any(padding) or dilation != (1, 1):
        return False  # before the lengths of x are compared, which would make torch.compile guard on them
    return stride != (1, 1) and all(length % step == 0 for length, step in zip(x.shape[2:], stride, strict=True))


def _patches_of_dtensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tensors = {"x": x, "weight": weight, "bias": bias}
    return sharding.run("conv2d", along_batch("x")(tensors), tensors, lambda local, _: _patch_embedding(**local))


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
