"""The spec of calls over packed sequences (`VarlenSpec`): sizes and options without data, and the keys of its plans.

A plan for packed tensors has three bounds: the number of sequences, their length and the total number of rows. None
of them affects results, so each is rounded up to one of a few values, and few plans serve many calls; the extra
sequences are empty. Measured on an H200: a length bound that is far too large costs nothing, an empty sequence costs
about 0.1 µs. The buckets of dense calls are packed plans, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cudnn_sdpa.attention import parts, sink_scores
from cudnn_sdpa.attention.arguments import as_launched, output_layout, outputs_without_data, spec_options
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense.parts import split_or_refuse
from cudnn_sdpa.attention.dense.specs import GRAD_OUT_COPY, key_of
from cudnn_sdpa.attention.mask import TOP_LEFT, normalize_mask
from cudnn_sdpa.attention.parts import Part
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.spec import DROPOUT, SCALE, SOFTCAP, AttentionSpec
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD, Configuration, refuse
from cudnn_sdpa.attention.varlen.arguments import PACKED_AXES, VarlenArguments, VarlenGradientCall
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.tensor_checks import without_data
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.backend import has_only_repeatable
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers

#: The end of a note on gradients of keys that are copied.
TOKEN_MAJOR = "(cuDNN sums groups only token-major)"


def sequence_bucket(sequences: int) -> int:
    """Number of sequences of a plan: powers of two, 1.5 times them, and the maximum number of a launch."""
    power = 1 << max(0, sequences - 1).bit_length()
    bucket = power * 3 // 4 if power >= 4 and sequences <= power * 3 // 4 else power
    return known_issues.MAX_GRID if sequences <= known_issues.MAX_GRID < bucket else bucket


def row_bucket(rows: int) -> int:
    """Total number of rows of a plan: four values per doubling, at least 128 rows apart.

    The workspace grows with it; at most a fifth is unused.
    """
    granularity = max(128, (1 << max(0, rows - 1).bit_length()) // 8)
    return -(-max(1, rows) // granularity) * granularity


def length_bucket(max_seqlen: int, rows: int, *, tight: bool) -> int:
    """Maximum sequence length of a plan: 1024 times powers of eight, at most the total number of rows.

    Args:
        max_seqlen: The longest sequence of the call.
        rows: Total number of rows.
        tight: Use 128 times powers of two, because memory grows with this bound.
    """
    bound, factor = (128, 2) if tight else (1024, 8)
    while bound < max_seqlen:
        bound *= factor
    return min(bound, row_bucket(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenSpec(AttentionSpec):
    """The layouts and options of a packed call, without data.

    Attributes:
        max_seqlen_q: Maximum number of queries of a sequence of the plan.
        shared_cu_seqlens: Whether queries and keys are known to have the same lengths.
    """

    sequences: int
    max_seqlen_q: int
    max_seqlen_kv: int
    shared_cu_seqlens: bool = False

    @property
    def totals(self) -> tuple[int, int]:
        return row_bucket(self.q.shape[0]), row_bucket(self.k.shape[0])

    def configuration(self, operation: str, target: Target, **more: bool) -> Configuration:
        facts = {"sq": self.max_seqlen_q, "skv": self.max_seqlen_kv, "packed": True, "lengths": True}
        return Configuration.of(self, operation, target, **facts, **more)

    def forward_key(self, out: TensorLayout, with_lse: bool, target: Target, device: int | None) -> PlanKey:
        """The key of the forward plan."""
        refuse(self.configuration(FORWARD, target), "sdpa_varlen")
        with_lse = with_lse or self.sink_use is SinkUse.AFTER_PLAN
        inputs = [
            *self._offsets("q", "k", "v", "out", *(("lse",) if with_lse else ())),
            *self._qkv(),
            *self._other_inputs(is_forward=True),
        ]
        outputs = [self._rows("out", out, self.max_seqlen_q)]
        if with_lse:
            outputs.append(self._lse())
        options = {**self._options(), "with_lse": with_lse}
        if self.deterministic and not has_only_repeatable(target.sm, self.max_seqlen_q):
            options["deterministic"] = True
        return graphs.sdpa_forward.key(inputs=inputs, outputs=outputs, options=options, target=target, device=device)

    def backward_key(self, out: TensorLayout, grad_out: TensorLayout, target: Target, device: int | None) -> PlanKey:
        """The key of the backward plan."""
        self.refuse_gradient(target)
        gradients = [
            self._rows(name, layout, max_seqlen)
            for name, layout, max_seqlen in zip(
                ("grad_q", "grad_k", "grad_v"),
                self.gradients(),
                (self.max_seqlen_q, self.max_seqlen_kv, self.max_seqlen_kv),
                strict=True,
            )
        ]
        outputs = [self._rows("out", out, self.max_seqlen_q), self._rows("grad_out", grad_out, self.max_seqlen_q)]
        operands = [*self._qkv(), *outputs, self._lse()]
        inputs = [
            *self._offsets(*(operand.name for operand in (*operands, *gradients))),
            *operands,
            *self._other_inputs(),
        ]
        options = {**self._options(), "deterministic": self.deterministic, "bias_gradient": None}
        return graphs.sdpa_backward.key(inputs=inputs, outputs=gradients, options=options, target=target, device=device)

    def refuse_gradient(self, target: Target) -> None:
        refuse(self.configuration(BACKWARD, target, deterministic=self.deterministic), "the gradient of sdpa_varlen")

    def gradients(self) -> tuple[TensorLayout, TensorLayout, TensorLayout]:
        """The gradients of q, k and v as cuDNN writes them: in the memory order of their tensors where it can.

        It sums the gradients of grouped heads correctly only where the heads of a token are contiguous.
        """
        grad_q, grad_k, grad_v = (dense_like(tensor) for tensor in (self.q, self.k, self.v))
        if self.q.shape[1] != self.k.shape[1]:
            grad_k = TensorLayout.contiguous(self.k.shape, self.k.dtype)
            grad_v = TensorLayout.contiguous(self.v.shape, self.v.dtype)
        return grad_q, grad_k, grad_v

    def extra_kernels(self, *, with_lse: bool) -> list[str]:
        """The extra kernels of a forward call, for `explain`."""
        lse_note = " and of the log-sum-exp become minus infinity" if with_lse else ""
        notes = [*self._notes_on_rows(f"rows of the output that see no key become zeros{lse_note}")]
        why_after = "too many sequences or heads for cuDNN's"
        return [*notes, *sink_scores.notes_on_results(self.sink_use, why_after, raises_lse=with_lse)]

    def backward_kernels(self) -> list[str]:
        """The extra kernels of a backward call, for `explain`."""
        notes = [GRAD_OUT_COPY]
        if self.q != dense_like(self.q):
            notes.append("q is copied (cuDNN cannot launch gradients of queries that are a slice of a larger tensor)")
        notes += self._notes_on_rows("rows of the gradients without queries or keys become zeros")
        if self.is_capped:
            notes.append("the log-sum-exp of fully masked rows is replaced to avoid NaN")
        wanted = (("q", self.q), ("k", self.k), ("v", self.v))
        notes += [
            f"the gradient of {name} is copied into the memory order of {name} {TOKEN_MAJOR}"
            for (name, layout), written in zip(wanted, self.gradients(), strict=True)
            if dense_like(layout) != written
        ]
        return notes

    def _notes_on_rows(self, unwritten: str) -> list[str]:
        packing = "the start and the length of each sequence are computed from the offsets"
        notes = [f"{packing}; {unwritten}, as cuDNN does not write them (one kernel)"]
        if self.is_capped:
            limits = "the first and the last key that each query sees are computed from them"
            notes.append(f"{limits}, for soft-capping (one kernel)")
        return notes

    def _options(self) -> dict[str, object]:
        return {"band": self.mask.band, "alibi": self.alibi, "dropout_p": self.dropout_p, "totals": self.totals}

    def _qkv(self) -> list[Operand]:
        return [
            self._rows("q", self.q, self.max_seqlen_q),
            self._rows("k", self.k, self.max_seqlen_kv),
            self._rows("v", self.v, self.max_seqlen_kv),
        ]

    def _offsets(self, *names: str) -> list[Operand]:
        layout = TensorLayout.contiguous((self.sequences + 1, 1, 1, 1), torch.int64)
        return [Operand(f"offsets_{name}", layout) for name in names]

    def _rows(self, name: str, packed: TensorLayout, max_seqlen: int) -> Operand:
        """A packed tensor as cuDNN sees it: a batch of sequences of the maximum length."""
        _, heads, dim = packed.shape
        row, head, _ = packed.stride
        layout = TensorLayout((self.sequences, heads, max_seqlen, dim), (max_seqlen * row, head, row, 1), packed.dtype)
        return Operand(name, layout, ragged=f"offsets_{name}")

    def _lse(self) -> Operand:
        heads = self.q.shape[1]
        shape = (self.sequences, heads, self.max_seqlen_q, 1)
        stride = (self.max_seqlen_q * heads, 1, heads, 1)
        return Operand("lse", TensorLayout(shape, stride, torch.float32), ragged="offsets_lse")

    def _other_inputs(self, *, is_forward: bool = False) -> list[Operand]:
        lengths = TensorLayout.contiguous((self.sequences, 1, 1, 1), torch.int32)
        result = [SCALE]
        if is_forward and self.sink_use is SinkUse.IN_PLAN:
            result.append(sink_scores.operand(self.q.shape[1]))
        result += [Operand("seq_len_q", lengths), Operand("seq_len_kv", lengths)]
        if self.dropout_p:
            result += DROPOUT
        if self.is_capped:
            result.append(SOFTCAP)
            limits = TensorLayout.contiguous((self.sequences, 1, self.max_seqlen_q, 1), torch.int32)
            result += [Operand("lowest", limits), Operand("highest", limits)]
        return result


@dataclass(frozen=True, slots=True)
class PackedForward:
    """The spec of a forward call, whose `key` is that of cuDNN's plan."""

    packed: VarlenSpec
    out: TensorLayout
    with_lse: bool

    @classmethod
    def of(cls, call: VarlenArguments) -> PackedForward:
        return cls(spec_of(as_launched(call)), output_layout(call), call.with_lse)

    def key(self, target: Target, device: int | None) -> PlanKey:
        return self.packed.forward_key(self.out, self.with_lse, target, device)


@dataclass(frozen=True, slots=True)
class PackedBackward:
    """The spec of a backward call, whose `key` is that of cuDNN's plan."""

    packed: VarlenSpec
    out: TensorLayout
    grad_out: TensorLayout

    @classmethod
    def of(cls, of: VarlenGradientCall) -> PackedBackward:
        return cls(spec_of(as_launched(of.call)), TensorLayout.of(of.out), TensorLayout.of(of.grad_out))

    def key(self, target: Target, device: int | None) -> PlanKey:
        return self.packed.backward_key(self.out, self.grad_out, target, device)


def spec_of(call: VarlenArguments, rows: tuple[int, int] | None = None) -> VarlenSpec:
    """The spec of a call, its numbers rounded up; the rows of queries and of keys to `rows`, if these are given."""
    softmax = call.softmax
    tight = softmax.deterministic or softmax.is_capped
    q, k, v = map(TensorLayout.of, call.qkv)
    if rows is not None:
        rows_q, rows_kv = rows
        q, k, v = (replace(x, shape=(n, *x.shape[1:])) for x, n in ((q, rows_q), (k, rows_kv), (v, rows_kv)))
    max_seqlens = min(call.max_seqlen_q, call.q.shape[0]), min(call.max_seqlen_kv, call.k.shape[0])
    is_shared = call.cu_seqlens_kv is None
    alignment = TOP_LEFT if is_shared else softmax.causal_alignment
    window_size = (softmax.window_left, softmax.window_right)
    sequences = sequence_bucket(call.cu_seqlens_q.shape[0] - 1)
    return VarlenSpec(
        q=q,
        k=k,
        v=v,
        sequences=sequences,
        max_seqlen_q=length_bucket(call.max_seqlen_q, q.shape[0], tight=tight),
        max_seqlen_kv=length_bucket(call.max_seqlen_kv, k.shape[0], tight=tight),
        mask=normalize_mask(softmax.is_causal, alignment, window_size, *max_seqlens, has_lengths=True),
        shared_cu_seqlens=is_shared,
        # With them cuDNN launches only so many sequences and heads.
        **spec_options(call, sinks_in_plan=max(sequences, q.shape[1]) <= known_issues.MAX_GRID),
    )


def chosen_key(spec: PackedForward | PackedBackward, target: Target, device: int | None) -> PlanKey:
    """See `dense.specs.key_of`, which a cold call of cuDNN's does not enter."""
    return key_of(spec, target, device) if providers.Setting.names not in _CUDNN_ALONE else spec.key(target, device)


#: Settings of `providers` under which cuDNN serves all packed calls.
_CUDNN_ALONE = ((providers.DEFAULT,), (providers.CUDNN,))


def forward_key(call: VarlenArguments, target: Target, device: int | None) -> PlanKey:
    """The key of a forward call that is not empty."""
    return chosen_key(PackedForward.of(call), target, device)


def backward_key(of: VarlenGradientCall, target: Target, device: int | None) -> PlanKey:
    """The key of a backward call that is not empty, with tensors that kernels can read."""
    return chosen_key(PackedBackward.of(of), target, device)


def keys(call: VarlenArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    if not call.is_empty:
        yield forward_key(call, target, device)


def gradient_keys(of: VarlenGradientCall, target: Target, device: int | None) -> Iterator[PlanKey]:
    if of.call.is_empty:
        return
    for part in [part_of(of, part) for part in split_gradient(of)] or [of]:
        yield backward_key(part, target, device)


def split_gradient(of: VarlenGradientCall) -> list[Part]:
    """The parts of a backward call, some heads each; none if one launch computes it."""
    limits = parts.packed_gradient_limits(deterministic=of.call.softmax.deterministic)
    reasons = limits.exceeded(*of.call.qkv, of.out, of.grad_out)
    what = "the gradient of sdpa_varlen"
    return split_or_refuse(of.call.as_dense(), limits, reasons, what) if reasons else []


def part_of(of: VarlenGradientCall, part: Part) -> VarlenGradientCall:
    call = parts.part_of_call(of.call, part, PACKED_AXES)
    rows = {"q": of.call.q, "grad_out": of.grad_out, "out": of.out, "lse": of.lse}
    q, grad_out, out, lse = (tensor_checks.aligned(name, x[:, part.heads]) for name, x in rows.items())
    call = call._replace(q=q, k=parts.compact(call.k), v=parts.compact(call.v))
    return of._replace(grad_out=grad_out, out=out, lse=lse, call=call)


def check_gradient(call: VarlenArguments, target: Target, device: int | None = None) -> None:
    """Refuses a call whose gradients are known to have no kernel, also in parts."""
    if call.is_empty:
        return
    call = dense_queries(without_data(call))  # others are copied
    deterministic, sequences = call.softmax.deterministic, call.cu_seqlens_q.shape[0] - 1
    layout, limits = output_layout(call), parts.packed_gradient_limits(deterministic=deterministic)
    is_large = bool(limits.exceeded(*call.qkv, layout)) or (deterministic and sequences > known_issues.MAX_GRID)
    if not is_large and not providers.may_be_others():
        # Nothing but the rules: packed training asks for each new number of tokens.
        spec_of(as_launched(call)).refuse_gradient(target)
        return
    of = VarlenGradientCall(**outputs_without_data(layout), call=call, needs=(True, True, True, False))
    for key in gradient_keys(of, target, device):
        known_issues.check(key)


def dense_queries(call: VarlenArguments) -> VarlenArguments:
    """The call with the layout of queries as backward plans read them: dense."""
    q = dense_like(TensorLayout.of(call.q))
    return call._replace(q=torch.empty_strided(q.shape, q.stride, dtype=q.dtype, device="meta"))
