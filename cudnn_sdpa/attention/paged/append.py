"""New keys and values into pages: `append_paged_kv`, and what `PagedKVCache.append` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cudnn_sdpa.attention.arguments import FP8_DTYPES, allowed_dtypes, dtype_error
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.arguments import (
    LAYOUTS,
    NHD,
    PAGE_DIMENSIONS,
    PageLayout,
    as_bits,
    check_page_layout,
    check_scale,
    in_heads_order,
)
from cudnn_sdpa.attention.paged.kv_cache_checks import refuse_gradient
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.autograd_checks import refuse_tangents, refuse_transforms, resolved
from cudnn_sdpa.engine.dispatch_state import can_be_recognized, can_bypass_dispatcher, needs_gradient
from cudnn_sdpa.engine.launch import NOT_A_CALL, items_by_name, layout_signature
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.engine.sharding import has_dtensor, refuse
from cudnn_sdpa.engine.tensor_checks import (
    check_are_tensors,
    check_present,
    check_tensor,
    dtype_name,
    shape_of,
)
from cudnn_sdpa.engine.torch_ops import SCHEMAS, Implementations, implement
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.graph.layouts import is_expanded
from cudnn_sdpa.graph.scalars import is_compiling, is_true
from cudnn_sdpa.plans.cache import CallTable
from cudnn_sdpa.plans.plan import Plan

#: The dtypes of quantized pages, and the largest number of each, to which values saturate.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def append_paged_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    page_layout: PageLayout,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes keys and values of new tokens into their slots of a paged cache, in place, by one kernel.

    The host reads no slot, so a captured CUDA graph can be replayed with others. Nothing but the slots is written.
    Pages may be those of any library, in any strides: K and V apart, side by side
    (`k_pages, v_pages = cache.split(head_dim, -1)`), or interleaved. Memory of any alignment works; 16 bytes are copied
    at a time where strides and addresses are multiples of that.

    Pages in FP8 get `value / scale`, rounded to the nearest number, ties to even; what is larger than the largest one
    (448 in E4M3, 57344 in E5M2) becomes that, and NaN stays NaN. The value of a stored number is its scale times that.

    Two tokens with one slot leave either in it. Tokens must not lie in the slots that are written.

    Args:
        k: Keys (T, Hkv, D), the last dimension dense: float16 or bfloat16, or the dtype of FP8 pages.
        v: Values (T, Hkv, Dv), in the dtype of k.
        k_pages: The pages of the keys, in the order of `page_layout`, of any page size: of the dtype of k, or in
            float8_e4m3fn or float8_e5m2.
        v_pages: The pages of the values, likewise, with Dv.
        slot_mapping: The slot of each token, `page * page_size + offset`, (T,) int64 or int32. Tokens of negative slots
            are skipped, as the padding of a captured graph is. Those of slots behind the last page are skipped on a
            GPU; on the CPU, and on a GPU if the environment variable `CUDNN_SDPA_DEBUG` is 1, they are refused.
        page_layout: "HND" for pages (P, Hkv, page_size, D), or "NHD" for pages (P, page_size, Hkv, D).
        k_scale: Of FP8 pages: one for all heads, () or (1,), or one for each, (Hkv,); float32. 1 if not given.
        v_scale: That of the values.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: Keys, values or scales require grad.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import append_paged_kv
        >>> cache = torch.zeros(4, 2, 16, 2 * 64, dtype=torch.bfloat16)  # pages of 16 tokens, K and V side by side
        >>> k, v = torch.randn(2, 3, 2, 64, dtype=torch.bfloat16)
        >>> slots = torch.tensor([2 * 16 + 15, 16, -1])  # the last of page 2, the first of page 1, none
        >>> append_paged_kv(k, v, *cache.split(64, -1), slots, page_layout="HND")
        >>> torch.equal(cache[2, :, 15, :64], k[0]), torch.equal(cache[1, :, 0, 64:], v[1])
        (True, True)
    """
    write_tokens(k, v, k_pages, v_pages, slot_mapping, None, None, None, k_scale, v_scale, page_layout, None)


class AppendCall(NamedTuple):
    """New keys and values and where they go, in the order in which the operator takes its arguments.

    Tokens are packed, (T, Hkv, D), with `slot_mapping`; or those of a step, (B, Hkv, `tokens`, D), whose slots follow
    from its tables and lengths.
    """

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slot_mapping: Tensor | None
    page_table: Tensor | None
    seq_lens_kv: Tensor | None
    seq_lens_q: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_layout: str
    tokens: int | None

    def tensors(self) -> dict[str, Tensor]:  # no property: Dynamo of PyTorch 2.9 reads none of a tuple that it has made
        given = zip(self._fields[:_TENSORS], self[:_TENSORS], strict=True)
        return {name: x for name, x in given if isinstance(x, Tensor)}

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1 if self.page_layout == NHD else 2]

    def in_heads_order(self) -> AppendCall:
        """The call with tokens (B, Hkv, tokens, D) and pages (pages, Hkv, page size, D), all of them views."""
        k, v = self.k, self.v
        if self.slot_mapping is not None:
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
        k_pages, v_pages = (in_heads_order(x, self.page_layout) for x in (self.k_pages, self.v_pages))
        return self._replace(k=k, v=v, k_pages=k_pages, v_pages=v_pages)


_TENSORS = AppendCall._fields.index("page_layout")
_calls = NativeCalls()
_table: CallTable[_Known] = CallTable()


def write_tokens(*given: Any) -> None:
    """Writes new keys and values to their slots, given the fields of an `AppendCall`, which nothing has checked."""
    may_be_known = not (is_compiling() or value_checks.enabled)
    if may_be_known and _calls.find is not None and _calls.find(*given) is not MISSED:
        count_write(given[2], given[3])
        return
    call = AppendCall._make(given)  # in compiled code, PyTorch 2.9 knows the properties of what this gives alone
    known = _find(call) if may_be_known else None
    if known is None:
        _append_checked(call)
        return
    known.run(call)
    if _calls.find is not None:
        pages = call.k_pages, call.v_pages
        _calls.register(given, {}, RepeatableCall(known.run.bound, known.run.tensors_of(call), (), written=pages))


def _find(call: AppendCall) -> _Known | None:
    """The launch of a known call, if nothing must intercept it."""
    try:
        tensors = [x for x in _tensors_of(call) if x is not None]
        if not can_be_recognized(tensors, lambda _: False) or needs_gradient(*tensors):
            return None
        return _table.get(_signature(call))
    except NOT_A_CALL:  # the checks name the wrong argument
        return None


def _signature(call: AppendCall) -> tuple[object, ...]:
    return (*map(layout_signature, _tensors_of(call)), *call[_TENSORS:])


def _tensors_of(call: AppendCall) -> Sequence[Tensor | None]:
    found: Any = call[:_TENSORS]
    return found  # type: ignore[no-any-return]


def count_write(k_pages: Tensor, v_pages: Tensor) -> None:
    """Tells autograd that the pages have changed."""
    increment_version([x for x in (k_pages, v_pages) if not x.is_inference()])


def _append_checked(call: AppendCall) -> None:
    call = checked(call)
    tensors = call.tensors().values()
    if is_compiling() or not can_bypass_dispatcher(*tensors, may_cast=False):
        torch.ops.cudnn_sdpa.append_paged_kv(*call)
    elif call.k.is_cuda:
        _append_on_gpu(call)
    elif call.k.is_cpu:
        _append_on_cpu(call)


def checked(call: AppendCall) -> AppendCall:
    """The call with tensors that are no negated views, checked."""
    check_page_layout(call.page_layout)
    required = 5 if call.tokens is None else 4
    check_are_tensors(dict(zip(call._fields[:_TENSORS], call[:_TENSORS], strict=True)), call._fields[required:_TENSORS])
    tensors, what = call.tensors().values(), "append_paged_kv" if call.tokens is None else "a PagedKVCache"
    if has_dtensor(*tensors):
        refuse(what, "each rank has pages of its own heads or sequences: give it the local tensors")
    refuse_tangents(call.tensors())
    refuse_transforms(what, *tensors, loops=False, functionalizes=False)
    if needs_gradient(*tensors):
        refuse_gradient(what)
    if not is_compiling() and any(x.is_neg() for x in tensors):
        for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
            if pages.is_neg():
                raise LayoutError(name, "a negated view", "memory that can be written", f"Use {name}.resolve_neg().")
        call = resolved(call)
    check(call)
    return call


class _Launch:
    """A launch of the kernel, for similar calls."""

    __slots__ = ("bound", "tensors_of")

    def __init__(self, call: AppendCall) -> None:
        self.bound = paging.bind_append(call.in_heads_order().tensors())
        self.tensors_of = items_by_name(self.bound.operands)

    def __call__(self, call: AppendCall) -> None:
        self.bound(self.tensors_of(call))
        count_write(call.k_pages, call.v_pages)


class _Known(NamedTuple):
    """The launch of a known call, as `CallTable` has it."""

    run: _Launch
    plan: Plan


def _append_on_gpu(call: AppendCall) -> None:
    if value_checks.enabled:
        check_values(call)
    if not call.k.numel() and not call.v.numel():
        return
    name = _signature(call)
    known = _table.get(name)
    if known is None:
        launch = _Launch(call)
        known = _Known(launch, launch.bound.plan)
        _table.add(name, known)
    known.run(call)


# Checks.


def check(call: AppendCall) -> None:
    """Checks that apply on every device. They read no address and no value, so fake tensors pass."""
    k, v, k_pages, v_pages = call[:4]
    shape, hint = PAGE_DIMENSIONS[call.page_layout], f"{call.page_layout!r} means {LAYOUTS[call.page_layout]}."
    unquantized = allowed_dtypes(k.device)
    if call.tokens is None:
        if k.dtype not in (allowed := (*unquantized, *FP8_DTYPES)):
            raise dtype_error("k", k.dtype, allowed, device=k.device, hint="Convert it with k.to(torch.bfloat16).")
        stored = (k.dtype,) if k.dtype in FP8_DTYPES else (k.dtype, *FP8_DTYPES)
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            check_tensor(name, pages, k, of="k", dtype=stored, shape=shape, hint="" if pages.dim() == 4 else hint)
            if is_true(pages.shape[0] == 0):
                raise ShapeError(name, shape_of(pages), "at least one page")
            if is_expanded(pages.shape, pages.stride()):
                raise LayoutError(name, f"strides {pages.stride()} that overlap", "a separate address for each element")
    to_k, to_v = (in_heads_order(x, call.page_layout) for x in (k_pages, v_pages))
    _check_alike(to_k, to_v)
    heads, tokens = to_k.shape[1], "tokens" if k.dim() != 3 else k.shape[0]
    for name, new, to in (("k", k, to_k), ("v", v, to_v)):
        dtype = k.dtype if name == "v" else (*unquantized, to.dtype) if to.dtype in FP8_DTYPES else to.dtype
        sizes: tuple[int | str, ...]
        if call.page_table is None or call.tokens is None:
            sizes, meaning = (tokens, heads, to.shape[3]), "(T, Hkv, head dim), as the pages have them"
        else:
            sizes, meaning = (call.page_table.shape[0], heads, call.tokens, to.shape[3]), "(B, Hkv, tokens, head dim)"
        check_tensor(name, new, to_k, of="the pages", dtype=dtype, shape=sizes, meaning=meaning, dense=True)
    if call.tokens is None:
        dtypes, meaning = (torch.int64, torch.int32), "a slot for each token"
        check_tensor(
            "slot_mapping", call.slot_mapping, k, of="k", dtype=dtypes, shape=(tokens,), meaning=meaning, dense=True
        )
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        check_scale(name, scale, heads, k, of="k")
        if scale is not None and k_pages.dtype == k.dtype:
            got = f"a scale for pages in {dtype_name(k_pages.dtype)}, the dtype of k"
            raise OptionError(name, got, "None, as nothing is quantized", "Scale the tokens yourself.")


def _check_alike(k: Tensor, v: Tensor) -> None:
    """The pages of keys and of values, in the order of heads, differ in no more than the head dim."""
    if v.dtype != k.dtype:
        raise DtypeError("v_pages", dtype_name(v.dtype), f"{dtype_name(k.dtype)}, the dtype of k_pages")
    for dim, what in enumerate(("pages", "heads", "tokens per page")):
        if is_true(v.shape[dim] != k.shape[dim]):
            raise ShapeError("v_pages", f"{v.shape[dim]} {what}", f"{k.shape[dim]}, as k_pages")
    if is_true(k.shape[2] == 0):
        raise ShapeError("k_pages", "pages of 0 tokens", "pages of at least one")


def check_values(call: AppendCall) -> None:
    if call.slot_mapping is not None:
        value_checks.check_slots("slot_mapping", call.slot_mapping, call.k_pages.shape[0] * call.page_size)


# Plain PyTorch.


def _append_on_cpu(call: AppendCall) -> None:
    for name, x in call.tensors().items():
        check_present(name, x)
    check_values(call)
    with torch.inference_mode():  # independent of the mode that the pages were made in
        _write(call.in_heads_order())


def _write(call: AppendCall) -> None:
    size = call.k_pages.shape[2]
    slots = _slots(call, size)
    is_there = (slots >= 0) & (slots < call.k_pages.shape[0] * size)
    slots = slots[is_there]
    of = (call.k, call.k_pages, call.k_scale), (call.v, call.v_pages, call.v_scale)
    for new, pages, scale in of:
        rows = as_bits(new.transpose(1, 2))[is_there].view(new.dtype)
        as_bits(pages)[slots // size, :, slots % size] = as_bits(stored(rows, pages.dtype, scale))


def _slots(call: AppendCall, size: int) -> Tensor:
    """The slot of each token, (B, tokens) int64; negative for those that are skipped."""
    if call.slot_mapping is not None:
        return call.slot_mapping.long().unsqueeze(0)
    assert call.page_table is not None
    assert call.seq_lens_q is not None
    assert call.seq_lens_kv is not None
    added = call.seq_lens_q.long().unsqueeze(1)
    token = torch.arange(call.k.shape[2], device=added.device)
    position = call.seq_lens_kv.long().unsqueeze(1) - added + token
    column, columns = position // size, call.page_table.shape[1]
    is_there = (token < added) & (position >= 0) & (column < columns)
    if not columns:
        return torch.full_like(position, -1)
    page = call.page_table.long().gather(1, column.clamp(0, columns - 1))
    return torch.where(is_there & (page >= 0), page * size + position % size, -1)


def stored(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Rows (tokens, Hkv, D) as pages of a dtype hold them: in FP8 divided by the scale, and saturated."""
    if rows.dtype == dtype:
        return rows
    values = rows.float()
    if scale is not None:
        values = values / scale.view(-1, 1)
    return values.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)


# The operator.


def _on_gpu(*given: Any) -> None:
    call = AppendCall(*given)
    check(call)
    _append_on_gpu(call)


def _on_cpu(*given: Any) -> None:
    call = AppendCall(*given)
    check(call)
    _append_on_cpu(call)
    count_write(call.k_pages, call.v_pages)


def _on_fake_tensors(*given: Any) -> None:
    check(AppendCall(*given))


(_schema,) = SCHEMAS[__name__]
implement(
    "append_paged_kv",
    _schema,
    Implementations(cuda=_on_gpu, cpu=_on_cpu, fake=_on_fake_tensors, flops=lambda *_, **__: 0),
)
