"""Calls that one launch cannot compute: split along batch entries and heads, and merged.

cuDNN's kernels have two limits. Those of gradients compute wrong addresses beyond 2³¹ elements. And many have batch
entries or heads in a dimension of CUDA's grid that ends at 65,535: more cannot be launched, and more query heads that
share key heads get wrong results (all seen on 9.19). Batch entries and query heads are independent, so such a call is
split along them; where query heads that share a key head are in different parts, the gradients of keys and values are
summed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import Axes
from cudnn_sdpa.engine.launch import Layout, Result, new_tensor
from cudnn_sdpa.engine.tensor_checks import FieldsT
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import TensorLayout

_UNLIMITED = 2**62
_BEYOND = "and cuDNN uses wrong addresses beyond"


class Limits(NamedTuple):
    """Which limits a launch of some pass has.

    Attributes:
        offsets: Whether offsets of elements end at `known_issues.MAX_OFFSET`.
        batch: Whether batch entries end at `known_issues.MAX_GRID`.
    """

    offsets: bool = False
    batch: bool = False
    heads: bool = False

    def exceeded(self, q: Tensor | TensorLayout, *others: Tensor | TensorLayout) -> list[str]:
        """Why one launch cannot compute a call with these tensors, (B, H, S, D) or packed (T, H, D); usually empty."""
        counts = (
            (q.shape[-4] if len(q.shape) == 4 else 1, self.batch, "batch entries"),
            (q.shape[1], self.heads, "heads"),
        )
        reasons = [
            f"there are {count} {what}, and cuDNN's kernel takes at most {known_issues.MAX_GRID}"
            for count, is_limited, what in counts
            if is_limited and count > known_issues.MAX_GRID
        ]
        if self.offsets and any(extent(tensor) > known_issues.MAX_OFFSET for tensor in (q, *others)):
            reasons.append(f"a tensor has more than {known_issues.MAX_OFFSET} elements, {_BEYOND}")
        return reasons


#: Of gradients.
GRADIENTS = Limits(offsets=True, batch=True, heads=True)


def packed_gradient_limits(*, deterministic: bool) -> Limits:
    """The limits of gradients of packed sequences, which are split along heads only."""
    return Limits(offsets=True, heads=deterministic)


class Part(NamedTuple):
    """A part of a call: batch entries, query heads, and their key heads."""

    entries: slice
    heads: slice
    heads_kv: slice


def split(q: Tensor, k: Tensor, v: Tensor, limits: Limits) -> list[Part]:
    """The parts of a call with tensors of rank 4: as few as possible, each small enough for one launch."""
    batch, heads, heads_kv = q.shape[0], q.shape[1], k.shape[1]
    dim, group = max(q.shape[3], v.shape[3]), heads // heads_kv
    of_head, of_head_kv = max(1, q.shape[2] * dim), max(1, k.shape[2] * dim)
    most = known_issues.MAX_OFFSET if limits.offsets else _UNLIMITED
    most_entries, most_heads = (
        known_issues.MAX_GRID if is_limited else _UNLIMITED for is_limited in (limits.batch, limits.heads)
    )
    if max(of_head, of_head_kv) > most:
        reason = f"one head has more than {known_issues.MAX_OFFSET} elements, {_BEYOND}"
        raise UnsupportedError("the gradient of a head this large", [reason], "shorter sequences")
    of_group = max(of_head * group, of_head_kv)
    if of_group <= most and group <= most_heads:
        groups = min(heads_kv, most // of_group, most_heads // group)
        entries = most // (of_group * groups)
        of_heads = [(slice(x.start * group, x.stop * group), x) for x in ranges(heads_kv, groups)]
    else:
        count = min(group, most_heads, most // of_head)
        entries = most // max(of_head * count, of_head_kv)
        of_heads = [
            (slice(h * group + x.start, h * group + x.stop), slice(h, h + 1))
            for h in range(heads_kv)
            for x in ranges(group, count)
        ]
    of_batch = ranges(batch, min(entries, most_entries))
    return [Part(entries, of_q, of_kv) for entries in of_batch for of_q, of_kv in of_heads]


def ranges(total: int, most: int) -> list[slice]:
    """As few ranges of at most so many as possible; all but the last have one size, so that one plan serves them."""
    size = -(-total // -(-total // most))
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


def ranges_of(name: str, shape: Sequence[int], axes: Axes) -> tuple[str | None, ...]:
    """Which ranges of a part each dimension of a call's tensor has, by their names; None where each part has all."""
    found: list[str | None] = [None] * len(shape)
    for ranges, of_tensors in zip(Part._fields, axes, strict=True):
        dim = of_tensors.get(name)
        if dim is not None and -len(shape) <= dim and shape[dim] != 1:
            found[dim] = ranges
    return tuple(found)


def part_of_call(call: FieldsT, part: Part, axes: Axes) -> FieldsT:
    """A part of a call: views of its tensors."""
    changes = {}
    for name in itertools.chain(*axes):
        x = getattr(call, name)
        if x is not None:
            ranges = ranges_of(name, x.shape, axes)
            changes[name] = x[tuple([slice(None) if each is None else getattr(part, each) for each in ranges])]
    return call._replace(**changes)


class Whole(NamedTuple):
    """A result of a call that parts give.

    Attributes:
        dims: Which ranges of a part its first dimensions have, by their names; None where each part has all of one.
        is_amax: Whether it is the maximum of the parts' results, not their sum, where they meet.
    """

    layout: Layout
    dims: tuple[str | None, ...]
    is_amax: bool = False

    def place(self, part: Part) -> tuple[slice, ...]:
        return tuple([slice(None) if name is None else getattr(part, name) for name in self.dims])

    @classmethod
    def gradient(cls, name: str, gradient: Tensor, axes: Axes) -> Whole:
        """The gradient of an input, given one without memory."""
        shape = tuple(gradient.shape)
        return cls((shape, gradient.stride(), gradient.dtype), ranges_of(name, shape, axes))


def merge(
    parts: Sequence[Part], run: Callable[[Part], Sequence[Tensor]], wholes: Sequence[Whole], device: torch.device
) -> list[Tensor]:
    """The results of a call, given what runs a part of it. Sums are in float32."""
    found, shared = [new_tensor(whole.layout, device) for whole in wholes], []
    for number, whole in enumerate(wholes):
        places = {tuple((x.start, x.stop) for x in whole.place(part)) for part in parts}
        shared.append(len(places) < len(parts))
        if shared[-1]:
            found[number] = torch.zeros_like(found[number], dtype=torch.float32)
    for part in parts:
        for whole, result, is_shared, of_part in zip(wholes, found, shared, run(part), strict=True):
            into = result[whole.place(part)]
            if not is_shared:
                into.copy_(of_part)
            elif whole.is_amax:
                torch.maximum(into, of_part, out=into)
            else:
                into += of_part
    for number, (whole, is_shared) in enumerate(zip(wholes, shared, strict=True)):
        if is_shared and whole.layout[2] != torch.float32:
            found[number] = new_tensor(whole.layout, device).copy_(found[number])
    return found


class ForwardCall(Protocol):
    @property
    def q(self) -> Tensor: ...
    @property
    def with_lse(self) -> bool: ...
    @property
    def out(self) -> Tensor | None: ...


def attend(
    parts: Sequence[Part],
    run: Callable[[Part, Tensor], Result],
    *,
    call: ForwardCall,
    results: tuple[Layout, Layout],
) -> Result:
    """The results of a forward call, given what runs a part of it into a part of the output.

    Args:
        parts: Its parts.
        run: Gives the results of a part, whose output is written into a given tensor.
        call: The call, which has `with_lse` and `out`.
        results: The layouts of its output and its LSE.
    """
    out, lse = (
        new_tensor(layout, call.q.device) if is_new else None
        for layout, is_new in zip(results, (call.out is None, call.with_lse), strict=True)
    )
    out = call.out if out is None else out
    assert out is not None
    for part in parts:
        place = part.entries, part.heads
        found = run(part, out[place])
        if lse is not None:
            lse[place] = found[1]
    return out if lse is None else (out, lse)


def extent(tensor: Tensor | TensorLayout) -> int:
    """The offset of a tensor's last element, in its own layout or in a dense copy, whichever is larger."""
    stride = tensor.stride() if isinstance(tensor, Tensor) else tensor.stride
    return max(math.prod(tensor.shape) - 1, _span(tensor.shape, stride))


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a dense copy if it spans too much memory."""
    return tensor.contiguous() if _span(tensor.shape, tensor.stride()) > known_issues.MAX_OFFSET else tensor


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
