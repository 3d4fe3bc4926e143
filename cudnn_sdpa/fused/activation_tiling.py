"""The views in which activations pass tensors to cuDNN: rows, in the fastest form, without a copy.

cuDNN's kernels work on tiles of a matrix, and its heuristics choose the tile by the number of rows. Where all is dense
any matrix will do; of halves of a projection's rows, each row is a matrix. Which one is quickest was measured on an
H200 (cuDNN 9.19), in bfloat16, for 0.9 to 134 million elements, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.graph.symbolic_shapes import is_true

#: More matrices would not fit into a grid's third dimension.
_MAX_MATRICES = 65535

#: From so many numbers on squares are quicker forward than rows of 128; in bfloat16 a tensor has 24 MB then.
_MANY = 12_000_000

#: Dense data is quickest in squares of 32, where there are not too many of them.
_SQUARE = 32

#: The next best.
_ROW = 64

#: Quicker where there is little.
_LONGER_ROW = 128

#: Lengths of the pieces that a row is cut into; the first that leaves the pieces of a row a good number.
_PIECES = (64, 128, 256)


def as_rows(tensors: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Tensors of one shape as rows (1, rows, n), the last dimension dense.

    Args:
        tensors: (..., n).
        names: Their names in errors.

    Raises:
        LayoutError: One of them would have to be copied.
    """
    return [_of_two(name, x).unsqueeze(0) for name, x in zip(names, tensors, strict=True)]


def forward_form(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The form of what `as_rows` gives in which a forward pass is quickest."""
    return _in_form(rows, gradients=False)


def backward_form(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same of a backward pass."""
    return _in_form(rows, gradients=True)


def _in_form(rows: tuple[Tensor, ...], *, gradients: bool) -> tuple[Tensor, ...]:
    count, size = rows[0].shape[1:]
    if all(x.is_contiguous() for x in rows):
        shape = _of_dense(count * size, size, gradients)
        return tuple(x.view(shape) for x in rows)
    matrices = [x[0] for x in rows]
    if count > _MAX_MATRICES:
        return rows
    if any(x.stride(0) == 0 for x in matrices):
        return tuple(x.unsqueeze(1) for x in matrices)  # one row for all: cuDNN takes that of matrices, not within one
    length = _piece(count, size, gradients)
    return rows if length is None else tuple(x.view(count, -1, length) for x in matrices)


def _of_dense(count: int, size: int, gradients: bool) -> tuple[int, int, int]:
    """The form of so many numbers in rows of a size, all dense."""
    squares = count % _SQUARE**2 == 0 and count // _SQUARE**2 <= _MAX_MATRICES
    if squares and (gradients or count >= _MANY):
        return -1, _SQUARE, _SQUARE
    if not gradients and count < _MANY and count % _LONGER_ROW == 0:
        return 1, -1, _LONGER_ROW
    return 1, -1, _ROW if count % _ROW == 0 else size


def _piece(count: int, size: int, gradients: bool) -> int | None:
    """Into pieces of which length to cut so many rows of a size that do not lie behind each other; None: not at all."""
    if gradients and size >= 32 * 32 and size % (32 * 16) == 0 and size % 4096:
        return size // 32  # whole sectors of memory; rows of a multiple of 4096 are quicker in pieces of 64
    if count * size < _MANY:
        return None
    if size == _SQUARE**2:
        return _SQUARE
    for length in _PIECES:  # that fill a kernel's tiles of 64, 128 or 256 rows
        pieces = size // length
        if size % length == 0 and (pieces % 64 == 0 or 32 < pieces <= length):
            return length
    return None


def _of_two(name: str, x: Tensor) -> Tensor:
    """A tensor (..., n) as rows (rows, n), without a copy."""
    if x.dim() == 0:
        return x.view(1, 1)
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise LayoutError(name, f"strides {x.stride()}", "a dense last dimension", f"Use {name}.contiguous().")
    if not _has_rows(x):
        got = f"shape {tuple(x.shape)}, strides {x.stride()}"
        raise LayoutError(name, got, "rows at one distance from each other", f"Use {name}.contiguous().")
    return x.view(-1, x.shape[-1])


def _has_rows(x: Tensor) -> bool:
    """Whether rows lie at one distance from each other, as `view` asks; it is not tried, which ends a compilation."""
    outer = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if not is_true(size == 1)]
    return not any(is_true(step != size * inner) for (_, step), (size, inner) in itertools.pairwise(outer))
