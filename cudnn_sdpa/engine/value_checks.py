"""Checks of values: lengths, offsets and page ids.

On the CPU reading values is free, so they are always checked. On a GPU reading them synchronizes: they are checked if
`CUDNN_SDPA_DEBUG` is 1, except while a CUDA graph is captured.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.errors import ShapeError

#: Whether values are read back from a GPU and checked. Set by the environment variable when the package is imported.
enabled = os.environ.get("CUDNN_SDPA_DEBUG", "").strip().lower() not in ("", "0", "off", "false", "no")


def check_lengths(name: str, lengths: Tensor | None, size: int, new: int = 0, *, what: str = "lengths") -> None:
    """Actual sequence lengths must be between 0 and the length of the tensor, with room for the tokens that are new."""
    if lengths is None or not _is_read(lengths):
        return
    wrong = [(entry, length) for entry, length in enumerate(lengths.tolist()) if not 0 <= length <= size - new]
    if wrong:
        entry, length = wrong[0]
        room = f", as there is room for {size}, of which {new} are new" if new else ""
        raise ShapeError(name, f"{length} for batch entry {entry}", f"{what} from 0 to {size - new}{room}")


def check_offsets(name: str, offsets: Tensor, tokens: int, max_seqlen: int, *, from_zero: bool = True) -> None:
    """Offsets of packed sequences must not decrease, lie within the tokens, and respect `max_seqlen`.

    The first is 0 unless tokens before the first sequence are allowed.
    """
    if not _is_read(offsets):
        return
    values = offsets.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(values)]
    first = next((entry for entry, length in enumerate(lengths) if length < 0), None)
    if first is not None:
        got = f"offsets that decrease, from {values[first]} to {values[first + 1]}"
        raise ShapeError(name, got, "offsets that never decrease")
    if values[0] < 0 or (from_zero and values[0] != 0) or values[-1] > tokens:
        least = "0" if from_zero else "0 or more"
        expected = f"from {least} to no more than {tokens}, the number of tokens"
        raise ShapeError(name, f"offsets from {values[0]} to {values[-1]}", expected)
    if lengths and max(lengths) > max_seqlen:
        raise ShapeError(name.replace("cu_seqlens", "max_seqlen"), f"{max_seqlen}", f"at least {max(lengths)}")


def check_pages(
    name: str,
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    pages: int,
    first: Callable[[], Tensor] | None = None,
) -> None:
    """The page ids that a sequence uses must be pages of the cache; `first` gives the first key that it uses."""
    if not _is_read(table, lengths):
        return
    begins = itertools.repeat(0) if first is None else first().tolist()
    for entry, (row, length, begin) in enumerate(zip(table.tolist(), lengths.tolist(), begins, strict=False)):
        used = row[begin // page_size : -(-length // page_size)] if begin < length else ()
        wrong = [page for page in used if not 0 <= page < pages]
        if wrong:
            raise ShapeError(name, f"page {wrong[0]} for batch entry {entry}", f"pages from 0 to {pages - 1}")


def check_slots(name: str, slots: Tensor, size: int) -> None:
    """Slots of tokens must be those of the cache, or negative."""
    if not _is_read(slots):
        return
    wrong = [(token, slot) for token, slot in enumerate(slots.tolist()) if slot >= size]
    if wrong:
        token, slot = wrong[0]
        raise ShapeError(name, f"slot {slot} for token {token}", f"slots below {size}, or negative ones")


def _is_read(*tensors: Tensor) -> bool:
    if not is_plain_memory(*tensors):
        return False
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return True
    on_gpu = all(tensor.is_cuda for tensor in tensors)
    return enabled and on_gpu and not torch.cuda.is_current_stream_capturing()
