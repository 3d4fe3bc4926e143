"""How tensors of an activation are shown to cuDNN: in three dimensions, without a copy, in the form it is quickest in.

cuDNN's kernels work on tiles of a matrix, and its heuristics choose the tile by the number of rows. Where all is dense
any matrix will do; of halves of a projection's rows, each row is a matrix. Which one is quickest was measured on an
H200 (cuDNN 9.19), in bfloat16, for 0.9 to 134 million numbers, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.runtime.symbols import is_known

#: More matrices would not fit into a grid's third dimension.
_MOST_MATRICES = 65535

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


def as_rows(tensors: Sequence[Tensor], names: Sequence[str], *, gradients: bool = False) -> list[Tensor]:
    """Tensors of one shape in three dimensions, without a copy.

    Args:
        tensors: What a graph reads, the last dimension dense.
        names: Their names in errors.
        gradients: The graph is that of a backward pass.

    Raises:
        LayoutError: One of them would have to be copied.
    """
    if all(_is_dense(x) for x in tensors):
        shape = _of_dense(tensors[0], gradients)
        return [x.view(shape) for x in tensors]
    rows = [_of_two(name, x) for name, x in zip(names, tensors, strict=True)]
    if any(is_known(x.stride(0) == 0) for x in rows) and is_known(rows[0].shape[0] <= _MOST_MATRICES):
        return [x.unsqueeze(1) for x in rows]  # one row for all: cuDNN takes that of matrices, not within one
    length = _piece(rows[0], gradients)
    if length is None:
        return [x.unsqueeze(0) for x in rows]
    return [x.view(x.shape[0], -1, length) for x in rows]


def _of_dense(x: Tensor, gradients: bool) -> tuple[int, int, int]:
    """The form of dense tensors.

    A compiler that does not know how many numbers there are shall not ask for it, and compile once more: for it they
    lie in rows of 64 if their last dimension does.
    """
    size, count = x.shape[-1] if x.dim() else 1, x.numel()
    squares = is_known(count % _SQUARE**2 == 0) and is_known(count // _SQUARE**2 <= _MOST_MATRICES)
    if squares and (gradients or is_known(count >= _MANY)):
        return -1, _SQUARE, _SQUARE
    if not gradients and is_known(count < _MANY) and is_known(count % _LONGER_ROW == 0):
        return 1, -1, _LONGER_ROW
    if size % _ROW == 0 or is_known(count % _ROW == 0):
        return 1, -1, _ROW
    return 1, -1, size


def _piece(rows: Tensor, gradients: bool) -> int | None:
    """Into pieces of which length to cut rows (rows, n) that do not lie behind each other; None: not at all.

    Nor where a compiler does not know n or how many rows there are: it shall not ask.
    """
    count, size = rows.shape
    length = _in_32(size) if gradients else None
    if length is None and is_known(count * size >= _MANY):
        length = _SQUARE if is_known(size == _SQUARE**2) else _in_tiles(size)
    return length if length is not None and is_known(count <= _MOST_MATRICES) else None


def _in_32(size: int) -> int | None:
    """The length of 32 pieces, where they are quickest in a backward pass: long enough, and of whole sectors of memory.

    Rows of a multiple of 4096 are quicker in pieces of 64.
    """
    fits = is_known(size >= 32 * 32) and is_known(size % (32 * 16) == 0)
    return size // 32 if fits and not is_known(size % 4096 == 0) else None


def _in_tiles(size: int) -> int | None:
    """The length of pieces that fill a kernel's tiles of 64, 128 or 256 rows."""
    for length in _PIECES:
        pieces = size // length
        fills = is_known(pieces % 64 == 0) or (is_known(pieces > 32) and is_known(pieces <= length))
        if is_known(size % length == 0) and fills:
            return length
    return None


def _is_dense(x: Tensor) -> bool:
    """Whether it is contiguous, also for a compiler that does not know its sizes."""
    if not torch.compiler.is_compiling():
        return x.is_contiguous()
    step: Any = 1  # by its strides, which a compiler knows also where it does not know sizes
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != step and size != 1:
            return False
        step = step * size
    return True


def _of_two(name: str, x: Tensor) -> Tensor:
    """A tensor (..., n) as rows (rows, n), without a copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise LayoutError(name, f"strides {x.stride()}", "a dense last dimension", f"Use {name}.contiguous().")
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        got = f"shape {tuple(x.shape)}, strides {x.stride()}"
        raise LayoutError(name, got, "rows at one distance from each other", f"Use {name}.contiguous().") from None
