"""Buckets: one plan for a range of sequence lengths and batch sizes, and the calls that it serves.

A dense call is treated as packed sequences, whose offsets and lengths are data. The key holds the rounded-up bounds,
the row strides and the mask. Measured on an H200: a bucket that is far too large costs nothing.

If the heads of a token are contiguous, a sequence is a batch entry with all its heads. Otherwise the head stride grows
with the sequence length, and each head of each batch entry is a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense.launch import Run
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.attention.mask import Mask
from cudnn_sdpa.attention.varlen.plans import VarlenSpec, length_bucket, sequence_bucket
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.device_memory import DeviceTables
from cudnn_sdpa.plans.plan import Plan, current_raw_stream

#: Longest sequence that a bucket serves; longer ones run long enough to be worth an exact-shape plan.
MAX_LENGTH = 65536

#: Maximum number of sequences of a bucket: with more, the offset tables would be too large.
MAX_SEQUENCES = 4096

_UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class Bucket:
    """A dense forward call as a packed one, whose plan it shares with calls of other shapes.

    Attributes:
        forward: The call.
        split_heads: Whether each head of each batch entry is a sequence.
        packed: The spec of the plan.
        out: The output as the plan writes it.
    """

    forward: ForwardSpec
    split_heads: bool
    packed: VarlenSpec
    out: TensorLayout

    @classmethod
    def of(cls, forward: ForwardSpec) -> Bucket | None:
        """The bucket of a call; None if it needs an exact-shape plan."""
        dense = forward.dense
        if not _is_plain(forward) or max(dense.sq, dense.skv) > MAX_LENGTH:
            return None
        tensors = (dense.q, dense.k, dense.v, forward.out)
        split_heads = not all(map(_has_contiguous_heads, tensors))
        heads = dense.q.shape[1]
        real = dense.q.shape[0] * (heads if split_heads else 1)
        if real > MAX_SEQUENCES or any(_row_stride(tensor, split_heads=split_heads) == 0 for tensor in tensors):
            return None
        decodes = forward.is_decode and dense.mask.band is None  # cuDNN's decode engines apply no mask
        queries, keys = dense.sq, dense.skv
        sequences = sequence_bucket(real)
        max_seqlen_q = 1 if decodes else length_bucket(queries, _UNBOUNDED, tight=False)
        max_seqlen_kv = length_bucket(keys, _UNBOUNDED, tight=False)
        rows = [length * sequences for length in (max_seqlen_q, max_seqlen_kv, max_seqlen_kv, max_seqlen_q)]
        q, k, v, out = (_packed(tensor, n, split_heads=split_heads) for tensor, n in zip(tensors, rows, strict=True))
        spec = VarlenSpec(
            q=q,
            k=k,
            v=v,
            sequences=sequences,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            mask=Mask(dense.mask.band),
        )
        return cls(forward, split_heads, spec, out)

    def key(self, target: Target, device: int | None) -> PlanKey | None:
        """The key of the plan; None if it is known to be unsupported."""
        try:
            return self.packed.forward_key(self.out, False, target, device)
        except UnsupportedError:
            return None

    def tables(self, device: torch.device | str) -> dict[str, Tensor]:
        """Offsets of the sequences of each tensor, in elements, and their lengths, computed on the device."""
        dense, sequences = self.forward.dense, self.packed.sequences
        batch, heads = dense.q.shape[:2]
        real = batch * heads if self.split_heads else batch
        number = torch.arange(sequences + 1, device=device).clamp_max_(real)
        entry, head = (number // heads, number % heads) if self.split_heads else (number, None)
        offsets: dict[tuple[int, int, int], Tensor] = {}
        result = {}
        for name, x in (("q", dense.q), ("k", dense.k), ("v", dense.v), ("out", self.forward.out)):
            group = heads // x.shape[1]
            entry_stride, head_stride = x.stride[0] if batch > 1 else 0, x.stride[1] if x.shape[1] > 1 else 0
            strides = (entry_stride, head_stride, group)
            if strides not in offsets:
                offsets[strides] = entry * entry_stride + (0 if head is None else head // group * head_stride)
            result[f"offsets_{name}"] = offsets[strides]
        lengths = torch.zeros(2, sequences, dtype=torch.int32, device=device)
        lengths[0, :real] = dense.sq
        lengths[1, :real] = dense.skv
        return result | {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}


def _is_plain(forward: ForwardSpec) -> bool:
    """Whether the call has no options but a band and the scale, and its plan no LSE."""
    dense = forward.dense
    left = dense.mask.band[0] if dense.mask.band is not None else None
    if left is not None and (left < 0 or dense.sq > dense.skv):
        return False  # the band depends on the lengths, or queries may see no key
    return dense == DenseSpec(dense.q, dense.k, dense.v, Mask(dense.mask.band)) and not forward.plan_has_lse


def _has_contiguous_heads(tensor: TensorLayout) -> bool:
    """Whether the heads of a token fit into its row stride, so that no stride depends on the length."""
    _, heads, rows, _ = tensor.shape
    return heads == 1 or rows == 1 or tensor.stride[1] * heads <= tensor.stride[2]


def _row_stride(tensor: TensorLayout, *, split_heads: bool) -> int:
    """The stride between the rows of a sequence; that of a dense tensor if there is only one row."""
    _, heads, rows, dim = tensor.shape
    if rows > 1:
        return tensor.stride[2]
    return dim if split_heads else heads * dim


def _packed(tensor: TensorLayout, rows: int, *, split_heads: bool) -> TensorLayout:
    """The layout of a tensor (B, H, S, D) as packed rows (T, H, D)."""
    _, heads, _, dim = tensor.shape
    heads = 1 if split_heads else heads
    head_stride = tensor.stride[1] if heads > 1 else dim
    return TensorLayout(
        (rows, heads, dim), (_row_stride(tensor, split_heads=split_heads), head_stride, 1), tensor.dtype
    )


# Forward calls that run the plan of their bucket.


#: Gives what runs a call on its exact-shape plan; None until that is available. Called at each use.
FindExact = Callable[[ForwardArguments], Run | None]


class BucketRun:
    """Runs calls of one shape on the plan of their bucket, with tables of sequence offsets and lengths.

    Attributes:
        is_captured: Whether its tables were made in a CUDA graph capture, and are valid only in that graph.
        table_bytes: Size of the tables in GPU memory.
    """

    __slots__ = ("_bound", "_device", "_find_exact", "_tables", "is_captured", "table_bytes")

    def __init__(self, bucket: Bucket, plan: Plan, scale: float, find_exact: FindExact | None) -> None:
        """Makes the tables on the current stream of the plan's GPU, which must be the current device."""
        self._find_exact = find_exact
        self._device = plan.device
        tables = bucket.tables(torch.device("cuda", plan.device))
        self.is_captured = torch.cuda.is_current_stream_capturing()
        stream = current_raw_stream(plan.device)
        self._tables = DeviceTables(tables, plan.device, stream, captured=self.is_captured)
        self.table_bytes = self._tables.size
        out = bucket.forward.out
        self._bound = BoundPlan(
            plan=plan,
            operands=("q", "k", "v"),
            results=[(out.shape, out.stride, out.dtype)],
            numbers={"scale": scale},
            fixed=self._tables.addresses,
        )

    def __call__(self, call: ForwardArguments) -> Result:
        """Launches the plan, or the exact-shape plan if that is available now."""
        exact = None if self._find_exact is None else self._find_exact(call)
        if exact is not None:
            return exact(call)
        self._tables.prepare(current_raw_stream(self._device))
        return self._bound((call.q, call.k, call.v), call.out)[0]
