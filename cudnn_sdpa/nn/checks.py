"""Checks of the modules' options and arguments."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged.kv_cache_checks import check_count
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph.scalars import as_bool


class Factory(TypedDict, total=False):
    """Device and dtype of a module's parameters: arguments of PyTorch's modules and factories."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


def check_counts(**counts: object) -> None:
    for name, count in counts.items():
        check_count(name, count, least=1)


def checked_flags(**flags: object) -> tuple[bool, ...]:
    """Flags, also numpy's, as Python's: PyTorch's modules do not take others in all versions."""
    checked = {name: as_bool(flag) for name, flag in flags.items()}
    for name, flag in checked.items():
        if not isinstance(flag, bool):
            raise OptionError(name, repr(flag), "True or False")
    return tuple(flag is True for flag in checked.values())


def check_number(name: str, number: object, *, below: float | None = None) -> None:
    expected = "a number of at least 0" if below is None else f"a number from 0 up to, not including, {below:g}"
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise OptionError(name, type(number).__name__, expected)
    if not 0 <= number < (float("inf") if below is None else below):
        raise OptionError(name, repr(number), expected)


def check_tokens(name: str, x: object, features: int) -> None:
    if not isinstance(x, Tensor):
        raise OptionError(name, type(x).__name__, "a torch.Tensor")
    if x.dim() != 3 or x.shape[2] != features:
        hint = "Add the batch with unsqueeze(0)." if x.dim() == 2 else ""
        raise ShapeError(name, shape_of(x), f"(batch, sequence, {features})", hint)


def unsharded(name: str, projected: Tensor, features: int) -> Tensor:
    """The result of a projection, checked to have all its features.

    Tensor parallelism leaves each process some rows of a projection. If the projection holds several parts (queries,
    keys, values), these rows belong to one part in one process and to another part in another. If it holds queries
    only, they need not belong to the process's keys. The module would split them at the wrong positions.
    """
    if projected.shape[-1] != features:
        reason = (
            f"{name} returned {projected.shape[-1]} of its {features} features: ColwiseParallel leaves each process "
            "some of its rows, but not the same share of each of its parts"
        )
        suggestion = (
            "a module made with packed=False, parallelized by cudnn_sdpa.nn.parallel_plan, or fully_shard (FSDP2) alone"
        )
        raise UnsupportedError("this tensor parallelism", [reason], suggestion)
    return projected
