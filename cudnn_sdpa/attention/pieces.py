"""Gradients of tensors that are too large for one plan, piece by piece.

Beyond 2³¹ elements, cuDNN 9.19's backward engines reach for wrong places. Batch entries and groups of heads do not
depend on each other, so a large call is cut along them. It is the distance in memory that goes wrong: what spans too
much of it is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.backward import BackwardArguments, Needs
from cudnn_sdpa.runtime.layouts import dense_stride_like

#: Elements of queries, and of the memory that they span, up to which one plan is right.
MOST_ELEMENTS = 2**31 - 1


def is_too_large(q: Tensor) -> bool:
    """Whether the gradient by `q` takes more than one plan."""
    return q.numel() > MOST_ELEMENTS or _span(q) > MOST_ELEMENTS


def near(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy of it if its elements lie too far apart."""
    return tensor.contiguous() if _span(tensor) > MOST_ELEMENTS else tensor


def _span(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def gradients(of: BackwardArguments, run: Callable[[BackwardArguments], list[Tensor]]) -> list[Tensor]:
    """The wanted gradients of a call without dropout and without a gradient by its mask."""
    call, needs = of.call, of.needs
    everything = Needs(True, True, True, False, needs.sinks)
    whole = [torch.empty_strided(x.shape, _dense(x), dtype=x.dtype, device=x.device) for x in call[:3]]
    sinks = torch.zeros(call.q.shape[1], dtype=torch.float32, device=call.q.device)
    for entry, heads_q, heads_kv in _pieces(call.q, call.k):
        piece = _cut(of, entry, heads_q, heads_kv)._replace(needs=everything)
        found = run(piece)
        for full, part, heads in zip(whole, found, (heads_q, heads_kv, heads_kv), strict=False):
            full[entry, heads].copy_(part)
        if needs.sinks:
            sinks[heads_q] += found[3]
    return [gradient for gradient, need in zip((*whole, sinks), (*needs[:3], needs.sinks), strict=True) if need]


def _pieces(q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice]]:
    """Batch entries, heads of queries and heads of keys that fit into one plan each."""
    batch, heads, length, dim = q.shape
    group = heads // k.shape[1]
    of_group = length * dim * group
    groups = max(1, min(k.shape[1], MOST_ELEMENTS // of_group))
    entries = max(1, MOST_ELEMENTS // (of_group * k.shape[1])) if groups == k.shape[1] else 1
    return [
        (slice(b, b + entries), slice(g * group, (g + groups) * group), slice(g, g + groups))
        for b in range(0, batch, entries)
        for g in range(0, k.shape[1], groups)
    ]


def _cut(of: BackwardArguments, entry: slice, heads_q: slice, heads_kv: slice) -> BackwardArguments:
    """One piece of a backward call."""
    call = of.call
    lengths = [None if x is None else x[entry] for x in (call.seq_lens_q, call.seq_lens_kv)]
    part: ForwardArguments = call._replace(
        q=near(call.q[entry, heads_q]),
        k=near(call.k[entry, heads_kv]),
        v=near(call.v[entry, heads_kv]),
        attn_mask=None if call.attn_mask is None else _cut_mask(call.attn_mask, entry, heads_q),
        sinks=None if call.sinks is None else call.sinks[heads_q],
        seq_lens_q=lengths[0],
        seq_lens_kv=lengths[1],
    )
    grad_out, out, lse = (x[entry, heads_q] for x in (of.grad_out, of.out, of.lse))
    return of._replace(grad_out=near(grad_out), out=near(out), lse=lse.contiguous(), call=part)


def _cut_mask(mask: Tensor, entry: slice, heads: slice) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    return mask[entry if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None)]


def _dense(tensor: Tensor) -> tuple[int, ...]:
    return dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
