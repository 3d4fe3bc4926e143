"""Calls that FlashAttention-4 serves faster than cuDNN: rows of measurements, for `providers("fastest")`.

The table has a row for each call of `benchmarks providers`. A row is
for calls of the same pass, head dims, kind of mask and options, whose lengths (of packed sequences the mean), left
bound of a window and number of tokens are within a factor of what was measured. Rows that were measured on the call's
GPU go before others'. Without a row, cuDNN serves a call.

Calls on pages have rows of their own, of steps of `benchmarks decode`. A row is for causal calls of the same head dims,
whose sequences have as many new tokens, in the mean, or more: numbers of keys are data.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged_varlen.plans import PagedForward
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.spec import AttentionSpec
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.preferences import gpu_of, rows_of, source_of

#: FlashAttention-4 serves calls that take it at most this share of cuDNN's time.
AT_MOST = 0.98

#: How far lengths and left bounds, and numbers of tokens, may be from those of a row.
LENGTH_FACTOR, TOKEN_FACTOR = 2**0.5, 4.0

#: Fewer tokens may not fill the GPU, and say nothing of larger batches: LENGTH_FACTOR bounds the tokens of such rows.
FEW_TOKENS = 2048

_Dense = ForwardSpec | BackwardSpec | PackedForward | PackedBackward
Spec = _Dense | PagedForward

#: Kinds of masks. A window ends at the diagonal; bands without rows are others.
FULL, CAUSAL, WINDOW, OTHER = "full", "causal", "window", "other"


class Configuration(NamedTuple):
    """The configuration of the calls that a row is for: neither data nor lengths."""

    sm: int
    is_backward: bool
    dims: tuple[int, int]
    mask: str
    is_capped: bool
    has_sinks: bool
    is_grouped: bool
    is_packed: bool


class Preference(NamedTuple):
    """A row: times in microseconds, the benchmark's call that took them, its left bound, and the table's section."""

    configuration: Configuration
    queries: int
    keys: int
    tokens: int
    fa4_us: float
    cudnn_us: float
    of: str
    section: str = "sdpa"
    left: int | None = None

    def __str__(self) -> str:
        times = f"measured {self.fa4_us:.0f} µs, cuDNN's engines {self.cudnn_us:.0f} µs"
        return f"{times} ({self.of}, on an {self.gpu}; {source_of(self.section)})"

    @property
    def gpu(self) -> str:
        return gpu_of(self.section)

    @property
    def prefers_flash4(self) -> bool:
        return self.fa4_us <= AT_MOST * self.cudnn_us


class PagesPreference(NamedTuple):
    """A row for calls on pages: its number of new tokens of a sequence, and times in microseconds."""

    sm: int
    dims: tuple[int, int]
    is_grouped: bool
    new_tokens: int
    fa4_us: float
    own_us: float
    of: str

    def __str__(self) -> str:
        times = f"measured {self.fa4_us:.0f} µs, the own kernel {self.own_us:.0f} µs"
        section = "sdpa_paged_varlen"
        return f"{times} ({self.of}, on an {gpu_of(section)}; {source_of(section)})"

    @property
    def prefers_flash4(self) -> bool:
        return self.fa4_us <= AT_MOST * self.own_us


@functools.cache
def preferences_for_pages() -> list[PagesPreference]:
    return [PagesPreference(**row) for row in rows_of("sdpa_paged_varlen")]


@functools.cache
def preferences() -> dict[Configuration, list[Preference]]:
    """All rows, by configuration."""
    found: dict[Configuration, list[Preference]] = {}
    for section in ("sdpa", "sdpa_h200"):
        for row in rows_of(section):
            configuration = Configuration(**{name: row.pop(name) for name in Configuration._fields})
            found.setdefault(configuration, []).append(Preference(configuration, **row, section=section))
    return found


def preference_of(spec: Spec, target: Target) -> Preference | PagesPreference | None:
    """The row of a call: the nearest within range, of those measured on its GPU if there are any; None without one."""
    if isinstance(spec, PagedForward):
        return _of_pages(spec, target)
    mask, left = _mask_of(spec)
    rows = preferences().get(_configuration_of(spec, mask, target), [])
    if not rows:
        return None
    queries, keys, tokens = _sizes(spec)
    near = [
        row
        for row in rows
        if _is_within(LENGTH_FACTOR, queries, row.queries)
        and _is_within(LENGTH_FACTOR, keys, row.keys)
        and _is_within(LENGTH_FACTOR, left or 0, row.left or 0)
        and _is_within(TOKEN_FACTOR if row.tokens >= FEW_TOKENS else LENGTH_FACTOR, tokens, row.tokens)
    ]
    of_its_gpu = [row for row in near if row.gpu == target.name]
    return min(of_its_gpu or near, key=lambda row: abs(row.tokens - tokens), default=None)


def _of_pages(spec: PagedForward, target: Target) -> PagesPreference | None:
    """Of the rows of the most new tokens that the call has, that in which FlashAttention-4 is slowest."""
    call = spec.call
    softmax = call.softmax._replace(scale=None)
    (tokens, heads, dim), heads_kv = call.q.shape, call.k.shape[1]
    if softmax != Softmax(is_causal=True, causal_alignment=BOTTOM_RIGHT) or call.sinks is not None:
        return None
    of_call = target.sm, (dim, call.v.shape[3]), heads > heads_kv
    rows = [x for x in preferences_for_pages() if x[:3] == of_call and x.new_tokens * call.batch <= tokens]
    most = max((row.new_tokens for row in rows), default=0)
    return max((x for x in rows if x.new_tokens == most), key=lambda x: x.fa4_us / x.own_us, default=None)


def _sizes(spec: _Dense) -> tuple[float, float, int]:
    """Queries and keys of a sequence, of packed ones the mean; and the number of all queries."""
    if isinstance(spec, (PackedForward, PackedBackward)):
        packed = spec.packed
        tokens, keys = packed.q.shape[0], packed.k.shape[0]
        return tokens / packed.sequences, keys / packed.sequences, tokens
    dense = spec.dense
    return dense.rows, dense.skv, dense.q.shape[0] * dense.rows


def _mask_of(spec: _Dense) -> tuple[str, int | None]:
    """The kind of mask, and a window's left bound, from the diagonal that ends at the last query and the last key."""
    if isinstance(spec, (PackedForward, PackedBackward)):
        band, shift = spec.packed.mask.band, 0  # from the first key only beside as many queries
    else:
        band, shift = spec.dense.mask.band, spec.dense.skv - spec.dense.rows
    if band is None:
        return FULL, None
    left, right, is_bottom_right = band
    shift = 0 if is_bottom_right else shift
    if right != shift:
        return OTHER, None
    return (CAUSAL, None) if left is None else (WINDOW, left + shift)


def _configuration_of(spec: _Dense, mask: str, target: Target) -> Configuration:
    is_packed = isinstance(spec, (PackedForward, PackedBackward))
    call: AttentionSpec = spec.packed if isinstance(spec, (PackedForward, PackedBackward)) else spec.dense
    is_backward = isinstance(spec, (BackwardSpec, PackedBackward))
    return Configuration(
        sm=target.sm,
        is_backward=is_backward,
        dims=(call.q.shape[-1], call.v.shape[-1]),
        mask=mask,
        is_capped=call.is_capped,
        has_sinks=not is_backward and call.sink_use is not SinkUse.ABSENT,
        is_grouped=call.q.shape[1] > call.k.shape[1],
        is_packed=is_packed,
    )


def _is_within(factor: float, number: float, measured: float) -> bool:
    return measured <= factor * number and number <= factor * measured
