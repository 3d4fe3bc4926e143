"""Checks of what is passed to a `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import as_int
from cudnn_sdpa.attention.paged_step import PagedStep
from cudnn_sdpa.attention.side_tensors import dtype_name, shape_of
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError


def check_count(name: str, count: Any, least: int = 0) -> None:
    """An argument that counts something."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise OptionError(name, repr(count), f"an int of at least {least}")


def checked_growth(
    sequences: Any, tokens: Any, length: Callable[[int], int], max_length: int
) -> tuple[list[int], list[int]]:
    """The arguments of `PagedKVCache.reserve` as lists.

    Args:
        sequences: Which take part.
        tokens: How many new tokens each gets.
        length: Gives the tokens of a sequence.
        max_length: Most tokens of a sequence.

    Raises:
        OptionError: One is wrong.
    """
    try:
        numbers = list(sequences)
    except TypeError:
        raise OptionError("sequences", repr(sequences), "numbers that add or fork gave") from None
    if isinstance(tokens, Iterable) and not isinstance(tokens, (str, Tensor)):
        added = [as_int(more) for more in tokens]
    else:
        added = [as_int(tokens)] * len(numbers)
    if len(added) != len(numbers):
        raise OptionError("tokens", f"{len(added)} numbers", f"{len(numbers)}, one for each sequence")
    for more in added:
        check_count("tokens", more)
    for number, more in zip(numbers, added, strict=True):
        if length(number) + more > max_length:
            raise OptionError("tokens", repr(more), f"no more than max_length ({max_length}) in all")
    return numbers, added


def check_rows(name: str, rows: Tensor, to: Tensor, step: PagedStep) -> None:
    """New keys or values fit a step and the pages that they go to, and can be read."""
    expected = (step.batch, to.shape[1], step.tokens, to.shape[3])
    if tuple(rows.shape) != expected:
        raise ShapeError(name, shape_of(rows), f"shape {expected}: (B, Hkv, tokens, head dim)")
    if rows.dtype != to.dtype:
        raise DtypeError(name, dtype_name(rows.dtype), f"{dtype_name(to.dtype)}, the dtype of the cache")
    if rows.device != to.device:
        raise DeviceError(name, str(rows.device), f"{to.device}, the device of the cache")
    if rows.is_cuda:
        try:
            memory.check_strides(rows, rows, rows)
            memory.check_memory(rows, rows, rows, None)
        except LayoutError as error:
            raise error.renamed({"q": name}) from None
