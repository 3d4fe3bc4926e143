"""A call on a paged cache, and the checks of its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments, check_is_dense, check_lengths, dtype_name, shape_of
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.errors import ArgumentError, DeviceError, DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.graph.symbolic_shapes import is_true

HND = "HND"
NHD = "NHD"
LAYOUTS = {HND: "(pages, heads, page size, head dim)", NHD: "(pages, page size, heads, head dim)"}


class PagedArguments(NamedTuple):
    """A call on a paged cache, in the order in which operators take its arguments.

    Pages are (pages, Hkv, page size, D) here, whatever their memory order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table_k: Tensor
    table_v: Tensor
    seq_lens_kv: Tensor
    seq_lens_q: Tensor | None = None
    sinks: Tensor | None = None
    is_causal: bool = True
    causal_alignment: str = BOTTOM_RIGHT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    softcap: float | None = None
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that are read, in the order of the operators' schemas."""
        return self.q, self.k, self.v, self.table_k, self.table_v, self.seq_lens_kv, self.seq_lens_q, self.sinks

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors: the inputs and `out`."""
        return (*self.inputs, self.out)

    @property
    def options(self) -> tuple[Any, ...]:
        """The options that decide the output, in the order of the operators' schemas."""
        return (
            *(self.is_causal, self.causal_alignment, self.window_left, self.window_right),
            *(self.scale, self.softcap),
        )

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims hold, as for `ForwardArguments`."""
        return True

    @property
    def scale_value(self) -> float:
        """The factor applied to the scores."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)

    def as_dense(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> ForwardArguments:
        """A dense call with the same options: for checks that both have, and for the reference."""
        return ForwardArguments(
            q,
            k,
            v,
            sinks=self.sinks,
            is_causal=self.is_causal,
            causal_alignment=self.causal_alignment,
            window_left=self.window_left,
            window_right=self.window_right,
            scale=self.scale,
            softcap=self.softcap,
            **more,
        )

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]

    @property
    def max_kv_len(self) -> int:
        """The most keys per sequence that the table has room for."""
        return self.table_k.shape[1] * self.k.shape[2]


def in_heads_order(pages: Any, page_layout: Any) -> Any:
    """A view of pages as (pages, Hkv, page size, D).

    Raises:
        OptionError: There is no such layout.
    """
    if not isinstance(page_layout, str) or page_layout not in LAYOUTS:
        expected = " or ".join(f"{name!r}: {shape}" for name, shape in LAYOUTS.items())
        raise OptionError("page_layout", repr(page_layout), expected)
    is_rank_4 = isinstance(pages, Tensor) and pages.dim() == 4
    return pages.transpose(1, 2) if page_layout == NHD and is_rank_4 else pages


#: Names that `arguments` uses in its messages, and what `sdpa_paged` calls the same.
NAMES = {"k": "k_pages", "v": "v_pages", "sequence length": "page size"}


def check(call: PagedArguments) -> None:
    """Checks what must hold on every device. Reads no address and no value, so that fake tensors pass through."""
    q, k, v = call.q, call.k, call.v
    _check_types(call)
    for name, tensor, shape in (("q", q, "(B, Hq, Sq, D)"), ("k_pages", k, LAYOUTS[HND]), ("v_pages", v, LAYOUTS[HND])):
        if tensor.dim() != 4:
            raise ShapeError(name, shape_of(tensor), f"rank 4: {shape}, pages in the order of page_layout")
    for name, tensor in (("q", q), ("k_pages", k), ("v_pages", v)):
        if "float8" in str(tensor.dtype):
            hint = "Queries and pages in FP8 go through sdpa_fp8(..., page_table=...), with their scales."
            raise DtypeError(name, dtype_name(tensor.dtype), "float16 or bfloat16", hint)
    if is_true(k.shape[0] == 0):
        raise ShapeError("k_pages", shape_of(k), "at least one page")
    present = 0 if is_true(q.shape[0] == 0) else 1
    try:
        arguments.check(call.as_dense(q[:present], k[:present], v[:present]))
    except (ShapeError, DtypeError, DeviceError, LayoutError) as error:
        raise error.renamed(NAMES) from None
    if call.out is not None:
        arguments.check_out(call.out, q, v, for_cudnn=arguments.has_limits(call))
    if is_true(v.shape[0] != k.shape[0]):
        raise ShapeError("v_pages", f"{v.shape[0]} pages", f"{k.shape[0]}, the number of pages of k_pages")
    if call.page_size < 1 or call.page_size & (call.page_size - 1):
        hint = "Other sizes have no kernel in cuDNN."
        raise ShapeError("k_pages", f"pages of {call.page_size} tokens", "a power of two, such as 16 or 64", hint)
    check_table("page_table", call.table_k, q)
    if call.table_v is not call.table_k:
        check_table("page_table_v", call.table_v, q)
        if call.table_v.shape != call.table_k.shape:
            raise ShapeError("page_table_v", shape_of(call.table_v), f"{tuple(call.table_k.shape)}, as page_table has")
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)
    check_lengths("seq_lens_q", call.seq_lens_q, q)


def _check_types(call: PagedArguments) -> None:
    try:
        arguments.check_types(ForwardArguments(call.q, call.k, call.v, sinks=call.sinks, out=call.out))
    except ArgumentError as error:
        raise error.renamed(NAMES) from None
    optional = ("seq_lens_q",)
    names = {"table_k": "page_table", "table_v": "page_table_v"}
    for field in ("table_k", "table_v", "seq_lens_kv", "seq_lens_q"):
        tensor = getattr(call, field)
        if not isinstance(tensor, Tensor) and not (tensor is None and field in optional):
            raise OptionError(names.get(field, field), type(tensor).__name__, "a torch.Tensor of int32")
        if tensor is not None:
            check_is_dense(names.get(field, field), tensor)
    if not isinstance(call.with_lse, bool):
        raise OptionError("return_lse", repr(call.with_lse), "True or False")


def check_table(name: str, table: Tensor, q: Tensor) -> None:
    """Checks the page ids of each sequence: int32, (B, max_pages), rows contiguous, on q's device."""
    if table.dtype != torch.int32:
        raise DtypeError(name, dtype_name(table.dtype), "int32", f"Convert with {name}.to(torch.int32).")
    if table.dim() != 2 or is_true(table.shape[0] != q.shape[0]):
        raise ShapeError(name, shape_of(table), f"shape ({q.shape[0]}, max_pages): the pages of each batch entry")
    if table.device != q.device:
        raise DeviceError(name, str(table.device), f"{q.device}, the device of q", f"Move it with {name}.to(q.device).")
    if is_true(table.shape[1] > 1) and table.stride(1) != 1:
        raise LayoutError(name, f"stride {table.stride(1)} in a row", "1: each row dense", f"Use {name}.contiguous().")
