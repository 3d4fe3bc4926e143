"""Context parallelism by exchange of heads: each rank computes some heads of the whole sequence.

An all-to-all before attention gives each rank all tokens of its heads, one after it gives the tokens back. ("DeepSpeed
Ulysses", Jacobs et al., 2023.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.autograd import refusing_gradients
from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.distributed.local_attention import Options, Part, State, attend
from cudnn_sdpa.distributed.zigzag import in_rank_order, in_sequence_order


def repeats(heads_q: int, heads_kv: int, ranks: int) -> int | None:
    """How often each head of keys is repeated, so that each rank has some of its own; None if heads do not divide."""
    number = math.lcm(heads_kv, ranks)
    return None if heads_q % number else number // heads_kv


def run(options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None) -> State:
    """The output and the LSE of this rank's queries. Differentiable."""
    place, dim = options.place, options.dim
    times = repeats(q.shape[1], k.shape[1], place.ranks)
    assert times is not None
    if times > 1:
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    q, k, v = (_HeadsForTokens.apply(x.movedim(dim, 0), place).movedim(0, dim) for x in (q, k, v))  # type: ignore[no-untyped-call]
    own = None if sinks is None else sinks.chunk(place.ranks)[place.rank]
    part = Part.whole(q.shape[dim], is_causal=options.is_causal, window=options.window)
    out, lse = attend(options, part, q=q, k=k, v=v, sinks=own, cu_seqlens=cu_seqlens)
    out = _TokensForHeads.apply(out.movedim(dim, 0), place).movedim(0, dim)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        lse = _tokens_for_heads(lse.unsqueeze(-1).movedim(dim, 0), place).movedim(0, dim).squeeze(-1)
    return out, refusing_gradients(lse, out)


def _heads_for_tokens(x: Tensor, place: Place) -> Tensor:
    """From (tokens of this rank, …, heads, D) to (all tokens, …, heads / P, D)."""
    parts = x.unflatten(-2, (place.ranks, -1)).movedim(-3, 0)  # type: ignore[no-untyped-call]
    return in_sequence_order(collectives.all_to_all(parts, place).flatten(0, 1), place.ranks)


def _tokens_for_heads(x: Tensor, place: Place) -> Tensor:
    """The opposite."""
    parts = in_rank_order(x, place.ranks).unflatten(0, (place.ranks, -1))  # type: ignore[no-untyped-call]
    return collectives.all_to_all(parts, place).movedim(0, -3).flatten(-3, -2)


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _heads_for_tokens(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _TokensForHeads.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _tokens_for_heads(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _HeadsForTokens.apply(grad, ctx.place), None  # type: ignore[no-untyped-call]
