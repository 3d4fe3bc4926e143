"""Memory layouts of tensors: the part of a plan's key that comes from its operands.

The functions on strides work on symbolic sizes too, which torch.compile and PyTorch's annotations call `int`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from cudnn_sdpa.graph.scalars import is_compiling, is_true

#: An object in a JSON file or message; values are checked where they are read.
JsonObject: TypeAlias = dict[str, Any]

#: cuDNN's names of the dtypes (members of ``cudnn.data_type``).
CUDNN_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.bool: "BOOLEAN",
    torch.float8_e4m3fn: "FP8_E4M3",
    torch.float8_e5m2: "FP8_E5M2",
}

_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in CUDNN_DTYPE_NAMES}

#: Bits of the exponent of numbers in FP8.
EXPONENT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}

#: Alignment in bytes of every pointer and every stride of cuDNN's kernels (one 128-bit load).
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape, stride (in elements) and dtype of one operand.

    The stride of a dimension of size 1 is never used to reach memory, so it is replaced by the value that a dense
    tensor of the same memory order has there (see `canonical_stride`); two views that differ only in it share a plan.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, *, channels_last: bool = False) -> TensorLayout:
        stride = canonical_stride(tensor.shape, tensor.stride(), channels_last=channels_last)
        return cls(tuple(tensor.shape), stride, tensor.dtype)

    @classmethod
    def with_first(cls, tensor: torch.Tensor, size: int) -> TensorLayout:
        """The layout of a tensor if its first dimension had this size."""
        shape = (size, *tensor.shape[1:])
        return cls(shape, canonical_stride(shape, tensor.stride()), tensor.dtype)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorLayout:
        return cls(tuple(shape), contiguous_stride(shape), dtype)

    def to_json(self) -> dict[str, object]:
        return {"shape": list(self.shape), "stride": list(self.stride), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, data: JsonObject) -> TensorLayout:
        return cls(tuple(data["shape"]), tuple(data["stride"]), _DTYPE_BY_NAME[data["dtype"]])

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{'×'.join(map(str, self.shape))}; strides {','.join(map(str, self.stride))}]"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; a dimension of size 0 counts as 1, as in PyTorch."""
    compare = _comparisons(shape)
    stride: list[int] = []
    span = 1
    for size in reversed(shape):
        stride.append(span)
        span = span * (1 if compare.is_true(size == 0) else size)
    return tuple(reversed(stride))


def canonical_stride(shape: Sequence[int], stride: Sequence[int], *, channels_last: bool = False) -> tuple[int, ...]:
    """`stride` with the entries of size-1 dimensions replaced by those of a dense tensor of the same memory order.

    cuDNN infers the memory order (NCHW, NHWC) from all strides, even those that address nothing: it treats a filter
    (8, 8, 3, 1) with strides (24, 1, 8, 1) differently from one with (24, 1, 8, 8). If all larger dimensions are in
    row-major order, so are those of size 1; if they are channels-last, so are those of size 1. `channels_last` decides
    where sizes of 1 make the order ambiguous.
    """
    compare = _comparisons(shape, stride)
    single = [compare.is_true(size == 1) for size in shape]
    if not any(single):
        return tuple(stride)
    order = _memory_order(shape, stride, compare, channels_last=channels_last)
    result = list(stride)
    span = 1
    for i in reversed(order):
        if single[i]:
            result[i] = span
        elif compare.is_true(shape[i] * result[i] > span):
            span = shape[i] * result[i]
    return tuple(result)


def has_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether channels, the second of four or more dimensions, are unambiguously innermost in memory."""
    compare = _comparisons(shape, stride)
    return (
        len(shape) >= _IMAGE
        and not _follows(range(len(shape)), shape, stride, compare)
        and _follows(channels_last_order(len(shape)), shape, stride, compare)
    )


def layouts_of(tensors: Sequence[torch.Tensor], *, channels_last: bool = False) -> list[TensorLayout]:
    """The layouts of one graph's operands. An order that sizes of 1 make ambiguous follows the other operands.

    `channels_last` decides if it is ambiguous for all operands.
    """
    last = channels_last or any(has_channels_last(x.shape, x.stride()) for x in tensors)
    return [TensorLayout.of(x, channels_last=last) for x in tensors]


#: Smallest rank with a channels-last memory order.
_IMAGE = 4


def channels_last_order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _memory_order(
    shape: Sequence[int], stride: Sequence[int], compare: _Comparisons, *, channels_last: bool
) -> Sequence[int]:
    rank = len(shape)
    orders = [tuple(range(rank))]
    if rank >= _IMAGE:
        orders.insert(0 if channels_last else 1, channels_last_order(rank))
    for order in orders:
        if _follows(order, shape, stride, compare):
            return order
    first = rank  # start of the trailing sizes of 1, which enclose nothing
    while first > 0 and compare.is_true(shape[first - 1] == 1):
        first -= 1
    return (*range(first, rank), *range(first))


def _follows(order: Sequence[int], shape: Sequence[int], stride: Sequence[int], compare: _Comparisons) -> bool:
    is_true, is_larger = compare
    strides = [stride[i] for i in order if not is_true(shape[i] == 1) and not is_true(stride[i] == 0)]
    return not any(is_larger(strides[i], strides[i - 1]) for i in range(1, len(strides)))


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return any(is_true(stride == 0) and is_true(size > 1) for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share an address, because a stride is within what smaller strides span."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def dense_stride_like(shape: Sequence[int], model: Sequence[int], model_stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` with the model's memory order; the last dimension is innermost.

    A model that overlaps itself (a stride of 0) has no order to follow, so the result is row-major, as with
    `torch.empty_like`. The shape matches the model's in all but the last dimension.
    """
    is_true, is_larger = _comparisons(shape, model, model_stride)
    larger_than_1 = [i for i in range(len(shape) - 1) if not is_true(model[i] == 1)]
    if any(is_true(model_stride[i] == 0) for i in larger_than_1):
        return contiguous_stride(shape)
    order: list[int] = []  # insertion sort, largest stride first: symbolic strides support only comparisons
    for i in larger_than_1:
        position = len(order)
        while position > 0 and is_larger(model_stride[i], model_stride[order[position - 1]]):
            position -= 1
        order.insert(position, i)
    order.append(len(shape) - 1)
    stride = [1] * len(shape)
    span = 1
    for i in reversed(order):
        stride[i] = span
        span = span * (1 if is_true(shape[i] == 0) else shape[i])
    return canonical_stride(shape, stride)


def dense_like(layout: TensorLayout) -> TensorLayout:
    """The layout of a gradient, as `like_in_memory` has it."""
    if layout.stride[-1] == 0 and layout.shape[-1] != 1:
        return TensorLayout.contiguous(layout.shape, layout.dtype)
    stride = dense_stride_like(layout.shape, layout.shape, layout.stride)
    return replace(layout, stride=stride)


# Comparisons of sizes and strides, which may be symbolic.


def _is_larger(a: int, b: int) -> bool:
    """For strides that depend on data, a multiple counts as larger."""
    condition = cast("bool | torch.SymBool", a > b)
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, statically_known_true

    if guard_or_false(condition):
        return True
    return bool(guard_or_true(condition)) and bool(statically_known_true(a % b == 0))


class _Comparisons(NamedTuple):
    """`is_true` and `_is_larger`, or faster equivalents for plain integers."""

    is_true: Callable[[bool], bool]
    is_larger: Callable[[int, int], bool]


def _comparisons(*sizes: Sequence[int]) -> _Comparisons:
    if not is_compiling() and type(sum(map(sum, sizes))) is int:
        return _Comparisons(bool, operator.gt)
    return _Comparisons(is_true, _is_larger)
