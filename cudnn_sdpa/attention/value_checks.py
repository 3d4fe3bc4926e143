"""Checks of values: lengths, offsets and page ids.

On the CPU reading them is free, so it is always done. On a GPU it waits for the GPU: it is done if `CUDNN_SDPA_DEBUG`
is 1, and skipped while a CUDA graph is captured.
"""

from __future__ import annotations

import itertools
import os

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.errors import ShapeError

#: Whether values are read back from a GPU and checked. Set by the environment variable when the package is imported.
enabled = os.environ.get("CUDNN_SDPA_DEBUG", "") not in ("", "0")


def check_lengths(name: str, lengths: Tensor | None, size: int) -> None:
    """True lengths lie between 0 and the length of the tensor.

    Raises:
        ShapeError: One does not.
    """
    if lengths is None or not _is_read(lengths):
        return
    wrong = [(number, length) for number, length in enumerate(lengths.tolist()) if not 0 <= length <= size]
    if wrong:
        number, length = wrong[0]
        raise ShapeError(name, f"{length} for batch entry {number}", f"lengths from 0 to {size}")


def check_offsets(name: str, offsets: Tensor, tokens: int, longest: int) -> None:
    """Offsets of packed sequences begin with 0, do not fall, end within the tokens, and keep to the maximum.

    Raises:
        ShapeError: They do not.
    """
    if not _is_read(offsets):
        return
    values = offsets.tolist()
    steps = [after - before for before, after in itertools.pairwise(values)]
    fall = next((number for number, step in enumerate(steps) if step < 0), None)
    if fall is not None:
        raise ShapeError(name, f"offsets that fall, from {values[fall]} to {values[fall + 1]}", "offsets that never do")
    if values[0] != 0 or values[-1] > tokens:
        expected = f"from 0 to no more than {tokens}, the number of tokens"
        raise ShapeError(name, f"offsets from {values[0]} to {values[-1]}", expected)
    if steps and max(steps) > longest:
        raise ShapeError(name.replace("cu_seqlens", "max_seqlen"), f"{longest}", f"at least {max(steps)}")


def check_pages(name: str, table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """The pages that a sequence uses are pages of the cache.

    Raises:
        ShapeError: One is not.
    """
    if not _is_read(table, lengths):
        return
    for number, (row, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        wrong = [page for page in row[: -(-length // page_size)] if not 0 <= page < pages]
        if wrong:
            raise ShapeError(name, f"page {wrong[0]} for batch entry {number}", f"pages from 0 to {pages - 1}")


def _is_read(*tensors: Tensor) -> bool:
    """Whether values are to be looked at, and can be: not those of batches and other tensors without memory."""
    if not is_plain_memory(*tensors):
        return False
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return True
    on_gpu = all(tensor.is_cuda for tensor in tensors)
    return enabled and on_gpu and not torch.cuda.is_current_stream_capturing()
