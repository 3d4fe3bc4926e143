"""Gradients of calls that are too large for one plan: split along batch entries and heads, and merged.

Beyond 2³¹ elements, cuDNN 9.19's backward engines compute wrong addresses. Batch entries and query heads are
independent, so a large call is split along them; where query heads that share a key head are in different parts, the
gradients of keys and values are summed. The limit concerns strides too: tensors that span too much memory are copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall
from cudnn_sdpa.attention.dense.plans import BackwardSpec, DenseSpec, ForwardSpec, Needs
from cudnn_sdpa.attention.memory import aligned
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.graph.target import Target

#: Largest offset of an element from the tensor's first that backward engines address correctly.
MAX_OFFSET = 2**31 - 1


class Part(NamedTuple):
    """A part of a call: batch entries, query heads, and their key heads."""

    entries: slice
    heads: slice
    heads_kv: slice


def is_too_large(*tensors: Tensor | TensorLayout) -> bool:
    """Whether the gradients of a call with these tensors need more than one plan."""
    return any(extent(tensor) > MAX_OFFSET for tensor in tensors)


def extent(tensor: Tensor | TensorLayout) -> int:
    """The offset of a tensor's last element, in its own layout or in a dense copy, whichever is larger."""
    stride = tensor.stride() if isinstance(tensor, Tensor) else tensor.stride
    return max(math.prod(tensor.shape) - 1, _span(tensor.shape, stride))


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy if it spans too much memory."""
    return tensor.contiguous() if _span(tensor.shape, tensor.stride()) > MAX_OFFSET else tensor


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def check(call: ForwardArguments, *, mask_gradient: bool) -> None:
    """Refuses a large call that cannot be split.

    Raises:
        UnsupportedError: It has dropout or ALiBi, its mask needs a gradient, or a single head is too large.
    """
    options = (("dropout", call.dropout_p), ("alibi", call.alibi), ("a gradient of attn_mask", mask_gradient))
    present = [name for name, is_set in options if is_set]
    if present:
        raise UnsupportedError(
            f"the gradient of a large call with {' and '.join(present)}",
            [f"a tensor has more than {MAX_OFFSET} elements, and cuDNN writes the gradient to wrong addresses"],
            "smaller batches",
        )
    split(call.q, call.k, call.v)


def check_gradient(call: ForwardArguments, target: Target, device: int | None) -> None:
    """Refuses a call whose gradients are known to be unsupported, also when split.

    Raises:
        UnsupportedError: With every reason.
    """
    mask_gradient = call.attn_mask is not None and call.attn_mask.requires_grad
    forward = ForwardSpec.of(call)
    if is_too_large(*call.qkv, forward.out):
        check(call, mask_gradient=mask_gradient)
    elif not (forward.is_empty or forward.dense.is_single or forward.dense.has_no_plan):
        backward = BackwardSpec(
            dense=forward.dense,
            out=forward.out,
            grad_out=forward.out,
            deterministic=call.deterministic,
            bias_gradient=mask_gradient,
            sink_gradient=call.sinks is not None and call.sinks.requires_grad,
        )
        known_issues.check(backward.key(target, device))


def gradient_keys(of: GradientCall, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a backward call that kernels can read.

    Raises:
        UnsupportedError: It has no plan.
    """
    for part in parts(of):
        yield BackwardSpec.of(part).key(target, device)


def parts(of: GradientCall) -> list[GradientCall]:
    """The backward calls that each need one plan: the call itself, its parts if it is too large, or none.

    Raises:
        UnsupportedError: It is too large and cannot be split.
    """
    call = of.call
    spec = DenseSpec.of(call)
    if spec.is_empty or spec.is_single or spec.has_no_plan:
        return []
    if not is_too_large(*call.qkv, of.out, of.grad_out):
        return [of]
    check(call, mask_gradient=Needs(*of.needs).attn_mask)
    return [part_of(of, part) for part in split(*call.qkv)]


def split(q: Tensor, k: Tensor, v: Tensor) -> list[Part]:
    """The parts of a call: as few as possible, each small enough for one plan.

    Raises:
        UnsupportedError: A single head does not fit.
    """
    batch, heads, heads_kv = q.shape[0], q.shape[1], k.shape[1]
    sq, skv, dim, group = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3]), heads // heads_kv
    group_size = max(sq * group, skv) * dim
    if group_size <= MAX_OFFSET:
        groups = min(heads_kv, MAX_OFFSET // group_size)
        entries = MAX_OFFSET // (group_size * heads_kv) if groups == heads_kv else 1
        return [
            Part(slice(b, b + entries), slice(h * group, (h + groups) * group), slice(h, h + groups))
            for b in range(0, batch, entries)
            for h in range(0, heads_kv, groups)
        ]
    count = MAX_OFFSET // (sq * dim) if skv * dim <= MAX_OFFSET else 0
    if count == 0:
        reason = f"one head has more than {MAX_OFFSET} elements, and cuDNN writes the gradient to wrong addresses"
        raise UnsupportedError("the gradient of a head this large", [reason], "shorter sequences")
    return [
        Part(slice(b, b + 1), slice(first, min(first + count, (h + 1) * group)), slice(h, h + 1))
        for b in range(batch)
        for h in range(heads_kv)
        for first in range(h * group, (h + 1) * group, count)
    ]


def merge(inputs: Sequence[Tensor], run: Callable[[Part], list[Tensor]], *, sinks: bool) -> list[Tensor]:
    """Merges the gradients of the parts: those of q, k, v, and with `sinks` of the sinks.

    Args:
        inputs: q, k and v, of rank 4.
        run: Returns the gradients of a part, also of rank 4.
        sinks: Whether the gradient of the sinks is needed.
    """
    q, k, v = inputs
    grad_q = _dense_like(q, q.dtype)
    parts = split(q, k, v)
    shared = any(a.heads_kv == b.heads_kv and a.entries == b.entries for a, b in itertools.pairwise(parts))
    grad_k, grad_v = (_dense_like(x, torch.float32 if shared else x.dtype).zero_() for x in (k, v))
    grad_sinks = torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    for part in parts:
        part_q, part_k, part_v, *part_sinks = run(part)
        grad_q[part.entries, part.heads].copy_(part_q)
        grad_k[part.entries, part.heads_kv] += part_k
        grad_v[part.entries, part.heads_kv] += part_v
        if sinks:
            grad_sinks[part.heads] += part_sinks[0]
    if shared:
        grad_k, grad_v = _dense_like(k, k.dtype).copy_(grad_k), _dense_like(v, v.dtype).copy_(grad_v)
    return [grad_q, grad_k, grad_v, *([grad_sinks] if sinks else [])]


def gradients(of: GradientCall, run: Callable[[GradientCall], list[Tensor]]) -> list[Tensor]:
    """The needed gradients of a call that `check` accepts; `run` gives those of a part."""
    needs = Needs(*of.needs)
    merged = merge(of.call.qkv, lambda part: run(part_of(of, part)), sinks=needs.sinks)
    needed = (needs.q, needs.k, needs.v, *([True] if needs.sinks else []))
    return [gradient for gradient, need in zip(merged, needed, strict=True) if need]


def part_of(of: GradientCall, part: Part) -> GradientCall:
    """One part of a backward call, which needs the gradients of q, k and v."""
    call = of.call
    entries, heads, heads_kv = part
    lengths_q, lengths_kv = (None if x is None else x[entries] for x in (call.seq_lens_q, call.seq_lens_kv))
    part_call = call._replace(
        q=compact(call.q[entries, heads]),
        k=compact(call.k[entries, heads_kv]),
        v=compact(call.v[entries, heads_kv]),
        attn_mask=None if call.attn_mask is None else _slice_mask(call.attn_mask, entries, heads),
        sinks=None if call.sinks is None else call.sinks[heads],
        seq_lens_q=lengths_q,
        seq_lens_kv=lengths_kv,
    )
    needs = Needs(q=True, k=True, v=True, attn_mask=False, sinks=Needs(*of.needs).sinks)
    return of._replace(
        grad_out=compact(of.grad_out[entries, heads]),
        out=compact(of.out[entries, heads]),
        lse=aligned("lse", of.lse[entries, heads]),
        call=part_call,
        needs=needs,
    )


def _slice_mask(mask: Tensor, entries: slice, heads: slice) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    return mask[entries if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None)]


def _dense_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
