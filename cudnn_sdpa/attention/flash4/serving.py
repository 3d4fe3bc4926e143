"""Calls of attention, dense, packed or on pages, that FlashAttention-4 serves by `providers`: reasons, and keys.

FlashAttention-4 takes a mask as a window that ends at the last query and the last key. Options that it lacks, or takes
in another way, are refused here.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from cudnn_sdpa.attention import sink_scores
from cudnn_sdpa.attention.arguments import FP8_DTYPES, numbers_of, results, scale_of
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.attention.flash4 import pages
from cudnn_sdpa.attention.flash4.plans import flash4_backward, flash4_forward, functions, reasons_against
from cudnn_sdpa.attention.flash4.preferences import Spec
from cudnn_sdpa.attention.flash4.programs import (
    BEGINS_KV,
    BEGINS_Q,
    PAGE_TABLE,
    Window,
    operands_of_any_size,
    sizes_of,
)
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.paged_varlen.plans import PagedForward
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.spec import SCALE, SOFTCAP, AttentionSpec
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward
from cudnn_sdpa.engine.launch import BoundPlan, Prepared, SingleLaunch
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.function_plan import SIZES
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, OWN

#: The largest number of packed sequences: of more, other functions would be called, too.
MAX_SEQUENCES = 256


class Call(NamedTuple):
    """A call as FlashAttention-4 would take it.

    Attributes:
        inputs, outputs: The operands of its plan: those of cuDNN's without what FlashAttention-4 lacks.
        lacking: Why it cannot be taken, by its options alone.
    """

    inputs: list[Operand]
    outputs: list[Operand]
    window: Window
    lacking: list[str]

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        return {operand.name: operand.layout for operand in (*self.inputs, *self.outputs)}

    @classmethod
    def of(cls, spec: Spec) -> Call:
        if isinstance(spec, (ForwardSpec, BackwardSpec)):
            return cls._of_dense(spec)
        return cls._of_pages(spec) if isinstance(spec, PagedForward) else cls._of_packed(spec)

    @classmethod
    def _of_dense(cls, spec: ForwardSpec | BackwardSpec) -> Call:
        dense = spec.dense
        lacking = _lacking(dense, attn_mask=dense.bias is not None, lengths=dense.has_lengths)
        lacking += dense.unreadable(spec.out)
        if isinstance(spec, ForwardSpec):
            return cls(spec.plain_inputs(), spec.outputs(), _window(dense), lacking)
        out = dense.visible(spec.out)
        lse = Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32))
        grad_out = Operand("grad_out", dense.visible(spec.grad_out))
        inputs = [*dense.qkv(), Operand("out", out), grad_out, lse, SCALE, *[SOFTCAP] * dense.is_capped]
        return cls(inputs, spec.outputs(), _window(dense), lacking)

    @classmethod
    def _of_packed(cls, spec: PackedForward | PackedBackward) -> Call:
        packed = spec.packed
        qkv = [Operand(name, layout) for name, layout in (("q", packed.q), ("k", packed.k), ("v", packed.v))]
        begins = TensorLayout.contiguous((packed.sequences + 1,), torch.int32)
        inputs = [*qkv, Operand(BEGINS_Q, begins), Operand(BEGINS_KV, begins), SCALE, *[SOFTCAP] * packed.is_capped]
        out = Operand("out", spec.out)
        lse = Operand("lse", TensorLayout.contiguous((packed.q.shape[1], packed.q.shape[0]), torch.float32))
        left, right, bottom_right = packed.mask.band or (None, None, True)
        lacking = _lacking(packed)
        if not (bottom_right or packed.shared_cu_seqlens):
            lacking.append("its masks end at the last key of each sequence, and this one begins at the first")
        if packed.sequences > MAX_SEQUENCES:
            lacking.append(f"its launches are for up to {MAX_SEQUENCES} sequences")
        if isinstance(spec, PackedForward):
            in_plan, after = (packed.sink_use is use for use in (SinkUse.IN_PLAN, SinkUse.AFTER_PLAN))
            inputs += [sink_scores.operand(packed.q.shape[1])] * in_plan
            outputs = [out, *[lse] * (spec.with_lse or after)]
            return cls(inputs, outputs, (left, right), lacking)
        gradients = [Operand(f"grad_{each.name}", dense_like(each.layout)) for each in qkv]
        inputs += [out, Operand("grad_out", spec.grad_out), lse]
        return cls(inputs, gradients, (left, right), lacking)

    @classmethod
    def _of_pages(cls, spec: PagedForward) -> Call:
        call = spec.call
        softmax = call.softmax
        left, right = (None if x == UNBOUNDED else x for x in (softmax.window_left, softmax.window_right))
        window = left, 0 if softmax.is_causal else right
        reasons = {
            "it has no FP8": call.k_pages.dtype in FP8_DTYPES,
            "it has no tree_mask": call.tree_mask is not None,
            "it has one page table for keys and values": call.page_table_v is not None,
            "its results depend on the batch": call.batch_invariant,
            "its log-sum-exp of pages is not returned": call.with_lse,
            "its scale is above 0": scale_of(call) <= 0,
            "its masks end at the last key of each sequence, and this one begins at the first": (
                window != (None, None) and softmax.causal_alignment != BOTTOM_RIGHT
            ),
            f"its launches are for up to {MAX_SEQUENCES} sequences": call.batch > MAX_SEQUENCES,
        }
        lacking = [reason for reason, holds in reasons.items() if holds]
        return cls(*pages.operands(call), window, lacking + pages.lacking(call))

    def reasons_against(self, target: Target) -> list[str]:
        """Why FlashAttention-4 cannot serve it; empty if it can."""
        found = self.lacking or reasons_against(self.layouts, self.window, target)
        return found or known_issues.reasons_against(self.key(target, None))

    def key(self, target: Target, device: int | None) -> PlanKey:
        operation = flash4_backward if "grad_q" in self.layouts else flash4_forward
        inputs, outputs = self.inputs, self.outputs
        if PAGE_TABLE in self.layouts:
            *inputs, out, sizes = operands_of_any_size([*inputs, *outputs], self.window)
            inputs, outputs = [*inputs, sizes], [out]
        return operation.key(inputs, outputs, {"window": self.window}, target, device=device)


def reasons_of(spec: Spec, target: Target) -> list[str]:
    """Why FlashAttention-4 cannot serve a call; empty if it can."""
    return Call.of(spec).reasons_against(target)


def key_of(spec: Spec, target: Target, device: int | None) -> PlanKey:
    return Call.of(spec).key(target, device)


def ready(spec: PagedForward, key: PlanKey) -> PlanKey:
    """This key, or that of the own kernel's plan while a kind is still compiled: see `dense.specs.ready`."""
    return functions.ready(
        key,
        of_cudnn=spec.key,
        has_plan=lambda key: plan_cache.find(key) is not None,
        others=(OWN, CUDNN, DEFAULT, FASTEST),
    )


def bind(spec: PagedForward, key: PlanKey) -> Prepared:
    """A call on pages, bound to its plan with the sizes and strides of its tensors."""
    call, of, device = spec.call, Call.of(spec), spec.call.q.get_device()
    plan = plan_cache.get(key, partial(build_plan, flash4_forward))
    with torch.cuda.device(device):
        bound = BoundPlan(
            plan,
            ("q", "k_pages", "v_pages"),
            results=results(call)[:1],
            numbers=numbers_of(call, scale_of(call)),
            extras=pages.extras(call, of.layouts["out"], device),
            arrays={SIZES: sizes_of(of.layouts, of.window)},
        )
    return Prepared(SingleLaunch(bound), plan)


def notes_on(spec: Spec) -> list[str]:
    """The copies of a call, for `explain`."""
    if isinstance(spec, PagedForward):
        return ["one kernel copies the page table, and keeps page ids, lengths and offsets within the tensors"]
    is_packed = isinstance(spec, PackedBackward) or (isinstance(spec, PackedForward) and spec.with_lse)
    return ["the log-sum-exp is transposed, which is (heads, tokens) in its kernels"] * is_packed


def _lacking(spec: AttentionSpec, *, attn_mask: bool = False, lengths: bool = False) -> list[str]:
    """Why FlashAttention-4 cannot take a call, by its options."""
    lacking = {
        "it has no attn_mask": attn_mask,
        "it has no sequence lengths": lengths,
        "it has no dropout": spec.dropout_p > 0,
        "it has no ALiBi": spec.alibi,
        "it does not promise deterministic results": spec.deterministic,
    }
    return [reason for reason, is_wanted in lacking.items() if is_wanted]


def _window(dense: DenseSpec) -> Window:
    """The mask as FlashAttention-4 takes it: relative to the diagonal that ends at the last query and the last key."""
    if dense.mask.band is None:
        return None, None
    left, right, bottom_right = dense.mask.band
    shift = 0 if bottom_right else dense.skv - dense.rows
    return None if left is None else left + shift, None if right is None else right - shift
