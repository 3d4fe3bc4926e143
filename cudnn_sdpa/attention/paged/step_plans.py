"""The plans that a server's steps need, to warm up before its first request."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypedDict, cast

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.paged import plans
from cudnn_sdpa.attention.paged.arguments import PageLayout
from cudnn_sdpa.attention.paged.call import PagedCall
from cudnn_sdpa.attention.paged.kv_cache_checks import PlanOptions, check_count
from cudnn_sdpa.attention.paged.plans import row_bucket
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.attention.varlen.plans import sequence_bucket
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.manifest import PlanManifest

_META = torch.device("meta")

#: Options whose names differ between `sdpa_paged` and `PagedArguments`.
_NAMES = {"return_lse": "with_lse"}


class _CallOptions(TypedDict, total=False):
    """The options of a step as fields of `PagedArguments`."""

    page_layout: str
    is_causal: bool
    causal_alignment: str
    window_left: int
    window_right: int
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    with_lse: bool


class Cache(Protocol):
    """The part of `PagedKVCache` that is used here."""

    page_layout: PageLayout
    _mark: tuple[int, int, int]

    def k_pages(self) -> Tensor:
        """The keys of a layer."""

    def v_pages(self) -> Tensor:
        """The values of a layer."""


def plans_of_steps(
    cache: Cache, q: object, batches: object, tokens: object, options: PlanOptions, target: Target
) -> PlanManifest:
    """`PagedKVCache.plans` for any target."""
    if not isinstance(q, Tensor) or q.dim() != 4 or 0 in q.shape:
        got = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ShapeError("q", got, "queries of a step, (B, Hq, tokens, D), no size 0")
    counts = _counts("batches", batches), _counts("tokens", tokens)
    call_options = _options(options, cache.page_layout)
    pages = [torch.empty_like(x, device=_META) for x in (cache.k_pages(), cache.v_pages())]
    keys: dict[Hashable, list[PlanKey]] = {}
    for batch in counts[0]:
        for count in counts[1]:
            step = None
            for form in _forms(batch, count):
                if form not in keys:
                    step = step or PagedStep.new(cache=cache, mark=cache._mark, batch=batch, tokens=count, device=_META)
                    keys[form] = list(
                        plans.keys(_call(step, q, pages, call_options, present=form.present), target, None)
                    )
    return PlanManifest.of([key for step_keys in keys.values() for key in step_keys])


class _Form(NamedTuple):
    """What decides the plans of a step: steps of equal form share their plans, as most do.

    Attributes:
        present: Whether the step has `seq_lens_q`, as some tokens may be absent.
        in_place_batch: The batch size, if cuDNN reads the step's tables directly.
        split_batch: The batch size, if the step is split.
        sequences: The bucket of the number of sequences.
        decoded: The bucket of the number of queries, for decode plans.
        rows: The bucket of the number of queries, for prefill plans.
        token_bits: The bucket of the number of new tokens.
    """

    present: bool
    in_place_batch: int | None
    split_batch: int | None
    sequences: int
    decoded: int
    rows: int
    token_bits: int


def _forms(batch: int, tokens: int) -> Iterator[_Form]:
    rows = batch * tokens
    # With several tokens `PagedKVCache.attend` always passes seq_lens_q.
    for present in (True, False) if tokens == 1 else (True,):
        yield _Form(
            present=present,
            in_place_batch=batch if not present else None,
            split_batch=batch if rows > known_issues.MAX_GRID else None,
            sequences=sequence_bucket(batch),
            decoded=sequence_bucket(rows),
            rows=row_bucket(rows),
            token_bits=(tokens - 1).bit_length(),
        )


def _call(step: PagedStep, q: Tensor, pages: list[Tensor], options: _CallOptions, *, present: bool) -> PagedCall:
    call = PagedCall(
        q=queries_like(q, step.batch, step.tokens),
        k_pages=pages[0],
        v_pages=pages[1],
        page_table=step.page_table,
        page_table_v=None,
        seq_lens_kv=step.seq_lens_kv,
        seq_lens_q=step.seq_lens_q if present else None,
        **options,
    )
    PAGED.check_all(call)
    call.check_strides()
    call.check_memory()
    return call


def _options(options: PlanOptions, page_layout: str) -> _CallOptions:
    """The options of `attend` as fields of `PagedArguments`, without data."""
    left, right = arguments.window_bounds(options.get("window_size"))
    known = PlanOptions.__optional_keys__
    for name in options.keys() - known:
        raise OptionError(name, "an argument", f"one of {', '.join(sorted(known))}", "It does not affect a plan.")
    others = {name: value for name, value in options.items() if name != "window_size"}
    data = {name: torch.empty_like(x, device=_META) if isinstance(x, Tensor) else x for name, x in others.items()}
    fields = {"sinks": None, "page_layout": page_layout, "window_left": left, "window_right": right}
    return cast("_CallOptions", fields | {_NAMES.get(name, name): x for name, x in data.items()})


def _counts(name: str, counts: object) -> list[int]:
    if isinstance(counts, (str, Tensor)) or not isinstance(counts, Iterable):
        raise OptionError(name, repr(counts), "several ints, such as [1, 2, 4] or range(1, 65)")
    checked = list(counts)
    for count in checked:
        check_count(name, count, least=1)
    return checked


def queries_like(q: Tensor, batch: int, tokens: int) -> Tensor:
    """Queries of another step, without data, with a memory layout like that of `q`.

    They are token-major as models make them, perhaps with gaps (a slice of a QKV projection), unless `q` has several
    tokens and is head-major.
    """
    _, heads, tokens_of_q, dim = q.shape
    shape = (batch, heads, tokens, dim)
    if tokens_of_q > 1 and heads > 1 and q.stride(1) > q.stride(2):
        return torch.empty(shape, dtype=q.dtype, device=_META)
    token = q.stride(2) if tokens_of_q > 1 else max(q.stride(0), heads * dim)
    stride = (tokens * token, q.stride(1) if heads > 1 else dim, token, 1)
    return torch.empty_strided(shape, stride, dtype=q.dtype, device=_META)
