"""Wrappers of paged caches: `plan` fills page tables, `run` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import SoftmaxOptions
from cudnn_sdpa.attention.paged.tables import page_table_of_csr
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.compat.flashinfer.arguments import (
    NHD,
    PagedCache,
    Result,
    Wrapper,
    called,
    check_lse,
    finished,
    softmax_options,
    with_scales,
)
from cudnn_sdpa.compat.flashinfer.page import get_seq_lens, names_of_pages, pages_of
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_tensor
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph.scalars import is_integer

#: Entries of a page table for captured runs, 256 MB, unless each sequence needs more for its share of the pages.
MAX_ENTRIES = 1 << 26


class PagesPlan(NamedTuple):
    """A plan of runs on pages, which `plan` makes. Pairs are of queries and keys, or `dims` of keys and values."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    page_size: int
    dtypes: tuple[torch.dtype, torch.dtype]
    table: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor
    tokens: int
    max_seqlen_q: int
    softmax: SoftmaxOptions
    batch_invariant: bool = False

    def check(self, q: Tensor, pages: tuple[Tensor, Tensor], kv_layout: str) -> None:
        check_is_tensor("q", q)
        (heads, heads_kv), (dtype_q, dtype_kv) = self.heads, self.dtypes
        rows, hint = (self.tokens, heads, self.dims[0]), "Plan with the sizes and dtypes of the call."
        sizes = (self.page_size, heads_kv) if kv_layout == NHD else (heads_kv, self.page_size)
        k, v = ((*sizes, dim) for dim in self.dims)
        shapes = q.shape, pages[0].shape[1:], pages[1].shape[1:]
        if shapes == (rows, k, v) and (q.dtype, pages[0].dtype, pages[1].dtype) == (dtype_q, dtype_kv, dtype_kv):
            return  # what follows says what is wrong
        check_tensor("q", q, q, dtype=dtype_q, shape=rows, meaning="as planned", hint=hint)
        for name, x, of_page in zip(("k_pages", "v_pages"), pages, (k, v), strict=True):
            check_tensor(name, x, x, dtype=dtype_kv, shape=("pages", *of_page), meaning="as planned", hint=hint)


class PagedWrapper(Wrapper):
    """The base of the wrappers of paged caches. FlashInfer has no such name."""

    _plan: PagesPlan | None = None
    _table: Tensor | None = None
    _lengths: Tensor | None = None
    _is_table_given = False
    _names: Mapping[str, str] = {}  #: of the function, and of the lists that the plan was made of
    _cache_name = "paged_kv_cache"

    def _fill(
        self,
        indptr: tuple[str, Tensor],
        indices: tuple[str, Tensor],
        last_page_len: tuple[str, Tensor],
        page_size: int,
        *,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_seqlen: int | None = None,
        host_indptr: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The page table and the lengths, of lists of pages end to end with their names, or as they are given.

        Beside `offsets` of new tokens, if they have any.
        """
        if not is_integer(page_size) or page_size < 1:
            raise OptionError("page_size", repr(page_size), "an int of at least 1")
        begins = self._staged(*indptr, non_blocking=non_blocking)
        last = self._staged(*last_page_len, non_blocking=non_blocking)
        batch = last.shape[0]
        if begins.shape[0] != batch + 1:
            raise ShapeError(indptr[0], f"{begins.shape[0]} entries", f"{batch + 1}: one more than {last_page_len[0]}")
        if offsets is not None and offsets.shape[0] != batch + 1:
            raise ShapeError("qo_indptr", f"{offsets.shape[0]} entries", f"{batch + 1}, as {indptr[0]}")
        if self._lengths is None or not self.is_cuda_graph_enabled:
            self._lengths = torch.empty(batch, dtype=torch.int32, device=self.device)
        if block_tables is not None:
            check_is_tensor("block_tables", block_tables)
            check_tensor("block_tables", block_tables, last, of="the workspace", shape=(batch, "pages"))
        if self.is_cuda_graph_enabled and self._table is not None:
            address = None if block_tables is None else block_tables.data_ptr()
            if address != (self._table.data_ptr() if self._is_table_given else None):
                raise OptionError("block_tables", "another one", "that of the first plan, which captured runs read")
        self._is_table_given = block_tables is not None
        if block_tables is not None:
            self._table = block_tables
            self._lengths.copy_(get_seq_lens(begins, last, page_size))
        else:
            pages = self._staged(*indices, non_blocking=non_blocking, is_exact=False)
            host = (indptr[1] if host_indptr is None else host_indptr).cpu()
            widest = int(host.diff().max()) if batch else 0
            self._table = self._table_for(batch, widest, pages.shape[0], -(-(max_seqlen or 0) // page_size))
            page_table_of_csr(
                begins, pages, last, page_size=page_size, out_table=self._table, out_lengths=self._lengths
            )
        if seq_lens is not None:
            check_is_tensor("seq_lens", seq_lens)
            self._lengths.copy_(seq_lens.reshape(batch))
        is_given = seq_lens is not None and seq_lens is not last_page_len[1]
        self._names = {
            "page_table": indices[0] if block_tables is None else "block_tables",
            "seq_lens_kv": "seq_lens" if is_given else last_page_len[0],
            "sdpa_paged_varlen": f"{type(self).__name__}.run",
        }
        return self._table, self._lengths

    def _table_for(self, batch: int, widest: int, entries: int, room: int) -> Tensor:
        """A table with room for the widest row, or in the mode of CUDA graphs for the rows of all plans."""
        if self._buffers is None:
            return torch.empty(batch, widest, dtype=torch.int32, device=self.device)
        table = self._table
        if table is None:
            columns = room or min(entries, max(-(-entries // max(batch, 1)), MAX_ENTRIES // max(batch, 1)))
            table = torch.zeros(batch, columns, dtype=torch.int32, device=self.device)
        if widest > table.shape[1]:
            hint = (
                "Captured runs read the table of the first plan: give that a larger max_sequence_kv, or block_tables."
            )
            raise ShapeError("indptr", f"{widest} pages of a sequence", f"at most {table.shape[1]}", hint)
        return table

    def _set(self, **options: Any) -> None:
        """Changes the options of the plan."""
        if self._plan is not None:
            self._plan = self._plan._replace(softmax=softmax_options(**options))

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Result:
        plan = self._plan
        if plan is None:
            raise OptionError("run", "a call before plan", "a call of plan first")
        pages = pages_of(paged_kv_cache, self._kv_layout, self._cache_name)
        names = {**self._names, **names_of_pages(paged_kv_cache, self._cache_name)}
        called(plan.check, q, pages, self._kv_layout, names=names)
        check_lse(lse, q, lse_base, lse_layout)
        planned = (plan.softmax.get("window_size") or (-1,))[0]
        if window_left is not None and max(window_left, -1) != planned:
            raise OptionError("window_left", window_left, f"{planned}, as planned, or None")
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        of_pages = {name: x for name, x in scales.items() if isinstance(x, Tensor)}
        factors = {name: x for name, x in scales.items() if not isinstance(x, Tensor)}
        softmax = with_scales(plan.softmax, plan.dims[0], q_scale=q_scale, k_scale=factors.get("k_scale"))
        options: dict[str, Any] = {**softmax, **of_pages, "sinks": sinks, "out": out}
        result: Result = called(
            *(sdpa_paged_varlen, q, *pages, plan.table),
            names=names,
            seq_lens_kv=plan.lengths,
            cu_seqlens_q=plan.cu_seqlens_q,
            max_seqlen_q=plan.max_seqlen_q,
            page_layout=self._kv_layout,
            batch_invariant=plan.batch_invariant,
            return_lse=return_lse,
            **options,
        )
        return finished(result, factors.get("v_scale"), lse, base=lse_base, layout=lse_layout)
