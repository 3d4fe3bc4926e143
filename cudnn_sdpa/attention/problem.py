"""An attention call without its data: what all tensors look like and which options are set.

A `Problem` is what forward and backward have in common; `Forward` and `Backward` in `passes` make keys of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.bias import bias_layout, repeated_row
from cudnn_sdpa.attention.options import Mask, normalize_mask
from cudnn_sdpa.attention.support import Case
from cudnn_sdpa.runtime.key import Operand, Role
from cudnn_sdpa.runtime.layouts import TensorLayout, canonical_stride
from cudnn_sdpa.runtime.target import Target

HOST_SCALAR = TensorLayout.contiguous((1, 1, 1, 1), torch.float32)
ONE_INT64 = TensorLayout.contiguous((1, 1, 1, 1), torch.int64)


@dataclass(frozen=True, slots=True)
class Problem:
    """What all tensors of a call look like, and which options are set.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        mask: The normalized band, and how many queries it leaves without keys.
        lengths_q: Whether the true numbers of queries are given.
        lengths_kv: Whether the true numbers of keys are given.
        bias: `attn_mask` as cuDNN reads it, without the rows of queries that see no key. None without one.
        sinks: Whether there are attention sinks.
        dropout_p: The share that is dropped.
        softcap: Whether there is a soft cap; its value is data.
        alibi: Whether there are linear biases.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    mask: Mask
    lengths_q: bool = False
    lengths_kv: bool = False
    bias: TensorLayout | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    softcap: bool = False
    alibi: bool = False

    @classmethod
    def of(cls, call: ForwardArguments) -> Problem:
        """Describes a call."""
        q, k, v = call.q, call.k, call.v
        lengths_q, lengths_kv = call.seq_lens_q is not None, call.seq_lens_kv is not None
        mask = normalize_mask(
            call.is_causal,
            call.causal_alignment,
            (call.window_left, call.window_right),
            q.shape[2],
            k.shape[2],
            has_lengths=lengths_q or lengths_kv,
            top_left_only=call.attn_mask is not None or call.dropout_p > 0 or call.alibi or call.softcap is not None,
            keep_causal=call.alibi,
        )
        return cls(
            TensorLayout.of(q),
            TensorLayout.of(k),
            TensorLayout.of(v),
            mask,
            lengths_q,
            lengths_kv,
            None if call.attn_mask is None else bias_layout(call.attn_mask, q, k.shape[2], mask.blind_rows),
            call.sinks is not None,
            float(call.dropout_p),
            call.softcap is not None,
            call.alibi,
        )

    @property
    def sq(self) -> int:
        """Queries."""
        return self.q.shape[2]

    @property
    def rows(self) -> int:
        """Queries that are left to the plan."""
        return self.sq - self.mask.blind_rows

    @property
    def skv(self) -> int:
        """Keys."""
        return self.k.shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, or no key."""
        return 0 in self.q.shape or 0 in self.k.shape

    @property
    def is_single(self) -> bool:
        """Whether there is one query and one key: gradients have no kernel for that, and are left to plain PyTorch."""
        return self.rows == 1 and self.skv == 1

    @property
    def has_no_plan(self) -> bool:
        """Whether both passes are left to plain PyTorch: a mask over one key.

        cuDNN 9.19 misreads a bias of one key, whose rows are one element apart: see `known_issues`.
        """
        return self.skv == 1 and self.bias is not None and not self.is_empty

    @property
    def has_lengths(self) -> bool:
        """Whether any true lengths are given."""
        return self.lengths_q or self.lengths_kv

    @property
    def has_no_sides(self) -> bool:
        """Whether the graph has no operands beside queries, keys, values, scale and lengths."""
        return self.bias is None and not (self.sinks or self.dropout_p or self.softcap)

    @property
    def needs_lengths(self) -> bool:
        """Whether cuDNN takes the mask only with lengths, be they full: a left bound with more queries than keys."""
        left_bound = self.mask.band is not None and self.mask.band[0] is not None
        return left_bound and not self.softcap and self.rows > self.skv

    def case(self, operation: str, target: Target, **more: Any) -> Case:
        """The case to look up in the rules of support."""
        return Case(
            operation,
            self.q.dtype,
            self.q.shape[3],
            self.v.shape[3],
            self.rows,
            self.skv,
            target.sm,
            target.cudnn,
            str(target),
            band=self.mask.band,
            lengths=self.has_lengths,
            bias=self.bias is not None,
            sinks=self.sinks,
            dropout=self.dropout_p > 0,
            softcap=self.softcap,
            alibi=self.alibi,
            **more,
        )

    @property
    def can_be_blind(self) -> bool:
        """Whether a query of the plan may see no key at all."""
        left_bound = self.mask.band is not None and self.mask.band[0] is not None
        return self.has_lengths or self.bias is not None or self.mask.blind_rows > 0 or left_bound

    def operands(self, *, decode: bool, sinks: bool, full_lengths: bool, whole_bias: bool = False) -> list[Operand]:
        """What both passes read beside queries, keys and values.

        Args:
            decode: The plan is for a decode engine.
            sinks: The graph has the sinks in it.
            full_lengths: Lengths are given to cuDNN in any case.
            whole_bias: The bias has a row for each query, be it always the same one: cuDNN 9.19's backward engines
                read a single row wrongly.
        """
        batch, heads = self.q.shape[:2]
        result = [Operand("scale", HOST_SCALAR, Role.SCALAR)]
        if self.bias is not None:
            result.append(Operand("bias", repeated_row(self.bias, self.rows) if whole_bias else self.bias))
        if sinks:
            result.append(Operand("sink", TensorLayout.contiguous((1, heads, 1, 1), torch.float32)))
        if self.softcap and self.has_lengths:
            layout = TensorLayout.contiguous((batch, 1, self.sq, 1), torch.int32)
            result += [Operand("lowest", layout), Operand("highest", layout)]
        elif self.has_lengths or full_lengths:
            layout = TensorLayout.contiguous((batch, 1, 1, 1), torch.int32)
            # A decode engine ignores the queries' lengths; a plan for more queries gets corrected ones.
            q_is_data = self.has_lengths and not decode
            kv_is_data = self.lengths_kv or (self.has_lengths and decode)
            full_q = self.rows
            result += [
                Operand("seq_len_q", layout) if q_is_data else Operand("seq_len_q", layout, Role.FILL, full_q),
                Operand("seq_len_kv", layout) if kv_is_data else Operand("seq_len_kv", layout, Role.FILL, self.skv),
            ]
        if self.dropout_p:
            result += [Operand("seed", ONE_INT64), Operand("offset", ONE_INT64)]
        if self.softcap:
            result.append(Operand("softcap", HOST_SCALAR, Role.SCALAR))
        return result

    def options(self) -> dict[str, Any]:
        """The static options of both passes."""
        return {"band": self.mask.band, "alibi": self.alibi, "dropout_p": self.dropout_p, "totals": None}

    def visible(self, layout: TensorLayout) -> TensorLayout:
        """The layout of the rows, of queries or of what goes with them, that see a key."""
        return cut_rows(layout, self.mask.blind_rows)

    def extra_kernels(self) -> list[str]:
        """What both passes run beside the plan, for `explain`."""
        notes = []
        if self.mask.blind_rows:
            notes.append(f"the first {self.mask.blind_rows} queries see no key: their output is filled with zeros")
        return notes


def cut_rows(layout: TensorLayout, rows: int) -> TensorLayout:
    """The layout of `tensor[:, :, rows:]`."""
    batch, heads, length, dim = layout.shape
    shape = (batch, heads, length - rows, dim)
    return TensorLayout(shape, canonical_stride(shape, layout.stride), layout.dtype)
