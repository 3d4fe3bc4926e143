"""Context parallelism by exchange of heads: each rank computes some heads of the whole sequence.

An exchange before attention gives each rank all tokens of its heads, and one after it returns the tokens. ("DeepSpeed
Ulysses", Jacobs et al., 2023.) While a kernel computes with some heads of packed sequences, the next ones are in
transit, and so are the previous results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import GroupRank, Pending
from cudnn_sdpa.distributed.local_attention import (
    Gradients,
    Inputs,
    Method,
    Options,
    Outputs,
    Part,
    State,
    attend,
    attend_backward,
    groups_of_heads,
    new_results,
    refusing_gradients,
)
from cudnn_sdpa.distributed.zigzag import chunks_of
from cudnn_sdpa.engine.dispatch_state import Function, materialized

#: Maximum number of groups of a rank's heads, packed and dense, and minimum bytes of a group's queries. On two H200s
#: two kernels beside communication take longer than one dense kernel of a long sequence that waits for it.
MAX_GROUPS, MAX_DENSE_GROUPS, MIN_BYTES = 2, 1, 16 << 20


def repeats(heads_q: int, heads_kv: int, ranks: int) -> int | None:
    """The number of copies of each key head, so that each rank has its own; None if heads do not divide."""
    number = math.lcm(heads_kv, ranks)
    return None if heads_q % number else number // heads_kv


class _Heads(NamedTuple):
    number: int
    groups: int

    def of(self, rank: int, heads: int, ranks: int) -> slice:
        size = heads // ranks // self.groups
        begin = (rank * self.groups + self.number) * size
        return slice(begin, begin + size)


ALL = _Heads(0, 1)


def run(options: Options, inputs: Inputs) -> State:
    times = repeats(inputs.q.shape[1], inputs.k.shape[1], options.group_rank.ranks)
    assert times is not None
    if times > 1:
        inputs = inputs._replace(k=inputs.k.repeat_interleave(times, 1), v=inputs.v.repeat_interleave(times, 1))
    if options.softmax.dropout_p:
        return _run_by_autograd(options, inputs)
    if inputs.cu_seqlens is not None:
        inputs = inputs._replace(cu_seqlens=inputs.cu_seqlens.clone())  # the caller may refill it
    return _METHOD.apply(options, inputs)


def calls(options: Options, inputs: Inputs) -> Iterator[tuple[Part, Inputs]]:
    q, k, v = inputs.qkv
    dim, ranks = options.dim, options.group_rank.ranks
    heads_kv = math.lcm(k.shape[1], ranks)
    shares = ranks * (1 if options.softmax.dropout_p else len(_groups(options, q, heads_kv)))

    def whole(x: Tensor, heads: int) -> Tensor:
        rows = x.movedim(dim, 0)
        shape = (rows.shape[0] * ranks, *rows.shape[1:-2], heads // shares, x.shape[-1])
        return x.new_empty(shape).movedim(0, dim)

    heads = {"q": whole(q, q.shape[1]), "k": whole(k, heads_kv), "v": whole(v, heads_kv)}
    yield Part.whole(options, q), inputs._replace(**heads)


def _forward(options: Options, inputs: Inputs) -> tuple[State, list[Tensor | None]]:
    q, k, v = inputs.qkv
    dim, group_rank = options.dim, options.group_rank
    part = Part.whole(options, q)
    rows = [x.movedim(dim, 0) for x in (q, k, v)]
    groups = _groups(options, rows[0], heads_kv=k.shape[1])
    receives = [_send_heads(rows, heads, group_rank) for heads in groups]
    out, lse = new_results(q, v)  # not views: autograd forbids changes in place to views of a function's results
    results = [out.movedim(dim, 0), _lse_rows(lse, dim)]
    saved: list[Tensor | None] = []
    sends = []
    for heads, pending in zip(groups, receives, strict=True):
        own_q, own_k, own_v = (x.movedim(0, dim) for x in pending.wait())
        of_heads = inputs.of_heads(heads.of(group_rank.rank, q.shape[1], group_rank.ranks))
        own = of_heads._replace(q=own_q, k=own_k, v=own_v)
        result = attend(options, part, own)
        saved += [*own.qkv, *result]
        sends.append(_send_tokens([result[0].movedim(dim, 0), _lse_rows(result[1], dim)], results, heads, group_rank))
    for pending_results in sends:
        pending_results.wait()
    return (out, lse), saved


def _gradients(options: Options, outputs: Outputs, saved: Sequence[Any]) -> Gradients:
    *of_groups, _, cu_seqlens = saved
    dim, group_rank = options.dim, options.group_rank
    calls = [of_groups[at : at + 5] for at in range(0, len(of_groups), 5)]
    groups = [_Heads(index, len(calls)) for index in range(len(calls))]
    part = Part.whole(options, outputs[0])
    rows = outputs[0].movedim(dim, 0)
    receives = [_send_heads([rows], heads, group_rank) for heads in groups]
    grads: list[Tensor] = []
    sends = []
    for heads, pending, (q, k, v, out, lse) in zip(groups, receives, calls, strict=True):
        of_group = (pending.wait()[0].movedim(0, dim), out, lse)
        group_grads = attend_backward(options, part, of_group, Inputs(q=q, k=k, v=v, cu_seqlens=cu_seqlens))
        if not grads:  # after the first kernel, whose workspace is free again
            shares = len(groups) * group_rank.ranks
            grads = [x.new_empty(*rows.shape[:-2], x.shape[1] * shares, x.shape[-1]) for x in (q, k, v)]
        sends.append(_send_tokens([x.movedim(dim, 0) for x in group_grads], grads, heads, group_rank))
    for pending_grads in sends:
        pending_grads.wait()
    grad_q, grad_k, grad_v = (x.movedim(0, dim) for x in grads)
    return grad_q, grad_k, grad_v


_METHOD = Method("ulysses", _forward, _gradients)


def _run_by_autograd(options: Options, inputs: Inputs) -> State:
    group_rank, dim = options.group_rank, options.dim
    q, k, v = (_Exchanged.apply(x.movedim(dim, 0), group_rank, True).movedim(0, dim) for x in inputs.qkv)
    of_heads = inputs.of_heads(ALL.of(group_rank.rank, inputs.q.shape[1], group_rank.ranks))
    out, lse = attend(options, Part.whole(options, inputs.q), of_heads._replace(q=q, k=k, v=v))
    out = _Exchanged.apply(out.movedim(dim, 0), group_rank, False).movedim(0, dim)
    with torch.no_grad():
        lse = _tokens_for_heads(_lse_rows(lse, dim), group_rank).squeeze(-1).movedim(0, dim)
    return out, refusing_gradients(lse, out)


class _Exchanged(Function):
    """Heads of all tokens for all heads of a rank's tokens, or the reverse, which is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_rank: GroupRank, for_heads: bool) -> Tensor:
        ctx.group_rank, ctx.for_heads = group_rank, for_heads
        return _send_heads([x], ALL, group_rank).wait()[0] if for_heads else _tokens_for_heads(x, group_rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchanged.apply(grad, ctx.group_rank, not ctx.for_heads), None, None


def _tokens_for_heads(x: Tensor, group_rank: GroupRank) -> Tensor:
    """(all tokens, …, heads / P, D) -> (tokens of this rank, …, heads, D)."""
    whole = x.new_empty(x.shape[0] // group_rank.ranks, *x.shape[1:-2], x.shape[-2] * group_rank.ranks, x.shape[-1])
    _send_tokens([x], [whole], ALL, group_rank).wait()
    return whole


def _lse_rows(lse: Tensor, dim: int) -> Tensor:
    return lse.movedim(dim, 0).unsqueeze(-1)


def _groups(options: Options, rows: Tensor, heads_kv: int) -> list[_Heads]:
    heads = heads_kv // options.group_rank.ranks
    in_bytes = rows.numel() * rows.element_size()
    most = MAX_GROUPS if options.is_packed else MAX_DENSE_GROUPS
    number = groups_of_heads(heads, min(most, in_bytes // MIN_BYTES))
    return [_Heads(index, number) for index in range(number)]


def _send_heads(xs: list[Tensor], heads: _Heads, group_rank: GroupRank) -> Pending[list[Tensor]]:
    """Starts to exchange (tokens of this rank, …, heads, D) for (all tokens, …, some of this rank's heads, D)."""
    mine = [_two_chunks(materialized(x)) for x in xs]
    wholes = []
    for x in mine:
        tokens, heads_of_rank = x.shape[1] * 2 * group_rank.ranks, x.shape[-2] // group_rank.ranks // heads.groups
        wholes.append(x.new_empty(tokens, *x.shape[2:-2], heads_of_rank, x.shape[-1]))
    return collectives.exchange(_shares(wholes, mine, heads, group_rank), wholes, group_rank)


def _send_tokens(xs: list[Tensor], to: list[Tensor], heads: _Heads, group_rank: GroupRank) -> Pending[None]:
    """Starts the exchange that inverts `_send_heads`, into tensors of all heads of this rank's tokens."""
    shares = _shares([materialized(x) for x in xs], [_two_chunks(x) for x in to], heads, group_rank)
    inverse = {rank: [(own, whole) for whole, own in pairs] for rank, pairs in shares.items()}
    return collectives.exchange(inverse, None, group_rank)


def _shares(
    wholes: list[Tensor], mine: list[Tensor], heads: _Heads, group_rank: GroupRank
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Each rank's tokens of tensors of all tokens, and its heads of this rank's tokens."""
    return {
        rank: [
            (_chunks(whole, rank, group_rank), x[..., heads.of(rank, x.shape[-2], group_rank.ranks), :])
            for whole, x in zip(wholes, mine, strict=True)
        ]
        for rank in range(group_rank.ranks)
    }


def _two_chunks(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, -1))  # type: ignore[no-untyped-call,no-any-return]


def _chunks(whole: Tensor, rank: int, group_rank: GroupRank) -> Tensor:
    first, last = chunks_of(group_rank._replace(rank=rank))
    chunks: Tensor = whole.unflatten(0, (2 * group_rank.ranks, -1))  # type: ignore[no-untyped-call]
    return chunks[first : last + 1 : last - first]
