"""The CUDA kernels for paged caches: their arguments and launches."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.plans import Gathered, right_bound
from cudnn_sdpa.engine.launch import Address, OwnKernel
from cudnn_sdpa.plans.nvrtc import Kernel, slots
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("paging.cu")
decode_kernel = Kernel(_SOURCE, "prepare_decode")
gather_kernel = Kernel(_SOURCE, "gather_pages")
append_kernel = Kernel(_SOURCE, "append_tokens")

_THREADS = 256
_WORD = 16  #: bytes that the kernels copy at a time
_TOKENS = 16  #: tokens that a block of `gather_pages` copies at a time
_PER_CALL = 0  #: an address that is filled in at each launch


class DecodeFields(NamedTuple):
    """The struct `Decode` of `paging.cu`."""

    lengths_kv: int
    lengths_q: int
    batch: int
    queries: int
    made: int
    max_kv_len: int
    page_size: int
    pages: int
    right: int
    bottom_right: int
    keys: int
    table_k: int
    table_v: int
    row_k: int
    row_v: int
    to_k: int
    to_v: int
    width: int
    q: int
    q_batch: int
    q_row: int
    q_head: int
    heads: int
    words: int
    to_q: int


class PagesFields(NamedTuple):
    """The struct `Pages` of `paging.cu`."""

    base: int
    page: int
    token: int
    head: int
    words: int
    table: int
    row: int
    to: int


class GatherFields(NamedTuple):
    """The struct `Gather` of `paging.cu`, up to its two `Pages`: of keys, then of values."""

    lengths_kv: int
    lengths_q: int
    batch: int
    queries: int
    max_kv_len: int
    page_bits: int
    pages: int
    heads: int
    ends_q: int
    ends_kv: int


class MoveFields(NamedTuple):
    """The struct `Move` of `paging.cu`; `from` is `source` here, as it is a keyword."""

    source: int
    batch: int
    row: int
    head: int
    words: int
    to: int
    page: int
    slot: int
    to_head: int


class AppendFields(NamedTuple):
    """The struct `Append` of `paging.cu`, up to its two `Move`s: of keys, then of values."""

    lengths_kv: int
    lengths_q: int
    table: int
    row: int
    columns: int
    batch: int
    tokens: int
    page_size: int
    pages: int
    heads: int


_DECODE_LENGTHS_KV, _DECODE_LENGTHS_Q, _DECODE_KEYS = slots(DecodeFields, "lengths_kv", "lengths_q", "keys")
_DECODE_TABLE_K, _DECODE_TABLE_V, _DECODE_Q = slots(DecodeFields, "table_k", "table_v", "q")
_DECODE_TO_K, _DECODE_TO_V, _DECODE_TO_Q = slots(DecodeFields, "to_k", "to_v", "to_q")
_GATHER_LENGTHS_KV, _GATHER_LENGTHS_Q = slots(GatherFields, "lengths_kv", "lengths_q")
_GATHER_ENDS_Q, _GATHER_ENDS_KV = slots(GatherFields, "ends_q", "ends_kv")
_GATHER_K = len(GatherFields._fields)
_GATHER_V = _GATHER_K + len(PagesFields._fields)
_K_BASE, _K_TABLE, _K_TO = slots(PagesFields, "base", "table", "to", start=_GATHER_K)
_V_BASE, _V_TABLE, _V_TO = slots(PagesFields, "base", "table", "to", start=_GATHER_V)
_APPEND_LENGTHS_KV, _APPEND_LENGTHS_Q, _APPEND_TABLE = slots(AppendFields, "lengths_kv", "lengths_q", "table")
_APPEND_K = len(AppendFields._fields)
_APPEND_V = _APPEND_K + len(MoveFields._fields)


class PageTableKernel(OwnKernel):
    """Copies queries, lengths and page ids for a decode plan, the latter two clamped to the cache."""

    __slots__ = ("operands",)

    def __init__(self, call: PagedArguments, rows: int, width: int) -> None:
        q, (of_keys, of_values) = call.q, call.tables
        batch, heads, queries, dim = q.shape
        size, made = q.element_size(), "copied_tables"
        table_bytes = 4 * rows * width
        lengths = rows * heads * dim * size  # behind the queries
        table_k = lengths + 4 * rows
        table_v = table_k + (0 if of_keys is of_values else table_bytes)
        self.operands = {
            "q": Address(made),
            "seq_len_kv": Address(made, lengths),
            "table_k": Address(made, table_k),
            "table_v": Address(made, table_v),
        }
        fields = DecodeFields(
            lengths_kv=_PER_CALL,
            lengths_q=_PER_CALL,
            batch=batch,
            queries=queries,
            made=rows,
            max_kv_len=call.max_kv_len,
            page_size=call.page_size,
            pages=call.k.shape[0],
            right=right_bound(call),
            bottom_right=call.softmax.causal_alignment == BOTTOM_RIGHT,
            keys=_PER_CALL,
            table_k=_PER_CALL,
            table_v=_PER_CALL,
            row_k=of_keys.stride(0),
            row_v=of_values.stride(0),
            to_k=_PER_CALL,
            to_v=_PER_CALL,
            width=width,
            q=_PER_CALL,
            q_batch=q.stride(0) * size,
            q_row=q.stride(2) * size,
            q_head=q.stride(1) * size,
            heads=heads,
            words=dim * size // _WORD,
            to_q=_PER_CALL,
        )
        super().__init__(
            decode_kernel,
            name=made,
            buffer_layout=((table_v + table_bytes,), (1,), torch.uint8),
            blocks=min(rows, 1024),
            threads=_THREADS,
            fields=fields,
            addresses={
                _DECODE_LENGTHS_KV: Address("seq_lens_kv"),
                _DECODE_LENGTHS_Q: Address("seq_lens_q"),
                _DECODE_TABLE_K: Address("page_table"),
                _DECODE_TABLE_V: Address("page_table" if call.page_table_v is None else "page_table_v"),
                _DECODE_Q: Address("q"),
                _DECODE_TO_Q: self.operands["q"],
                _DECODE_KEYS: self.operands["seq_len_kv"],
                _DECODE_TO_K: self.operands["table_k"],
                _DECODE_TO_V: self.operands["table_v"],
            },
            device=q.get_device(),
        )


class GatherKernel:
    """Gathers keys and values from their pages into packed sequences, for similar calls.

    With `seq_lens_q`, the absent queries of each sequence become a sequence without keys, whose output is zeros.
    """

    __slots__ = ("_blocks", "_cu_seqlens", "_device", "_fields", "_kernel", "_rows")

    def __init__(self, call: PagedArguments) -> None:
        batch, _, queries, _ = call.q.shape
        max_kv_len = call.max_kv_len
        self._device = call.q.get_device()
        self._kernel = gather_kernel.on(self._device)
        heads, tokens = call.k.shape[1], batch * max_kv_len
        self._cu_seqlens = ((batch if call.seq_lens_q is None else 2 * batch) + 1,)
        self._rows = []
        fields: list[int] = []
        fields += GatherFields(
            lengths_kv=_PER_CALL,
            lengths_q=_PER_CALL,
            batch=batch,
            queries=queries,
            max_kv_len=max_kv_len,
            page_bits=call.page_size.bit_length() - 1,
            pages=call.k.shape[0],
            heads=heads,
            ends_q=_PER_CALL,
            ends_kv=_PER_CALL,
        )
        for pages, table in zip((call.k, call.v), call.tables, strict=True):
            dim, size = pages.shape[3], pages.element_size()
            self._rows.append(((tokens, heads, dim), (heads * dim, dim, 1), pages.dtype))
            fields += PagesFields(
                base=_PER_CALL,
                page=pages.stride(0) * size,
                token=pages.stride(2) * size,
                head=pages.stride(1) * size,
                words=dim * size // _WORD,
                table=_PER_CALL,
                row=table.stride(0),
                to=_PER_CALL,
            )
        self._fields = array("q", fields)
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._blocks = 2 * batch * max(1, min(-(-max_kv_len // _TOKENS), 8 * processors // batch))

    def __call__(self, call: PagedArguments) -> Gathered:
        """Launches the kernel on the current stream of the call's GPU, which must be the current device."""
        cu_seqlens_q = allocate(self._cu_seqlens, (1,), torch.int32)
        cu_seqlens_kv = allocate(self._cu_seqlens, (1,), torch.int32)
        k, v = allocate(*self._rows[0]), allocate(*self._rows[1])
        fields = self._fields[:]
        fields[_GATHER_LENGTHS_KV] = call.seq_lens_kv.data_ptr()
        fields[_GATHER_LENGTHS_Q] = 0 if call.seq_lens_q is None else call.seq_lens_q.data_ptr()
        fields[_GATHER_ENDS_Q], fields[_GATHER_ENDS_KV] = cu_seqlens_q.data_ptr(), cu_seqlens_kv.data_ptr()
        table_k, table_v = call.tables
        fields[_K_BASE], fields[_K_TABLE], fields[_K_TO] = call.k_pages.data_ptr(), table_k.data_ptr(), k.data_ptr()
        fields[_V_BASE], fields[_V_TABLE], fields[_V_TO] = call.v_pages.data_ptr(), table_v.data_ptr(), v.data_ptr()
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return Gathered(k, v, cu_seqlens_q, cu_seqlens_kv)


class AppendKernel:
    """Writes new keys and values into their pages, for similar calls.

    Args:
        new: Keys and values (B, Hkv, tokens, D).
        pages: The pages to write to, (pages, Hkv, page size, D).
        table: A page table, (B, columns) int32.
    """

    __slots__ = ("_blocks", "_device", "_fields", "_has_several_gpus", "_kernel")

    def __init__(self, new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], table: Tensor) -> None:
        batch, heads, tokens, _ = new[0].shape
        self._device = new[0].get_device()
        self._has_several_gpus = torch.cuda.device_count() > 1
        self._kernel = append_kernel.on(self._device)
        self._blocks = max(1, min(batch * tokens, 4096))
        fields: list[int] = []
        fields += AppendFields(
            lengths_kv=_PER_CALL,
            lengths_q=_PER_CALL,
            table=_PER_CALL,
            row=table.stride(0),
            columns=table.shape[1],
            batch=batch,
            tokens=tokens,
            page_size=pages[0].shape[2],
            pages=pages[0].shape[0],
            heads=heads,
        )
        for rows, to in zip(new, pages, strict=True):
            size = rows.element_size()
            fields += MoveFields(
                source=_PER_CALL,
                batch=rows.stride(0) * size,
                row=rows.stride(2) * size,
                head=rows.stride(1) * size,
                words=rows.shape[3] * size // _WORD,
                to=to.data_ptr(),
                page=to.stride(0) * size,
                slot=to.stride(2) * size,
                to_head=to.stride(1) * size,
            )
        self._fields = array("q", fields)

    def __call__(self, k: int, v: int, table: Tensor, lengths_kv: Tensor, lengths_q: Tensor) -> None:
        """Launches the kernel on the current stream.

        Args:
            k: Address of the keys.
            v: Address of the values.
            table: The pages of each sequence.
            lengths_kv: The length of each sequence, new tokens included, (B,) int32.
            lengths_q: The number of new tokens of each sequence, (B,) int32.
        """
        if self._has_several_gpus and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(k, v, table, lengths_kv=lengths_kv, lengths_q=lengths_q)
        fields = self._fields[:]
        fields[_APPEND_LENGTHS_KV], fields[_APPEND_LENGTHS_Q] = lengths_kv.data_ptr(), lengths_q.data_ptr()
        fields[_APPEND_TABLE], fields[_APPEND_K], fields[_APPEND_V] = table.data_ptr(), k, v
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return None


def copy_pages(layers: tuple[Tensor, Tensor], copies: list[tuple[int, int]]) -> None:
    """Copies pages (from, to) of keys and values (layers, pages, …) in all layers, on any device."""
    with torch.inference_mode():  # independent of the mode that the cache was created in
        numbers = torch.tensor(copies, device="cpu").t()
        if layers[0].is_cuda:
            numbers = numbers.pin_memory().to(layers[0].device, non_blocking=True)
        for pages in layers:
            pages.index_copy_(1, numbers[1], pages.index_select(1, numbers[0]))
