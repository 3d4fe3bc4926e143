"""How large the plan cache may be, and what it counts."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

_log = logging.getLogger("cudnn_sdpa")

DEFAULT_SIZE = 512


@dataclass(frozen=True)
class PlanCacheInfo:
    """Counters of the plan cache since the process started or `clear` was called.

    Attributes:
        plans: Plans held now.
        capacity: Most plans that are held.
        builds: Plans built.
        loads: Plans loaded from the plan store.
        hits: Uses of a plan that was there already; a warm call is one.
        evictions: Plans let go to stay within the capacity.
        failures: Builds that raised.
        captured: Plans kept alive, whether held or not, because a CUDA graph holds a launch of them.
        build_seconds: Time spent building.
    """

    plans: int
    capacity: int
    builds: int
    loads: int
    hits: int
    evictions: int
    failures: int
    captured: int
    build_seconds: float


def capacity_from_environment() -> int:
    """What `CUDNN_SDPA_CACHE_SIZE` says, if it is a capacity, or 512."""
    text = os.environ.get("CUDNN_SDPA_CACHE_SIZE", "")
    if not text:
        return DEFAULT_SIZE
    if not (text.isdecimal() and text.isascii() and len(text) < 19 and int(text) > 0):
        _log.warning(
            "CUDNN_SDPA_CACHE_SIZE: got %r; expected an integer of at least 1; %d plans are held", text, DEFAULT_SIZE
        )
        return DEFAULT_SIZE
    return int(text)
