"""Context parallelism by all-gather: this rank's queries attend to gathered keys of all ranks, some heads at a time.

While a kernel computes with the keys of some heads of dense tensors, the next keys are in transit, and so are, in the
backward pass, the gradients of the previous heads. The backward pass gathers keys and values again, so that no layer
keeps those of other ranks. ("The Llama 3 Herd of Models", 2024, section 3.3.2, gathers keys and values, too.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import Pending
from cudnn_sdpa.distributed.local_attention import (
    Gradients,
    Options,
    Part,
    PartCall,
    State,
    attend,
    attend_backward,
    gradient_of_sinks,
    narrowed,
    new_results,
    parts_of_gathered,
    resumed,
    save,
    split_at_diagonal,
    split_kv,
)
from cudnn_sdpa.distributed.zigzag import gathered, in_rank_order, in_sequence_order
from cudnn_sdpa.engine.call import Function

#: Maximum number of head groups, dense and packed, and minimum bytes of a group's gathered keys and values: with fewer,
#: launches cost more than communication. On two H100s with NVLink, packed sequences lose more by four kernels than by
#: waiting (36.9 ms instead of 33.5 for 64k tokens); a single group costs memory.
MAX_GROUPS, MAX_PACKED_GROUPS, MIN_BYTES = 4, 1, 4 << 20


def head_groups(k: Tensor, v: Tensor, options: Options) -> list[slice]:
    heads = k.shape[1]
    in_bytes = (k.numel() + v.numel()) * k.element_size() * options.group_rank.ranks
    wanted = max(1, min(MAX_PACKED_GROUPS if options.is_packed else MAX_GROUPS, heads, in_bytes // MIN_BYTES))
    number = max(n for n in range(1, wanted + 1) if heads % n == 0)
    size = heads // number
    return [slice(first, first + size) for first in range(0, heads, size)]


def query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


def run(options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None) -> State:
    if options.dropout_p:
        return _run_by_autograd(options, q, k, v, sinks=sinks, cu_seqlens=cu_seqlens)
    out, lse = _AllGather.apply(options, cu_seqlens, q, k, v, sinks)
    return out, lse


def calls(options: Options, q: Tensor, k: Tensor, v: Tensor) -> Iterator[PartCall]:
    """The calls for some heads whose gradients are computed, given tensors without data.

    The calls are those of this rank and of rank 0, which has the first chunk and the last: if another rank is refused,
    rank 0 nearly always is, too.
    """
    dim, group_rank = options.dim, options.group_rank
    heads = slice(0, k.shape[1]) if options.dropout_p else head_groups(k, v, options)[0]
    heads_q = query_heads(heads, q, k)
    own = torch.cat([k[:, heads], v[:, heads]], -1).movedim(dim, 0)
    both = own.new_empty(own.shape[0] * group_rank.ranks, *own.shape[1:]).movedim(0, dim)
    keys, values = split_kv(both, k.shape[-1])
    for rank in dict.fromkeys((0, group_rank.rank)):
        for chunk in parts_of_gathered(replace(options, group_rank=group_rank._replace(rank=rank)), keys.shape[dim]):
            for part in [chunk] if options.dropout_p else split_at_diagonal(chunk):
                yield PartCall(part, _select(q, options, heads_q, part.rows), *_columns(options, part, keys, values))


def _run_by_autograd(
    options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None
) -> State:
    dim, group_rank = options.dim, options.group_rank
    k, v = (gathered(x.movedim(dim, 0), group_rank).movedim(0, dim) for x in (k, v))
    states = []
    for part in parts_of_gathered(options, k.shape[dim]):
        rows, keys, values = (narrowed(x, dim, at) for x, at in ((q, part.rows), (k, part.columns), (v, part.columns)))
        states.append(attend(options, part, q=rows, k=keys, v=values, sinks=sinks, cu_seqlens=cu_seqlens))
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs, dim), torch.cat(lses, dim)


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        cu_seqlens: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> State:
        dim, groups = options.dim, head_groups(k, v, options)
        parts = parts_of_gathered(options, k.shape[dim] * options.group_rank.ranks)
        out, lse = new_results(q, v)
        receives: Pending[Tensor] | None = _gather(options, k, v, groups[0])
        for number, heads in enumerate(groups):
            assert receives is not None
            keys, values = _received_kv(options, receives, k)
            receives = _gather(options, k, v, groups[number + 1]) if number + 1 < len(groups) else None
            heads_q = query_heads(heads, q, k)
            for part in parts:
                part_q, part_out, part_lse = (_select(x, options, heads_q, part.rows) for x in (q, out, lse))
                part_k, part_v = _columns(options, part, keys, values)
                group_sinks = None if sinks is None else sinks[heads_q]
                result = attend(options, part, q=part_q, k=part_k, v=part_v, sinks=group_sinks, cu_seqlens=cu_seqlens)
                part_out.copy_(result[0])
                part_lse.copy_(result[1])
        save(ctx, options, (q, k, v, sinks, cu_seqlens, out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Gradients:
        return resumed("all_gather", ctx, grad_out, grad_lse, gradients=_gradients)


def _gradients(options: Options, grad_out: Tensor, saved: tuple[Any, ...]) -> Gradients:
    q, k, v, sinks, cu_seqlens, out, lse = saved
    dim, groups = options.dim, head_groups(k, v, options)
    whole = parts_of_gathered(options, k.shape[dim] * options.group_rank.ranks)
    parts = [part for chunk in whole for part in split_at_diagonal(chunk)]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    receives: Pending[Tensor] | None = _gather(options, k, v, groups[0])
    sends: tuple[slice, Pending[Tensor]] | None = None
    for number, heads in enumerate(groups):
        assert receives is not None
        keys, values = _received_kv(options, receives, k)
        receives = _gather(options, k, v, groups[number + 1]) if number + 1 < len(groups) else None
        heads_q = query_heads(heads, q, k)
        tokens, batch = keys.shape[dim], [] if options.is_packed else [k.shape[0]]
        sums = torch.zeros(
            *(tokens, *batch, heads.stop - heads.start, k.shape[-1] + v.shape[-1]), dtype=exact, device=k.device
        )
        sum_k, sum_v = split_kv(sums.movedim(0, dim), k.shape[-1])
        for part in parts:
            of_q, of_grad, of_out, of_lse = (_select(x, options, heads_q, part.rows) for x in (q, grad_out, out, lse))
            outputs, (of_k, of_v) = (of_grad, of_out, of_lse), _columns(options, part, keys, values)
            dq, dk, dv = attend_backward(options, part, outputs, q=of_q, k=of_k, v=of_v, cu_seqlens=cu_seqlens)
            _select(grad_q, options, heads_q, part.rows).add_(dq)
            narrowed(sum_k, dim, part.columns).add_(dk)
            narrowed(sum_v, dim, part.columns).add_(dv)
        if sends is not None:
            _store_gradients(options, sends, grad_k, grad_v)
        sends = heads, collectives.reduce_scatter(in_rank_order(sums, options.group_rank.ranks), options.group_rank)
    assert sends is not None
    _store_gradients(options, sends, grad_k, grad_v)
    grad_sinks = gradient_of_sinks(options, grad_out, out, lse, sinks=sinks, cu_seqlens=cu_seqlens)
    return grad_q, grad_k, grad_v, grad_sinks


def _gather(options: Options, k: Tensor, v: Tensor, heads: slice) -> Pending[Tensor]:
    both = torch.cat([k[:, heads], v[:, heads]], -1).movedim(options.dim, 0)
    return collectives.all_gather(both, options.group_rank)


def _received_kv(options: Options, receives: Pending[Tensor], k: Tensor) -> tuple[Tensor, Tensor]:
    both = in_sequence_order(receives.wait(), options.group_rank.ranks).movedim(0, options.dim)
    return split_kv(both, k.shape[-1])


def _columns(options: Options, part: Part, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return narrowed(keys, options.dim, part.columns), narrowed(values, options.dim, part.columns)


def _select(x: Tensor, options: Options, heads: slice, rows: slice) -> Tensor:
    return narrowed(x[:, heads], options.dim, rows)


def _store_gradients(options: Options, sends: tuple[slice, Pending[Tensor]], grad_k: Tensor, grad_v: Tensor) -> None:
    heads, pending = sends
    sum_k, sum_v = split_kv(pending.wait().movedim(0, options.dim), grad_k.shape[-1])
    grad_k[:, heads].copy_(sum_k)
    grad_v[:, heads].copy_(sum_v)
