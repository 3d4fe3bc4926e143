"""Checks of the arguments of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import CPU_DTYPES, FP8_DTYPES, SoftmaxOptions, allowed_dtypes, dtype_error
from cudnn_sdpa.attention.paged.arguments import check_scale
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, dtype_name, shape_of
from cudnn_sdpa.errors import DeviceError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.graph.scalars import as_int


def check_count(name: str, count: object, least: int = 0) -> None:
    """Checks a count: an int of at least `least`."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise OptionError(name, repr(count), f"an int of at least {least}")


class PlanOptions(SoftmaxOptions, total=False):
    """The options of `PagedKVCache.plans`."""

    return_lse: bool


class StepOptions(SoftmaxOptions, total=False):
    """The options of `PagedKVCache.attend` but `return_lse`."""

    out: Tensor | None


class AttendOptions(StepOptions, total=False):
    """The options of `PagedKVCache.attend`."""

    return_lse: bool


#: Their names.
OPTIONS = AttendOptions.__optional_keys__


def refuse_options(options: Iterable[str], known: frozenset[str] = OPTIONS) -> NoReturn:
    """Raises the error of an option that `attend` of a cache does not take."""
    raise OptionError(min({*options} - known), "an argument", f"one of {', '.join(sorted(known))}")


def check_sizes(sizes: dict[str, int], max_length: int | None, dtype: object) -> None:
    """Checks the sizes of a `PagedKVCache` of a dtype."""
    multiple, why = 8, "as cuDNN's attention takes"
    if dtype in FP8_DTYPES:
        multiple, why = ALIGNMENT, f"as head vectors in FP8 begin at multiples of {ALIGNMENT} bytes"
    for name, size in {**sizes, **({} if max_length is None else {"max_length": max_length})}.items():
        check_count(name, size, least=1)
        if name.startswith("head_dim") and size % multiple:
            raise OptionError(name, repr(size), f"a multiple of {multiple}, {why}")


def checked_device(device: torch.device | str | int | None) -> torch.device:
    """The device of a cache; by default the current GPU, or the CPU without one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = "a CUDA device such as 'cuda' or 'cuda:0', or 'cpu' for the reference"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise OptionError("device", repr(device), expected) from None
    if parsed.type not in ("cuda", "cpu", "meta"):
        raise DeviceError("device", str(parsed), expected)
    if parsed.type == "cuda" and not (parsed.index or 0) < torch.cuda.device_count():
        raise DeviceError("device", str(parsed), f"one of the {torch.cuda.device_count()} visible GPUs, or 'cpu'")
    return parsed


def check_dtype(dtype: object, device: torch.device, fp8_hint: str) -> None:
    """Checks that attention supports the dtype of a cache on its device."""
    if not isinstance(dtype, torch.dtype):
        raise OptionError("dtype", repr(dtype), "a torch.dtype")
    allowed = CPU_DTYPES if device.type == "meta" else allowed_dtypes(device)
    if dtype not in allowed:
        hint = fp8_hint if "float8" in str(dtype) else ""
        raise dtype_error("dtype", dtype, allowed, device=device, hint=hint)


def refuse_gradient(what: str) -> NoReturn:
    reasons = ["keys or values require grad, and a cache stores values without their autograd history"]
    raise UnsupportedError(f"{what} with a gradient", reasons, "calling it under torch.no_grad()")


def checked_growth(
    sequences: Iterable[int], tokens: int | Iterable[int], length: Callable[[int], int], max_length: int
) -> tuple[list[int], list[int]]:
    """The sequences and token counts of `PagedKVCache.reserve`, as lists."""
    try:
        numbers = list(sequences)
    except TypeError:
        raise OptionError("sequences", repr(sequences), "sequence numbers from add or fork") from None
    if isinstance(tokens, Iterable) and not isinstance(tokens, (str, Tensor)):
        added = [as_int(more) for more in tokens]
    else:
        added = [as_int(tokens)] * len(numbers)  # type: ignore[list-item]  # it is checked below
    if len(added) != len(numbers):
        raise OptionError("tokens", f"{len(added)} counts", f"{len(numbers)}, one for each sequence")
    for more in added:
        check_count("tokens", more)
    for number, more in zip(numbers, added, strict=True):
        if length(number) + more > max_length:
            raise OptionError("tokens", repr(more), f"at most max_length ({max_length}) tokens in total")
    return numbers, added


def check_scale_of(name: str, scale: Tensor | None, heads: int, pages: Tensor) -> None:
    """Checks the scale of a cache's keys or values."""
    if scale is None:
        return
    check_is_tensor(name, scale)
    check_scale(name, scale, heads, pages, of="the cache")
    if pages.dtype.itemsize > 1:
        expected = "None, or a cache in float8_e4m3fn or float8_e5m2"
        raise OptionError(name, f"a scale for a cache in {dtype_name(pages.dtype)}", expected)


def check_queries(q: object, tokens: int) -> None:
    """Queries are those of a step's new tokens."""
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[2] != tokens:
        raise ShapeError("q", shape_of(q), f"(B, Hq, {tokens}, D): as many queries as the step has tokens")
