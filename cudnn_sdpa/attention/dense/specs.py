"""The specs of dense calls (`ForwardSpec`, `BackwardSpec`): layouts and options without data, and their plans' keys.

`DenseSpec` is what both passes share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cudnn_sdpa.attention import sink_scores
from cudnn_sdpa.attention.arguments import (
    MIN_SCALE,
    ForwardArguments,
    GradientCall,
    Needs,
    as_launched,
    output_layout,
    spec_options,
)
from cudnn_sdpa.attention.bias import bias_layout, repeated_row
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.mask import normalize_mask
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.spec import DROPOUT, SCALE, SOFTCAP, AttentionSpec
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD, Configuration, refuse
from cudnn_sdpa.engine.tensor_checks import like_in_memory
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.backend import has_only_repeatable
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, canonical_stride, dense_like
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.program_plan import ProgramOp


@dataclass(frozen=True, slots=True)
class DenseSpec(AttentionSpec):
    """The layouts and options that both passes of a dense call share.

    Attributes:
        lengths_q: Whether actual sequence lengths of the queries are passed.
        lengths_kv: Whether actual sequence lengths of the keys are passed.
        bias: `attn_mask` as cuDNN reads it, without fully masked rows. None without one.
        attn_mask: The same as the caller gave it.
    """

    lengths_q: bool = False
    lengths_kv: bool = False
    bias: TensorLayout | None = None
    attn_mask: TensorLayout | None = None

    @classmethod
    def of(cls, call: ForwardArguments) -> DenseSpec:
        q, k, v = call.q, call.k, call.v
        softmax, lengths_q, lengths_kv = call.softmax, call.seq_lens_q is not None, call.seq_lens_kv is not None
        is_capped = softmax.is_capped
        mask = normalize_mask(
            is_causal=softmax.is_causal,
            alignment=softmax.causal_alignment,
            window_size=(softmax.window_left, softmax.window_right),
            sq=q.shape[2],
            skv=k.shape[2],
            has_lengths=lengths_q or lengths_kv,
            top_left_only=call.attn_mask is not None or softmax.dropout_p > 0 or softmax.alibi or is_capped,
            keep_causal=softmax.alibi,
        )
        bias = None if call.attn_mask is None else bias_layout(call.attn_mask, q, k.shape[2], mask.masked_rows)
        return cls(
            q=TensorLayout.of(q),
            k=TensorLayout.of(k),
            v=TensorLayout.of(v),
            mask=mask,
            lengths_q=lengths_q,
            lengths_kv=lengths_kv,
            bias=bias,
            attn_mask=None if call.attn_mask is None else TensorLayout.of(call.attn_mask),
            **spec_options(call, sinks_in_plan=q.shape[2] - mask.masked_rows != 1),
        )

    @property
    def sq(self) -> int:
        return self.q.shape[2]

    @property
    def rows(self) -> int:
        return self.sq - self.mask.masked_rows

    @property
    def skv(self) -> int:
        return self.k.shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key."""
        return 0 in self.q.shape or 0 in self.k.shape

    @property
    def is_one_by_one(self) -> bool:
        """Whether there is one query and one key: cuDNN has no backward kernel for it, so the reference runs."""
        return self.rows == 1 and self.skv == 1

    @property
    def has_no_plan(self) -> bool:
        """Whether the reference runs both passes: a mask over one key.

        cuDNN 9.19 misreads a bias of one key, whose row stride is 1: see `known_issues`.
        """
        return self.skv == 1 and self.bias is not None and not self.is_empty

    @property
    def has_lengths(self) -> bool:
        return self.lengths_q or self.lengths_kv

    @property
    def needs_lengths(self) -> bool:
        """Whether cuDNN needs lengths, even full ones, for the mask: a left bound with more queries than keys."""
        left_bound = self.mask.band is not None and self.mask.band[0] is not None
        return left_bound and not self.is_capped and self.rows > self.skv

    def refuse_unreadable(self, what: str, out: TensorLayout) -> None:
        if reasons := self.unreadable(out):
            raise UnsupportedError(what, reasons, "contiguous tensors")

    def unreadable(self, out: TensorLayout) -> list[str]:
        """The tensors whose strides only own kernels read, and why; nothing has refused them where those may serve."""
        reasons = []
        for name, x in {"q": self.q, "k": self.k, "v": self.v, "out": out}.items():
            *sizes, (dim, last) = zip(x.shape, x.stride, strict=True)
            elements = ALIGNMENT // x.dtype.itemsize
            if (last != 1 and dim != 1) or any(size != 1 and stride % elements for size, stride in sizes):
                reasons.append(f"{name} has strides {x.stride}: head vectors must be dense, at multiples of 16 bytes")
        return reasons

    def configuration(self, operation: str, target: Target, **more: bool) -> Configuration:
        facts = {"sq": self.rows, "skv": self.skv, "lengths": self.has_lengths, "bias": self.bias is not None}
        return Configuration.of(self, operation, target, **facts, **more)

    @property
    def can_have_masked_rows(self) -> bool:
        left_bound = self.mask.band is not None and self.mask.band[0] is not None
        return self.has_lengths or self.bias is not None or self.mask.masked_rows > 0 or left_bound

    def qkv(self) -> list[Operand]:
        return [Operand("q", self.visible(self.q)), Operand("k", self.k), Operand("v", self.v)]

    def operands(
        self, *, full_lengths: bool, decode: bool = False, is_forward: bool = False, expand_bias: bool = False
    ) -> list[Operand]:
        """The inputs of both passes other than queries, keys and values.

        Args:
            decode: The plan is for a decode engine.
            is_forward: The graph is that of the forward pass. A backward pass has its LSE.
            full_lengths: Lengths are always passed to cuDNN.
            expand_bias: Expand a bias of one row to all queries: cuDNN 9.19's backward engines misread a single row.
        """
        batch, heads = self.q.shape[:2]
        result = [SCALE]
        if self.bias is not None:
            result.append(Operand("bias", repeated_row(self.bias, self.rows) if expand_bias else self.bias))
        if is_forward and self.sink_use is SinkUse.IN_PLAN:
            result.append(sink_scores.operand(heads))
        if self.is_capped and self.has_lengths:
            layout = TensorLayout.contiguous((batch, 1, self.sq, 1), torch.int32)
            result += [Operand("lowest", layout), Operand("highest", layout)]
        elif self.has_lengths or full_lengths:
            layout = TensorLayout.contiguous((batch, 1, 1, 1), torch.int32)
            # A decode engine ignores the queries' lengths; a plan for more queries gets corrected ones.
            q_is_data = self.has_lengths and not decode
            kv_is_data = self.lengths_kv or (self.has_lengths and decode)
            result += [
                Operand("seq_len_q", layout) if q_is_data else Operand("seq_len_q", layout, Role.FILL, self.rows),
                Operand("seq_len_kv", layout) if kv_is_data else Operand("seq_len_kv", layout, Role.FILL, self.skv),
            ]
        if self.dropout_p:
            result += DROPOUT
        if self.is_capped:
            result.append(SOFTCAP)
        return result

    def options(self) -> dict[str, object]:
        return {"band": self.mask.band, "alibi": self.alibi, "dropout_p": self.dropout_p, "totals": None}

    def visible(self, layout: TensorLayout) -> TensorLayout:
        """A layout with one row per query, without the fully masked rows."""
        if not self.mask.masked_rows:
            return layout
        batch, heads, length, dim = layout.shape
        shape = (batch, heads, length - self.mask.masked_rows, dim)
        return TensorLayout(shape, canonical_stride(shape, layout.stride), layout.dtype)

    def extra_kernels(self) -> list[str]:
        """The extra kernels of both passes, for `explain`."""
        rows = self.mask.masked_rows
        return [f"the first {rows} queries see no key: their output is filled with zeros"] if rows else []


#: Before cuDNN 9.28, a backward pass without lengths does not mask the padding of the last tile of this size, and a
#: very negative LSE makes its weights infinite (seen on 9.19, not on 9.28).
FIRST_RIGHT_LAST_TILE = 92800
LAST_TILE = 128


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """The spec of a forward call."""

    dense: DenseSpec
    out: TensorLayout
    with_lse: bool

    @classmethod
    def of(cls, call: ForwardArguments) -> ForwardSpec:
        """The spec of a call: its queries as they are launched, its output in the memory order of the caller's."""
        return cls(DenseSpec.of(as_launched(call)), output_layout(call), call.with_lse)

    @property
    def is_decode(self) -> bool:
        """Whether there is one query per sequence, so that cuDNN's decode engines run it."""
        return self.dense.rows == 1

    @property
    def plan_has_lse(self) -> bool:
        return self.with_lse or self.dense.sink_use is SinkUse.AFTER_PLAN

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan."""
        dense = self.dense
        refuse(dense.configuration(FORWARD, target), "sdpa")
        dense.refuse_unreadable("sdpa", self.out)
        inputs = [
            *dense.qkv(),
            *dense.operands(decode=self.is_decode, is_forward=True, full_lengths=dense.needs_lengths),
        ]
        options = {**dense.options(), "with_lse": self.plan_has_lse}
        if dense.deterministic and not has_only_repeatable(target.sm, dense.rows):
            options["deterministic"] = True
        return graphs.sdpa_forward.key(
            inputs=inputs, outputs=self.outputs(), options=options, target=target, device=device
        )

    def plain_inputs(self) -> list[Operand]:
        """The inputs of a plan for a call without lengths and `attn_mask`."""
        return [*self.dense.qkv(), *self.dense.operands(full_lengths=False, is_forward=True)]

    def outputs(self) -> list[Operand]:
        out = self.dense.visible(self.out)
        if not self.plan_has_lse:
            return [Operand("out", out)]
        return [Operand("out", out), Operand("lse", TensorLayout.contiguous((*out.shape[:3], 1), torch.float32))]

    def extra_kernels(self) -> list[str]:
        """The extra kernels of a call, for `explain`."""
        dense, notes = self.dense, self.dense.extra_kernels()
        if dense.has_no_plan:
            return [MASK_OF_ONE_KEY]
        if dense.mask.masked_rows and self.plan_has_lse:
            notes.append("the log-sum-exp of the other queries is copied into place")
        notes += _notes_on_operands(dense, is_decode=self.is_decode)
        raises_lse = self.with_lse and dense.can_have_masked_rows
        why_after = "cuDNN has none for a single query"
        return [*notes, *sink_scores.notes_on_results(dense.sink_use, why_after, raises_lse=raises_lse)]


@dataclass(frozen=True, slots=True)
class BackwardSpec:
    """The spec of a backward call.

    Attributes:
        bias_gradient: Whether the gradient of `attn_mask` is needed.
    """

    dense: DenseSpec
    out: TensorLayout
    grad_out: TensorLayout
    bias_gradient: bool

    @classmethod
    def of(cls, of: GradientCall) -> BackwardSpec:
        """The spec of a backward call, its queries as they are launched."""
        return cls(
            dense=DenseSpec.of(as_launched_backward(of)),
            out=TensorLayout.of(of.out),
            grad_out=TensorLayout.of(of.grad_out),
            bias_gradient=Needs(*of.needs).attn_mask,
        )

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of this call's plan."""
        dense = self.dense
        more = {"bias_gradient": self.bias_gradient, "deterministic": dense.deterministic}
        refuse(dense.configuration(BACKWARD, target, **more), "the gradient of sdpa")
        dense.refuse_unreadable("the gradient of sdpa", self.out)
        out = dense.visible(self.out)
        lse = TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)
        inputs = [
            *dense.qkv(),
            Operand("out", out),
            Operand("grad_out", dense.visible(self.grad_out)),
            Operand("lse", lse),
            *dense.operands(full_lengths=dense.needs_lengths or self._pads(target), expand_bias=True),
        ]
        options = {
            **dense.options(),
            "deterministic": dense.deterministic,
            "bias_gradient": self.grad_bias.shape if self.bias_gradient else None,
        }
        return graphs.sdpa_backward.key(
            inputs=inputs, outputs=self.outputs(), options=options, target=target, device=device
        )

    def _pads(self, target: Target) -> bool:
        """Whether full lengths are passed to mask the padding of the last tiles: see `known_issues`."""
        dense = self.dense
        partial = dense.rows % LAST_TILE != 0 or dense.skv % LAST_TILE != 0
        return partial and target.cudnn < FIRST_RIGHT_LAST_TILE and not dense.is_capped

    def outputs(self) -> list[Operand]:
        dense = self.dense
        result = [
            Operand("grad_q", dense.visible(dense_like(dense.q))),
            Operand("grad_k", dense_like(dense.k)),
            Operand("grad_v", dense_like(dense.v)),
        ]
        if self.bias_gradient:
            result.append(Operand("grad_bias", self.grad_bias))
        return result

    def extra_kernels(self) -> list[str]:
        """The extra kernels of a call, for `explain`."""
        dense, notes = self.dense, [GRAD_OUT_COPY]
        if dense.has_no_plan:
            return [*notes, MASK_OF_ONE_KEY]
        if dense.is_one_by_one:
            return [*notes, "one query on one key is computed in plain PyTorch"]
        if dense.mask.masked_rows:
            notes.append(f"the gradient of the first {dense.mask.masked_rows} queries is filled with zeros")
            notes.append("the log-sum-exp of the other queries is copied")
        notes += _notes_on_operands(dense, is_decode=False)
        if dense.bias is not None or dense.is_capped:
            notes.append(REPLACED_LSE)
        if self.bias_gradient:
            notes.append("the gradient of attn_mask is summed over its broadcast dimensions")
        return notes

    @property
    def grad_bias(self) -> TensorLayout:
        """The gradient of the mask before it is summed over the broadcast dimensions."""
        batch, heads, _, _ = self.dense.q.shape
        return TensorLayout.contiguous((batch, heads, self.dense.rows, self.dense.skv), self.dense.q.dtype)


class _HasKey(Protocol):
    def key(self, target: Target, device: int | None) -> PlanKey: ...


def key_of(spec: _HasKey, target: Target, device: int | None) -> PlanKey:
    """The key of a call's plan, dense or packed, of the first provider in force that serves it."""
    names = providers.Setting.names or providers.active()
    if set(names) <= {providers.CUDNN, providers.DEFAULT}:
        return spec.key(target, device)
    found: PlanKey = providers.chooser().key_of(spec, target, device, names)
    return found


def ready(
    key: PlanKey,
    of_cudnn: Callable[[Target, int | None], PlanKey],
    has_plan: Callable[[PlanKey], bool] = lambda key: plan_cache.find(key) is not None,
) -> PlanKey:
    """A key of another provider's, or that of cuDNN's plan while a kind is still compiled and cuDNN may serve the call.

    Once it is compiled, in a thread, calls find their plans again. `has_plan` says whether cuDNN can serve the call of
    a key without building a plan.
    """
    operation = find_operation(key.operation)
    if isinstance(operation, ProgramOp):
        return operation.ready(key, of_cudnn=of_cudnn, has_plan=has_plan)
    return key


#: Of every backward pass; depends on the caller's gradient.
GRAD_OUT_COPY = "a copy of grad_out, if cuDNN cannot read its layout (always for out.sum().backward())"

CONVERTED_MASK = "attn_mask is converted to a bias if cuDNN cannot read its layout, a boolean mask always (one kernel)"
REPLACED_LSE = "the log-sum-exp of fully masked rows is replaced to avoid NaN"
MASK_OF_ONE_KEY = "attn_mask over a single key: all is computed in plain PyTorch, as cuDNN misreads such a mask"


def _notes_on_operands(dense: DenseSpec, *, is_decode: bool) -> list[str]:
    """How lengths and `attn_mask` become operands of a plan."""
    notes = []
    if dense.is_capped and dense.has_lengths:
        limits = "the first and the last key that each query sees are computed from the lengths"
        notes.append(f"{limits}, for soft-capping (one kernel)")
    elif dense.has_lengths:
        corrected = "lengths are clamped to the tensors"
        if dense.lengths_q and is_decode:
            corrected += "; those of keys become 0 where a sequence has no queries, as cuDNN's decode engines need it"
        elif dense.lengths_kv and not is_decode:
            corrected += "; those of queries become 0 where a sequence has no keys, as cuDNN leaves its rows unwritten"
        notes.append(f"{corrected} (one kernel)")
    if dense.bias is not None:
        notes.append(CONVERTED_MASK)
    return notes


# Backward calls.


#: Smallest scale with which cuDNN computes the gradient of attn_mask right in float16. Its kernels round that gradient
#: multiplied by the scale and divide afterwards (seen on 9.19: 10 % off at 1e-6, 0 at 1e-8).
MIN_SCALE_OF_MASK_GRADIENT = 2**-6


def query_factor_backward(of: GradientCall) -> float | None:
    """The factor of q in a backward plan, and then of its gradient; None without one: see `query_factor`.

    The scale must be positive, and must not round the gradient of attn_mask to zero.
    """
    call, needs = of.call, Needs(*of.needs)
    scale: float = call.scale_value
    if abs(scale) < MIN_SCALE:
        return 0.0
    if needs.attn_mask and call.q.dtype == torch.float16 and abs(scale) < MIN_SCALE_OF_MASK_GRADIENT:
        return scale
    return -1.0 if scale < 0 else None


def as_launched_backward(of: GradientCall) -> ForwardArguments:
    """The forward call whose gradients a plan computes: where `query_factor_backward` says so, with a copy of q."""
    call = of.call
    factor = query_factor_backward(of)
    if factor is None:
        return call
    q = like_in_memory(torch.empty_strided(call.q.shape, call.q.stride(), dtype=call.q.dtype, device="meta"))
    return call._replace(q=q, softmax=call.softmax._replace(scale=call.scale_value / factor if factor else 1.0))
