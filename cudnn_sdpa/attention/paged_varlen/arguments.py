"""A call of packed queries on a paged cache, and the checks of its arguments."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import Softmax, check_flag
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import (
    MULTIPLE,
    check_dims,
    check_keys_and_values,
    check_page_layout,
    check_scales,
    check_strides_on_pages,
    check_tables,
    in_heads_order,
    named,
)
from cudnn_sdpa.attention.varlen.arguments import check_cumulative, check_max_seqlen
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.tensor_checks import check_tensor, shape_of
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph.scalars import is_true


class PagedVarlenArguments(NamedTuple):
    """A call of packed queries on a paged cache, in the order in which operators take its arguments.

    Attributes:
        page_table_v: None if values have the page table of the keys.
        tree_mask: Whether token t sees the j-th new token of its own sequence, (T, n): it replaces the causal mask
            among the new tokens.
        k_scale: What a stored number of FP8 keys is multiplied by; None is 1.
        batch_invariant: Whether the results of a sequence do not depend on the others.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    page_table_v: Tensor | None
    seq_lens_kv: Tensor
    cu_seqlens_q: Tensor
    sinks: Tensor | None
    tree_mask: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    max_seqlen_q: int
    page_layout: str
    batch_invariant: bool = False
    softmax: Softmax = Softmax(is_causal=True, causal_alignment=BOTTOM_RIGHT)
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def k(self) -> Tensor:
        """The keys, (pages, Hkv, page size, D), whatever their memory order."""
        return in_heads_order(self.k_pages, self.page_layout)

    @property
    def v(self) -> Tensor:
        """The values, (pages, Hkv, page size, Dv)."""
        return in_heads_order(self.v_pages, self.page_layout)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.page_table, self.page_table if self.page_table_v is None else self.page_table_v

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def max_kv_len(self) -> int:
        return self.page_table.shape[1] * self.page_size

    @property
    def is_empty(self) -> bool:
        """Whether no token sees a key, whatever the lengths are."""
        return 0 in self.q.shape or 0 in self.page_table.shape

    @property
    def is_for_cudnn(self) -> bool:
        """Whether the limits of a GPU's kernel apply, as for `ForwardArguments`."""
        return True


def as_dense(q: Tensor) -> Tensor:
    """A view of packed queries as (1, Hq, T, D)."""
    return q.transpose(0, 1).unsqueeze(0)


def first_keys(call: PagedVarlenArguments) -> Tensor:
    """The first key of each sequence that a new token of it sees, (B,): all before may be garbage, or have no page.

    It is the length of a sequence without new tokens, which reads no key.
    """
    new, lengths = call.cu_seqlens_q.diff(), call.seq_lens_kv
    first = torch.zeros_like(lengths)
    if call.softmax.window_left != UNBOUNDED and call.softmax.causal_alignment == BOTTOM_RIGHT:
        first = (lengths - new - call.softmax.window_left).clamp_min(0)
    return torch.where(new > 0, first, lengths)


# Checks.


def check_types(call: PagedVarlenArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    check_page_layout(call.page_layout)
    check_flag("batch_invariant", call.batch_invariant)
    required = {"q": call.q, "k_pages": call.k_pages, "v_pages": call.v_pages, "page_table": call.page_table}
    required |= {"seq_lens_kv": call.seq_lens_kv, "cu_seqlens_q": call.cu_seqlens_q}
    optional = {"page_table_v": call.page_table_v, "sinks": call.sinks, "tree_mask": call.tree_mask}
    optional |= {"k_scale": call.k_scale, "v_scale": call.v_scale, "out": call.out}
    arguments.check_operands(required, optional, call.with_lse)


def check_options(call: PagedVarlenArguments) -> None:
    arguments.check_options(call)
    if call.tree_mask is None:
        return
    hint = "The mask is for the new tokens alone: they see all keys before them."
    if not call.softmax.is_causal:
        raise OptionError("is_causal", "False in addition to tree_mask", "True", hint)
    if call.softmax.causal_alignment != BOTTOM_RIGHT:
        got = f"{call.softmax.causal_alignment!r} in addition to tree_mask"
        raise OptionError("causal_alignment", got, repr(BOTTOM_RIGHT), hint)
    if call.softmax.has_window:
        window = call.softmax.window_left, call.softmax.window_right
        raise OptionError("window_size", f"{window} in addition to tree_mask", "None", hint)


def check(call: PagedVarlenArguments) -> None:
    """Checks of tensors that apply on every device. They read no address and no value, so fake tensors pass."""
    q, is_limited = call.q, arguments.has_limits(call)
    hint = "sdpa_paged takes tensors of rank 4." if q.dim() == 4 else ""
    check_tensor("q", q, q, shape=("tokens", "heads", "head dim"), hint=hint)
    arguments.check_dtype(q, for_cudnn=is_limited)
    check_keys_and_values(call)
    with named():
        arguments.check_sizes(as_dense(q), call.k[:1], call.v[:1], MULTIPLE if is_limited else 1)
    if is_limited:
        check_dims(q, call.v)
    check_scales(call)
    if call.out is not None:
        arguments.check_out(call.out, q, call.v, for_cudnn=is_limited)
    check_cumulative("cu_seqlens_q", call.cu_seqlens_q, q)
    check_max_seqlen("max_seqlen_q", call.max_seqlen_q)
    check_tables(q, call.batch, call.page_table, call.page_table_v)
    of_sequences = partial(check_tensor, like=q, dtype=torch.int32, shape=(call.batch,), dense=True)
    of_sequences("seq_lens_kv", call.seq_lens_kv, meaning="one length per sequence of cu_seqlens_q")
    arguments.check_sinks(call.sinks, q)
    _check_tree_mask(call)


def _check_tree_mask(call: PagedVarlenArguments) -> None:
    mask = call.tree_mask
    if mask is None:
        return
    shape = (call.q.shape[0], "new tokens")
    meaning = "whether each token sees the new tokens of its sequence"
    check_tensor("tree_mask", mask, call.q, dtype=torch.bool, shape=shape, meaning=meaning, dense=True)
    if is_true(mask.shape[1] < call.max_seqlen_q):
        expected = f"a column for each of the up to {call.max_seqlen_q} new tokens of a sequence (max_seqlen_q)"
        raise ShapeError("tree_mask", shape_of(mask), expected)


def check_values(call: PagedVarlenArguments) -> None:
    value_checks.check_offsets("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0], call.max_seqlen_q, from_zero=False)
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.max_kv_len)
    for name, table in zip(("page_table", "page_table_v"), call.tables, strict=True):
        value_checks.check_pages(
            name=name,
            table=table,
            lengths=call.seq_lens_kv,
            page_size=call.page_size,
            pages=call.k_pages.shape[0],
            first=partial(first_keys, call),
        )


def check_strides(call: PagedVarlenArguments) -> None:
    check_strides_on_pages(as_dense(call.q), call.k, call.v)


def check_memory(call: PagedVarlenArguments) -> None:
    with named():
        arguments.check_memory(call)
