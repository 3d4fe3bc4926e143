"""Checks of what is passed to a `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import CPU_DTYPES, CUDA_DTYPES, as_int, dtype_name, shape_of
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError


def check_count(name: str, count: Any, least: int = 0) -> None:
    """An argument that counts something."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise OptionError(name, repr(count), f"an int of at least {least}")


#: What `PagedKVCache.attend` takes of the options of `sdpa_paged`.
OPTIONS = frozenset({"is_causal", "causal_alignment", "window_size", "scale", "softcap", "sinks", "return_lse", "out"})


def refuse_options(options: dict[str, Any]) -> NoReturn:
    """Raises the error of an option that `attend` does not have."""
    name = min(options.keys() - OPTIONS)
    raise OptionError(name, "an argument", f"one of {', '.join(sorted(OPTIONS))}")


def check_sizes(sizes: dict[str, Any], max_length: Any) -> None:
    """The sizes of a `PagedKVCache`.

    Raises:
        OptionError: One is none.
    """
    for name, size in {**sizes, **({} if max_length is None else {"max_length": max_length})}.items():
        check_count(name, size, least=1)
        if name.startswith("head_dim") and size % 8:
            raise OptionError(name, repr(size), "a multiple of 8, as cuDNN's attention takes")
    page_size = sizes["page_size"]
    if page_size & (page_size - 1):
        raise OptionError("page_size", repr(page_size), "a power of two, such as 16 or 64")


def checked_device(device: Any) -> torch.device:
    """Where a cache is to be: the device that is meant, the current GPU or the CPU if none is given.

    Raises:
        OptionError: It is no device.
        DeviceError: Attention runs on no such device, or it is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = "a CUDA device such as 'cuda' or 'cuda:0', or 'cpu' for the reference"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise OptionError("device", repr(device), expected) from None
    if found.type not in ("cuda", "cpu", "meta"):
        raise DeviceError("device", str(found), expected)
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise DeviceError("device", str(found), f"one of the {torch.cuda.device_count()} GPUs that are here, or 'cpu'")
    return found


def check_dtype(dtype: Any, device: torch.device, hint_of_fp8: str) -> None:
    """The dtype of a cache: one that attention takes where the cache is.

    Raises:
        OptionError: It is no dtype.
        DtypeError: It is another one.
    """
    if not isinstance(dtype, torch.dtype):
        raise OptionError("dtype", repr(dtype), "a torch.dtype")
    allowed = CPU_DTYPES if device.type != "cuda" else CUDA_DTYPES
    if dtype not in allowed:
        expected = " or ".join(map(dtype_name, allowed)) + f" on {device.type}"
        raise DtypeError("dtype", dtype_name(dtype), expected, hint_of_fp8 if "float8" in str(dtype) else "")


def refuse_gradient(what: str) -> NoReturn:
    """Raises the error of keys or values that require grad."""
    reasons = ["keys or values require grad, and a cache keeps numbers without their history"]
    raise UnsupportedError(f"{what} with a gradient", reasons, "calling it under torch.no_grad()")


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
