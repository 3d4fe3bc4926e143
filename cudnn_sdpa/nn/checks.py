"""Checks of what modules are made with and called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudnn_sdpa.attention.arguments import shape_of
from cudnn_sdpa.attention.paged.kv_cache_checks import check_count
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError


def check_counts(**counts: Any) -> None:
    """Arguments that count something and are not zero."""
    for name, count in counts.items():
        check_count(name, count, least=1)


def check_flags(**flags: Any) -> None:
    """Arguments that are True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise OptionError(name, repr(flag), "True or False")


def check_number(name: str, number: Any, *, below: float | None = None) -> None:
    """A number from 0, or up to one that it is not itself."""
    expected = "a number of at least 0" if below is None else f"a number from 0 up to, not including, {below:g}"
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise OptionError(name, type(number).__name__, expected)
    if not 0 <= number < (float("inf") if below is None else below):
        raise OptionError(name, repr(number), expected)


def check_choice(name: str, choice: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if not isinstance(choice, str) or choice not in choices:
        raise OptionError(name, repr(choice), " or ".join(map(repr, choices)))


def check_tokens(name: str, x: Any, features: int) -> None:
    """Sequences of tokens: (B, S, features)."""
    if not isinstance(x, Tensor):
        raise OptionError(name, type(x).__name__, "a torch.Tensor")
    if x.dim() != 3 or x.shape[2] != features:
        hint = "Add the batch with unsqueeze(0)." if x.dim() == 2 else ""
        raise ShapeError(name, shape_of(x), f"(batch, sequence, {features})", hint)


def whole(name: str, projected: Any, features: int) -> Any:
    """What a projection gave, if it has all the features that the module cuts up by their places.

    Tensor parallelism leaves each process some rows of a projection. Of one that holds several parts these are the
    first part in one process and the second in another, and of queries alone not those that belong to the keys at hand:
    what is made of them is something else.

    Raises:
        UnsupportedError: It has others.
    """
    if projected.shape[-1] != features:
        reason = (
            f"{name} gave {projected.shape[-1]} of its {features} features; a share of its rows, which ColwiseParallel "
            f"leaves to each process, is no share of each part of them"
        )
        suggestion = (
            "fully_shard (FSDP2), or separate torch.nn.Linear projections, each with ColwiseParallel, around "
            "cudnn_sdpa.sdpa or cudnn_sdpa.silu_mul"
        )
        raise UnsupportedError("this tensor parallelism", [reason], suggestion)
    return projected
