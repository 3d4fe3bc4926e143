"""The plans that a server's steps need, to warm up before its first request: a dry run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged.arguments import PageLayout
from cudnn_sdpa.attention.paged.kv_cache_checks import PlanOptions, check_count, refuse_options
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED, call_of, sdpa_paged
from cudnn_sdpa.attention.paged.specs import MAX_DECODED
from cudnn_sdpa.attention.paged.step import Mark, PagedStep
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.manifest import PlanManifest

_META = torch.device("meta")


class Cache(Protocol):
    """The part of `PagedKVCache`, which imports this module, that is used here."""

    page_layout: PageLayout
    k_scale: Tensor | None
    v_scale: Tensor | None
    _mark: Mark

    def k_pages(self) -> Tensor: ...
    def v_pages(self) -> Tensor: ...


def plans_of_steps(
    cache: Cache, q: object, batches: object, tokens: object, options: PlanOptions, target: Target
) -> PlanManifest:
    """`PagedKVCache.plans` for any target."""
    if not isinstance(q, Tensor) or q.dim() != 4 or 0 in q.shape:
        got = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ShapeError("q", got, "queries of a step, (B, Hq, tokens, D), no size 0")
    if not options.keys() <= PlanOptions.__optional_keys__:
        refuse_options(options, PlanOptions.__optional_keys__)
    pages = {"k_pages": cache.k_pages(), "v_pages": cache.v_pages(), "page_layout": cache.page_layout}
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    arguments: dict[str, Any] = {**(sdpa_paged.__kwdefaults__ or {}), **options, **pages, **scales}
    arguments |= {name: torch.empty_like(x, device=_META) for name, x in arguments.items() if isinstance(x, Tensor)}

    def keys_of(batch: int, count: int) -> list[PlanKey]:
        step = PagedStep.new(cache=cache, mark=cache._mark, batch=batch, tokens=count, device=_META)
        of_step = {"q": queries_like(q, batch, count), "page_table": step.page_table, "seq_lens_kv": step.seq_lens_kv}
        keys: list[PlanKey] = []
        # `attend` passes `seq_lens_q` for several tokens, and for single ones if some are absent.
        for seq_lens_q in (step.seq_lens_q, None) if count == 1 else (step.seq_lens_q,):
            call = call_of(**{**arguments, **of_step, "seq_lens_q": seq_lens_q})
            if (refused := PAGED.checked(call, lambda call: call).refused) is not None:
                raise refused
            keys += call.keys(target, None)
        return keys

    sizes, counts = _counts("batches", batches), sorted(_counts("tokens", tokens))
    steps = (keys for batch in sizes for keys in _distinct(partial(keys_of, batch), counts))
    return PlanManifest.of(list({key for keys in steps for key in keys}))


def _distinct(keys_of: Callable[[int], list[PlanKey]], counts: list[int]) -> Iterable[list[PlanKey]]:
    """The keys of all these numbers of tokens, in ascending order, without asking for each.

    Past decode steps, plans follow from the number of tokens by rounding it up and comparing it with bounds. So if two
    numbers have the same plans, those between have them, too.
    """
    found = {i: keys_of(count) for i, count in enumerate(counts) if count <= MAX_DECODED}
    spans = [(len(found), len(counts) - 1)] if len(found) < len(counts) else []
    while spans:
        first, last = spans.pop()
        for i in (first, last):
            found[i] = found.get(i) or keys_of(counts[i])
        middle = (first + last) // 2
        if found[first] != found[last] and first < middle:
            spans += [(first, middle), (middle, last)]
    return found.values()


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
