"""Context parallelism on a ring: keys and values pass from rank to rank, and partial results are merged by their LSE.

While a kernel computes with the keys of one rank, those of the next are in transit. In the backward pass the gradients
of keys and values follow them one step behind. No rank ever holds more keys than its own and one other's.
("Ring Attention with Blockwise Transformers", Liu et al., 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import GRADIENTS, KEYS, Pending
from cudnn_sdpa.distributed.local_attention import (
    Gradients,
    Options,
    Part,
    PartCall,
    State,
    attend,
    attend_backward,
    gradient_of_sinks,
    make_readable,
    narrowed,
    new_results,
    parts_of_ring,
    resumed,
    save,
)
from cudnn_sdpa.engine.call import Function


def run(options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None) -> State:
    k, v = (make_readable(x, options) for x in (k, v))  # for the first step; messages of later steps are dense
    out, lse = _Ring.apply(options, cu_seqlens, q, k, v, sinks)
    return out, lse


def calls(options: Options, q: Tensor, k: Tensor, v: Tensor) -> Iterator[PartCall]:
    dim, group_rank = options.dim, options.group_rank
    own = [make_readable(x, options).movedim(dim, 0) for x in (k, v)]
    received = [x.contiguous() for x in own]
    for rank in (0, group_rank.ranks - 1):  # their first two steps have every signature of the ring
        of_rank = replace(options, group_rank=group_rank._replace(rank=rank))
        for step in range(2):
            for part in parts_of_ring(of_rank, k.shape[dim] * group_rank.ranks, step):
                of_k, of_v = _keys_and_values(options, part, received if step else own)
                yield PartCall(part, narrowed(q, dim, part.rows), of_k, of_v)


class _Ring(Function):
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
        dim, group_rank = options.dim, options.group_rank
        exact = _sum_dtype(options, q) if sinks is None else torch.promote_types(q.dtype, torch.float32)
        total = lse = q.new_empty(0)
        if options.is_packed:
            total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=exact, device=q.device)
            lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        columns = [x.movedim(dim, 0) for x in (k, v)]
        for step in range(group_rank.ranks):
            receives = collectives.ring_shift(columns, group_rank, KEYS) if step + 1 < group_rank.ranks else None
            for part in parts_of_ring(options, k.shape[dim] * group_rank.ranks, step):
                own, (of_k, of_v) = narrowed(q, dim, part.rows), _keys_and_values(options, part, columns)
                result = attend(options, part, q=own, k=of_k, v=of_v, sinks=None, cu_seqlens=cu_seqlens)
                if step == 0 and not options.is_packed:
                    total, lse = result[0].to(exact), result[1]
                else:
                    _merge(narrowed(total, dim, part.rows), narrowed(lse, dim, part.rows), *result)
            if receives is not None:
                columns = receives.wait()
        if sinks is not None:
            of_heads = sinks.float().view([-1 if at == 1 else 1 for at in range(lse.dim())])
            with_sinks = torch.logaddexp(lse, of_heads)
            total.mul_(_share(lse, with_sinks).unsqueeze(-1))
            lse = with_sinks
        out = total if total.dtype == q.dtype and not options.is_packed else new_results(q, v)[0].copy_(total)
        save(ctx, options, (q, k, v, sinks, cu_seqlens, out, lse))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Gradients:
        return resumed("ring", ctx, grad_out, grad_lse, gradients=_gradients)


def _gradients(options: Options, grad_out: Tensor, saved: tuple[Any, ...]) -> Gradients:
    q, k, v, sinks, cu_seqlens, out, lse = saved
    dim, group_rank = options.dim, options.group_rank
    exact = _sum_dtype(options, q)
    grad_q = q.new_empty(0)
    columns = [x.movedim(dim, 0) for x in (k, v)]
    following: Pending[list[Tensor]] | None = None
    for step in range(group_rank.ranks):
        is_last = step + 1 == group_rank.ranks
        receives = None if is_last else collectives.ring_shift(columns, group_rank, KEYS)
        part_grads = []
        for part in parts_of_ring(options, k.shape[dim] * group_rank.ranks, step):
            grad_rows, out_rows, lse_rows = (narrowed(x, dim, part.rows) for x in (grad_out, out, lse))
            outputs, own = (grad_rows, out_rows, lse_rows), narrowed(q, dim, part.rows)
            of_k, of_v = _keys_and_values(options, part, columns)
            part_grads.append(
                (part, attend_backward(options, part, outputs, q=own, k=of_k, v=of_v, cu_seqlens=cu_seqlens))
            )
        if step == 0 and not options.is_packed:  # this part has all rows and columns
            (_, (dq, dk, dv)), *part_grads = part_grads
            grad_q, sums = dq.to(exact), [x.movedim(dim, 0) for x in (dk, dv)]  # rounded already
        elif following is None:
            grad_q = torch.zeros(q.shape, dtype=exact, device=q.device)
            sums = [torch.zeros(x.shape, dtype=exact, device=x.device) for x in columns]
        else:
            sums = [x.to(exact) for x in following.wait()]
        for part, (dq, dk, dv) in part_grads:
            narrowed(grad_q, dim, part.rows).add_(dq)
            for total, grad in zip(sums, (dk, dv), strict=True):
                narrowed(total, 0, part.columns).add_(grad.movedim(dim, 0))
        following = collectives.ring_shift([x.to(k.dtype) for x in sums] if is_last else sums, group_rank, GRADIENTS)
        if receives is not None:
            columns = receives.wait()
    assert following is not None
    grads = grad_q.to(q.dtype), *(x.movedim(0, dim) for x in following.wait())
    grad_sinks = gradient_of_sinks(options, grad_out, out, lse, sinks=sinks, cu_seqlens=cu_seqlens)
    return *grads, grad_sinks


def _keys_and_values(options: Options, part: Part, columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    of_k, of_v = (narrowed(x, 0, part.columns).movedim(0, options.dim) for x in columns)
    return of_k, of_v


def _sum_dtype(options: Options, q: Tensor) -> torch.dtype:
    """The dtype of sums over the steps.

    A sum of two results, which are rounded to their dtype already, is in that dtype: it is rounded once, as a float32
    sum would be at its end, and half as much memory is read and written.
    """
    if q.dtype == torch.float64 or (options.group_rank.ranks == 2 and not options.is_packed):
        return q.dtype
    return torch.float32


def _merge(total: Tensor, lse: Tensor, out: Tensor, lse_of_part: Tensor) -> None:
    """Adds a part's result in place, both weighted by their share: `merge_states` for two, in float32."""
    merged = torch.logaddexp(lse, lse_of_part)
    scaled = total * _share(lse, merged).unsqueeze(-1)
    torch.addcmul(scaled, out, _share(lse_of_part, merged).unsqueeze(-1), out=total)
    lse.copy_(merged)


def _share(lse: Tensor, merged: Tensor) -> Tensor:
    return torch.exp(lse - torch.where(torch.isneginf(merged), 0.0, merged))
