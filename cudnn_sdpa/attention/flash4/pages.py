"""Operands of FlashAttention-4's plans for packed queries on pages, and the kernel that makes some of them.

Its kernel trusts offsets, lengths and page ids, and reads the keys of whole tiles. So a kernel of our own makes them of
the call's, within the tensors; and a sequence begins at the first key that a query of it sees, as a window leaves slots
before that which may hold NaN, or have no page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import sink_scores
from cudnn_sdpa.attention.arguments import output_layout
from cudnn_sdpa.attention.flash4.programs import BEGINS_Q, LENGTHS, PAGE_TABLE
from cudnn_sdpa.attention.mask import UNBOUNDED
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.attention.spec import SCALE, SOFTCAP
from cudnn_sdpa.attention.varlen.packing import SOURCE, THREADS, rows_of
from cudnn_sdpa.engine.launch import Address, LaunchExtras, OwnKernel
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import side_by_side

kernel, _argument = Kernel(SOURCE, "prepare_chunks"), Struct(SOURCE, "Chunks")

_MADE = "chunks"  #: what addresses call the memory that the kernel fills

_ENTRIES_OF_BLOCK, _MAX_PARTS = 1024, 16


class Table(NamedTuple):
    """The page table that a plan reads.

    Attributes:
        keys: The keys of an entry: those of a page; or one, if a window has sequences begin anywhere in a page.
        entries: From the first entry of a page to that of the next.
        width: The entries of a sequence.
    """

    keys: int
    entries: int
    width: int

    @classmethod
    def of(cls, call: PagedVarlenArguments) -> Table:
        size, columns, left = call.page_size, call.page_table.shape[1], call.softmax.window_left
        if left == UNBOUNDED or left >= columns * size:
            return cls(size, 1, columns)
        seen = max(1, left + min(call.max_seqlen_q, call.q.shape[0]))
        return cls(1, _slots_apart(call.k), min(columns * size, seen))


def _slots_apart(pages: Tensor) -> int:
    """Slots from the beginning of a page to that of the next; 0 if that is no whole number."""
    page, _, slot, _ = pages.stride()
    return 1 if pages.shape[2] == 1 else page // slot if slot and page % slot == 0 else 0


def lacking(call: PagedVarlenArguments) -> list[str]:
    """Why the pages of a call cannot be read."""
    table = Table.of(call)
    if table.keys == call.page_size:
        return []
    if not table.entries or table.entries != _slots_apart(call.v):
        return ["under a window it takes pages that begin as many slots apart for keys as for values, a whole number"]
    if table.entries * call.k.shape[0] > torch.iinfo(torch.int32).max:
        return ["under a window it numbers slots, in 32 bits"]
    return []


def operands(call: PagedVarlenArguments) -> tuple[list[Operand], list[Operand]]:
    """The inputs and outputs of a call's plan."""
    table, batch = Table.of(call), call.batch
    ints = {BEGINS_Q: (batch + 1,), LENGTHS: (batch,), PAGE_TABLE: (batch, table.width)}
    tensors = {"q": TensorLayout.of(call.q), "k": _as_read(call.k, table), "v": _as_read(call.v, table)}
    tensors |= {name: TensorLayout.contiguous(shape, torch.int32) for name, shape in ints.items()}
    inputs = [*(Operand(name, layout) for name, layout in tensors.items()), SCALE, *[SOFTCAP] * call.softmax.is_capped]
    if call.sinks is not None:
        inputs.append(sink_scores.operand(call.q.shape[1]))
    return inputs, [Operand("out", output_layout(call))]


def _as_read(pages: Tensor, table: Table) -> TensorLayout:
    """Pages (pages, heads, page size, D), of as many tokens as an entry has."""
    if table.keys == pages.shape[2]:
        return TensorLayout.of(pages)
    (count, heads, _, dim), (_, head, slot, one) = pages.shape, TensorLayout.of(pages).stride
    return TensorLayout((count * table.entries, heads, 1, dim), (slot, head, slot, one), pages.dtype)


def extras(call: PagedVarlenArguments, out: TensorLayout, device: int) -> LaunchExtras:
    """The tensors and the kernel of a launch besides queries and pages."""
    table, batch, size = Table.of(call), call.batch, call.page_size
    offsets, made = side_by_side([4 * (batch + 1), 4 * batch, 4 * batch * table.width])
    values = {
        "table_row": call.page_table.stride(0),
        "batch": batch,
        "tokens": call.q.shape[0],
        "max_kv_len": call.max_kv_len,
        "page_size": size,
        "pages": call.k.shape[0],
        "left": call.softmax.window_left,
        "keys_of_entry": table.keys,
        "entries": table.entries,
        "width": table.width,
        "out": rows_of(Operand("out", out)),
    }
    given = {"ends": "cu_seqlens_q", "lengths": "seq_lens_kv", "table": "page_table"}
    addresses = {field: Address(name) for field, name in given.items()}
    of_plan = {x: Address(_MADE, offset) for x, offset in zip((BEGINS_Q, LENGTHS, PAGE_TABLE), offsets, strict=True)}
    addresses |= dict(zip(("begins", "keys", "made"), of_plan.values(), strict=True))
    prologue = OwnKernel(
        kernel,
        name=_MADE,
        buffer_layout=((made,), (1,), torch.uint8),
        blocks=batch * min(_MAX_PARTS, -(-table.width // _ENTRIES_OF_BLOCK)),
        threads=THREADS,
        argument=_argument,
        values=values,
        addresses={**addresses, "out.base": Address("out")},
        device=device,
    )
    names = tuple(given.values())
    pages = {"k": Address("k_pages"), "v": Address("v_pages")}
    found = LaunchExtras(operands=names, kernels=(prologue,), addresses={**of_plan, **pages}, unaligned_ok=names)
    return found if call.sinks is None else found + sink_scores.EXTRAS
