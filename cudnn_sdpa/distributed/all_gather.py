"""Context parallelism by all-gather: this rank's queries attend to gathered keys of all ranks, some heads at a time.

While a kernel computes with the keys of some heads of dense tensors, the next keys are in transit, and so are, in the
backward pass, the gradients of the previous heads. The backward pass gathers keys and values again, so that no layer
keeps those of other ranks. ("The Llama 3 Herd of Models", 2024, section 3.3.2, gathers keys and values, too.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import Pending
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
    narrowed,
    new_results,
    parts_of_gathered,
    split_at_diagonal,
    split_kv,
)
from cudnn_sdpa.distributed.zigzag import gathered, in_rank_order, in_sequence_order

#: Maximum number of head groups, dense and packed, and minimum bytes of a group's gathered keys and values: with fewer,
#: launches cost more than communication. On two H100s with NVLink, packed sequences lose more by four kernels than by
#: waiting (36.9 ms instead of 33.5 for 64k tokens); a single group costs memory.
MAX_GROUPS, MAX_PACKED_GROUPS, MIN_BYTES = 4, 1, 4 << 20


def head_groups(k: Tensor, v: Tensor, options: Options) -> list[slice]:
    heads = k.shape[1]
    in_bytes = (k.numel() + v.numel()) * k.element_size() * options.group_rank.ranks
    most = MAX_PACKED_GROUPS if options.is_packed else MAX_GROUPS
    size = heads // groups_of_heads(heads, min(most, in_bytes // MIN_BYTES))
    return [slice(first, first + size) for first in range(0, heads, size)]


def query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


def run(options: Options, inputs: Inputs) -> State:
    if options.softmax.dropout_p:
        return _run_by_autograd(options, inputs)
    return _METHOD.apply(options, inputs)


def calls(options: Options, inputs: Inputs) -> Iterator[tuple[Part, Inputs]]:
    """The calls for some heads whose gradients are computed, given tensors without data.

    The calls are those of this rank and of rank 0, which has the first chunk and the last: if another rank is refused,
    rank 0 nearly always is, too.
    """
    q, k, v = inputs.qkv
    dim, group_rank, is_whole = options.dim, options.group_rank, options.softmax.dropout_p > 0
    heads = slice(0, k.shape[1]) if is_whole else head_groups(k, v, options)[0]
    of_heads = inputs.of_heads(query_heads(heads, q, k))
    own = torch.cat([k[:, heads], v[:, heads]], -1).movedim(dim, 0)
    both = own.new_empty(own.shape[0] * group_rank.ranks, *own.shape[1:]).movedim(0, dim)
    for rank in dict.fromkeys((0, group_rank.rank)):
        for chunk in parts_of_gathered(options.of_rank(rank), both.shape[dim]):
            for part in [chunk] if is_whole else split_at_diagonal(chunk):
                yield part, _of_part(options, part, of_heads, both)


def _run_by_autograd(options: Options, inputs: Inputs) -> State:
    q, k, v = inputs.qkv
    dim = options.dim
    k, v = (gathered(x.movedim(dim, 0), options.group_rank).movedim(0, dim) for x in (k, v))
    states = []
    for part in parts_of_gathered(options, k.shape[dim]):
        rows, keys, values = (narrowed(x, dim, at) for x, at in ((q, part.rows), (k, part.columns), (v, part.columns)))
        states.append(attend(options, part, inputs._replace(q=rows, k=keys, v=values)))
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs, dim), torch.cat(lses, dim)


def _forward(options: Options, inputs: Inputs) -> tuple[State, Sequence[Tensor]]:
    q, k, v = inputs.qkv
    parts = parts_of_gathered(options, k.shape[options.dim] * options.group_rank.ranks)
    out, lse = new_results(q, v)
    for heads, both in _gathered_heads(options, k, v):
        heads_q = query_heads(heads, q, k)
        of_heads = inputs.of_heads(heads_q)
        for part in parts:
            result = attend(options, part, _of_part(options, part, of_heads, both))
            for to, x in zip((out, lse), result, strict=True):
                narrowed(to[:, heads_q], options.dim, part.rows).copy_(x)
    return (out, lse), inputs.qkv


def _gradients(options: Options, outputs: Outputs, saved: Sequence[Any]) -> Gradients:
    inputs = Inputs(*saved)
    q, k, v = inputs.qkv
    dim, group_rank = options.dim, options.group_rank
    whole = parts_of_gathered(options, k.shape[dim] * group_rank.ranks)
    parts = [part for chunk in whole for part in split_at_diagonal(chunk)]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    sends: tuple[slice, Pending[Tensor]] | None = None
    for heads, both in _gathered_heads(options, k, v):
        heads_q = query_heads(heads, q, k)
        of_heads = inputs.of_heads(heads_q)
        sums = torch.zeros(both.movedim(dim, 0).shape, dtype=exact, device=k.device)
        sum_k, sum_v = split_kv(sums.movedim(0, dim), k.shape[-1])
        for part in parts:
            grad_out, out, lse = (narrowed(x[:, heads_q], dim, part.rows) for x in outputs)
            of_part = _of_part(options, part, of_heads, both)
            dq, dk, dv = attend_backward(options, part, (grad_out, out, lse), of_part)
            narrowed(grad_q[:, heads_q], dim, part.rows).add_(dq)
            narrowed(sum_k, dim, part.columns).add_(dk)
            narrowed(sum_v, dim, part.columns).add_(dv)
        if sends is not None:
            _store_gradients(options, sends, grad_k, grad_v)
        sends = heads, collectives.reduce_scatter(in_rank_order(sums, group_rank.ranks), group_rank)
    assert sends is not None
    _store_gradients(options, sends, grad_k, grad_v)
    return grad_q, grad_k, grad_v


_METHOD = Method("all_gather", _forward, _gradients)


def _gathered_heads(options: Options, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Groups of heads, with their keys and values of all ranks. The next are in transit meanwhile."""
    groups = head_groups(k, v, options)

    def gather(heads: slice) -> Pending[Tensor]:
        both = torch.cat([k[:, heads], v[:, heads]], -1).movedim(options.dim, 0)
        return collectives.all_gather(both, options.group_rank)

    receives: Pending[Tensor] | None = gather(groups[0])
    for heads, following in zip(groups, [*groups[1:], None], strict=True):
        assert receives is not None
        both = in_sequence_order(receives.wait(), options.group_rank.ranks).movedim(0, options.dim)
        receives = None if following is None else gather(following)
        yield heads, both


def _of_part(options: Options, part: Part, inputs: Inputs, both: Tensor) -> Inputs:
    """A part's queries, keys and values, out of the queries of some heads, and their gathered keys and values."""
    k, v = split_kv(narrowed(both, options.dim, part.columns), inputs.k.shape[-1])
    return inputs._replace(q=narrowed(inputs.q, options.dim, part.rows), k=k, v=v)


def _store_gradients(options: Options, sends: tuple[slice, Pending[Tensor]], grad_k: Tensor, grad_v: Tensor) -> None:
    heads, pending = sends
    sum_k, sum_v = split_kv(pending.wait().movedim(0, options.dim), grad_k.shape[-1])
    grad_k[:, heads].copy_(sum_k)
    grad_v[:, heads].copy_(sum_v)
