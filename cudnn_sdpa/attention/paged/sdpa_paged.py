"""Attention on a paged cache: `sdpa_paged`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from cudnn_sdpa.attention import arguments, memory, value_checks
from cudnn_sdpa.attention.arguments import Result, kind_of
from cudnn_sdpa.attention.paged import arguments as paged_arguments
from cudnn_sdpa.attention.paged import launch, torch_ops
from cudnn_sdpa.attention.paged.arguments import HND, PagedArguments, in_heads_order
from cudnn_sdpa.attention.paged.launch import MARK, PagedCall
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import cast_tensor
from cudnn_sdpa.engine.dispatch_state import (
    Guard,
    can_bypass_dispatcher,
    is_deterministic,
    is_profiling,
    needs_gradient,
    tensor_guard,
)
from cudnn_sdpa.engine.fallback import or_else
from cudnn_sdpa.engine.memory import MISALIGNED
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling


class CachedCall:
    """The most recent decode call: single queries, no mask but the causal one."""

    __slots__ = (
        "alignment",
        "deterministic",
        "is_causal",
        "is_like",
        "layout",
        "mark",
        "prepared",
        "scale",
        "scale_type",
        "with_lse",
    )

    def __init__(self, call: PagedArguments, layout: str, prepared: PagedCall, is_like: Guard) -> None:
        self.layout = layout
        self.mark = launch.mark_of(call)
        self.prepared = prepared
        self.deterministic = prepared.decode.deterministic
        self.is_like = is_like
        self.is_causal, self.alignment = call.is_causal, call.causal_alignment
        self.scale, self.scale_type = call.scale, type(call.scale)
        self.with_lse = call.with_lse


class CachedCalls(NamedTuple):
    """The most recent decode calls.

    Attributes:
        own: The one on tables and lengths of a `PagedKVCache`.
        foreign: The one on other tables and lengths.
    """

    own: CachedCall | None
    foreign: CachedCall | None


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    page_layout: str = ...,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    page_layout: str = ...,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    page_layout: str = ...,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
    out: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    page_layout: str = HND,
    is_causal: bool = True,
    causal_alignment: str = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries on a paged KV cache. For inference only: it has no gradients.

    Key j of sequence b is in slot `j % page_size` of page `page_table[b, j // page_size]`. Lengths and tables are data
    on the GPU: the host never reads them, and new values never build a plan. Options shared with `sdpa` mean the same
    here.

    cuDNN's decode kernels, which read the pages directly, serve up to 8 queries per sequence. Two runs may differ in
    the last bit unless `torch.use_deterministic_algorithms` is on, which is slower on long sequences. For more queries,
    with logit soft-capping, and for several queries under windows that are not causal or are aligned top-left, one
    kernel first gathers keys and values into contiguous memory: up to 1 GiB at a time, at least one sequence. Batch
    sizes are rounded up to 2^n or 3·2^n, so that a server whose batch changes in every step needs about a dozen plans.

    Tables and lengths of a `PagedKVCache` are read in place. All others are copied by one small kernel that clamps
    lengths to the table and page ids to the cache: invalid values give wrong results, but no GPU error and no
    out-of-bounds read. They are checked on the CPU, and on GPUs if the environment variable `CUDNN_SDPA_DEBUG` is 1.

    Args:
        q: Queries (B, Hq, Sq, D), float16 or bfloat16: those of the newest tokens. Under `torch.autocast` they are
            cast if autocast's dtype is that of the pages.
        k_pages: Keys (P, Hkv, page_size, D), or with "NHD" (P, page_size, Hkv, D). The page size is a power of two.
        v_pages: Values, likewise, with Dv.
        page_table: Page ids of each sequence, (B, max_pages) int32, in order. Entries past a sequence's last page are
            ignored. Rows may have any stride.
        seq_lens_kv: Number of keys of each sequence, those of the new queries included, (B,) int32. May be 0.
        page_table_v: The page table of the values, if it differs.
        seq_lens_q: How many of the Sq queries each sequence has, (B,) int32; the other rows of its output are zeros.
        page_layout: "HND" or "NHD".
        is_causal: Hide later keys from each query.
        causal_alignment: "bottom_right" aligns the last query with the last key, "top_left" the first with the first.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores; None is 1/sqrt(D).
        softcap: Logit soft-capping: scores become softcap · tanh(score / softcap).
        sinks: Attention sinks (Hq,) float32.
        return_lse: Also return the log-sum-exp of the scores.
        out: Buffer for the result, (B, Hq, Sq, Dv); it must not overlap an input.

    Returns:
        The output (B, Hq, Sq, Dv) in q's memory order. With `return_lse` also the log-sum-exp (B, Hq, Sq) float32. For
        a query that sees no key the output is zeros, and the log-sum-exp is minus infinity or the sink.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: An input requires a gradient, or cuDNN or this GPU has no kernel for it.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> k_pages = v_pages = torch.randn(8, 2, 16, 64)  # 8 pages of 16 tokens, 2 heads of 64
        >>> table = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 9], dtype=torch.int32)
        >>> cudnn_sdpa.sdpa_paged(torch.randn(2, 8, 1, 64), k_pages, v_pages, table, lengths).shape
        torch.Size([2, 8, 1, 64])

    Paged KV caches come from vLLM ("Efficient Memory Management for Large Language Model Serving with PagedAttention",
    Kwon et al., 2023).
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_paged")
    if not is_compiling() and (
        page_table_v is seq_lens_q is window_size is softcap is sinks is out is None  # type: ignore[comparison-overlap]
    ):
        # Is it like the most recent call? Then checks and signature are skipped, which saves 50 µs.
        recent: CachedCalls | None = launch.calls.last
        try:
            mark = getattr(page_table, MARK, None)
            trusted = mark is not None and getattr(seq_lens_kv, MARK, None) == mark
            last = None if recent is None else recent.own if trusted else recent.foreign
            is_like_last = (
                last is not None
                and (not trusted or last.mark == mark)
                and last.layout == page_layout
                and last.is_causal is is_causal
                and last.alignment == causal_alignment
                and (last.scale is scale or (last.scale_type is type(scale) and last.scale == scale))
                and last.with_lse is return_lse
                and last.deterministic is is_deterministic()
                and not (
                    q.is_nested or k_pages.is_nested or v_pages.is_nested
                )  # the guard aborts the process on nested tensors
                and not (page_table.is_nested or seq_lens_kv.is_nested or value_checks.enabled)
                and last.is_like(q, k_pages, v_pages, page_table, seq_lens_kv)
                and not is_profiling()
                and forward_ad._current_level < 0
            )
        except (AttributeError, TypeError):  # not tensors: the checks report it
            last, is_like_last = None, False
        if is_like_last and last is not None:
            q_address, k_address, v_address = q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr()
            table, lengths = page_table.data_ptr(), seq_lens_kv.data_ptr()
            is_aligned = not (q_address | k_address | v_address) & MISALIGNED
            if is_aligned and q_address and k_address and v_address and table and lengths:
                outputs = last.prepared.run_plain(
                    q=q_address, k=k_address, v=v_address, table=table, seq_lens_kv=lengths
                )
                return (outputs[0], outputs[1]) if return_lse else outputs[0]
    left, right = arguments.window_bounds(window_size)
    k, v = in_heads_order(k_pages, page_layout), in_heads_order(v_pages, page_layout)
    table_v = page_table if page_table_v is None else page_table_v
    call = PagedArguments._make(  # in the order of the fields: names would cost a warm call 0.5 µs
        (
            *(q, k, v, page_table, table_v, seq_lens_kv, seq_lens_q, sinks),
            *(is_causal, causal_alignment, left, right, scale, softcap, return_lse, out),
        )
    )
    return _run(call, (k_pages, v_pages, page_layout))


def _run(call: PagedArguments, pages: tuple[Tensor, Tensor, str]) -> Result:
    """Runs an unchecked call, without checks and dispatcher if there has been one like it.

    Args:
        call: The call.
        pages: Its keys, values and their layout as the caller passed them.
    """
    if not is_compiling() and not value_checks.enabled and isinstance(call.q, Tensor) and call.q.is_cuda:
        known = _find(call)
        if known is not None:
            if isinstance(known, PagedCall):
                _remember(call, known, pages)
            return known(call)
    call = _cast_for_autocast(call)
    if not is_compiling():  # a compiled graph is checked when it is traced and when it runs
        paged_arguments.check(call)
    refuse_gradients(call)
    return or_else(lambda: _dispatch(call), lambda: torch_ops.forward_cpu(call), lambda: kind_of(call))


def _cast_for_autocast(call: PagedArguments) -> PagedArguments:
    """The call with its queries cast to autocast's dtype, if that is the dtype of the pages."""
    cast = cast_tensor(call.q, call.q) if isinstance(call.q, Tensor) and isinstance(call.k, Tensor) else call.q
    return call if cast is call.q or cast.dtype != call.k.dtype else call._replace(q=cast)


def _dispatch(call: PagedArguments) -> Result:
    """Runs a checked call, through PyTorch's dispatcher where it is needed."""
    if not is_compiling() and call.q.is_cuda and can_bypass_dispatcher(*call.tensors):
        return torch_ops.forward_cuda(call)
    operator, inputs = torch.ops.cudnn_sdpa, (*call.inputs, *call.options)
    if call.out is not None:
        lse = operator.paged_forward_out(*inputs, call.out)
        return (call.out, lse) if call.with_lse else call.out
    forward = operator.paged_forward_lse if call.with_lse else operator.paged_forward
    result: Result = forward(*inputs)
    return result


def _find(call: PagedArguments) -> Callable[[PagedArguments], Result] | None:
    """The bound call for an unchecked call, if one like it has run and it may skip the dispatcher."""
    try:
        tensors = call.tensors
        if not can_bypass_dispatcher(*tensors) or needs_gradient(*tensors):
            return None
        prepared = launch.known(call)
        if prepared is not None:
            memory.check_memory(call.q, call.k, call.v, call.out)
            others = (call.table_k, call.table_v, call.seq_lens_kv, call.seq_lens_q, call.sinks)
            if any(tensor is not None and tensor.data_ptr() == 0 for tensor in others):
                return None
    except (AttributeError, IndexError, TypeError, RuntimeError, ValueError):  # the checks report what is wrong
        return None
    return prepared


def _remember(call: PagedArguments, prepared: PagedCall, pages: tuple[Tensor, Tensor, str]) -> None:
    """Caches a call, so that the guard recognizes the next one like it."""
    k_pages, v_pages, layout = pages
    guarded = (call.q, k_pages, v_pages, call.table_k, call.seq_lens_kv)
    if not (
        call.q.shape[2] == 1
        and call.seq_lens_q is None
        and call.table_v is call.table_k
        and call.sinks is call.out is None
        and len({id(tensor) for tensor in guarded}) == len(guarded)  # a guard takes no tensor twice
        and not any(tensor.requires_grad for tensor in guarded)
        and call.window_left == call.window_right == -1
        and launch.has_memory_order_of_q(call)
    ):
        return
    last = CachedCall(call, layout, prepared, tensor_guard(*guarded))
    recent: CachedCalls | None = launch.calls.last
    own, foreign = (None, None) if recent is None else recent
    own, foreign = (last, foreign) if last.mark is not None else (own, last)
    launch.calls.remember_last(CachedCalls(own, foreign), prepared.plan)
    if not all(other is None or other.prepared.plan.held for other in (own, foreign)):
        launch.calls.last = None  # keep no plan that was evicted meanwhile


def refuse_gradients(call: PagedArguments) -> None:
    """Raises if a gradient would be lost: paged calls are for inference.

    Raises:
        UnsupportedError: An input requires grad.
    """
    autograd_checks.check("sdpa_paged", call.out, q=call.q, k_pages=call.k, v_pages=call.v, sinks=call.sinks)
    if needs_gradient(call.q, call.k, call.v, call.sinks):
        raise UnsupportedError(
            "sdpa_paged with a gradient",
            ["an input requires grad, and attention on a paged cache is for inference only"],
            "calling it under torch.no_grad(), or sdpa_varlen for training",
        )
