"""What the kernels for paged caches are told: where everything lies, as the fields of their one argument."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.decode_plans import right_bound
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("paging.cu")
decode_kernel = Kernel(_SOURCE, "prepare_decode")
gather_kernel = Kernel(_SOURCE, "gather_pages")
append_kernel = Kernel(_SOURCE, "append_tokens")

_THREADS = 256
_WORD = 16  #: bytes that the kernels copy at a time
_TOKENS = 16  #: that a block of `gather_pages` copies at a time


class PageTableKernel:
    """Makes what a plan for decode steps reads, for calls that look alike: lengths and page ids kept within the cache.

    Attributes:
        places: Where in the memory of a preparation queries, lengths and both tables are, in bytes.
    """

    __slots__ = ("_blocks", "_device", "_fields", "_kernel", "_size", "places")

    def __init__(self, call: PagedArguments, rows: int, width: int) -> None:
        q = call.q
        batch, heads, queries, dim = q.shape
        size = q.element_size()
        self._device = q.get_device()
        table = 4 * rows * width
        keys = rows * heads * dim * size
        first = keys + 4 * rows
        self.places = 0, keys, first, first if call.table_k is call.table_v else first + table
        self._size = (self.places[3] + table,)
        self._blocks = min(rows, 1024)
        self._kernel = decode_kernel.on(self._device)
        fields = (
            *(0, 0, batch, queries, rows, call.max_kv_len, call.page_size, call.k.shape[0]),
            *(right_bound(call), call.causal_alignment == BOTTOM_RIGHT, 0),
            *(0, 0, call.table_k.stride(0), call.table_v.stride(0), 0, 0, width),
            *(0, q.stride(0) * size, q.stride(2) * size, q.stride(1) * size, heads, dim * size // _WORD, 0),
        )
        self._fields = array("q", fields)

    def __call__(self, q: int, tables: tuple[int, int], lengths_kv: int, lengths_q: int) -> Tensor:
        """The memory of a preparation, on the current device and stream.

        Args:
            q: Address of the queries.
            tables: Of the tables.
            lengths_kv: Of the lengths.
            lengths_q: Of the numbers of queries, 0 if all are there.
        """
        memory: Tensor = allocate(self._size, (1,), torch.uint8)
        start = memory.data_ptr()
        fields = self._fields[:]  # of this call alone: calls are made by many threads at once
        fields[0], fields[1], fields[11], fields[12], fields[18] = lengths_kv, lengths_q, *tables, q
        fields[24], fields[10], fields[15], fields[16] = (start + place for place in self.places)
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return memory


class Gathered(NamedTuple):
    """Pages put in a row.

    Attributes:
        k: Keys (tokens, Hkv, D), of which those of all sequences come first.
        v: Values (tokens, Hkv, Dv).
        ends_q: Where the sequences of queries end, (sequences + 1,) int32.
        ends_kv: The same of keys.
    """

    k: Tensor
    v: Tensor
    ends_q: Tensor
    ends_kv: Tensor


class GatherKernel:
    """Puts the keys and values of calls that look alike in a row, as packed sequences.

    With `seq_lens_q`, the absent queries of each sequence become a sequence without keys, whose output is zeros.
    """

    __slots__ = ("_blocks", "_device", "_ends", "_fields", "_kernel", "_rows")

    def __init__(self, call: PagedArguments) -> None:
        batch, _, queries, _ = call.q.shape
        max_kv_len = call.max_kv_len
        self._device = call.q.get_device()
        self._kernel = gather_kernel.on(self._device)
        heads, tokens = call.k.shape[1], batch * max_kv_len
        self._ends = ((batch if call.seq_lens_q is None else 2 * batch) + 1,)
        self._rows = []
        fields = [0, 0, batch, queries, max_kv_len, call.page_size.bit_length() - 1, call.k.shape[0], heads, 0, 0]
        for pages, table in ((call.k, call.table_k), (call.v, call.table_v)):
            dim, size = pages.shape[3], pages.element_size()
            self._rows.append(((tokens, heads, dim), (heads * dim, dim, 1), pages.dtype))
            steps = [pages.stride(number) * size for number in (0, 2, 1)]
            fields += [0, *steps, dim * size // _WORD, 0, table.stride(0), 0]
        self._fields = array("q", fields)
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._blocks = 2 * batch * max(1, min(-(-max_kv_len // _TOKENS), 8 * processors // batch))

    def __call__(self, call: PagedArguments) -> Gathered:
        """Launches it, on the current stream of the call's GPU, which must be the current device."""
        ends_q, ends_kv = allocate(self._ends, (1,), torch.int32), allocate(self._ends, (1,), torch.int32)
        k, v = allocate(*self._rows[0]), allocate(*self._rows[1])
        fields = self._fields[:]
        fields[0], fields[8], fields[9] = call.seq_lens_kv.data_ptr(), ends_q.data_ptr(), ends_kv.data_ptr()
        fields[1] = 0 if call.seq_lens_q is None else call.seq_lens_q.data_ptr()
        fields[10], fields[15], fields[17] = call.k.data_ptr(), call.table_k.data_ptr(), k.data_ptr()
        fields[18], fields[23], fields[25] = call.v.data_ptr(), call.table_v.data_ptr(), v.data_ptr()
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return Gathered(k, v, ends_q, ends_kv)


class AppendKernel:
    """Writes new keys and values into their pages, for calls that look alike.

    Args:
        new: Keys and values (B, Hkv, tokens, D).
        pages: Where they go, (pages, Hkv, page size, D).
        table: A table of pages, (B, columns) int32.
    """

    __slots__ = ("_blocks", "_device", "_elsewhere", "_fields", "_kernel")

    def __init__(self, new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], table: Tensor) -> None:
        batch, heads, tokens, _ = new[0].shape
        self._device = new[0].get_device()
        self._elsewhere = torch.cuda.device_count() > 1
        self._kernel = append_kernel.on(self._device)
        self._blocks = max(1, min(batch * tokens, 4096))
        fields = [0, 0, 0, table.stride(0), table.shape[1], batch, tokens, pages[0].shape[2], pages[0].shape[0], heads]
        for rows, to in zip(new, pages, strict=True):
            size = rows.element_size()
            fields += [0, *(rows.stride(number) * size for number in (0, 2, 1)), rows.shape[3] * size // _WORD]
            fields += [to.data_ptr(), *(to.stride(number) * size for number in (0, 2, 1))]
        self._fields = array("q", fields)

    def __call__(self, k: int, v: int, table: Tensor, lengths_kv: Tensor, lengths_q: Tensor) -> None:
        """Launches it, on the current stream.

        Args:
            k: Address of the keys.
            v: Address of the values.
            table: The pages of each sequence.
            lengths_kv: Of each sequence with the new tokens, (B,) int32.
            lengths_q: How many tokens are new, (B,) int32.
        """
        if self._elsewhere and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(k, v, table, lengths_kv, lengths_q)
        fields = self._fields[:]
        fields[0], fields[1], fields[2] = lengths_kv.data_ptr(), lengths_q.data_ptr(), table.data_ptr()
        fields[10], fields[19] = k, v
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return None


def copy_pages(layers: tuple[Tensor, Tensor], copies: list[tuple[int, int]]) -> None:
    """Copies pages (from, to) of keys and values (layers, pages, …), in all layers, on any device."""
    with torch.inference_mode():  # whatever mode the cache was made in
        numbers = torch.tensor(copies).t()
        if layers[0].is_cuda:
            numbers = numbers.pin_memory().to(layers[0].device, non_blocking=True)
        for pages in layers:
            pages.index_copy_(1, numbers[1], pages.index_select(1, numbers[0]))
