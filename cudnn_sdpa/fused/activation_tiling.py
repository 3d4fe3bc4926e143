"""Views of tensors as matrices in the fastest form for cuDNN's activations, without copies.

cuDNN's kernels work on tiles of a matrix, and its heuristics choose the tile by the number of rows. A contiguous tensor
can be viewed as any matrix; in the halves of a projection, each row is a matrix. The fastest form was measured on an
H200 (cuDNN 9.19), in bfloat16, for 0.9 to 134 million elements, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import Views
from cudnn_sdpa.graph.scalars import is_empty, is_true

#: Maximum size of a grid's third dimension.
_MAX_MATRICES = 65535

#: Number of elements from which squares are faster than rows of 128 in the forward pass: 24 MB in bfloat16.
_LARGE = 12_000_000

#: Contiguous data is fastest as squares of this size, unless there are more than `_MAX_MATRICES`.
_SQUARE = 32

#: Row length that is second fastest.
_ROW = 64

#: Row length that is faster for less than `_LARGE` elements.
_LONGER_ROW = 128

#: Lengths of the parts of a split row, in the order of preference.
_SPLIT_LENGTHS = (64, 128, 256)


def forward_views(operands: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """The fastest views of tensors (..., n) in a forward pass; of one tensor for gate and up, its halves."""
    return _views(operands, results, options, gradients=False)


def backward_views(operands: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """The fastest views in a backward pass, whose first operand is the gradient of the output."""
    return _views(operands, results, options, gradients=True)


def _views(operands: Sequence[Value], results: Sequence[Tensor], options: Options, *, gradients: bool) -> Views:
    operands, results = halves(operands, results, gradients=gradients)
    rows = [_rows(x) for x in operands if isinstance(x, Tensor)]
    shape = tiled_shape(rows, gradients=gradients)
    return [x.view(shape) for x in rows], [_rows(x).view(shape) for x in results], options


def halves(
    operands: Sequence[Value], results: Sequence[Tensor], *, gradients: bool
) -> tuple[Sequence[Value], Sequence[Tensor]]:
    """Operands and results with gate and up apart, where one tensor holds both."""
    *others, last = operands
    if last is not None:
        return operands, results
    *before, both = others
    written = [half for result in results for half in result.chunk(2, dim=-1)] if gradients else results
    return [*before, *split(both)], written


def split(both: Value) -> tuple[Tensor, Tensor]:
    assert isinstance(both, Tensor)
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def tiled_shape(rows: Sequence[Tensor], *, gradients: bool) -> tuple[int, int, int]:
    """The fastest view of rows (rows, n)."""
    count, size = rows[0].shape
    if all(x.is_contiguous() for x in rows):
        return _contiguous_form(count * size, size, gradients=gradients)
    if count > _MAX_MATRICES:
        return 1, count, size
    if any(x.stride(0) == 0 for x in rows):
        return count, 1, size  # cuDNN broadcasts a row across matrices, not within one
    length = _split_length(count, size, gradients=gradients)
    return (1, count, size) if length is None else (count, size // length, length)


def _contiguous_form(count: int, size: int, *, gradients: bool) -> tuple[int, int, int]:
    """The fastest view of `count` elements in contiguous rows of `size`."""
    squares = count % _SQUARE**2 == 0 and count // _SQUARE**2 <= _MAX_MATRICES
    if squares and (gradients or count >= _LARGE):
        return -1, _SQUARE, _SQUARE
    if not gradients and count < _LARGE and count % _LONGER_ROW == 0:
        return 1, -1, _LONGER_ROW
    return 1, -1, _ROW if count % _ROW == 0 else size


def _split_length(count: int, size: int, *, gradients: bool) -> int | None:
    """The length of the parts of `count` rows of `size` with gaps between them; None to leave them whole."""
    if gradients and size >= 32 * 32 and size % (32 * 16) == 0 and size % 4096:
        return size // 32  # whole sectors of memory; rows of a multiple of 4096 are faster in parts of 64
    if count * size < _LARGE:
        return None
    if size == _SQUARE**2:
        return _SQUARE
    for length in _SPLIT_LENGTHS:  # enough to fill a kernel's tiles of 64, 128 or 256 rows
        parts = size // length
        if size % length == 0 and (parts % 64 == 0 or 32 < parts <= length):
            return length
    return None


def check_rows(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Checks that tensors (..., n) can be viewed as rows with a dense last dimension."""
    for name, x in zip(names, tensors, strict=True):
        if x.dim() == 0 or is_empty(x):
            continue
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise LayoutError(name, f"strides {x.stride()}", "a dense last dimension", f"Use {name}.contiguous().")
        if not _has_rows(x):
            got = f"shape {tuple(x.shape)}, strides {x.stride()}"
            raise LayoutError(name, got, "rows at one stride from each other", f"Use {name}.contiguous().")


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1)


def _has_rows(x: Tensor) -> bool:
    """Whether all rows are at one stride from each other, so that `view` works; trying it would abort a compilation."""
    dims = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    outer = [(size, stride) for size, stride in dims if not is_true(size == 1)]
    return not any(is_true(stride != size * inner) for (_, stride), (size, inner) in itertools.pairwise(outer))
