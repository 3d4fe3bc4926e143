"""Gradients of tensors that are too large for one plan, piece by piece.

Beyond 2³¹ elements, cuDNN 9.19's backward engines reach for wrong places. Batch entries and heads of queries do not
depend on each other, so a large call is cut along them; what heads of queries that were cut apart give to the keys and
values that they share is summed. It is the distance in memory that goes wrong: what spans too much of it is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.attention.dense.plans import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.memory import aligned
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.graph.target import Target

#: The farthest element, counted from a tensor's first, that one plan reaches rightly.
FARTHEST = 2**31 - 1


class Part(NamedTuple):
    """A part of a call: batch entries, heads of queries, and the heads of keys that these see."""

    entries: slice
    heads: slice
    heads_kv: slice


def is_too_large(*tensors: Tensor | TensorLayout) -> bool:
    """Whether the gradients of a call with these tensors take more than one plan."""
    return any(extent(tensor) > FARTHEST for tensor in tensors)


def extent(tensor: Tensor | TensorLayout) -> int:
    """How far a tensor's last element is from its first, be it where it is or in a dense copy."""
    stride = tensor.stride() if isinstance(tensor, Tensor) else tensor.stride
    return max(math.prod(tensor.shape) - 1, _span(tensor.shape, stride))


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy of it if its elements lie too far apart."""
    return tensor.contiguous() if _span(tensor.shape, tensor.stride()) > FARTHEST else tensor


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def check(call: ForwardArguments, *, mask_gradient: bool) -> None:
    """Refuses a large call that cannot be cut.

    Raises:
        UnsupportedError: It draws random numbers, or its mask has a gradient, or a head is too large by itself.
    """
    present = (("dropout", call.dropout_p), ("alibi", call.alibi), ("a gradient of attn_mask", mask_gradient))
    what = [name for name, there in present if there]
    if what:
        raise UnsupportedError(
            f"the gradient of a large call with {' and '.join(what)}",
            [f"a tensor has more than {FARTHEST} elements, and cuDNN misplaces the gradient beyond them"],
            "smaller batches",
        )
    split(call.q, call.k, call.v)


def check_gradient(call: ForwardArguments, target: Target, device: int | None) -> None:
    """Refuses a call whose gradients are known to have no plan, be it in pieces.

    Raises:
        UnsupportedError: With every reason.
    """
    of_mask = call.attn_mask is not None and call.attn_mask.requires_grad
    forward = ForwardSpec.of(call)
    if is_too_large(*call[:3], forward.out):
        check(call, mask_gradient=of_mask)
    elif not (forward.is_empty or forward.problem.is_single or forward.problem.has_no_plan):
        of_sinks = call.sinks is not None and call.sinks.requires_grad
        passes = BackwardSpec(forward.problem, forward.out, forward.out, call.deterministic, of_mask, of_sinks)
        known_issues.check(passes.key(target, device))


def split(q: Tensor, k: Tensor, v: Tensor) -> list[Part]:
    """The pieces of a call: as few as fit into one plan each.

    Raises:
        UnsupportedError: A single head does not fit.
    """
    batch, heads, heads_kv = q.shape[0], q.shape[1], k.shape[1]
    sq, skv, dim, group = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3]), heads // heads_kv
    of_group = max(sq * group, skv) * dim
    if of_group <= FARTHEST:
        groups = min(heads_kv, FARTHEST // of_group)
        entries = FARTHEST // (of_group * heads_kv) if groups == heads_kv else 1
        return [
            Part(slice(b, b + entries), slice(h * group, (h + groups) * group), slice(h, h + groups))
            for b in range(0, batch, entries)
            for h in range(0, heads_kv, groups)
        ]
    some = FARTHEST // (sq * dim) if skv * dim <= FARTHEST else 0
    if some == 0:
        reason = f"one head has more than {FARTHEST} elements, and cuDNN misplaces the gradient beyond them"
        raise UnsupportedError("the gradient of a head this large", [reason], "shorter sequences")
    return [
        Part(slice(b, b + 1), slice(first, min(first + some, (h + 1) * group)), slice(h, h + 1))
        for b in range(batch)
        for h in range(heads_kv)
        for first in range(h * group, (h + 1) * group, some)
    ]


def merge(inputs: Sequence[Tensor], run: Callable[[Part], list[Tensor]], *, sinks: bool) -> list[Tensor]:
    """The gradients by q, k, v, and with `sinks` by the sinks, out of those of the pieces.

    Args:
        inputs: q, k and v, of rank 4.
        run: Gives the gradients of a piece, likewise of rank 4.
        sinks: Whether there is a gradient by the sinks.
    """
    q, k, v = inputs
    grad_q = _dense_like(q, q.dtype)
    cuts = split(q, k, v)
    shared = any(a.heads_kv == b.heads_kv and a.entries == b.entries for a, b in itertools.pairwise(cuts))
    of_keys = [_dense_like(x, torch.float32 if shared else x.dtype).zero_() for x in (k, v)]
    of_sinks = torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    for piece in cuts:
        found = run(piece)
        grad_q[piece.entries, piece.heads].copy_(found[0])
        for whole, part in zip(of_keys, found[1:3], strict=True):
            whole[piece.entries, piece.heads_kv] += part
        if sinks:
            of_sinks[piece.heads] += found[3]
    if shared:
        of_keys = [_dense_like(x, x.dtype).copy_(whole) for x, whole in zip((k, v), of_keys, strict=True)]
    return [grad_q, *of_keys, *([of_sinks] if sinks else [])]


def gradients(of: BackwardArguments, run: Callable[[BackwardArguments], list[Tensor]]) -> list[Tensor]:
    """The wanted gradients of a call that `check` lets pass."""
    needs, inputs = of.needs, of.call[:3]
    everything = Needs(True, True, True, False, needs.sinks)
    found = merge(inputs, lambda piece: run(_part(of, piece)._replace(needs=everything)), sinks=needs.sinks)
    wanted = (*needs[:3], *([True] if needs.sinks else []))
    return [gradient for gradient, need in zip(found, wanted, strict=True) if need]


def _part(of: BackwardArguments, piece: Part) -> BackwardArguments:
    """A piece of a backward call."""
    call, (entries, heads, heads_kv) = of.call, piece
    lengths = [None if x is None else x[entries] for x in (call.seq_lens_q, call.seq_lens_kv)]
    part: ForwardArguments = call._replace(
        q=compact(call.q[entries, heads]),
        k=compact(call.k[entries, heads_kv]),
        v=compact(call.v[entries, heads_kv]),
        attn_mask=None if call.attn_mask is None else _part_of_mask(call.attn_mask, entries, heads),
        sinks=None if call.sinks is None else call.sinks[heads],
        seq_lens_q=lengths[0],
        seq_lens_kv=lengths[1],
    )
    grad_out, out, lse = (x[entries, heads] for x in (of.grad_out, of.out, of.lse))
    return of._replace(grad_out=compact(grad_out), out=compact(out), lse=aligned("lse", lse), call=part)


def _part_of_mask(mask: Tensor, entries: slice, heads: slice) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    return mask[entries if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None)]


def _dense_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
