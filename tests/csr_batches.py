"""Batches on pages listed end to end, as FlashInfer has them, and their attention in float64.

Slots that belong to no sequence are NaN, and so are pages that none lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

Cache = Tensor | tuple[Tensor, Tensor]


@dataclass
class CsrBatch:
    """Sequences on pages.

    Attributes:
        keys: The keys of each sequence, (tokens, heads, head dim); as the pages hold them, so are `values`.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    cache: Cache
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The pages of keys and of values."""
        return self.cache if isinstance(self.cache, tuple) else tuple(self.cache.unbind(1))  # type: ignore[return-value]


def offsets(counts: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def csr_batch(
    lengths: Sequence[int],
    page: int = 16,
    *,
    heads: int = 2,
    dim: int = 16,
    layout: str = "NHD",
    is_one: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> CsrBatch:
    """Random keys and values on pages, in one tensor or in two; pages in FP8 hold rounded numbers."""
    counts = [-(-length // page) for length in lengths]
    number = sum(counts) + 2
    of_page = (page, heads) if layout == "NHD" else (heads, page)
    whole = torch.full((number, 2, *of_page, dim), math.nan, dtype=torch.float32, device=device)
    indices = torch.randperm(number)[: number - 2]
    keys, values = [], []
    for begin, count, length in zip(offsets(counts).tolist(), counts, lengths, strict=False):
        drawn = torch.randn(2, length, heads, dim, device=device).to(dtype).float()
        for j in range(length):
            slot = (j % page, slice(None)) if layout == "NHD" else (slice(None), j % page)
            whole[(int(indices[begin : begin + count][j // page]), slice(None), *slot)] = drawn[:, j]
        keys.append(drawn[0])
        values.append(drawn[1])
    cache = whole.to(dtype)
    last = [length - (count - 1) * page if count else 0 for count, length in zip(counts, lengths, strict=True)]
    return CsrBatch(
        indptr=offsets(counts, device),
        indices=indices.int().to(device),
        last_page_len=torch.tensor(last, dtype=torch.int32, device=device),
        cache=cache if is_one else tuple(x.clone() for x in cache.unbind(1)),  # type: ignore[arg-type]
        keys=keys,
        values=values,
    )


def attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries (n, Hq, D) on keys (m, Hkv, D) in float64, and its LSE (n, Hq) to the base of 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(len(q), device=q.device).unsqueeze(1) + len(k) - len(q)  # the key of each query's own token
    j = torch.arange(len(k), device=q.device)
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device) if mask is None else mask.clone()
    if causal:
        seen &= j <= own
    if window_left >= 0:
        seen &= j >= own - window_left
    scores = scores.masked_fill(~seen, -math.inf)
    of_sinks = torch.full((q.shape[1],), -math.inf, device=q.device) if sinks is None else sinks
    scores = torch.cat([scores, of_sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], 2)
    lse = scores.logsumexp(2)
    weights = torch.where(lse.isneginf().unsqueeze(2), 0.0, (scores - lse.unsqueeze(2)).exp())[..., :-1]
    return torch.einsum("hij,jhd->ihd", weights, v), lse.t() / math.log(2)


def attention_on(batch: CsrBatch, q: Tensor, counts: Sequence[int], **options: object) -> tuple[Tensor, Tensor]:
    """Attention of packed queries, `counts` of each sequence."""
    parts = zip(q.split(list(counts)), batch.keys, batch.values, strict=True)
    found = [attention_of(*part, **options) for part in parts]  # type: ignore[arg-type]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
