"""Context parallelism on a ring: keys and values pass from rank to rank, and partial results are merged by their LSE.

While a kernel computes with the keys of one rank, those of the next are in transit. In the backward pass the gradients
of keys and values follow them one step behind. No rank ever holds more keys than its own and one other's.
("Ring Attention with Blockwise Transformers", Liu et al., 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import GRADIENTS, KEYS, Pending
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
    make_readable,
    narrowed,
    new_results,
    parts_of_ring,
)


def run(options: Options, inputs: Inputs) -> State:
    k, v = (make_readable(x, options) for x in (inputs.k, inputs.v))  # the first step's; later messages are dense
    return _METHOD.apply(options, inputs._replace(k=k, v=v))


def calls(options: Options, inputs: Inputs) -> Iterator[tuple[Part, Inputs]]:
    own = [make_readable(x, options).movedim(options.dim, 0) for x in (inputs.k, inputs.v)]
    received = [x.contiguous() for x in own]
    for rank in (0, options.group_rank.ranks - 1):  # their first two steps have every signature of the ring
        for step, columns in enumerate((own, received)):
            for part in parts_of_ring(options.of_rank(rank), own[0].shape[0], step):
                yield part, _of_part(options, part, inputs, columns)


def _forward(options: Options, inputs: Inputs) -> tuple[State, Sequence[Tensor]]:
    q, v, dim = inputs.q, inputs.v, options.dim
    exact = torch.promote_types(q.dtype, torch.float32) if inputs.has_sinks else _sum_dtype(options, q)
    total = lse = q.new_empty(0)
    if options.is_packed:
        total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=exact, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    for step, columns in _received_columns(options, inputs):
        for part in parts_of_ring(options, q.shape[dim], step):
            result = attend(options, part, _of_part(options, part, inputs.without_sinks(), columns))
            if step == 0 and not options.is_packed:
                total, lse = result[0].to(exact), result[1]
            else:
                _merge(narrowed(total, dim, part.rows), narrowed(lse, dim, part.rows), *result)
    inputs.add_sinks(total, lse)
    out = total if total.dtype == q.dtype and not options.is_packed else new_results(q, v)[0].copy_(total)
    return (out, lse), inputs.qkv


def _gradients(options: Options, outputs: Outputs, saved: Sequence[Any]) -> Gradients:
    inputs = Inputs(*saved)
    q, k, _ = inputs.qkv
    dim, group_rank = options.dim, options.group_rank
    exact = _sum_dtype(options, q)
    grad_q = q.new_empty(0)
    following: Pending[list[Tensor]] | None = None
    for step, columns in _received_columns(options, inputs):
        part_grads = []
        for part in parts_of_ring(options, q.shape[dim], step):
            grad_out, out, lse = (narrowed(x, dim, part.rows) for x in outputs)
            of_part = _of_part(options, part, inputs, columns)
            part_grads.append((part, attend_backward(options, part, (grad_out, out, lse), of_part)))
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
        sent = [x.to(k.dtype) for x in sums] if step + 1 == group_rank.ranks else sums
        following = collectives.ring_shift(sent, group_rank, GRADIENTS)
    assert following is not None
    grad_k, grad_v = (x.movedim(0, dim) for x in following.wait())
    return grad_q.to(q.dtype), grad_k, grad_v


_METHOD = Method("ring", _forward, _gradients)


def _received_columns(options: Options, inputs: Inputs) -> Iterator[tuple[int, list[Tensor]]]:
    """Each step's keys and values, tokens first. The next step's are in transit meanwhile."""
    columns = [x.movedim(options.dim, 0) for x in (inputs.k, inputs.v)]
    for step in range(options.group_rank.ranks - 1):
        receives = collectives.ring_shift(columns, options.group_rank, KEYS)
        yield step, columns
        columns = receives.wait()
    yield options.group_rank.ranks - 1, columns


def _of_part(options: Options, part: Part, inputs: Inputs, columns: list[Tensor]) -> Inputs:
    k, v = (narrowed(x, 0, part.columns).movedim(0, options.dim) for x in columns)
    return inputs._replace(q=narrowed(inputs.q, options.dim, part.rows), k=k, v=v)


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
