"""FP8 calls on keys and values in pages of a cache: their checks, and what they are without pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import fp8_arguments, memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.fp8_arguments import Fp8Forward
from cudnn_sdpa.attention.paged_arguments import check_table
from cudnn_sdpa.attention.side_tensors import check_is_dense, check_lengths, shape_of
from cudnn_sdpa.errors import OptionError, ShapeError


def tables_of(page_table: Any, page_table_v: Any) -> tuple[Tensor, Tensor] | None:
    """The tables of keys and of values, None without pages.

    Raises:
        OptionError: One of them is none.
    """
    if page_table is None and page_table_v is None:
        return None
    for name, table in (("page_table", page_table), ("page_table_v", page_table_v)):
        if not isinstance(table, Tensor) and (table is not None or name == "page_table"):
            raise OptionError(name, type(table).__name__, "a torch.Tensor of int32")
        if table is not None:
            check_is_dense(name, table)
    return page_table, page_table if page_table_v is None else page_table_v


def check_forward(of: Fp8Forward) -> None:
    """Everything that holds on every device, with pages or without."""
    if of.tables is None:
        fp8_arguments.check_forward(of)
        return
    call = of.call
    q, k, v = call.q, call.k, call.v
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            shape = "(batch, heads, sequence, head dim)" if name == "q" else "(pages, heads, page size, head dim)"
            raise ShapeError(name, shape_of(tensor), f"rank 4: {shape}")
    if k.shape[0] == 0:
        raise ShapeError("k", shape_of(k), "at least one page")
    present = min(1, q.shape[0])
    bare = call._replace(q=q[:present], k=k[:present], v=v[:present], seq_lens_q=None, seq_lens_kv=None)
    try:
        fp8_arguments.check_forward(of._replace(call=bare))
    except ShapeError as error:
        raise error.renamed({"sequence length": "page size"}) from None
    if v.shape[0] != k.shape[0]:
        raise ShapeError("v", f"{v.shape[0]} pages", f"{k.shape[0]}, the number of pages of k")
    if k.shape[2] < 1 or k.shape[2] & (k.shape[2] - 1):
        raise ShapeError("k", f"pages of {k.shape[2]} tokens", "a power of two, such as 16 or 64")
    if call.seq_lens_kv is None:
        raise OptionError("seq_lens_kv", "None", "the true numbers of keys, which a page table does not tell")
    for name, table in zip(("page_table", "page_table_v"), of.tables, strict=True):
        check_table(name, table, q)
    if of.tables[0].shape != of.tables[1].shape:
        raise ShapeError("page_table_v", shape_of(of.tables[1]), f"{tuple(of.tables[0].shape)}, as page_table has")
    check_lengths("seq_lens_q", call.seq_lens_q, q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)


def described(of: Fp8Forward) -> ForwardArguments:
    """The call, if it has pages one without them and without data, of which all but the memory of keys is the same."""
    if of.tables is None:
        return of.call
    batch, width = of.tables[0].shape
    rows = []
    for pages in (of.call.k, of.call.v):
        _, heads, size, dim = pages.shape
        rows.append(torch.empty(batch, heads, width * size, dim, dtype=pages.dtype, device="meta"))
    return of.call._replace(k=rows[0], v=rows[1])


def gathered(of: Fp8Forward) -> Fp8Forward:
    """The same call on keys and values put in a row; any device. What no sequence owns is zeros."""
    if of.tables is None:
        return of
    lengths = of.call.seq_lens_kv
    assert lengths is not None
    keys = of.tables[0].shape[1] * of.call.k.shape[2]
    is_owned = torch.arange(keys, device=lengths.device) < lengths.unsqueeze(1)

    def in_a_row(pages: Tensor, table: Tensor) -> Tensor:
        bits = pages.view(torch.uint8)
        row = bits[table.clamp(0, pages.shape[0] - 1).long()].transpose(1, 2).flatten(2, 3)
        return row.masked_fill(~is_owned[:, None, :, None], 0).view(pages.dtype)

    rows = (in_a_row(pages, table) for pages, table in zip((of.call.k, of.call.v), of.tables, strict=True))
    k, v = rows
    return of._replace(call=of.call._replace(k=k, v=v), tables=None)


def readable_tables(of: Fp8Forward) -> dict[str, Tensor]:
    """The tables as cuDNN reads them: dense, and every id a page that there is."""
    if of.tables is None:
        return {}
    for name, table in zip(("page_table", "page_table_v"), of.tables, strict=True):
        if table.data_ptr() == 0:
            memory.check_present(name, table)
    last = of.call.k.shape[0] - 1
    first = of.tables[0].clamp(0, last).contiguous()
    second = first if of.tables[1] is of.tables[0] else of.tables[1].clamp(0, last).contiguous()
    return {"table_k": first, "table_v": second}
