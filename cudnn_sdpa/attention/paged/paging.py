"""The CUDA kernels for paged caches: their arguments and launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.arguments import PagedArguments, as_bits
from cudnn_sdpa.attention.paged.specs import Gathered, right_bound
from cudnn_sdpa.engine.launch import Address, BoundPlan, LaunchExtras, OwnKernel
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import EXPONENT_BITS, TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

_SOURCE = Path(__file__).with_name("paging.cu")
decode_kernel = Kernel(_SOURCE, "prepare_decode")
gather_kernel = Kernel(_SOURCE, "gather_pages")
append_kernel = Kernel(_SOURCE, "append_tokens")
csr_kernel = Kernel(_SOURCE, "table_of_csr")
_decode, _gather, _append, _csr = (Struct(_SOURCE, name) for name in ("Decode", "Gather", "Append", "Csr"))

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


@functools.partial(KernelOp, folder=_SOURCE.parent)
def append_tokens(key: PlanKey) -> KernelProgram:
    """Writes new keys and values (B, Hkv, tokens, D) into their pages (pages, Hkv, page size, D)."""
    layouts = {x.name: x.layout for x in key.inputs}
    (batch, heads, tokens, _), (pages, _, page_size, _) = layouts["k"].shape, layouts["k_pages"].shape
    of, units = [], 0
    for name in ("k", "v"):
        new, to, scale = layouts[name], layouts[f"{name}_pages"], layouts.get(f"{name}_scale")
        size, stored, dim = new.dtype.itemsize, to.dtype.itemsize, new.shape[3]
        at_once = _WORD // size
        apart = [size * stride % _WORD for stride in new.stride[:3]]
        apart += [stored * stride % (at_once * stored) for stride in to.stride[:3]]
        is_wide = not any(apart) and dim % at_once == 0 and new.stride[3] == to.stride[3] == 1
        strides = dict(zip(("batch", "head", "row"), [size * x for x in new.stride], strict=False))
        strides |= dict(zip(("page", "to_head", "slot", "to_element"), [stored * x for x in to.stride], strict=True))
        step = 0 if scale is None or math.prod(scale.shape) == 1 else scale.stride[0]
        of.append({**strides, "dim": dim, "scale_step": step, "is_wide": is_wide})
        units += heads * (dim // at_once if is_wide else dim)
    slots, table = layouts.get("slot_mapping"), layouts.get("page_table")
    dtype, of_pages = layouts["k"].dtype, layouts["k_pages"].dtype
    fields = _append.filled(
        slot_bytes=0 if slots is None else slots.dtype.itemsize,
        table_row=0 if table is None else table.stride[0],
        columns=0 if table is None else table.shape[1],
        batch=batch,
        tokens=tokens,
        page_size=page_size,
        pages=pages,
        heads=heads,
        size=dtype.itemsize,
        fp8=0 if dtype == of_pages else EXPONENT_BITS[of_pages],
        is_bfloat16=dtype == torch.bfloat16,
        at_once=(at_once := max(1, _THREADS // units)),
        of=of,
    )
    names = list(layouts)
    places = _append.indices(*(_APPENDED[name] for name in names))
    blocks = max(1, min(-(-batch * tokens // at_once), 4096))
    return KernelProgram([KernelCall(append_kernel, blocks, _THREADS)], fields, dict(zip(names, places, strict=True)))


#: The operands of `append_tokens`, and their fields.
_APPENDED = {
    "k": "of.0.from",
    "v": "of.1.from",
    "k_pages": "of.0.to",
    "v_pages": "of.1.to",
    "slot_mapping": "slot_mapping",
    "page_table": "table",
    "seq_lens_kv": "lengths_kv",
    "seq_lens_q": "lengths_q",
    "k_scale": "of.0.scale",
    "v_scale": "of.1.scale",
}


def bind_append(given: Mapping[str, Tensor]) -> BoundPlan:
    """The kernel that appends, for similar calls.

    Its plan is kept with the call and not in the plan cache: it owns nothing, and there may be one for each number of
    tokens.

    Args:
        given: The operands: keys and values (B, Hkv, tokens, D), pages (pages, Hkv, page size, D), and the slots, or
            tables and lengths.
    """
    device, names = given["k"].get_device(), tuple(given)
    inputs = [Operand(name, TensorLayout.of(x)) for name, x in given.items()]
    plan = append_tokens.plan(append_tokens.key(inputs, [], {}, target=live_target(device), device=device))
    plan.held = True
    return BoundPlan(plan, names, results=[], numbers={}, extras=LaunchExtras(unaligned_ok=names))


def table_of_csr(ends: Tensor, ids: Tensor, last: Tensor, *, table: Tensor, lengths: Tensor, page_size: int) -> None:
    """Fills a page table and lengths from page ids end to end, on the current stream of their GPU."""
    device, (batch, columns) = table.get_device(), table.shape
    fields = _csr.filled(batch=batch, all=ids.shape[0], page_size=page_size, columns=columns, row=table.stride(0))
    addresses = {"ends": ends, "ids": ids, "last": last, "table": table, "lengths": lengths}
    for place, tensor in zip(_csr.indices(*addresses), addresses.values(), strict=True):
        fields[place] = tensor.data_ptr()
    with torch.cuda.device(device):
        csr_kernel.on(device).launch(min(batch, 4096), 128, fields, current_raw_stream(device))
    torch.autograd.graph.increment_version([x for x in (table, lengths) if not x.is_inference()])


def copy_pages(layers: tuple[Tensor, Tensor], copies: list[tuple[int, int]]) -> None:
    """Copies pages (from, to) of keys and values (layers, pages, …) in all layers, on any device."""
    with torch.inference_mode():  # independent of the mode that the cache was created in
        numbers = torch.tensor(copies, device="cpu").t()
        if layers[0].is_cuda:
            numbers = numbers.pin_memory().to(layers[0].device, non_blocking=True)
        for pages in map(as_bits, layers):
            pages.index_copy_(1, numbers[1], pages.index_select(1, numbers[0]))
