"""Buckets: one plan for all lengths of a range, and for several numbers of sequences; and calls that they serve.

A dense call is seen as sequences that lie somewhere in memory: where each begins, and how long it is, are data. What is
left for the key are the rounded-up numbers, the distance of the rows, and what hides keys. Measured on an H200: a
bucket that is far too large costs nothing.

A sequence is a batch entry with all its heads, where the heads of a token lie together. Where they do not, the distance
of the heads grows with the length of the call, and every head of every batch entry is a sequence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments, Result
from cudnn_sdpa.attention.dense.launch import ForwardCall, _check_memory
from cudnn_sdpa.attention.dense.packed import VarlenSpec, length_bucket, sequence_bucket
from cudnn_sdpa.attention.dense.plans import ForwardSpec
from cudnn_sdpa.attention.mask import Mask
from cudnn_sdpa.attention.memory import MISALIGNED
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.cache import next_use
from cudnn_sdpa.plans.device_memory import DeviceTables
from cudnn_sdpa.plans.plan import Plan, allocate, current_device, current_raw_stream

#: Longer sequences take so long that a plan of their own is worth waiting for.
LONGEST = 65536

#: More sequences would make the tables of where they begin larger than they are worth.
MAX_SEQUENCES = 4096

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

    forward: ForwardSpec
    heads_apart: bool
    packed: VarlenSpec
    out: TensorLayout

    @classmethod
    def of(cls, forward: ForwardSpec) -> Bucket | None:
        """The bucket of a call; None if it needs a plan of its own."""
        problem = forward.problem
        if forward.plan_has_lse or not _is_plain(forward) or max(problem.sq, problem.skv) > LONGEST:
            return None
        tensors = (problem.q, problem.k, problem.v, forward.out)
        apart = not all(map(_heads_lie_together, tensors))
        heads = problem.q.shape[1]
        real = problem.q.shape[0] * (heads if apart else 1)
        if real > MAX_SEQUENCES or any(_row_step(tensor, apart=apart) == 0 for tensor in tensors):
            return None
        sequences = sequence_bucket(real)
        decodes = forward.is_decode and problem.mask.band is None  # cuDNN's decode engines draw no mask
        max_seqlen_q = 1 if decodes else length_bucket(problem.sq, _UNBOUNDED, tight=False)
        max_seqlen_kv = length_bucket(problem.skv, _UNBOUNDED, tight=False)
        rows = [longest * sequences for longest in (max_seqlen_q, max_seqlen_kv, max_seqlen_kv, max_seqlen_q)]
        q, k, v, out = (_packed(tensor, n, apart=apart) for tensor, n in zip(tensors, rows, strict=True))
        return cls(
            forward, apart, VarlenSpec(q, k, v, sequences, max_seqlen_q, max_seqlen_kv, Mask(problem.mask.band)), out
        )

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


def _is_plain(forward: ForwardSpec) -> bool:
    """Whether nothing but the band, lengths and the scale decides the result."""
    problem = forward.problem
    left = problem.mask.band[0] if problem.mask.band is not None else None
    if left is not None and (left < 0 or problem.sq > problem.skv):
        return False  # the band depends on the lengths, or queries may see no key
    return problem.has_no_sides and not (problem.alibi or problem.has_lengths or problem.mask.masked_rows)


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


# Forward calls served by the plan of their bucket.


class Successor(Protocol):
    """What leads from a bucket's plan to the plan of a shape's own."""

    def find(self) -> ForwardCall | None:
        """The call of the shape's own plan, once that is there. Asked at each call."""


class BucketCall(ForwardCall):
    """A plain call bound to the plan of its bucket: a launch like any other, with tables of where sequences begin.

    Attributes:
        is_of_graph: Whether its tables are made in a CUDA graph, and are of no use outside.
        table_bytes: What they take of the GPU's memory.
    """

    may_be_replaced = True

    __slots__ = ("_offsets", "_successor", "_tables", "_tail", "is_of_graph", "table_bytes")

    def __init__(self, bucket: Bucket, plan: Plan, scale: float, successor: Successor | None) -> None:
        """Makes the tables, on the current stream of the plan's GPU, which must be the current one."""
        super().__init__(bucket.forward, plan, scale)
        self._successor = successor
        tables = bucket.tables(torch.device("cuda", plan.device))
        self.is_of_graph = torch.cuda.is_current_stream_capturing()
        stream = current_raw_stream(plan.device)
        self._tables = DeviceTables(tables, plan.device, stream, captured=self.is_of_graph)
        self.table_bytes = self._tables.size
        known = self._tables.addresses
        self._offsets = tuple(known[f"offsets_{name}"] for name in ("q", "k", "v", "out"))
        self._tail = (self._fixed["scale"], known["seq_len_q"], known["seq_len_kv"])

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        return self.run(call.q, call.k, call.v, None, call.out)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same with the arguments one by one; there are no lengths."""
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self.run(q, k, v, lengths_kv, out)
        own = None if self._successor is None else self._successor.find()
        if own is not None:
            return own.run(q, k, v, None, out)
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is not None or (first | second | third) & MISALIGNED or not (first and second and third):
            _check_memory(q, k, v, out)
        if out is None:
            out = allocate(*self._out)
        self._tables.prepare(current_raw_stream(plan.device))
        plan.last_used = next_use()
        plan.launch((*self._offsets, first, second, third, *self._tail, out.data_ptr()))
        return out
