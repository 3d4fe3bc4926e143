"""Measured preferences: where `sdpa_paged` takes the library's own kernel for pages, and where cuDNN's engines.

`preferences.json` has a row for each kind of call that was measured: the compute capability, the head dims, and ranges,
whose ends are included, of new tokens, of sequences, of the keys that a row of the page table has room for, and of
query heads. The times, in microseconds, are those of the step `of` of `benchmarks decode`, which
`scripts/preference_times.py` copies. Without a row, cuDNN serves the call if it has a kernel for the pages.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.graph.target import Target

OWN = "own"

_FILE = Path(__file__).with_name("preferences.json")


class Preference(NamedTuple):
    """A row of the table; an end of a range is None where there is none."""

    sm: int
    head_dims: tuple[int, int]
    new_tokens: tuple[int, int | None]
    sequences: tuple[int, int | None]
    keys: tuple[int, int | None]
    kernel: str
    own_us: float
    cudnn_us: float
    of: str
    heads: tuple[int, int | None] = (1, None)

    def __str__(self) -> str:
        ours, theirs = ("our own kernel for pages", self.own_us), ("cuDNN's engines", self.cudnn_us)
        (taken, time), (other, other_time) = (ours, theirs) if self.kernel == OWN else (theirs, ours)
        return f"{taken}: measured {time} µs; {other}, {other_time} µs ({self.of}; preferences.json)"


@functools.cache
def preferences() -> tuple[Preference, ...]:
    rows: list[dict[str, Any]] = json.loads(_FILE.read_text())["rows"]
    return tuple(Preference(**{name: _hashable(x) for name, x in row.items()}) for row in rows)


def _hashable(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def preference_of(call: PagedArguments, target: Target) -> Preference | None:
    """The row of a call on a GPU; None if nothing like it was measured."""
    batch, heads, tokens, dim = call.q.shape
    dims = dim, call.v.shape[3]
    for row in preferences():
        if row.sm == target.sm and row.head_dims == dims:
            sizes = tokens, batch, call.max_kv_len, heads
            if all(map(_is_in, sizes, (row.new_tokens, row.sequences, row.keys, row.heads))):
                return row
    return None


def runs_own_kernel(call: PagedArguments, target: Target) -> bool:
    """Whether the own kernel serves a call: it is faster, or cuDNN has none."""
    if call.is_beyond_cudnn:
        return True
    row = preference_of(call, target)
    return row is not None and row.kernel == OWN


def _is_in(number: int, bounds: tuple[int, int | None]) -> bool:
    least, most = bounds
    return least <= number and (most is None or number <= most)
