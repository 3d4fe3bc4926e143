"""The CUDA kernels for paged caches: their arguments and launches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.specs import Gathered, right_bound
from cudnn_sdpa.engine.launch import Address, OwnKernel
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("paging.cu")
decode_kernel = Kernel(_SOURCE, "prepare_decode")
gather_kernel = Kernel(_SOURCE, "gather_pages")
append_kernel = Kernel(_SOURCE, "append_tokens")
_decode, _gather, _append = (Struct(_SOURCE, name) for name in ("Decode", "Gather", "Append"))

_THREADS = 256
_WORD = 16  #: bytes that the kernels copy at a time
_TOKENS = 16  #: tokens that a block of `gather_pages` copies at a time


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
        values = {
            "batch": batch,
            "queries": queries,
            "made": rows,
            "max_kv_len": call.max_kv_len,
            "page_size": call.page_size,
            "pages": call.k.shape[0],
            "right": right_bound(call),
            "bottom_right": call.softmax.causal_alignment == BOTTOM_RIGHT,
            "row_k": of_keys.stride(0),
            "row_v": of_values.stride(0),
            "width": width,
            "q_batch": q.stride(0) * size,
            "q_row": q.stride(2) * size,
            "q_head": q.stride(1) * size,
            "heads": heads,
            "words": dim * size // _WORD,
        }
        addresses = {
            "lengths_kv": Address("seq_lens_kv"),
            "lengths_q": Address("seq_lens_q"),
            "table_k": Address("page_table"),
            "table_v": Address("page_table" if call.page_table_v is None else "page_table_v"),
            "q": Address("q"),
            "to_q": self.operands["q"],
            "keys": self.operands["seq_len_kv"],
            "to_k": self.operands["table_k"],
            "to_v": self.operands["table_v"],
        }
        super().__init__(
            decode_kernel,
            name=made,
            buffer_layout=((table_v + table_bytes,), (1,), torch.uint8),
            blocks=min(rows, 1024),
            threads=_THREADS,
            argument=_decode,
            values=values,
            addresses=addresses,
            device=q.get_device(),
        )


class GatherKernel:
    """Gathers keys and values from their pages into packed sequences, for similar calls.

    With `seq_lens_q`, the absent queries of each sequence become a sequence without keys, whose output is zeros.
    """

    __slots__ = ("_blocks", "_cu_seqlens", "_device", "_fields", "_indices", "_kernel", "_rows")

    def __init__(self, call: PagedArguments) -> None:
        batch, _, queries, _ = call.q.shape
        max_kv_len = call.max_kv_len
        self._device = call.q.get_device()
        self._kernel = gather_kernel.on(self._device)
        heads, tokens = call.k.shape[1], batch * max_kv_len
        self._cu_seqlens = ((batch if call.seq_lens_q is None else 2 * batch) + 1,)
        self._rows, of = [], []
        for pages, table in zip((call.k, call.v), call.tables, strict=True):
            dim, size = pages.shape[3], pages.element_size()
            self._rows.append(((tokens, heads, dim), (heads * dim, dim, 1), pages.dtype))
            strides = {"page": pages.stride(0) * size, "token": pages.stride(2) * size, "head": pages.stride(1) * size}
            of.append({**strides, "words": dim * size // _WORD, "row": table.stride(0)})
        self._fields = _gather.filled(
            batch=batch,
            queries=queries,
            max_kv_len=max_kv_len,
            page_bits=call.page_size.bit_length() - 1,
            pages=call.k.shape[0],
            heads=heads,
            of=of,
        )
        self._indices = _gather.indices(
            *("lengths_kv", "lengths_q", "ends_q", "ends_kv"),
            *(f"of.{which}.{name}" for which in (0, 1) for name in ("base", "table", "to")),
        )
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._blocks = 2 * batch * max(1, min(-(-max_kv_len // _TOKENS), 8 * processors // batch))

    def __call__(self, call: PagedArguments) -> Gathered:
        """Launches the kernel on the current stream of the call's GPU, which must be the current device."""
        cu_seqlens_q = allocate(self._cu_seqlens, (1,), torch.int32)
        cu_seqlens_kv = allocate(self._cu_seqlens, (1,), torch.int32)
        k, v = allocate(*self._rows[0]), allocate(*self._rows[1])
        (table_k, table_v), fields = call.tables, self._fields[:]
        of_k, of_v = (call.k_pages, table_k, k), (call.v_pages, table_v, v)
        tensors = (call.seq_lens_kv, call.seq_lens_q, cu_seqlens_q, cu_seqlens_kv, *of_k, *of_v)
        for place, tensor in zip(self._indices, tensors, strict=True):
            fields[place] = 0 if tensor is None else tensor.data_ptr()
        self._kernel.launch(self._blocks, _THREADS, fields, current_raw_stream(self._device))
        return Gathered(k, v, cu_seqlens_q, cu_seqlens_kv)


class AppendKernel:
    """Writes new keys and values into their pages, for similar calls.

    Args:
        new: Keys and values (B, Hkv, tokens, D).
        pages: The pages to write to, (pages, Hkv, page size, D).
        table: A page table, (B, columns) int32.
    """

    __slots__ = ("_blocks", "_device", "_fields", "_has_several_gpus", "_indices", "_kernel")

    def __init__(self, new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], table: Tensor) -> None:
        batch, heads, tokens, _ = new[0].shape
        self._device = new[0].get_device()
        self._has_several_gpus = torch.cuda.device_count() > 1
        self._kernel = append_kernel.on(self._device)
        self._blocks = max(1, min(batch * tokens, 4096))
        of = []
        for rows, to in zip(new, pages, strict=True):
            size = rows.element_size()
            strides = {"batch": rows.stride(0) * size, "row": rows.stride(2) * size, "head": rows.stride(1) * size}
            strides |= {"page": to.stride(0) * size, "slot": to.stride(2) * size, "to_head": to.stride(1) * size}
            of.append({**strides, "words": rows.shape[3] * size // _WORD, "to": to.data_ptr()})
        self._fields = _append.filled(
            row=table.stride(0),
            columns=table.shape[1],
            batch=batch,
            tokens=tokens,
            page_size=pages[0].shape[2],
            pages=pages[0].shape[0],
            heads=heads,
            of=of,
        )
        self._indices = _append.indices("lengths_kv", "lengths_q", "table", "of.0.from", "of.1.from")

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
        fields, (to_kv, to_q, to_table, to_k, to_v) = self._fields[:], self._indices
        fields[to_kv], fields[to_q] = lengths_kv.data_ptr(), lengths_q.data_ptr()
        fields[to_table], fields[to_k], fields[to_v] = table.data_ptr(), k, v
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
