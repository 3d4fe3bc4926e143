"""The two passes of an attention call without their data, and the keys of their plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cudnn_sdpa.attention import graphs
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.problem import Problem
from cudnn_sdpa.attention.support import BACKWARD, FORWARD, refusal
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.key import Operand, PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.runtime.repeatability import has_only_repeatable
from cudnn_sdpa.runtime.target import Target

#: On cuDNN before 9.28, queries and keys that fill up the last tile of this size are not hidden from a backward pass
#: without lengths, and a very negative log-sum-exp makes their weights infinite (seen on 9.19, not on 9.28).
FIRST_RIGHT_LAST_TILE = 92800
LAST_TILE = 128


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward call without its data.

    Attributes:
        problem: What it has in common with its backward pass.
        out: The output.
        with_lse: Whether the caller wants the log-sum-exp.
        deterministic: Whether the result must be bit-exact.
    """

    problem: Problem
    out: TensorLayout
    with_lse: bool
    deterministic: bool = False

    @classmethod
    def of(cls, call: ForwardArguments) -> Forward:
        """Describes a call. The output, where it is not given, lies in memory in the order of `q`."""
        q = call.q
        shape = (*q.shape[:3], call.v.shape[3])
        stride = dense_stride_like(shape, q.shape, q.stride())
        out = TensorLayout(shape, stride, q.dtype) if call.out is None else TensorLayout.of(call.out)
        return cls(Problem.of(call), out, call.with_lse, call.deterministic)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key."""
        return self.problem.is_empty

    @property
    def is_decode(self) -> bool:
        """One query for each sequence: cuDNN's decode engines take it."""
        return self.problem.rows == 1

    @property
    def sinks_outside(self) -> bool:
        """Whether the sinks are applied after the plan, from the log-sum-exp: cuDNN has none for a single query."""
        return self.problem.sinks and self.is_decode

    @property
    def plan_has_lse(self) -> bool:
        """Whether the plan writes the log-sum-exp."""
        return self.with_lse or self.sinks_outside

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan.

        Raises:
            UnsupportedError: It is known to have none.
        """
        problem = self.problem
        refused = refusal(problem.case(FORWARD, target), "sdpa")
        if refused is not None:
            raise refused
        inputs = [
            Operand("q", problem.visible(problem.q)),
            Operand("k", problem.k),
            Operand("v", problem.v),
            *problem.operands(
                decode=self.is_decode,
                sinks=problem.sinks and not self.sinks_outside,
                full_lengths=problem.needs_lengths,
            ),
        ]
        out = problem.visible(self.out)
        outputs = [Operand("out", out)]
        if self.plan_has_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)))
        options = {**problem.options(), "with_lse": self.plan_has_lse}
        if self.deterministic and not has_only_repeatable(target.sm, problem.rows):
            options["deterministic"] = True
        return graphs.sdpa_forward.key(inputs, outputs, options, target, device)

    def extra_kernels(self) -> list[str]:
        """What a call runs beside its plan, for `explain`."""
        problem, notes = self.problem, self.problem.extra_kernels()
        if problem.has_no_plan:
            return [MASK_OF_ONE_KEY]
        if problem.mask.blind_rows and self.plan_has_lse:
            notes.append("the log-sum-exp of the other queries is copied into place")
        notes += _notes_on_sides(problem, is_decode=self.is_decode)
        if self.sinks_outside:
            notes.append("the sinks are applied to the output from the log-sum-exp (cuDNN has none for a single query)")
        elif problem.sinks and self.plan_has_lse and problem.can_be_blind:
            notes.append("the log-sum-exp is raised to the sinks where it is lower, for queries that see no key")
        return notes


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward call without its data.

    Attributes:
        problem: What it has in common with its forward pass.
        out: The output of the forward pass.
        grad_out: Its gradient, as cuDNN reads it.
        deterministic: Whether the result must be bit-exact.
        bias_gradient: Whether the gradient by `attn_mask` is wanted.
        sink_gradient: Whether the gradient by the sinks is wanted, which is computed beside the plan.
    """

    problem: Problem
    out: TensorLayout
    grad_out: TensorLayout
    deterministic: bool
    bias_gradient: bool
    sink_gradient: bool

    def refusal(self, target: Target) -> UnsupportedError | None:
        """Everything that is known to speak against a plan."""
        case = self.problem.case(BACKWARD, target, bias_gradient=self.bias_gradient, deterministic=self.deterministic)
        return refusal(case, "the gradient of sdpa")

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan.

        Raises:
            UnsupportedError: It is known to have none.
        """
        problem, refused = self.problem, self.refusal(target)
        if refused is not None:
            raise refused
        out = problem.visible(self.out)
        lse = TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)
        inputs = [
            Operand("q", problem.visible(problem.q)),
            Operand("k", problem.k),
            Operand("v", problem.v),
            Operand("out", out),
            Operand("grad_out", problem.visible(self.grad_out)),
            Operand("lse", lse),
            *problem.operands(
                decode=False,
                sinks=False,
                full_lengths=problem.needs_lengths or self._pads(target),
                whole_bias=True,
            ),
        ]
        options = {
            **problem.options(),
            "deterministic": self.deterministic,
            "bias_gradient": self.grad_bias.shape if self.bias_gradient else None,
        }
        return graphs.sdpa_backward.key(inputs, self.outputs(), options, target, device)

    def _pads(self, target: Target) -> bool:
        """Whether full lengths are given so that what fills up the last tiles is hidden: see `known_issues`."""
        problem = self.problem
        partial = problem.rows % LAST_TILE != 0 or problem.skv % LAST_TILE != 0
        return partial and target.cudnn < FIRST_RIGHT_LAST_TILE and not problem.softcap

    def outputs(self) -> list[Operand]:
        """The gradients, each in the memory order of its tensor."""
        problem = self.problem
        result = [
            Operand("grad_q", problem.visible(dense_like(problem.q))),
            Operand("grad_k", dense_like(problem.k)),
            Operand("grad_v", dense_like(problem.v)),
        ]
        if self.bias_gradient:
            result.append(Operand("grad_bias", self.grad_bias))
        return result

    def extra_kernels(self) -> list[str]:
        """What a call runs beside its plan, for `explain`."""
        problem, notes = self.problem, [GRAD_OUT_COPY]
        if problem.has_no_plan:
            return [*notes, MASK_OF_ONE_KEY]
        if problem.is_single:
            return [*notes, "one query on one key is computed in plain PyTorch"]
        if problem.mask.blind_rows:
            notes.append(f"the gradient of the first {problem.mask.blind_rows} queries is filled with zeros")
            notes.append("the log-sum-exp of the other queries is copied")
        notes += _notes_on_sides(problem, is_decode=False)
        if problem.bias is not None or problem.softcap:
            notes.append("the log-sum-exp of queries that see nothing is replaced, so that no NaN comes of it")
        if self.bias_gradient:
            notes.append("the gradient of attn_mask is summed over what attn_mask is repeated along")
        if self.sink_gradient:
            notes.append("the gradient of the sinks is computed from the output and its gradient")
        return notes

    @property
    def grad_bias(self) -> TensorLayout:
        """The gradient by the mask before it is summed over what the mask was repeated along."""
        batch, heads, _, _ = self.problem.q.shape
        return TensorLayout.contiguous((batch, heads, self.problem.rows, self.problem.skv), self.problem.q.dtype)


#: What every backward pass may have to do; only the caller's gradient decides.
GRAD_OUT_COPY = "grad_out is copied, if cuDNN cannot read it where it lies (that of a sum, which is expanded, never)"

MASK_OF_ONE_KEY = "attn_mask over a single key: all is computed in plain PyTorch, as cuDNN misreads such a mask"


def _notes_on_sides(problem: Problem, *, is_decode: bool) -> list[str]:
    """What is made for a plan of the lengths and of `attn_mask`."""
    notes = []
    if problem.softcap and problem.has_lengths:
        notes.append("the first and the last key that each query sees are computed from the lengths, for the soft cap")
    elif problem.has_lengths:
        notes.append("lengths are kept within the tensors")
        if problem.lengths_kv and not is_decode:
            notes.append(
                "lengths are corrected on the GPU where a sequence has no keys (cuDNN leaves its rows unwritten)"
            )
        if problem.lengths_q and is_decode:
            notes.append("lengths are combined (cuDNN's decode engines ignore those of the queries)")
    if problem.bias is not None:
        notes.append("attn_mask is converted to a bias, if cuDNN cannot read it where it lies (booleans never)")
    return notes


def dense_like(layout: TensorLayout) -> TensorLayout:
    """A dense tensor of the same shape, its dimensions in memory in the same order."""
    stride = dense_stride_like(layout.shape, layout.shape, layout.stride)
    return replace(layout, stride=stride)
