"""What the kernels for paged caches are told: where everything lies, as the fields of their one argument."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.options import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged_arguments import PagedArguments
from cudnn_sdpa.attention.paged_plans import right_bound
from cudnn_sdpa.runtime.kernels import Kernel
from cudnn_sdpa.runtime.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("paging.cu")
decode_kernel = Kernel(_SOURCE, "prepare_decode")
gather_kernel = Kernel(_SOURCE, "gather_pages")
append_kernel = Kernel(_SOURCE, "append_tokens")

_THREADS = 256
_WORD = 16  #: bytes that the kernels copy at a time
_TOKENS = 16  #: that a block of `gather_pages` copies at a time


class Prepared(NamedTuple):
    """What `prepare_decode` has written.

    Attributes:
        keys: How many keys each row sees, (rows,) int32.
        tables: The tables of keys and of values, (rows, width) int32.
        q: Queries (rows, Hq, D), if they were copied.
    """

    keys: Tensor
    tables: tuple[Tensor, Tensor]
    q: Tensor | None


def prepare_decode(call: PagedArguments, rows: int, width: int, *, copy_q: bool) -> Prepared:
    """Lengths and page ids kept within the cache, for as many rows as a plan has, on the current device and stream."""
    q = call.q
    batch, heads, queries, dim = q.shape
    device = q.get_device()
    shared = call.table_k is call.table_v
    ints = rows + rows * width * (1 if shared else 2)
    memory: Tensor = allocate((ints,), (1,), torch.int32)
    keys, first, second = memory[:rows], memory[rows : rows + rows * width], memory[-rows * width :]
    copied: Tensor | None = allocate((rows, heads, dim), (heads * dim, dim, 1), q.dtype) if copy_q else None
    size = q.element_size()
    fields = (
        *_lengths(call),
        *(batch, queries, rows, call.most_keys, call.page_size, call.k.shape[0]),
        *(right_bound(call), call.causal_alignment == BOTTOM_RIGHT),
        keys.data_ptr(),
        *(call.table_k.data_ptr(), call.table_v.data_ptr(), call.table_k.stride(0), call.table_v.stride(0)),
        *(first.data_ptr(), second.data_ptr(), width),
        *(q.data_ptr(), q.stride(0) * size, q.stride(2) * size, q.stride(1) * size),
        *(heads, dim * size // _WORD, 0 if copied is None else copied.data_ptr()),
    )
    decode_kernel.on(device).launch(min(rows, 1024), _THREADS, array("q", fields), current_raw_stream(device))
    return Prepared(keys, (first.view(rows, width), second.view(rows, width)), copied)


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


def gather(call: PagedArguments) -> Gathered:
    """The keys and values of a call as packed sequences, on the current device and stream.

    With `seq_lens_q`, the absent queries of each sequence become a sequence without keys, whose output is zeros.
    """
    batch, _, queries, _ = call.q.shape
    device = call.q.get_device()
    heads, tokens = call.k.shape[1], batch * call.most_keys
    sequences = batch if call.seq_lens_q is None else 2 * batch
    ends: Tensor = allocate((2, sequences + 1), (sequences + 1, 1), torch.int32)
    fields = [
        *_lengths(call),
        *(batch, queries, call.most_keys, call.page_size, call.k.shape[0], heads),
        *(ends[0].data_ptr(), ends[1].data_ptr()),
    ]
    rows = []
    for pages, table in ((call.k, call.table_k), (call.v, call.table_v)):
        dim, size = pages.shape[3], pages.element_size()
        to: Tensor = allocate((tokens, heads, dim), (heads * dim, dim, 1), pages.dtype)
        rows.append(to)
        steps = [pages.stride(number) * size for number in (0, 2, 1)]
        fields += [pages.data_ptr(), *steps, dim * size // _WORD, table.data_ptr(), table.stride(0), to.data_ptr()]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = max(1, min(-(-call.most_keys // _TOKENS), 8 * processors // batch))
    gather_kernel.on(device).launch(batch * parts, _THREADS, array("q", fields), current_raw_stream(device))
    return Gathered(rows[0], rows[1], ends[0], ends[1])


def append(
    new: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], table: Tensor, lengths_kv: Tensor, lengths_q: Tensor
) -> None:
    """Writes new keys and values into their pages, on the current stream of the current device.

    Args:
        new: Keys and values (B, Hkv, tokens, D).
        pages: Where they go, (pages, Hkv, page size, D).
        table: The pages of each sequence, (B, columns) int32.
        lengths_kv: Of each sequence with the new tokens, (B,) int32.
        lengths_q: How many tokens are new, (B,) int32.
    """
    batch, heads, tokens, _ = new[0].shape
    device = new[0].get_device()
    fields = [
        *(lengths_kv.data_ptr(), lengths_q.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1]),
        *(batch, tokens, pages[0].shape[2], pages[0].shape[0], heads),
    ]
    for rows, to in zip(new, pages, strict=True):
        size = rows.element_size()
        fields += [
            rows.data_ptr(),
            *(rows.stride(number) * size for number in (0, 2, 1)),
            rows.shape[3] * size // _WORD,
        ]
        fields += [to.data_ptr(), *(to.stride(number) * size for number in (0, 2, 1))]
    blocks = max(1, min(batch * tokens, 4096))
    append_kernel.on(device).launch(blocks, _THREADS, array("q", fields), current_raw_stream(device))


def _lengths(call: PagedArguments) -> tuple[int, int]:
    return call.seq_lens_kv.data_ptr(), 0 if call.seq_lens_q is None else call.seq_lens_q.data_ptr()
