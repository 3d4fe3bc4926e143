"""What a call asks for, in one normalized form: two ways of saying the same thing share a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOP_LEFT = "top_left"
BOTTOM_RIGHT = "bottom_right"
ALIGNMENTS = (TOP_LEFT, BOTTOM_RIGHT)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query may see, beside the sequences' lengths.

    Attributes:
        causal: Where the diagonal of the causal mask lies: None (no mask), "top_left" or "bottom_right".
        blind_rows: How many of the first queries see no key at all. They are left out of the graph and answered
            with zeros; `causal` then speaks of the queries that remain.
    """

    causal: str | None
    blind_rows: int = 0


def normalize_mask(is_causal: bool, alignment: str, sq: Any, skv: Any, has_lengths: bool) -> Mask:
    """The simplest mask that means the same for `sq` queries and `skv` keys.

    - A single query on the last key, or any query on a single key, sees everything: no mask. (At Sq=1 the mask
      would keep cuDNN from its decode engine.)
    - Without lengths, the two alignments of a square are one.
    - Without lengths, bottom-right with more queries than keys is a square whose first queries see nothing; cuDNN
      plans only the square.
    """
    if not is_causal:
        return Mask(None)
    if alignment == TOP_LEFT:
        return Mask(None) if skv == 1 else Mask(TOP_LEFT)
    if sq == 1:
        return Mask(None)
    if has_lengths or sq < skv:
        return Mask(BOTTOM_RIGHT)
    blind = sq - skv
    return Mask(None if skv == 1 else TOP_LEFT, blind)
