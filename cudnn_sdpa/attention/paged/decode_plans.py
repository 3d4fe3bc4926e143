"""Plans of decode steps on a paged cache: their keys, and how sizes are rounded up so that few plans serve many calls.

cuDNN decodes fast only where every sequence has one query. In speculative decoding each query therefore becomes a
sequence, which sees the keys up to its own. That reads the keys once per query, but from the L2 cache: 2, 4 and 8
queries took 1.4, 2.4 and 4.7 times as long as one on an H200 (`bench decode`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense.packed import sequence_bucket
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.support.rules import FORWARD, Configuration, refusal
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout, canonical_stride
from cudnn_sdpa.graph.target import Target

#: Maximum number of queries per sequence that the decode kernels serve.
MAX_DECODED = 8


def is_decode(call: PagedArguments) -> bool:
    """Whether cuDNN's decode kernels serve a call."""
    queries = call.q.shape[2]
    if queries > MAX_DECODED or call.softcap is not None:
        return False
    if call.window_left == UNBOUNDED:
        return True
    # cuDNN counts the window from the last key that a row sees, which must then be the key on its diagonal.
    return call.causal_alignment == BOTTOM_RIGHT and (right_bound(call) == 0 or queries == 1)


def right_bound(call: PagedArguments) -> int:
    """The last key that a query sees, relative to the diagonal; -1 if unbounded."""
    return 0 if call.is_causal else call.window_right


def table_width(columns: int) -> int:
    """The pages per sequence of a plan: 64 times a power of eight. Unused columns cost nothing."""
    width = 64
    while width < columns:
        width *= 8
    return width


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """A decode step without its data.

    Attributes:
        q: Queries (rows, Hq, 1, D), with as many rows as the plan has.
        k: Keys (pages, Hkv, page size, D).
        v: Values (pages, Hkv, page size, Dv).
        out: The output (rows, Hq, 1, Dv).
        tables: The page tables of keys and of values (rows, 1, width, 1).
        left: The window's left bound, or None.
        with_lse: Whether the plan writes the log-sum-exp.
        deterministic: Whether every run must give the same bits.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    out: TensorLayout
    tables: tuple[TensorLayout, TensorLayout]
    left: int | None
    with_lse: bool
    deterministic: bool

    @classmethod
    def of(cls, call: PagedArguments, *, in_place: bool) -> DecodeSpec:
        """The spec of a call.

        Args:
            call: The call.
            in_place: Whether cuDNN reads the call's tables and queries directly, without copies.
        """
        batch, heads, queries, dim = call.q.shape
        rows = sequence_bucket(batch * queries)
        width = table_width(call.table_k.shape[1])
        row_q, head_q = (heads * dim, dim) if not in_place else (call.q.stride(0), call.q.stride(1))
        shape_q, shape_out = (rows, heads, 1, dim), (rows, heads, 1, call.v.shape[3])
        strides = [t.stride(0) if in_place and rows > 1 else width for t in (call.table_k, call.table_v)]
        table_k, table_v = (TensorLayout((rows, 1, width, 1), (x, x, 1, 1), torch.int32) for x in strides)
        return cls(
            q=TensorLayout(shape_q, canonical_stride(shape_q, (row_q, head_q, head_q, 1)), call.q.dtype),
            k=TensorLayout.of(call.k),
            v=TensorLayout.of(call.v),
            out=TensorLayout.contiguous(shape_out, call.q.dtype),
            tables=(table_k, table_v),
            left=None if call.window_left == UNBOUNDED else call.window_left,
            with_lse=call.with_lse or call.sinks is not None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    @property
    def rows(self) -> int:
        """The number of queries in the plan."""
        return self.q.shape[0]

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of its plan.

        Raises:
            UnsupportedError: cuDNN is known to have no plan.
        """
        configuration = Configuration(
            operation=FORWARD,
            dtype=self.q.dtype,
            head_dim=self.q.shape[3],
            head_dim_v=self.v.shape[3],
            sq=1,
            skv=self.tables[0].shape[2] * self.k.shape[2],
            sm=target.sm,
            cudnn=target.cudnn,
            gpu=str(target),
            lengths=True,
        )
        refused = refusal(configuration, "sdpa_paged")
        if refused is not None:
            raise refused
        lengths = TensorLayout.contiguous((self.rows, 1, 1, 1), torch.int32)
        inputs = [  # in the order of the slots in `paged.launch`
            Operand("q", self.q),
            Operand("k", self.k),
            Operand("v", self.v),
            Operand("scale", HOST_SCALAR, Role.SCALAR),
            Operand("seq_len_q", lengths, Role.FILL, 1),
            Operand("seq_len_kv", lengths),
            Operand("table_k", self.tables[0]),
            Operand("table_v", self.tables[1]),
        ]
        outputs = [Operand("out", self.out)]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((*self.q.shape[:2], 1, 1), torch.float32)))
        options: dict[str, Any] = {"left": self.left, "with_lse": self.with_lse}
        if self.deterministic:
            options["deterministic"] = True
        key = graphs.paged_decode.key(inputs=inputs, outputs=outputs, options=options, target=target, device=device)
        known_issues.check(key)  # now and not at build time, so that the call can run as prefill
        return key
