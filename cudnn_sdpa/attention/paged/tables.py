"""Page tables that others made: `trusted_pages` has them read in place, `page_table_of_csr` makes them of CSR lists."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.step import MARK
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.autograd_checks import refuse_transforms
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.sharding import has_dtensor, refuse
from cudnn_sdpa.engine.tensor_checks import check_apart, check_are_tensors, check_tensor
from cudnn_sdpa.errors import LayoutError, OptionError
from cudnn_sdpa.graph.scalars import is_compiling, is_integer


def trusted_pages(page_table: Tensor, seq_lens_kv: Tensor, *, pages: int, page_size: int) -> None:
    """Marks a page table and lengths as valid, so that `sdpa_paged` reads them in place, as those of `PagedKVCache`.

    You vouch that page ids are from 0 to `pages - 1`, as far as lengths need them, and lengths from 0 to what the table
    has room for, whenever a call or a replayed CUDA graph reads them. An id beyond the cache reads memory of others. It
    saves the kernel that copies and clamps tables in each call. That both are valid is checked now if they are on the
    CPU or the environment variable `CUDNN_SDPA_DEBUG` is 1, as in each call then.

    The marks are on these two tensor objects. They stay when the tensors are written to, so that an engine marks its
    buffers once. Views, slices and clones have none: mark the slice that you pass, and keep it. But `copy.copy`,
    `copy.deepcopy` and pickle copy marks: you vouch for those tensors, too. Calls with both tensors read them in place
    if the cache has at least `pages` pages of this size and the table still has as many columns, with one query for
    each sequence; others copy and clamp as always.

    Args:
        page_table: Page ids of each sequence, (B, max_pages) int32, its rows dense.
        seq_lens_kv: Number of keys of each sequence, (B,) int32, dense.
        pages: Number of pages of the cache.
        page_size: Tokens per page.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import sdpa_paged, trusted_pages
        >>> k_pages, v_pages = torch.randn(2, 32, 2, 16, 64, dtype=torch.bfloat16)
        >>> table, lengths = torch.arange(8, dtype=torch.int32).view(4, 2), torch.full((4,), 20, dtype=torch.int32)
        >>> trusted_pages(table, lengths, pages=32, page_size=16)
        >>> q = torch.randn(4, 8, 1, 64, dtype=torch.bfloat16)
        >>> sdpa_paged(q, k_pages, v_pages, table, lengths, page_layout="HND").shape
        torch.Size([4, 8, 1, 64])
    """
    check_are_tensors({"page_table": page_table, "seq_lens_kv": seq_lens_kv})
    for name, number in (("pages", pages), ("page_size", page_size)):
        if not is_integer(number) or number < 1:
            raise OptionError(name, repr(number), "an int of at least 1")
    check_tensor("page_table", page_table, page_table, dtype=torch.int32, shape=("B", "max_pages"), dense=True)
    rows, meaning = page_table.shape[0], "the length of each row of the table"
    check_tensor("seq_lens_kv", seq_lens_kv, page_table, of="page_table", shape=(rows,), meaning=meaning, dense=True)
    value_checks.check_lengths("seq_lens_kv", seq_lens_kv, page_table.shape[1] * page_size)
    value_checks.check_pages("page_table", page_table, lengths=seq_lens_kv, page_size=page_size, pages=pages)
    for tensor in (page_table, seq_lens_kv):
        setattr(tensor, MARK, (int(pages), page_table.shape[1], int(page_size)))


def page_table_of_csr(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *,
    page_size: int,
    out_table: Tensor,
    out_lengths: Tensor,
) -> None:
    """Fills a page table and lengths from lists of pages end to end, as FlashInfer has them, by one kernel.

    Row b of the table begins with `indices[indptr[b]:indptr[b + 1]]`, and the rest of it is left as it is. Its length
    is `(pages - 1) * page_size + last_page_len[b]`, or 0 without pages. The host reads no value, so a captured CUDA
    graph can be replayed with others. Values that do not fit are clamped: `indptr` to the ids, a row to the columns of
    the table, the last page to the page size. The ids are copied as they are.

    Args:
        indptr: Where the pages of each sequence begin and end, (B + 1,) int32.
        indices: The page ids of all sequences, (N,) int32; N is at least `indptr[-1]`.
        last_page_len: The number of tokens in the last page of each sequence, (B,) int32.
        page_size: Tokens per page.
        out_table: The page table to fill, (B, max_pages) int32, its rows dense.
        out_lengths: The lengths to fill, (B,) int32.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import page_table_of_csr
        >>> indptr, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 4], [5, 0, 16]))
        >>> indices = torch.tensor([7, 2, 9, 4], dtype=torch.int32)
        >>> table, lengths = torch.full((3, 4), -1, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        >>> page_table_of_csr(indptr, indices, last, page_size=16, out_table=table, out_lengths=lengths)
        >>> table.tolist(), lengths.tolist()
        ([[7, 2, 9, -1], [-1, -1, -1, -1], [4, -1, -1, -1]], [37, 0, 16])
    """
    inputs = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    outputs = {"out_table": out_table, "out_lengths": out_lengths}
    _check_csr(inputs, outputs, page_size)
    if not out_lengths.shape[0]:
        return
    if out_table.is_cuda and not is_compiling() and is_plain_memory(*inputs.values(), *outputs.values()):
        paging.table_of_csr(indptr, indices, last_page_len, table=out_table, lengths=out_lengths, page_size=page_size)
        return
    columns, n = out_table.shape[1], indices.shape[0]
    begin = indptr[:-1].clamp(0, n)
    all_pages = (indptr[1:].clamp(0, n) - begin).clamp(min=0)
    pages = all_pages.clamp(max=columns)
    last = torch.where(all_pages > columns, page_size, last_page_len.clamp(0, page_size))
    column = torch.arange(columns, device=out_table.device, dtype=torch.int32)
    if n and columns:
        ids = indices[(begin.unsqueeze(1) + column).clamp(max=n - 1).long()]
        out_table.copy_(torch.where(column < pages.unsqueeze(1), ids, out_table))
    out_lengths.copy_(torch.where(pages > 0, (pages - 1) * page_size + last, 0))


def _check_csr(inputs: dict[str, Tensor], outputs: dict[str, Tensor], page_size: int) -> None:
    tensors = {**inputs, **outputs}
    check_are_tensors(tensors)
    refuse_transforms("page_table_of_csr", *tensors.values(), loops=False)
    if has_dtensor(*tensors.values()):
        refuse("page_table_of_csr", "a page table is of the pages that one rank has")
    if not is_integer(page_size) or page_size < 1:
        raise OptionError("page_size", repr(page_size), "an int of at least 1")
    lengths = outputs["out_lengths"]
    batch = lengths.shape[0] if lengths.dim() == 1 else "B"
    ends = "B + 1" if isinstance(batch, str) else batch + 1
    shapes: dict[str, tuple[int | str, ...]] = {
        "out_lengths": (batch,),
        "out_table": (batch, "max_pages"),
        "indptr": (ends,),
        "indices": ("N",),
        "last_page_len": (batch,),
    }
    for name, shape in shapes.items():
        meaning = "" if name in ("out_lengths", "indices") else "as out_lengths has sequences"
        x, of = tensors[name], "out_lengths"
        check_tensor(name, x, lengths, of=of, dtype=torch.int32, shape=shape, meaning=meaning, dense=True)
    table = outputs["out_table"]
    if table.shape[0] > 1 and table.stride(0) < table.shape[1]:
        raise LayoutError("out_table", f"strides {table.stride()} that overlap", "a separate address for each element")
    if not is_compiling() and is_plain_memory(*tensors.values()):
        check_apart("out_table", table, {**inputs, "out_lengths": lengths}.items())
        check_apart("out_lengths", lengths, inputs.items())
