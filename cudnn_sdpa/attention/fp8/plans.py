"""The two passes of attention in FP8 without their data, and the keys of their plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense.plans import FIRST_RIGHT_LAST_TILE, GRAD_OUT_COPY, LAST_TILE, DenseSpec
from cudnn_sdpa.attention.fp8 import arguments, graphs, workarounds
from cudnn_sdpa.attention.fp8.arguments import FP8_DTYPES, Fp8Backward, Fp8BackwardScales, Fp8Forward, Fp8Scales
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD, refusal
from cudnn_sdpa.attention.support.rules_fp8 import RULES
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, canonical_stride, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import Target

#: What keeps all multiprocessors of a Hopper GPU busy: so many heads times tiles of keys, in sequences of some length.
_ENOUGH_TILES, _TILE, _LONG = 512, 128, 1024

#: A scale, or a largest value, as cuDNN reads and writes it.
ONE_NUMBER = TensorLayout.contiguous((1, 1, 1, 1), torch.float32)


def numbers(names: Iterable[str]) -> list[Operand]:
    """Operands of one number each on the GPU."""
    return [Operand(name, ONE_NUMBER) for name in names]


def spec_of(call: ForwardArguments) -> DenseSpec:
    """Describes a call; what can be counted from the top left is, since Hopper has nothing else.

    Without true lengths, a bottom-right band is a top-left one whose bounds are moved by Skv - Sq. A left bound may not
    become negative by that.
    """
    problem = DenseSpec.of(call)
    band = problem.mask.band
    if band is None or problem.has_lengths:
        return problem
    left, right, bottom_right = band
    if right is None or not bottom_right:
        return problem
    shift = problem.skv - problem.rows
    if left is not None and left < shift:
        return problem
    moved = (None if left is None else left - shift, right + shift, False)
    return replace(problem, mask=replace(problem.mask, band=moved))


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """A forward call without its data.

    Attributes:
        problem: What it has in common with its backward pass.
        out: The output.
        with_lse: Whether the log-sum-exp is wanted.
        pages: The layouts of the pages of keys and values, and of a table, if they lie in pages.
    """

    problem: DenseSpec
    out: TensorLayout
    with_lse: bool
    pages: tuple[TensorLayout, TensorLayout, TensorLayout] | None = None

    @classmethod
    def of(cls, of: Fp8Forward) -> ForwardSpec:
        """Describes a call. The output lies in memory in the order of `q`."""
        q = of.call.q
        shape = (*q.shape[:3], of.call.v.shape[3])
        out = TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride()), of.out_dtype)
        pages = None
        if of.tables is not None:
            batch, width = of.tables[0].shape
            table = TensorLayout.contiguous((batch, 1, width, 1), torch.int32)
            pages = (TensorLayout.of(of.call.k), TensorLayout.of(of.call.v), table)
        return cls(spec_of(arguments.described(of)), out, of.call.with_lse, pages)

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan.

        Raises:
            UnsupportedError: It is known to have none.
        """
        problem = self.problem
        case = problem.case(FORWARD, target, half_output=self.out.dtype not in FP8_DTYPES)
        refused = refusal(case, "sdpa_fp8", RULES)
        if refused is not None:
            raise refused
        scale, *lengths = problem.operands(decode=False, sinks=False, full_lengths=problem.needs_lengths)
        k, v, *tables = (problem.k, problem.v) if self.pages is None else self.pages
        inputs = [
            Operand("q", problem.visible(problem.q)),
            *(Operand("k", k), Operand("v", v)),
            *(scale, *numbers(Fp8Scales._fields), *lengths),
            *(Operand(name, table) for table in tables for name in ("table_k", "table_v")),
        ]
        out = problem.visible(self.out)
        outputs = [Operand("out", out), *numbers(("amax_s", "amax_o"))]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)))
        options = {"band": problem.mask.band, "with_lse": self.with_lse}
        return graphs.sdpa_fp8_forward.key(inputs, outputs, options, target, device)

    def extra_kernels(self) -> list[str]:
        """What a call runs beside its plan, for `explain`."""
        notes = [AMAXES, *self.problem.extra_kernels(), *_notes_on_lengths(self.problem)]
        if self.problem.mask.masked_rows and self.with_lse:
            notes.append("the log-sum-exp of the other queries is copied into place")
        if self.pages is not None:
            notes.append("page tables are kept within the pages")
        if self.problem.lengths_q or self.pages is not None:
            notes.append("rows past the lengths are filled with zeros, and amax_o is taken from the output")
        return notes


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """A backward call without its data.

    Attributes:
        problem: What it has in common with its forward pass.
        out: The output of the forward pass.
        grad_out: Its gradient, as cuDNN reads it; gradients are of its dtype.
        deterministic: Whether the result must be bit-exact.
    """

    problem: DenseSpec
    out: TensorLayout
    grad_out: TensorLayout
    deterministic: bool

    @classmethod
    def of(cls, of: Fp8Backward) -> BackwardSpec:
        """Describes a call."""
        out, grad_out = TensorLayout.of(of.out), TensorLayout.of(of.grad_out)
        return cls(spec_of(of.call), out, grad_out, of.call.deterministic)

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan.

        Raises:
            UnsupportedError: It is known to have none.
        """
        problem = self.problem
        refused = refusal(problem.case(BACKWARD, target, deterministic=self.deterministic), "sdpa_fp8_backward", RULES)
        if refused is not None:
            raise refused
        full = problem.needs_lengths or self._pads(target)
        scale, *lengths = problem.operands(decode=False, sinks=False, full_lengths=full)
        rows = self.rows_made(target)
        out = self._of_rows(self.out, rows)
        inputs = [
            Operand("q", self._of_rows(problem.q, rows)),
            Operand("k", problem.k),
            Operand("v", problem.v),
            Operand("out", out),
            Operand("grad_out", self._of_rows(self.grad_out, rows)),
            Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)),
            *(scale, *numbers(Fp8BackwardScales._fields), *lengths),
        ]
        options = {"band": problem.mask.band, "deterministic": self.deterministic}
        return graphs.sdpa_fp8_backward.key(inputs, self._outputs(rows), options, target, device)

    def gradients(self) -> list[TensorLayout]:
        """The gradients by q, k and v, all rows of them."""
        return [self.whole(layout) for layout in (self.problem.q, self.problem.k, self.problem.v)]

    def piece(self, target: Target) -> BackwardSpec:
        """The call of the batch entries that go into one launch: itself, or see `fp8.launch`."""
        entries = self._entries_on_hopper() if target.sm // 10 == 9 else self.problem.q.shape[0]
        if entries == self.problem.q.shape[0]:
            return self
        problem = self.problem
        q, k, v, out, grad_out = (
            TensorLayout((entries, *x.shape[1:]), canonical_stride((entries, *x.shape[1:]), x.stride), x.dtype)
            for x in (problem.q, problem.k, problem.v, self.out, self.grad_out)
        )
        return replace(self, problem=replace(problem, q=q, k=k, v=v), out=out, grad_out=grad_out)

    def _entries_on_hopper(self) -> int:
        """How many batch entries go into one launch there: as few as keep the GPU busy, and all have as many."""
        problem, batch = self.problem, self.problem.q.shape[0]
        band = problem.mask.band
        # A piece of a whole gradient lies as its plan says if entries do not lie among each other.
        apart = all(layout.stride[0] == max(layout.stride) for layout in self.gradients())
        if band is None or band[1] is None or not apart or problem.skv < _LONG:
            return batch
        wanted = -(-_ENOUGH_TILES // (problem.q.shape[1] * -(-problem.skv // _TILE)))
        return next((entries for entries in range(wanted, batch) if batch % entries == 0), batch)

    def rows_made(self, target: Target) -> int:
        """How many queries the plan has: those that see a key, on Hopper with zeros up to a multiple of 16."""
        rows = self.problem.rows
        return workarounds.rows_made(rows) if target.sm // 10 == 9 else rows

    def _of_rows(self, layout: TensorLayout, rows: int) -> TensorLayout:
        """The layout of queries, or of what goes with them, as the plan reads it."""
        return self.problem.visible(layout) if rows == self.problem.rows else workarounds.longer(layout, rows)

    def _pads(self, target: Target) -> bool:
        """Whether full lengths are given so that what fills up the last tiles is hidden: see `known_issues`."""
        partial = self.problem.rows % LAST_TILE != 0 or self.problem.skv % LAST_TILE != 0
        return partial and target.cudnn < FIRST_RIGHT_LAST_TILE

    def _outputs(self, rows: int) -> list[Operand]:
        """The gradients, each in the memory order of its tensor, and the largest values."""
        problem = self.problem
        gradients = {"grad_q": self._of_rows(self.whole(problem.q), rows), "grad_k": self.whole(problem.k)}
        gradients["grad_v"] = self.whole(problem.v)
        largest = numbers(("amax_dq", "amax_dk", "amax_dv", "amax_dp"))
        return [*(Operand(name, layout) for name, layout in gradients.items()), *largest]

    def whole(self, layout: TensorLayout) -> TensorLayout:
        """The layout of a gradient, all rows of it."""
        return replace(dense_like(layout), dtype=self.grad_out.dtype)

    def extra_kernels(self) -> list[str]:
        """What a call runs beside its plan, for `explain`."""
        notes, blind = [AMAXES, GRAD_OUT_COPY, *_notes_on_lengths(self.problem)], self.problem.mask.masked_rows
        if blind:
            notes.append(f"the gradient of the first {blind} queries is filled with zeros")
            notes.append("the log-sum-exp of the other queries is copied")
        entries = self._entries_on_hopper()
        if entries != self.problem.q.shape[0]:
            notes.append(f"on Hopper {entries} of the batch entries go into one launch, and as many launches follow")
        if self.problem.rows % workarounds.ROWS_AT_ONCE:
            notes.append(
                "on Hopper q, out, grad_out and lse are copied into longer tensors, and the gradient of q out of one: "
                "the number of queries is no multiple of 16"
            )
        return notes


AMAXES = "the largest values are filled with zeros beforehand, but not on Hopper"


def _notes_on_lengths(problem: DenseSpec) -> list[str]:
    return ["lengths are kept within the tensors"] if problem.has_lengths else []
