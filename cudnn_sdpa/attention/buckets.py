"""Buckets: one plan for all lengths of a range, and for several numbers of sequences.

A dense call is seen as sequences that lie somewhere in memory: where each begins, and how long it is, are data. What is
left for the key are the rounded-up numbers, the distance of the rows, and what hides keys. Measured on an H200: a
bucket that is far too large costs nothing.

A sequence is a batch entry with all its heads, where the heads of a token lie together. Where they do not, the distance
of the heads grows with the length of the call, and every head of every batch entry is a sequence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.options import Mask
from cudnn_sdpa.attention.packed import Packed, length_bucket, sequence_bucket
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout
from cudnn_sdpa.runtime.target import Target

#: Longer sequences take so long that a plan of their own is worth waiting for.
LONGEST = 65536

#: More sequences would make the tables of where they begin larger than they are worth.
MOST_SEQUENCES = 4096

_UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class Bucket:
    """A dense forward call as one of the calls that share a plan.

    Attributes:
        forward: The call.
        heads_apart: Whether every head of every batch entry is a sequence of its own.
        packed: What the plan is made for.
        out: The output as the plan writes it.
    """

    forward: Forward
    heads_apart: bool
    packed: Packed
    out: TensorLayout

    @classmethod
    def of(cls, forward: Forward) -> Bucket | None:
        """The bucket of a call; None if it needs a plan of its own."""
        problem = forward.problem
        if forward.plan_has_lse or not _is_plain(forward) or max(problem.sq, problem.skv) > LONGEST:
            return None
        tensors = (problem.q, problem.k, problem.v, forward.out)
        apart = not all(map(_heads_lie_together, tensors))
        heads = problem.q.shape[1]
        real = problem.q.shape[0] * (heads if apart else 1)
        if real > MOST_SEQUENCES or any(_row_step(tensor, apart=apart) == 0 for tensor in tensors):
            return None
        sequences = sequence_bucket(real)
        decodes = forward.is_decode and problem.mask.band is None  # cuDNN's decode engines draw no mask
        longest_q = 1 if decodes else length_bucket(problem.sq, _UNBOUNDED, closely=False)
        longest_kv = length_bucket(problem.skv, _UNBOUNDED, closely=False)
        rows = [longest * sequences for longest in (longest_q, longest_kv, longest_kv, longest_q)]
        q, k, v, out = (_packed(tensor, n, apart=apart) for tensor, n in zip(tensors, rows, strict=True))
        return cls(forward, apart, Packed(q, k, v, sequences, longest_q, longest_kv, Mask(problem.mask.band)), out)

    def key(self, target: Target, device: int | None) -> PlanKey | None:
        """The key of the plan; None if there is known to be none."""
        try:
            return self.packed.forward_key(self.out, False, target, device)
        except UnsupportedError:
            return None

    def tables(self, device: torch.device | str) -> dict[str, Tensor]:
        """Where the sequences of each tensor begin, in elements, and how long they are: made on the device."""
        problem, sequences = self.forward.problem, self.packed.sequences
        batch, heads = problem.q.shape[:2]
        real = batch * heads if self.heads_apart else batch
        number = torch.arange(sequences + 1, device=device).clamp_max_(real)
        entry, head = (number // heads, number % heads) if self.heads_apart else (number, None)
        begins: dict[Any, Tensor] = {}
        result = {}
        for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", self.forward.out)):
            group = heads // x.shape[1]
            where = (x.stride[0] if batch > 1 else 0, x.stride[1] if x.shape[1] > 1 else 0, group)
            if where not in begins:
                of_heads = 0 if head is None else head // group * where[1]
                begins[where] = entry * where[0] + of_heads
            result[f"offsets_{name}"] = begins[where]
        lengths = torch.zeros(2, sequences, dtype=torch.int32, device=device)
        lengths[0, :real] = problem.sq
        lengths[1, :real] = problem.skv
        return result | {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}


def _is_plain(forward: Forward) -> bool:
    """Whether nothing but the band, lengths and the scale decides the result."""
    problem = forward.problem
    left = problem.mask.band[0] if problem.mask.band is not None else None
    if left is not None and (left < 0 or problem.sq > problem.skv):
        return False  # the band depends on the lengths, or queries may see no key
    return problem.has_no_sides and not (problem.alibi or problem.has_lengths or problem.mask.blind_rows)


def _heads_lie_together(tensor: TensorLayout) -> bool:
    """Whether a token's heads lie within the distance of two tokens, which then does not depend on the length."""
    _, heads, rows, _ = tensor.shape
    return heads == 1 or rows == 1 or tensor.stride[1] * heads <= tensor.stride[2]


def _row_step(tensor: TensorLayout, *, apart: bool) -> int:
    """How far apart in memory the rows of a sequence are; of a single one it does not matter."""
    _, heads, rows, dim = tensor.shape
    if rows > 1:
        return tensor.stride[2]
    return dim if apart else heads * dim


def _packed(tensor: TensorLayout, rows: int, *, apart: bool) -> TensorLayout:
    """A tensor (B, H, S, D) as packed rows, (T, H, D)."""
    _, heads, _, dim = tensor.shape
    heads = 1 if apart else heads
    head_step = tensor.stride[1] if heads > 1 else dim
    return TensorLayout((rows, heads, dim), (_row_step(tensor, apart=apart), head_step, 1), tensor.dtype)
