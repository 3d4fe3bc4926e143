"""A call on a paged cache, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import FP8_DTYPES, ForwardArguments, ReferenceArguments, Softmax, check_lengths
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.engine import tensor_checks, value_checks
from cudnn_sdpa.engine.tensor_checks import check_tensor, dtype_name, shape_of
from cudnn_sdpa.errors import ArgumentError, DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.graph.scalars import is_true

PageLayout = Literal["HND", "NHD"]
HND: Final = "HND"
NHD: Final = "NHD"
PAGE_DIMENSIONS = {HND: ("pages", "heads", "page size", "head dim"), NHD: ("pages", "page size", "heads", "head dim")}
LAYOUTS = {name: f"({', '.join(dimensions)})" for name, dimensions in PAGE_DIMENSIONS.items()}

#: The largest head dims of the library's own kernel for pages, and what all are multiples of.
MAX_DIM, MULTIPLE = 256, 8

#: The head dims of keys and values in multi-head latent attention, which are larger.
LATENT_DIMS = 576, 512

#: Whose pages have which layout, for those who do not know theirs by this name.
_USED_BY = {
    HND: "as in cuDNN, TensorRT-LLM and PagedKVCache, which has it as page_layout",
    NHD: "as in FlashAttention, and by default in FlashInfer and vLLM",
}


class PagedArguments(NamedTuple):
    """A call on a paged cache, in the order in which operators take its arguments.

    Attributes:
        page_table_v: None if values have the page table of the keys.
        k_scale: What a stored number of FP8 keys is multiplied by; None is 1.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    page_table_v: Tensor | None
    seq_lens_kv: Tensor
    seq_lens_q: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_layout: str
    softmax: Softmax = Softmax(is_causal=True, causal_alignment=BOTTOM_RIGHT)
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def k(self) -> Tensor:
        """The keys, (pages, Hkv, page size, D), whatever their memory order."""
        return in_heads_order(self.k_pages, self.page_layout)

    @property
    def v(self) -> Tensor:
        """The values, (pages, Hkv, page size, Dv)."""
        return in_heads_order(self.v_pages, self.page_layout)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.page_table, self.page_table if self.page_table_v is None else self.page_table_v

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None

    @property
    def of_softmax(self) -> dict[str, Any]:
        """The fields that calls of other kinds have, too, for the same softmax."""
        return {"sinks": self.sinks, "softmax": self.softmax}

    @property
    def is_empty(self) -> bool:
        return 0 in self.q.shape or self.page_table.shape[1] == 0

    @property
    def is_beyond_cudnn(self) -> bool:
        """Whether cuDNN has no kernel for such pages, in FP8 under queries of 16 bits, or of no power of two tokens."""
        return self.k_pages.dtype in FP8_DTYPES or not is_power_of_two(self.page_size)

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims hold, as for `ForwardArguments`."""
        return True

    def as_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seq_lens_q: Tensor | None = None,
        seq_lens_kv: Tensor | None = None,
        with_lse: bool = False,
    ) -> ForwardArguments:
        """A dense call with the same options: for checks that both have, and for the reference."""
        kind = ForwardArguments if self.is_for_cudnn else ReferenceArguments
        return kind(q, k, v, **self.of_softmax, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv, with_lse=with_lse)

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1 if self.page_layout == NHD else 2]

    @property
    def max_kv_len(self) -> int:
        return self.page_table.shape[1] * self.page_size


class WithPages(Protocol):
    """A call on pages, of queries of any form."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k_pages(self) -> Tensor: ...
    @property
    def v_pages(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def page_layout(self) -> str: ...
    @property
    def k_scale(self) -> Tensor | None: ...
    @property
    def v_scale(self) -> Tensor | None: ...


def in_heads_order(pages: Tensor, page_layout: str) -> Tensor:
    """A view of pages as (pages, Hkv, page size, D)."""
    return pages.transpose(1, 2) if page_layout == NHD else pages


def as_bits(pages: Tensor) -> Tensor:
    """A view of pages that PyTorch can index and mask on every device: of FP8, which it often cannot, the bits."""
    return pages.view(torch.uint8) if pages.element_size() == 1 else pages


#: Names that `arguments` uses in its messages, and what `sdpa_paged` calls the same.
NAMES = {"k": "k_pages", "v": "v_pages", "sequence length": "page size"}


@contextmanager
def named() -> Iterator[None]:
    """Errors of what is checked here name the arguments of `sdpa_paged`."""
    try:
        yield
    except ArgumentError as error:
        raise error.renamed(NAMES) from None


def check(call: PagedArguments) -> None:
    """Checks of tensors that apply on every device. They read no address and no value, so fake tensors pass."""
    q, is_limited = call.q, arguments.has_limits(call)
    if q.dtype in FP8_DTYPES:
        hint = "Queries and pages in FP8 go through sdpa_fp8(..., page_table=...), with their scales."
        raise DtypeError("q", dtype_name(q.dtype), "float16 or bfloat16", hint)
    check_tensor("q", q, q, shape=arguments.DIMENSIONS)
    arguments.check_dtype(q, for_cudnn=is_limited)
    check_keys_and_values(call)
    k, v = call.k, call.v
    heads = max(1, k.shape[1])
    if is_true(q.shape[1] % heads != 0) and is_true(q.shape[2] % heads == 0):
        hint = "Is q (B, Sq, Hq, D), as in FlashAttention? Pass q.transpose(1, 2)."
        expected = f"(B, Hq, Sq, D) with Hq a multiple of the {k.shape[1]} heads of k_pages"
        raise ShapeError("q", shape_of(q), expected, hint)
    present = 0 if is_true(q.shape[0] == 0) else 1
    with named():
        arguments.check_sizes(q[:present], k[:present], v[:present], MULTIPLE if is_limited else 1)
    if is_limited and is_true(max(q.shape[3], v.shape[3]) > MAX_DIM) and call.is_beyond_cudnn:
        what = "in FP8" if k.dtype in FP8_DTYPES else f"of {call.page_size} tokens, no power of two"
        check_dims(q, v, f" on pages {what}")
    arguments.check_sinks(call.sinks, q)
    check_scales(call)
    if call.out is not None:
        arguments.check_out(call.out, q, v, for_cudnn=is_limited)
    check_tables(q, q.shape[0], call.page_table, call.page_table_v)
    check_lengths("seq_lens_kv", call.seq_lens_kv, q)
    check_lengths("seq_lens_q", call.seq_lens_q, q)


def check_page_layout(page_layout: object) -> None:
    """Checks the name of a layout. A default would be silently wrong for other libraries' pages."""
    if not isinstance(page_layout, str) or page_layout not in LAYOUTS:
        expected = ", or ".join(f"{name!r} for pages {shape}, {_USED_BY[name]}" for name, shape in LAYOUTS.items())
        raise OptionError("page_layout", repr(page_layout), expected)


def check_types(call: PagedArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    check_page_layout(call.page_layout)
    required = {"q": call.q, "k_pages": call.k_pages, "v_pages": call.v_pages}
    required |= {"page_table": call.page_table, "seq_lens_kv": call.seq_lens_kv}
    optional = {"page_table_v": call.page_table_v, "seq_lens_q": call.seq_lens_q, "sinks": call.sinks}
    optional |= {"k_scale": call.k_scale, "v_scale": call.v_scale, "out": call.out}
    arguments.check_operands(required, optional, call.with_lse)


def check_values(call: PagedArguments) -> None:
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.max_kv_len)
    value_checks.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    for name, table in zip(("page_table", "page_table_v"), call.tables, strict=True):
        value_checks.check_pages(
            name=name, table=table, lengths=call.seq_lens_kv, page_size=call.page_size, pages=call.k_pages.shape[0]
        )


def check_strides(call: PagedArguments) -> None:
    check_strides_on_pages(call.q, call.k, call.v)


def check_memory(call: PagedArguments) -> None:
    """Addresses, and that `out` overlaps no other tensor."""
    with named():
        tensor_checks.check_addresses(q=call.q, k=call.k, v=call.v)
    if call.out is not None:
        tensor_checks.check_out_apart(call.out, call)


# Checks that other calls on pages have, too.


def check_keys_and_values(call: WithPages) -> None:
    """The pages beside the queries: rank, dtype, device, and how many there are, of how many tokens."""
    rank = PAGE_DIMENSIONS[call.page_layout]
    check_tensor("k_pages", call.k_pages, call.q, dtype=(call.q.dtype, *FP8_DTYPES), shape=rank)
    check_tensor("v_pages", call.v_pages, call.k_pages, of="k_pages", shape=rank)
    check_number_of_pages({"k_pages": call.k, "v_pages": call.v})
    if is_true(call.k.shape[0] == 0):
        raise ShapeError("k_pages", shape_of(call.k_pages), "at least one page")
    if is_true(call.k.shape[2] == 0):
        raise ShapeError("k_pages", "pages of 0 tokens", "at least one token")


def check_dims(q: Tensor, v: Tensor, where: str = "") -> None:
    """The largest head dims of the library's own kernel for pages."""
    dims = {"q": q.shape[-1], "v_pages": v.shape[-1]}
    if all(is_true(x == y) for x, y in zip(dims.values(), LATENT_DIMS, strict=True)):
        return
    for name, dim in dims.items():
        if is_true(dim > MAX_DIM):
            expected = f"at most {MAX_DIM}{where}, or {LATENT_DIMS[0]} for q and {LATENT_DIMS[1]} for v_pages"
            hint = "sdpa_varlen takes more, on keys and values gathered from the pages."
            raise ShapeError(name, f"head dim {dim}", expected, hint)


def check_scales(call: WithPages) -> None:
    """The scales of keys and of values, which only pages in FP8 have."""
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is None:
            continue
        if call.k_pages.dtype not in FP8_DTYPES:
            dtype = dtype_name(call.k_pages.dtype)
            hint = "Keys in full precision are scaled by the option scale, and values by a factor of the output."
            raise OptionError(name, "a tensor", f"None: pages in {dtype} are not scaled", hint)
        check_scale(name, scale, call.k.shape[1], call.q, of="q")


def check_scale(name: str, scale: Tensor | None, heads: int, like: Tensor, *, of: str) -> None:
    """The scale of FP8 pages, float32: one for all heads, () or (1,), or one for each, (Hkv,)."""
    shape: tuple[int, ...] = (1 if scale is not None and scale.dim() == 1 and is_true(scale.shape[0] == 1) else heads,)
    if scale is not None and scale.dim() == 0:
        shape = ()
    meaning = "a scale of each head; or () or (1,), one for all"
    check_tensor(name, scale, like, of=of, dtype=torch.float32, shape=shape, meaning=meaning)


def check_strides_on_pages(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Strides of queries (B, Hq, Sq, D) and pages (pages, Hkv, page size, D) that kernels can read.

    Head vectors are dense, at multiples of 16 bytes from each other.
    """
    with named():
        tensor_checks.check_strides_of("q", q)
        for name, pages in (("k", k), ("v", v)):
            tensor_checks.check_strides_of(name, pages, _hint_on_strides(pages))


def _hint_on_strides(pages: Tensor) -> str:
    """A suggestion for dense pages that are no multiples either, as those of FP8 with a head dim of 8."""
    if pages.shape[3] * pages.element_size() % ALIGNMENT == 0:
        return ""
    return f"Allocate pages with {ALIGNMENT} bytes, or a multiple, for each head vector."


def check_number_of_pages(pages: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The pages of keys, with their name; there are as many of values."""
    (name_k, k), (name_v, v) = pages.items()
    if is_true(v.shape[0] != k.shape[0]):
        raise ShapeError(name_v, f"{v.shape[0]} pages", f"{k.shape[0]}, the number of pages of {name_k}")
    return name_k, k


def is_power_of_two(size: int) -> bool:
    return size > 0 and not size & (size - 1)


def check_page_size(name: str, size: int) -> None:
    """The tokens of a page of keys, for calls that only cuDNN serves."""
    if not is_power_of_two(size):
        hint = "Other sizes have no kernel in cuDNN; sdpa_paged and sdpa_paged_varlen read any, by one of this library."
        raise ShapeError(name, f"pages of {size} tokens", "a power of two, such as 16 or 64", hint)


def check_tables(q: Tensor, batch: int, table: Tensor, table_v: Tensor | None) -> None:
    """Page tables, int32 (B, max_pages), their rows dense."""
    shape, meaning = (batch, "max_pages"), "the pages of each batch entry"
    check_tensor("page_table", table, q, dtype=torch.int32, shape=shape, meaning=meaning, dense=True)
    check_tensor("page_table_v", table_v, q, dtype=torch.int32, shape=table.shape, meaning="as page_table", dense=True)
