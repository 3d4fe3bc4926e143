"""The specs of FP8 calls (`ForwardSpec`, `BackwardSpec`): layouts and options without data, and their plans' keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.arguments import FP8_DTYPES, ForwardArguments
from cudnn_sdpa.attention.arguments import results as dense_results
from cudnn_sdpa.attention.dense.specs import FIRST_RIGHT_LAST_TILE, GRAD_OUT_COPY, LAST_TILE, DenseSpec
from cudnn_sdpa.attention.fp8 import arguments, graphs, workarounds
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Arguments,
    Fp8BackwardArguments,
    Fp8BackwardScales,
    Fp8Scales,
    as_dense,
)
from cudnn_sdpa.attention.parts import GRADIENTS, Part
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD, refuse
from cudnn_sdpa.attention.support.rules_fp8 import RULES
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, canonical_stride, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import Target

#: Heads times tiles of keys that keep all multiprocessors of a Hopper GPU busy, and the keys from which that counts.
_ENOUGH_TILES, _TILE, _LONG = 512, 128, 1024

#: A scale or an amax, as cuDNN reads and writes it.
SCALAR_LAYOUT = TensorLayout.contiguous((1, 1, 1, 1), torch.float32)

#: An amax, as the caller sees it.
AMAX: Layout = ((1,), (1,), torch.float32)


def device_scalars(names: Iterable[str]) -> list[Operand]:
    """Operands of one float32 element each on the GPU."""
    return [Operand(name, SCALAR_LAYOUT) for name in names]


def spec_of(call: ForwardArguments) -> DenseSpec:
    """The spec of a call, with its mask aligned top-left where possible, because Hopper has no other kernels."""
    dense = DenseSpec.of(call)
    band = dense.mask.band
    if band is None or dense.has_lengths:
        return dense
    # Without actual sequence lengths, a bottom-right band is a top-left one whose bounds are shifted by Skv - Sq. The
    # left bound may not become negative.
    left, right, bottom_right = band
    if right is None or not bottom_right:
        return dense
    shift = dense.skv - dense.rows
    if left is not None and left < shift:
        return dense
    moved = (None if left is None else left - shift, right + shift, False)
    return replace(dense, mask=replace(dense.mask, band=moved))


def results(call: Fp8Arguments) -> tuple[Layout, ...]:
    (shape, stride, dtype), lse = dense_results(as_dense(call))
    return (shape, stride, call.out_dtype or dtype), AMAX, AMAX, lse


def results_of_backward(call: Fp8BackwardArguments) -> tuple[Layout, ...]:
    dtype = call.grad_out.dtype
    qkv = [(tuple(x.shape), dense_stride_like(x.shape, x.shape, x.stride()), dtype) for x in (call.q, call.k, call.v)]
    return *qkv, AMAX, AMAX, AMAX, AMAX


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """A forward call without its data.

    Attributes:
        dense: The part that it has in common with its backward pass.
        pages: The layouts of the pages of keys and values, and of a page table, for paged calls.
    """

    dense: DenseSpec
    out: TensorLayout
    with_lse: bool
    pages: tuple[TensorLayout, TensorLayout, TensorLayout] | None = None

    @classmethod
    def of(cls, call: Fp8Arguments) -> ForwardSpec:
        pages = None
        if call.tables is not None:
            batch, width = call.tables[0].shape
            table = TensorLayout.contiguous((batch, 1, width, 1), torch.int32)
            pages = (TensorLayout.of(call.k), TensorLayout.of(call.v), table)
        out = TensorLayout(*results(call)[0])
        return cls(spec_of(arguments.without_pages(call)), out, call.with_lse, pages)

    def key(self, target: Target, device: int | None) -> PlanKey:
        dense = self.dense
        configuration = dense.configuration(FORWARD, target, half_output=self.out.dtype not in FP8_DTYPES)
        refuse(configuration, "sdpa_fp8", RULES)
        scale, *lengths = dense.operands(full_lengths=dense.needs_lengths)
        k, v, *tables = (dense.k, dense.v) if self.pages is None else self.pages
        inputs = [
            Operand("q", dense.visible(dense.q)),
            *(Operand("k", k), Operand("v", v)),
            *(scale, *device_scalars(Fp8Scales._fields), *lengths),
            *(Operand(name, table) for table in tables for name in ("table_k", "table_v")),
        ]
        out = dense.visible(self.out)
        outputs = [Operand("out", out), *device_scalars(("amax_s", "amax_o"))]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)))
        options = {"band": dense.mask.band, "with_lse": self.with_lse}
        return graphs.sdpa_fp8_forward.key(
            inputs=inputs, outputs=outputs, options=options, target=target, device=device
        )

    def extra_kernels(self) -> list[str]:
        notes = [AMAXES, *self.dense.extra_kernels(), *_notes_on_lengths(self.dense)]
        if self.dense.mask.masked_rows and self.with_lse:
            notes.append("the log-sum-exp of the other queries is copied into place")
        if self.pages is not None:
            notes.append("page ids are clamped to the cache")
        if self.dense.lengths_q or self.pages is not None:
            notes.append("rows past the lengths are zeroed, and amax_o is computed from the output")
        return notes


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """A backward call without its data.

    Attributes:
        dense: The part that it has in common with its forward pass.
        grad_out: The gradient of the output, as cuDNN reads it; gradients are of its dtype.
    """

    dense: DenseSpec
    out: TensorLayout
    grad_out: TensorLayout
    deterministic: bool

    @classmethod
    def of(cls, call: Fp8BackwardArguments) -> BackwardSpec:
        out, grad_out = TensorLayout.of(call.out), workarounds.readable_layout(call)
        return cls(spec_of(as_dense(call)), out, grad_out, call.softmax.deterministic)

    def key(self, target: Target, device: int | None) -> PlanKey:
        dense = self.dense
        configuration = dense.configuration(BACKWARD, target, deterministic=self.deterministic)
        refuse(configuration, "sdpa_fp8_backward", RULES)
        full = dense.needs_lengths or self._pads(target)
        scale, *lengths = dense.operands(full_lengths=full)
        rows = self.padded_rows(target)
        out = self._of_rows(self.out, rows)
        inputs = [
            Operand("q", self._of_rows(dense.q, rows)),
            Operand("k", dense.k),
            Operand("v", dense.v),
            Operand("out", out),
            Operand("grad_out", self._of_rows(self.grad_out, rows)),
            Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)),
            *(scale, *device_scalars(Fp8BackwardScales._fields), *lengths),
        ]
        grad_q, grad_k, grad_v = self.gradients()
        outputs = [
            Operand("grad_q", self._of_rows(grad_q, rows)),
            *(Operand("grad_k", grad_k), Operand("grad_v", grad_v)),
            *device_scalars(("amax_dq", "amax_dk", "amax_dv", "amax_dp")),
        ]
        options = {"band": dense.mask.band, "deterministic": self.deterministic}
        return graphs.sdpa_fp8_backward.key(
            inputs=inputs, outputs=outputs, options=options, target=target, device=device
        )

    def gradients(self) -> list[TensorLayout]:
        """The layouts of the gradients, each in the memory order of its tensor."""
        dtype, dense = self.grad_out.dtype, self.dense
        return [replace(dense_like(layout), dtype=dtype) for layout in (dense.q, dense.k, dense.v)]

    def part(self, target: Target) -> BackwardSpec:
        """The spec of the batch entries of one launch: itself, or a part for `SplitBackward`."""
        entries = self._entries_on_hopper() if target.sm // 10 == 9 else self.dense.q.shape[0]
        if entries == self.dense.q.shape[0]:
            return self
        dense = self.dense
        q, k, v, out, grad_out = (
            TensorLayout((entries, *x.shape[1:]), canonical_stride((entries, *x.shape[1:]), x.stride), x.dtype)
            for x in (dense.q, dense.k, dense.v, self.out, self.grad_out)
        )
        return replace(self, dense=replace(dense, q=q, k=k, v=v), out=out, grad_out=grad_out)

    def _entries_on_hopper(self) -> int:
        """Batch entries per launch: the fewest that keep the GPU busy and divide the batch."""
        dense, batch = self.dense, self.dense.q.shape[0]
        band = dense.mask.band
        # A slice of the full gradient has the plan's layout only if batch entries are not interleaved.
        apart = all(layout.stride[0] == max(layout.stride) for layout in self.gradients())
        if band is None or band[1] is None or not apart or dense.skv < _LONG:
            return batch
        wanted = -(-_ENOUGH_TILES // (dense.q.shape[1] * -(-dense.skv // _TILE)))
        return next((entries for entries in range(wanted, batch) if batch % entries == 0), batch)

    def padded_rows(self, target: Target) -> int:
        """Queries in the plan: those that see a key, zero-padded to a multiple of 16 on Hopper."""
        rows = self.dense.rows
        return workarounds.padded_rows(rows) if target.sm // 10 == 9 else rows

    def _of_rows(self, layout: TensorLayout, rows: int) -> TensorLayout:
        return self.dense.visible(layout) if rows == self.dense.rows else workarounds.padded_layout(layout, rows)

    def _pads(self, target: Target) -> bool:
        """Whether full lengths are passed to mask the padding of the last tiles: see `known_issues`."""
        partial = self.dense.rows % LAST_TILE != 0 or self.dense.skv % LAST_TILE != 0
        return partial and target.cudnn < FIRST_RIGHT_LAST_TILE

    def extra_kernels(self) -> list[str]:
        notes, masked_rows = [AMAXES, GRAD_OUT_COPY, *_notes_on_lengths(self.dense)], self.dense.mask.masked_rows
        if masked_rows:
            notes.append(f"the gradient of the first {masked_rows} queries is zeroed")
            notes.append("the log-sum-exp of the other queries is copied")
        entries = self._entries_on_hopper()
        if entries != self.dense.q.shape[0]:
            notes.append(f"on Hopper the batch is split into launches of {entries} entries")
        if self.dense.rows % workarounds.ROWS_AT_ONCE:
            notes.append(
                "on Hopper q, out, grad_out and lse are copied into padded tensors, and the gradient of q out of one: "
                "the number of queries is not a multiple of 16"
            )
        return notes


def keys(call: Fp8Arguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    spec = ForwardSpec.of(call)
    if not spec.dense.is_empty:
        yield spec.key(target, device)


def keys_of_backward(call: Fp8BackwardArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    for part in [part_of(call, part) for part in split_backward(call)] or [call]:
        spec = BackwardSpec.of(part)
        if not spec.dense.is_empty:
            yield spec.part(target).key(target, device)


def split_backward(call: Fp8BackwardArguments) -> list[Part]:
    """The parts of a backward call; none if one launch computes it."""
    return split_gradients(call.q, call.k, call.v, call.out, call.grad_out)


def split_gradients(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Part]:
    reasons = GRADIENTS.exceeded(q, k, v, *others)
    if not reasons or 0 in q.shape or 0 in k.shape:
        return []
    found = parts.split(q, k, v, GRADIENTS)
    if any((a.entries, a.heads_kv) == (b.entries, b.heads_kv) for a, b in itertools.pairwise(found)):
        reasons.append("query heads of one key head would be in several parts, and gradients in FP8 cannot be summed")
        raise UnsupportedError("the gradient of attention in FP8", reasons, "sdpa in torch.bfloat16, or fewer heads")
    return found


def part_of(call: Fp8BackwardArguments, part: Part) -> Fp8BackwardArguments:
    entries, heads, heads_kv = part
    lengths_q, lengths_kv = (None if x is None else x[entries] for x in (call.seq_lens_q, call.seq_lens_kv))
    return call._replace(
        grad_out=parts.compact(call.grad_out[entries, heads]),
        q=parts.compact(call.q[entries, heads]),
        k=parts.compact(call.k[entries, heads_kv]),
        v=parts.compact(call.v[entries, heads_kv]),
        out=parts.compact(call.out[entries, heads]),
        lse=tensor_checks.aligned("lse", call.lse[entries, heads]),
        seq_lens_q=lengths_q,
        seq_lens_kv=lengths_kv,
    )


AMAXES = "the amax outputs are zeroed first, except on Hopper"


def _notes_on_lengths(dense: DenseSpec) -> list[str]:
    return ["lengths are clamped to the tensors"] if dense.has_lengths else []
