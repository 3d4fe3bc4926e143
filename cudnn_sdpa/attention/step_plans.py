"""Which plans the steps of a server need, so that they are ready before its first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.describe_paged import describe_paged
from cudnn_sdpa.attention.kv_arguments import check_count
from cudnn_sdpa.attention.paged_step import PagedStep
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.runtime.manifest import PlanManifest
from cudnn_sdpa.runtime.target import Target

_META = torch.device("meta")


class Cache(Protocol):
    """What is asked of a `PagedKVCache`."""

    page_layout: str
    _mark: tuple[int, int, int]

    def k_pages(self) -> Tensor:
        """The keys of a layer."""

    def v_pages(self) -> Tensor:
        """The values of a layer."""


def plans_of_steps(
    cache: Cache, q: Any, batches: Any, tokens: Any, options: dict[str, Any], target: Target
) -> PlanManifest:
    """See `PagedKVCache.plans`; for any GPU."""
    if not isinstance(q, Tensor) or q.dim() != 4 or 0 in q.shape:
        got = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ShapeError("q", got, "queries of a step, (B, Hq, tokens, D), none of them 0")
    counts = _counts("batches", batches), _counts("tokens", tokens)
    k, v = (torch.empty_like(pages, device=_META) for pages in (cache.k_pages(), cache.v_pages()))
    keys = []
    for batch in counts[0]:
        for count in counts[1]:
            step = PagedStep.new(cache, cache._mark, batch, count, _META)
            present = step.seq_lens_q if count > 1 else None  # as `PagedKVCache.attend` gives it
            of_step = (queries_like(q, batch, count), k, v, step.page_table, step.seq_lens_kv)
            described = describe_paged(*of_step, seq_lens_q=present, page_layout=cache.page_layout, **options)
            keys.append(described.key(target, None))
    return PlanManifest.of(keys)


def _counts(name: str, counts: Any) -> list[int]:
    if isinstance(counts, (str, Tensor)) or not isinstance(counts, Iterable):
        raise OptionError(name, repr(counts), "several ints, such as [1, 2, 4] or range(1, 65)")
    found = list(counts)
    for count in found:
        check_count(name, count, least=1)
    return found


def queries_like(q: Tensor, batch: int, tokens: int) -> Tensor:
    """Queries of another step, without data, that lie in memory as these do.

    The tokens of sequences follow each other, as models make them, perhaps with other tensors between them; unless `q`
    has several tokens and those of each head follow each other.
    """
    _, heads, given, dim = q.shape
    shape = (batch, heads, tokens, dim)
    if given > 1 and heads > 1 and q.stride(1) > q.stride(2):
        return torch.empty(shape, dtype=q.dtype, device=_META)
    token = q.stride(2) if given > 1 else max(q.stride(0), heads * dim)
    stride = (tokens * token, q.stride(1) if heads > 1 else dim, token, 1)
    return torch.empty_strided(shape, stride, dtype=q.dtype, device=_META)
