"""Checks of what only the GPU knows: lengths and offsets, read back and looked at if `CUDNN_SDPA_DEBUG` is 1.

They wait for the GPU, so they are off unless asked for, and skipped while a CUDA graph is captured.
"""

from __future__ import annotations

import itertools
import os

import torch
from torch import Tensor

from cudnn_sdpa.errors import ShapeError

#: Whether values are read back and checked. Set by the environment variable when the package is imported.
enabled = os.environ.get("CUDNN_SDPA_DEBUG", "") not in ("", "0")


def check_lengths(name: str, lengths: Tensor | None, size: int) -> None:
    """True lengths lie between 0 and the length of the tensor.

    Raises:
        ShapeError: One does not.
    """
    if not enabled or lengths is None or not _readable(lengths):
        return
    wrong = [(number, length) for number, length in enumerate(lengths.tolist()) if not 0 <= length <= size]
    if wrong:
        number, length = wrong[0]
        raise ShapeError(name, f"{length} for batch entry {number}", f"lengths from 0 to {size}")


def check_offsets(name: str, offsets: Tensor, tokens: int, longest: int) -> None:
    """Offsets of packed sequences begin with 0, do not fall, end at the number of tokens, and keep to the maximum.

    Raises:
        ShapeError: They do not.
    """
    if not enabled or not _readable(offsets):
        return
    values = offsets.tolist()
    steps = [after - before for before, after in itertools.pairwise(values)]
    if values[0] != 0 or values[-1] != tokens:
        raise ShapeError(name, f"offsets from {values[0]} to {values[-1]}", f"from 0 to {tokens}, the number of tokens")
    if any(step < 0 for step in steps):
        raise ShapeError(name, f"offsets that fall: {values[:8]} …", "offsets that never fall")
    if steps and max(steps) > longest:
        raise ShapeError(name.replace("cu_seqlens", "max_seqlen"), f"{longest}", f"at least {max(steps)}")


def check_pages(name: str, table: Tensor, lengths: Tensor, page_size: int, pages: int) -> None:
    """The pages that a sequence uses are pages of the cache.

    Raises:
        ShapeError: One is not.
    """
    if not enabled or not _readable(table):
        return
    for number, (row, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        wrong = [page for page in row[: -(-length // page_size)] if not 0 <= page < pages]
        if wrong:
            raise ShapeError(name, f"page {wrong[0]} for batch entry {number}", f"pages from 0 to {pages - 1}")


def _readable(tensor: Tensor) -> bool:
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
