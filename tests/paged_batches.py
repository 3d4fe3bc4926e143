"""Batches of new tokens on a paged cache: packed, and as many for each sequence.

Slots are NaN, and page ids wild, but for the keys of sequences with new tokens, from the first on that one sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from float64_reference import attend_packed_on_pages, seen_keys
from torch import Tensor

#: Where keys and values are: apart, side by side in a slot, in turns of pages, or in one half of memory each.
PLACES = ("apart", "side by side", "interleaved", "halves")

#: Page ids of which no sequence makes use.
WILD = (-1, -(2**31), 2**31 - 1, 10**6)


def batch_on_pages(
    new: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int = 4,
    heads_kv: int = 2,
    dims: tuple[int, int] = (16, 24),
    page: int = 5,
    layout: str = "NHD",
    place: str = "apart",
    dtype: torch.dtype = torch.float64,
    cache: torch.dtype | None = None,
    before: int = 0,
    behind: int = 0,
    has_table_v: bool = False,
    device: str = "cpu",
    **mask: Any,
) -> dict[str, Any]:
    """The arguments of a call, `mask` among them.

    Args:
        new: Number of new tokens of each sequence.
        lengths: Number of keys of each.
        heads: Query heads.
        heads_kv: Key heads.
        dims: Head dims of keys and values; one number twice unless keys and values are apart or side by side.
        page: Tokens of a page.
        layout: `page_layout`.
        place: One of `PLACES`.
        dtype: That of the queries.
        cache: That of the pages, if another.
        before: Tokens before the first sequence.
        behind: Tokens behind the last.
        has_table_v: Whether values have pages of their own.
        device: Of all tensors.
        **mask: Options that say which keys are seen.
    """
    keys_of = [_used(*of, mask) for of in zip(new, lengths, strict=True)]
    columns = max([1, *(-(-length // page) for length in lengths)]) + 1
    used = [sorted({j // page for j in row}) for row in keys_of]
    number = sum(map(len, used))
    whole = _memory(place, number + 2, page, heads_kv, dims, layout)
    pages, tables = [x.fill_(math.nan) for x in whole], []
    for which, dim in enumerate(dims):
        if which == 0 or has_table_v:
            table = torch.tensor(WILD, dtype=torch.int64)[torch.randint(len(WILD), (len(new), columns))]
            ids = iter(torch.randperm(number + 2).tolist())
            for row, columns_used in zip(table, used, strict=True):
                for column in columns_used:
                    row[column] = next(ids)
            tables.append(table)
        slots = pages[which] if layout == "NHD" else pages[which].transpose(1, 2)
        for row, keys in zip(tables[-1], keys_of, strict=True):
            j = torch.tensor(keys, dtype=torch.int64)
            slots[row[j // page], j % page] = torch.randn(len(keys), heads_kv, dim)
    stored = [_like(x, cache or dtype) for x in pages]
    ends = [*accumulate(new, initial=before)]
    ints = {"page_table": tables[0], "seq_lens_kv": lengths, "cu_seqlens_q": ends}
    made: dict[str, Any] = {"q": torch.randn(ends[-1] + behind, heads, dims[0]).to(dtype)}
    made |= dict(zip(("k_pages", "v_pages"), stored, strict=True))
    made |= {name: torch.as_tensor(x, dtype=torch.int64).to(torch.int32) for name, x in ints.items()}
    if has_table_v:
        made["page_table_v"] = tables[1].to(torch.int32)
    found = {name: x.to(device) for name, x in made.items()}
    return {**found, "max_seqlen_q": max([0, *new]), "page_layout": layout, **mask}


def padded_on_pages(
    queries: int, lengths: Sequence[int], present: Sequence[int] | None = None, **settings: Any
) -> dict[str, Any]:
    """The arguments of a call of `sdpa_paged`, without masks.

    Args:
        queries: Queries of each sequence, (B, Hq, queries, D).
        lengths: Number of keys of each.
        present: How many of the queries each has, if not all.
        **settings: Those of `batch_on_pages`.
    """
    made = batch_on_pages([queries] * len(lengths), lengths, **settings)
    rows = made.pop("q").unflatten(0, (len(lengths), queries))
    del made["cu_seqlens_q"], made["max_seqlen_q"]
    if present is not None:
        made["seq_lens_q"] = torch.tensor(present, dtype=torch.int32, device=rows.device)
    return {"q": rows.transpose(1, 2), **made}


def attend_padded_on_pages(
    q: Tensor, *pages: Tensor, seq_lens_q: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of `sdpa_paged` in float64: for absent queries zeros, and the LSE of their sinks alone."""
    batch, heads, queries, _ = q.shape
    counts = torch.full((batch,), queries, device=q.device) if seq_lens_q is None else seq_lens_q
    is_there = torch.arange(queries, device=q.device) < counts.unsqueeze(1)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    found, of_lse = attend_packed_on_pages(q.transpose(1, 2)[is_there], *pages, cu_seqlens_q=ends, **options)
    nothing = options.get("sinks", torch.tensor(-math.inf, device=q.device)).double()
    out, lse = found.new_zeros(batch, queries, heads, found.shape[2]), nothing.expand(batch, queries, heads).clone()
    out[is_there], lse[is_there] = found, of_lse
    return out.transpose(1, 2), lse.transpose(1, 2)


def _used(new: int, length: int, mask: dict[str, Any]) -> range:
    """The keys of a sequence from the first on that some new token sees."""
    if new == 0:
        return range(0)
    options = {"is_causal": True, "causal_alignment": "bottom_right", **mask}
    seen = seen_keys(1, new, length, options)[0, 0].any(0).nonzero()[:, 0].tolist()
    return range(min(seen, default=length), length)


def _memory(place: str, pages: int, page: int, heads: int, dims: tuple[int, int], layout: str) -> tuple[Tensor, Tensor]:
    slots = (page, heads) if layout == "NHD" else (heads, page)
    if place == "side by side":
        one, other = torch.empty(pages, *slots, sum(dims)).split(dims, dim=-1)
        return one, other
    if place == "apart":
        return torch.empty(pages, *slots, dims[0]), torch.empty(pages, *slots, dims[1])
    assert dims[0] == dims[1]
    one, other = (
        torch.empty(pages, 2, *slots, dims[0]).unbind(1)
        if place == "interleaved"
        else torch.empty(2, pages, *slots, dims[0]).unbind(0)
    )
    return one, other


def _like(pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages in another dtype, with the same strides, and NaN between them."""
    memory = torch.full((1 + sum((n - 1) * s for n, s in zip(pages.shape, pages.stride(), strict=True)),), math.nan)
    return memory.to(dtype).as_strided(pages.shape, pages.stride()).copy_(pages)
