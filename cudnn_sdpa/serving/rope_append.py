"""`rope_append_paged_kv`: rotated queries, and rotated keys and values in the pages of a cache, by one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.paged import append
from cudnn_sdpa.attention.paged.append import AppendCall, count_write, write_tokens
from cudnn_sdpa.attention.paged.arguments import PageLayout
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.dispatch_state import (
    can_be_recognized,
    can_bypass_dispatcher,
    has_subclass,
    is_batch,
    needs_gradient,
)
from cudnn_sdpa.engine.launch import (
    NOT_A_CALL,
    BoundPlan,
    LaunchExtras,
    Layout,
    items_by_name,
    layout_signature,
    new_tensor,
)
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.checks import checked_flag
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.rotary.rope import completed, operands_of
from cudnn_sdpa.fused.rotary.rope_graphs import as_heads, rope_rows
from cudnn_sdpa.fused.rotary.rope_kernels import own_rope_append
from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.graph.layouts import EXPONENT_BITS, TensorLayout, dense_stride_like
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans.cache import CallTable, build_plan, plan_cache
from cudnn_sdpa.plans.manifest import recorded_as
from cudnn_sdpa.plans.plan import Plan


def rope_append_paged_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    *,
    page_layout: PageLayout,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`rope` of queries and keys, whose keys go with the values straight into a paged cache. For inference.

    One kernel instead of two reads each head once. It needs one head dim, and heads, and pages in q's dtype, that begin
    at multiples of 16 bytes; elsewhere (another head dim of values, under `torch.compile`) `rope` and `append_paged_kv`
    run one after the other, with the same results: keys for FP8 pages are rounded to q's dtype before they are divided
    by their scale. The host reads no slot, so a captured CUDA graph can be replayed with others.

    Args:
        q: (T, Hq, D), as for `rope`.
        k: (T, Hkv, D).
        v: (T, Hkv, D), the last dimension dense.
        cos: Cosines of the positions, (T, n), as for `rope`.
        sin: The sines.
        k_pages: The pages of the keys, as for `append_paged_kv`.
        v_pages: The pages of the values.
        slot_mapping: The slot of each token, (T,) int64 or int32; keys and values of tokens with a negative one, or one
            behind the last page, are not written.
        page_layout: "HND" for pages (P, Hkv, page_size, D), or "NHD" for pages (P, page_size, Hkv, D).
        q_weight: (D,), in q's dtype or float32; None: the queries are not normalized.
        k_weight: (D,), likewise; None: the keys are not normalized.
        eps: As for `rope`.
        zero_centered: As for `rope`.
        interleaved: As for `rope`.
        k_scale: Of FP8 pages, as for `append_paged_kv`.
        v_scale: That of the values.

    Returns:
        The rotated queries, dense in the memory order of q, features innermost.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: A tensor requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cache = torch.zeros(2, 4, 16, 2, 64).bfloat16()  # K and V, 4 pages of 16 tokens, 2 heads
        >>> q, k, v = torch.randn(3, 8, 64).bfloat16().split([4, 2, 2], 1)
        >>> cos, sin = cudnn_sdpa.nn.RotaryEmbedding(64)(torch.tensor([5, 0, 1]))
        >>> slots = torch.tensor([2 * 16 + 5, 16, 17])
        >>> out = cudnn_sdpa.rope_append_paged_kv(q, k, v, cos, sin, *cache, slots, page_layout="NHD")
        >>> torch.equal(cache[0, 2, 5], cudnn_sdpa.rope(q, k, cos, sin)[1][0]), torch.equal(cache[1, 1, 1], v[2])
        (True, True)
    """
    if interleaved is not False:
        interleaved = checked_flag("interleaved", interleaved)
    rotation: Any = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "zero_centered": zero_centered}
    operands = completed(operands_of(q, k, cos, sin, **rotation))
    pages = k_pages, v_pages, slot_mapping, None, None, None, k_scale, v_scale
    return rotate_and_append(*operands, v, *pages, page_layout, None, interleaved)


def rope_append(step: PagedStep, layer: int, v: Tensor, *, interleaved: bool, **rotation: Any) -> Tensor:
    """Rotated queries of a step, (B, Hq, tokens, D); appends its keys, rotated likewise, and its values."""
    cache: Any = step.cache()
    no_norms = {"q_weight": None, "k_weight": None, "eps": 0.0, "zero_centered": False}
    operands = completed(operands_of(**no_norms | rotation))
    out = rotate_and_append(*operands, v, *cache._places_of(step, layer), interleaved)
    step.written.add(layer)
    return out


class RopeAppendCall(NamedTuple):
    """The operands of a rotation, and what an `AppendCall` has besides keys and scales.

    Tokens are packed, (T, H, D), with `slot_mapping`; or those of a step, (B, H, `tokens`, D), whose slots follow from
    its tables and lengths.
    """

    q: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float | None
    shift: float | None
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slot_mapping: Tensor | None
    page_table: Tensor | None
    seq_lens_kv: Tensor | None
    seq_lens_q: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_layout: PageLayout
    tokens: int | None
    interleaved: bool

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in zip(self._fields, self, strict=True) if isinstance(x, Tensor)}

    @property
    def numbers(self) -> dict[str, float]:
        return {name: x for name, x in (("eps", self.eps), ("shift", self.shift)) if x is not None}

    @property
    def of_rotation(self) -> tuple[Value, ...]:
        operands: Any = self[:_OF_ROTATION]
        return operands  # type: ignore[no-any-return]

    def append_of(self, k: Tensor) -> AppendCall:
        return AppendCall(**{name: getattr(self, name) for name in AppendCall._fields} | {"k": k})


_OF_ROTATION = RopeAppendCall._fields.index("v")
_TENSORS = RopeAppendCall._fields.index("page_layout")
_calls = NativeCalls(numbers=_OF_ROTATION)
_table: CallTable[_Known] = CallTable()


def rotate_and_append(*given: Any) -> Tensor:
    """Rotated queries, given the fields of a `RopeAppendCall`, of which nothing but eps is checked."""
    call = RopeAppendCall._make(given)
    may_be_known = not (is_compiling() or value_checks.enabled)
    if may_be_known and _calls.find is not None and (found := _calls.find(*given)) is not MISSED:
        count_write(call.k_pages, call.v_pages)
        return found  # type: ignore[no-any-return]
    known = _find(call) if may_be_known else None
    if known is None:
        return _first(call)
    out = known.run(call)
    if _calls.find is not None:
        bound, pages = known.run.bound, (call.k_pages, call.v_pages)
        repeatable = RepeatableCall(bound, known.run.tensors_of(call), (0,), single_output=True, written=pages)
        _calls.register(given, {}, repeatable)
    return out


def _find(call: RopeAppendCall) -> _Known | None:
    """The launch of a known call, if nothing must intercept it."""
    try:
        tensors = list(call.tensors.values())
        if not can_be_recognized(tensors, lambda _: False) or needs_gradient(*tensors):
            return None
        return _table.get(_signature(call))
    except NOT_A_CALL:  # the checks name the wrong argument
        return None


def _signature(call: RopeAppendCall) -> tuple[object, ...]:
    layouts = [layout_signature(x) if isinstance(x, Tensor) else type(x) for x in call[:_TENSORS]]
    return (*layouts, *call[_TENSORS:])


def _first(call: RopeAppendCall) -> Tensor:
    of_rotation, options = rope_rows.arguments(call.of_rotation, {"interleaved": call.interleaved})
    if requiring := [name for name, x in call.tensors.items() if needs_gradient(x)]:
        reasons = [f"{requiring[0]} requires grad, and a cache stores values without their autograd history"]
        what = "rope_append_paged_kv" if call.tokens is None else "a PagedKVCache"
        raise UnsupportedError(f"{what} with a gradient", reasons, "calling it under torch.no_grad()")
    appended = append.checked(call.append_of(call.k))
    if is_compiling() or not _is_fused(call):
        return _by_two_operations(of_rotation, options, appended)
    tensors = list(call.tensors.values())
    if not (all(x.is_cuda for x in tensors) and can_bypass_dispatcher(*tensors, may_cast=False)):
        with recorded_as(lambda target: _key(call, target, None), tensors):
            return _by_two_operations(of_rotation, options, appended)
    if value_checks.enabled:
        append.check_values(appended)
    launch = _Launch(call)
    _table.add(_signature(call), _Known(launch, launch.bound.plan))
    return launch(call)


def _is_fused(call: RopeAppendCall) -> bool:
    """Whether the kernel serves a call on a GPU that the checks have let pass."""
    tensors = list(call.tensors.values())
    heads = call.q, call.k, call.v, call.k_pages, call.v_pages
    return (
        not has_subclass(*tensors)
        and all(x.numel() and not x.is_neg() and not is_batch(x) for x in tensors)
        and call.k_pages.dtype in (call.q.dtype, *EXPONENT_BITS)
        and call.v.shape[-1] == call.q.shape[-1]
        and all(x.stride(-1) == 1 for x in heads)
        and all(x is None or x.is_contiguous() for x in (call.cos, call.sin, call.q_weight, call.k_weight))
        and (call.page_table is None or call.page_table.stride(1) == 1)
    )


def _by_two_operations(of_rotation: tuple[Value, ...], options: Options, appended: AppendCall) -> Tensor:
    out: Tensor
    out, k = rope_rows.run(of_rotation, options)
    write_tokens(*appended._replace(k=k))
    return out


def _layout_of_result(q: Tensor) -> Layout:
    return tuple(q.shape), dense_stride_like(q.shape, q.shape, q.stride()), q.dtype


def _key(call: RopeAppendCall, target: Target, device: int | None) -> PlanKey:
    out = new_tensor(_layout_of_result(call.q), "meta")
    rotation, results, options = as_heads(call.of_rotation, [out], {"interleaved": call.interleaved})
    named = dict(zip(call._fields, rotation, strict=False)) | call.append_of(call.k).in_heads_order().tensors()
    layout = TensorLayout.of
    return own.key_of(own_rope_append, named, results, options, target=target, device=device, layout=layout)


class _Launch:
    """A launch of the kernel, for similar calls."""

    __slots__ = ("bound", "tensors_of")

    def __init__(self, call: RopeAppendCall) -> None:
        device = call.q.get_device()
        with torch.cuda.device(device):
            key = _key(call, live_target(device), device)
            plan = plan_cache.get(key, partial(build_plan, own_rope_append))
        names = [x.name for x in key.inputs if x.role is Role.TENSOR]
        read_by_element = ("slot_mapping", "page_table", "seq_lens_kv", "seq_lens_q", "k_scale", "v_scale")
        in_fp8 = ("k_pages", "v_pages") if call.k_pages.dtype in EXPONENT_BITS else ()
        extras = LaunchExtras(unaligned_ok=read_by_element + in_fp8)
        self.bound = BoundPlan(plan, names, results=[_layout_of_result(call.q)], numbers=call.numbers, extras=extras)
        self.tensors_of = items_by_name(names)

    def __call__(self, call: RopeAppendCall) -> Tensor:
        (out,) = self.bound(self.tensors_of(call), numbers=tuple(call.numbers.values()))
        count_write(call.k_pages, call.v_pages)
        return out


class _Known(NamedTuple):
    """The launch of a known call, as `CallTable` has it."""

    run: _Launch
    plan: Plan
