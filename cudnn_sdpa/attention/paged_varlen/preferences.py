"""The provider of calls of `sdpa_paged`: cuDNN, or the library's own kernel for pages, by `providers` and measurements.

The table has a row for each kind of call that was measured: the compute capability, the head dims, and ranges, whose
ends are included, of new tokens, of sequences, of the keys that a row of the page table has room for, and of query
heads. The times, in microseconds, are those of the step `of` of `benchmarks decode`.
The own kernel is preferred up to `SLOWER` times cuDNN's: it takes less CPU time, and no kernel checks the tables before
it. Without a row, cuDNN serves the call if it has a kernel for the pages.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.mask import UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged_varlen.plans import reasons_against
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.preferences import rows_of
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, FLASH4, FRONTEND, OWN

#: How much longer than cuDNN's engines the own kernel may take where it is preferred.
SLOWER = 1.02

_KERNELS = {OWN: "our own kernel for pages", CUDNN: "cuDNN's engines"}
_AGAINST_PAGED = {
    FLASH4: "FlashAttention-4: of pages it serves sdpa_paged_varlen alone",
    FRONTEND: "cuDNN's frontend: it serves no pages here",
}


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
        times = {OWN: self.own_us, CUDNN: self.cudnn_us}
        (other,) = times.keys() - {self.kernel}
        of_other = f"{_KERNELS[other]}, {times[other]} µs ({self.of}; preferences.json)"
        return f"{_KERNELS[self.kernel]}: measured {times[self.kernel]} µs; {of_other}"


@functools.cache
def preferences() -> tuple[Preference, ...]:
    return tuple(Preference(**row) for row in rows_of("sdpa_paged"))


def preference_of(call: PagedArguments, target: Target) -> Preference | None:
    """The row of a call on a GPU; None if nothing like it was measured."""
    batch, heads, tokens, dim = call.q.shape
    dims = dim, call.v.shape[3]
    is_plain = not call.softmax.is_capped and call.softmax.window_left == UNBOUNDED
    for row in preferences():
        if row.kernel == CUDNN and not is_plain:  # another of its kernels may run than was measured
            continue
        if row.sm == target.sm and row.head_dims == dims:
            sizes = tokens, batch, call.max_kv_len, heads
            if all(map(_is_in, sizes, (row.new_tokens, row.sequences, row.keys, row.heads))):
                return row
    return None


def provider_of(call: PagedArguments, target: Target) -> tuple[str, str]:
    """The provider that serves a call on a target, and why if another could.

    Raises:
        UnsupportedError: None of the providers in force has a kernel.
    """
    named = providers.Setting.names or providers.active()
    names, reasons = [name for name in named if name not in _AGAINST_PAGED] or [CUDNN], []
    only_own = f"cuDNN has none for pages {_beyond_cudnn(call)}" if call.is_beyond_cudnn else ""
    for name in names:
        if name in (DEFAULT, FASTEST):
            if only_own:
                return OWN, f"{_KERNELS[OWN]}: {only_own}"
            row = preference_of(call, target)
            if row is not None and row.kernel == OWN and (against := reasons_against(call, target)):
                return CUDNN, f"{_KERNELS[CUDNN]}: our own kernel does not serve it, as {'; '.join(against)}"
            return (CUDNN, "") if row is None else (row.kernel, str(row))
        against = [only_own] * bool(only_own) if name == CUDNN else reasons_against(call, target)
        if not against:
            return name, f"{_KERNELS[name]}, by providers({', '.join(map(repr, named))})"
        reasons += [f"{_KERNELS[name]}: {reason}" for reason in against]
    reasons += [reason for name, reason in _AGAINST_PAGED.items() if name in named]
    raise UnsupportedError("sdpa_paged", reasons, f"providers({CUDNN!r}, {OWN!r})")


def runs_own_kernel(call: PagedArguments, target: Target) -> bool:
    return provider_of(call, target)[0] == OWN


def _beyond_cudnn(call: PagedArguments) -> str:
    return "in FP8" if call.k_pages.dtype in FP8_DTYPES else "of no power of two tokens"


def _is_in(number: int, bounds: tuple[int, int | None]) -> bool:
    least, most = bounds
    return least <= number and (most is None or number <= most)
