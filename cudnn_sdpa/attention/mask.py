"""What a call asks for, in one normalized form: two ways of saying the same thing share a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOP_LEFT = "top_left"
BOTTOM_RIGHT = "bottom_right"
ALIGNMENTS = (TOP_LEFT, BOTTOM_RIGHT)

#: A window's side without a bound, as FlashAttention writes it.
UNBOUNDED = -1

#: (left, right, bottom_right): a query sees the keys from `left` before to `right` after the diagonal. None is no
#: bound. The diagonal starts at the first query and key, or ends at each sequence's last ones.
Band = tuple[int | None, int | None, bool]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query may see, beside the sequences' lengths and the caller's own mask.

    Attributes:
        band: None if all.
        masked_rows: How many of the first queries see no key at all. They are left out of the graph and answered
            with zeros; `band` then speaks of the queries that remain.
    """

    band: Band | None = None
    masked_rows: int = 0


def normalize_mask(
    is_causal: bool,
    alignment: str,
    window_size: tuple[int, int],
    sq: Any,
    skv: Any,
    *,
    has_lengths: bool = False,
    top_left_only: bool = False,
    keep_causal: bool = False,
) -> Mask:
    """The simplest mask that means the same for `sq` queries and `skv` keys.

    - A bound that hides nothing is dropped: a window as wide as the sequence, a causal mask for a single query on the
      last key (at Sq=1 a mask would keep cuDNN from its decode engines).
    - Without lengths, the two alignments of a square are one.
    - Without lengths, bottom-right with more queries than keys is top-left for the queries that see a key.

    Args:
        is_causal: Hide what is after the diagonal.
        alignment: "top_left" or "bottom_right".
        window_size: Bounds to the left and to the right of the diagonal, -1 for none.
        sq: Queries.
        skv: Keys.
        has_lengths: Whether the true lengths are data.
        top_left_only: Write a bottom-right band as a top-left one, which may have a negative left bound.
        keep_causal: Keep the bound of a causal mask also where it hides nothing.
    """
    left, right = (None if bound == UNBOUNDED else bound for bound in window_size)
    right = 0 if is_causal else right
    if left is None and right is None:
        return Mask()
    if has_lengths and alignment == BOTTOM_RIGHT:
        return Mask(_band(left, right, last_row=skv - 1, last_column=sq - 1, bottom_right=True))
    shift = skv - sq if alignment == BOTTOM_RIGHT else 0
    blind = 0 if right is None else max(0, -(right + shift))
    left = None if left is None else left - shift - blind
    right = None if right is None else right + shift + blind
    last_column = skv if keep_causal else skv - 1
    band = _band(left, right, last_row=sq - blind - 1, last_column=last_column, bottom_right=False)
    if band is not None and shift > 0 and not top_left_only:
        band = (_moved(band[0], shift), _moved(band[1], -shift), True)
    return Mask(band, blind)


def _band(left: Any, right: Any, *, last_row: Any, last_column: Any, bottom_right: bool) -> Band | None:
    """A band without the bounds that are out of reach."""
    left = None if left is None or left >= last_row else left
    right = None if right is None or right >= last_column else right
    return None if left is None and right is None else (left, right, bottom_right)


def _moved(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by
