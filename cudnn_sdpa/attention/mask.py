"""Causal masks and windows in one normalized form, so that equivalent calls share a plan; values that mask a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Alignment = Literal["top_left", "bottom_right"]
TOP_LEFT: Final = "top_left"
BOTTOM_RIGHT: Final = "bottom_right"
ALIGNMENTS = (TOP_LEFT, BOTTOM_RIGHT)

#: A window's side without a bound, as FlashAttention writes it.
UNBOUNDED = -1

#: Lower values of a float mask mask a key, as −∞ does: kernels compute in base 2, and times log₂ e they are −∞ in
#: float32. `finfo.min` of bfloat16 and of float32 are lower, -10⁹ and `finfo.min` of float16 are not.
LOWEST_BIAS: Final = torch.finfo(torch.float32).min * math.log(2)

#: (left, right, bottom_right): a query sees the keys from `left` before to `right` after the diagonal; None is
#: unbounded. The diagonal starts at the first query and key, or ends at each sequence's last ones.
Band = tuple[int | None, int | None, bool]


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query may see, apart from sequence lengths and the caller's `attn_mask`.

    Attributes:
        band: The band, None if a query sees all keys.
        masked_rows: Number of fully masked rows: the first queries, which see no key. They are left out of the graph
            and their output is zeros; `band` then applies to the remaining queries.
    """

    band: Band | None = None
    masked_rows: int = 0


def as_kernels_see(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.float16 else mask.masked_fill(mask < LOWEST_BIAS, -math.inf)


def normalize_mask(
    is_causal: bool,
    alignment: str,
    window_size: tuple[int, int],
    sq: int,
    skv: int,
    *,
    has_lengths: bool = False,
    top_left_only: bool = False,
    keep_causal: bool = False,
) -> Mask:
    """The simplest equivalent mask for `sq` queries and `skv` keys.

    - A bound that masks nothing is dropped: a window as wide as the sequence, a causal mask for a single query on the
      last key (at Sq=1 a mask would keep cuDNN from its decode engines).
    - Without lengths, the two alignments are the same for as many queries as keys.
    - Without lengths, bottom-right with more queries than keys is top-left for the queries that see a key.

    Args:
        is_causal: Mask keys after the diagonal.
        alignment: "top_left" or "bottom_right".
        window_size: Bounds to the left and to the right of the diagonal, -1 for none.
        sq: Number of queries.
        skv: Number of keys.
        has_lengths: Whether actual sequence lengths are passed as data.
        top_left_only: Express a bottom-right band as a top-left one, which may have a negative left bound.
        keep_causal: Keep the bound of a causal mask even where it masks nothing.
    """
    left, right = (None if bound == UNBOUNDED else bound for bound in window_size)
    right = 0 if is_causal else right
    if left is None and right is None:
        return Mask()
    if has_lengths and alignment == BOTTOM_RIGHT:
        return Mask(_band(left, right, last_row=skv - 1, last_column=sq - 1, bottom_right=True))
    shift = skv - sq if alignment == BOTTOM_RIGHT else 0
    masked_rows = 0 if right is None else max(0, -(right + shift))
    left = None if left is None else left - shift - masked_rows
    right = None if right is None else right + shift + masked_rows
    last_column = skv if keep_causal else skv - 1
    band = _band(left, right, last_row=sq - masked_rows - 1, last_column=last_column, bottom_right=False)
    if band is not None and shift > 0 and not top_left_only:
        band = (_shifted(band[0], shift), _shifted(band[1], -shift), True)
    return Mask(band, masked_rows)


def _band(left: int | None, right: int | None, *, last_row: int, last_column: int, bottom_right: bool) -> Band | None:
    """A band without the bounds that mask nothing."""
    left = None if left is None or left >= last_row else left
    right = None if right is None or right >= last_column else right
    return None if left is None and right is None else (left, right, bottom_right)


def _shifted(bound: int | None, shift: int) -> int | None:
    return None if bound is None else bound + shift
