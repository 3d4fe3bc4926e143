"""Attention on a paged cache: `sdpa_paged`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import SoftmaxOptions, softmax_of
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.paged.arguments import PageLayout
from cudnn_sdpa.attention.paged.call import PagedCall, ReferencePagedCall
from cudnn_sdpa.attention.paged.step import MARK
from cudnn_sdpa.attention.sink_scores import as_sinks
from cudnn_sdpa.engine import autograd_checks, value_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.graph.scalars import as_bool, is_compiling

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedOptions(SoftmaxOptions, total=False):
    """The options of `sdpa_paged` but `page_layout` and `return_lse`."""

    page_table_v: Tensor | None
    seq_lens_q: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor | None


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_layout: PageLayout,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedOptions],
) -> Tensor: ...


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_layout: PageLayout,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_layout: PageLayout,
    return_lse: bool,
    **options: Unpack[PagedOptions],
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
    page_layout: PageLayout | None = None,
    is_causal: bool = True,
    causal_alignment: Alignment = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries on a paged KV cache. For inference only: it has no gradients.

    Key j of sequence b is in slot `j % page_size` of page `page_table[b, j // page_size]`. Lengths and tables are data
    on the GPU: the host never reads them, and new values never build a plan. Options shared with `sdpa` mean the same
    here.

    Where it was measured to be faster, the kernel of `sdpa_paged_varlen` serves the call: on Hopper nearly everywhere,
    for head dims of 64, 128, 192/128 and 256. `explain` shows the measurement. Other calls are cuDNN's: its decode
    kernels, which read the pages directly, serve up to 8 queries per sequence. Two of their runs may differ in the last
    bit unless `torch.use_deterministic_algorithms` is on, which is slower on long sequences. For more queries, with
    logit soft-capping, and for several queries under windows that are not causal or are aligned top-left, one kernel
    first gathers keys and values into contiguous memory: up to 1 GiB at a time, at least one sequence. Batch sizes are
    rounded up to 2^n or 3·2^n, so that a server whose batch changes in every step needs about a dozen plans.

    cuDNN reads tables and lengths of a `PagedKVCache` in place. All others are copied by one small kernel that clamps
    lengths to the table and page ids to the cache; to the kernel of `sdpa_paged_varlen`, pages beyond the cache are
    zeros. So invalid values give wrong results, but no GPU error and no out-of-bounds read. They are checked on the
    CPU, and on GPUs if the environment variable `CUDNN_SDPA_DEBUG` is 1.

    Args:
        q: Queries (B, Hq, Sq, D), float16 or bfloat16: those of the newest tokens. Under `torch.autocast` they are
            cast if autocast's dtype is that of the pages, or these are in FP8.
        k_pages: Keys, in the order of `page_layout`, in q's dtype, float8_e4m3fn or float8_e5m2.
        v_pages: Values, likewise, in the dtype of the keys, with Dv.
        page_table: Page ids of each sequence, (B, max_pages) int32, in order. Entries past a sequence's last page are
            ignored. Rows may have any stride.
        seq_lens_kv: Number of keys of each sequence, those of the new queries included, (B,) int32. May be 0.
        page_table_v: The page table of the values, if it differs.
        seq_lens_q: How many of the Sq queries each sequence has, (B,) int32; the other rows of its output are zeros.
        page_layout: "HND" for pages (P, Hkv, page_size, D), as in cuDNN, TensorRT-LLM and, by default, `PagedKVCache`;
            "NHD" for (P, page_size, Hkv, D), as in FlashAttention and, by default, FlashInfer and vLLM. Required: the
            wrong one may fit the sizes, and gives wrong results.
        is_causal: Hide later keys from each query.
        causal_alignment: "bottom_right" aligns the last query with the last key, "top_left" the first with the first.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores; None is 1/sqrt(D).
        softcap: Logit soft-capping: scores become softcap · tanh(score / softcap).
        sinks: Attention sinks (Hq,) float32.
        k_scale: What the stored numbers of keys in FP8 are multiplied by, float32: one number, () or (1,), or one for
            each head, (Hkv,). None is 1.
        v_scale: The same of values.
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
        >>> k_pages = v_pages = torch.randn(8, 2, 16, 64, dtype=torch.bfloat16)  # 8 pages of 16 tokens, 2 heads of 64
        >>> table = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 9], dtype=torch.int32)
        >>> q = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16)
        >>> cudnn_sdpa.sdpa_paged(q, k_pages, v_pages, table, lengths, page_layout="HND").shape
        torch.Size([2, 8, 1, 64])

    Paged KV caches come from vLLM ("Efficient Memory Management for Large Language Model Serving with PagedAttention",
    Kwon et al., 2023).
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_paged")
    given = (
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens_kv,
        page_table_v,
        seq_lens_q,
        page_layout,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        softcap,
        sinks,
        k_scale,
        v_scale,
        return_lse,
        out,
    )
    if not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    call = call_of(*given)
    result: Tensor | tuple[Tensor, Tensor] = PAGED(call, NativeKey(_calls, given))
    return result


def call_of(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    page_table_v: Tensor | None,
    seq_lens_q: Tensor | None,
    page_layout: PageLayout | None,
    is_causal: bool,
    causal_alignment: Alignment,
    window_size: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
) -> PagedCall:
    """The call that arguments of `sdpa_paged` make; they have not been checked."""
    return PagedCall(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        page_table_v=None if page_table_v is page_table else page_table_v,
        seq_lens_kv=seq_lens_kv,
        seq_lens_q=seq_lens_q,
        sinks=None if sinks is None else as_sinks(sinks),
        k_scale=k_scale,
        v_scale=v_scale,
        page_layout=page_layout,  # type: ignore[arg-type]  # None is refused by the check of types
        softmax=softmax_of(is_causal, causal_alignment, window_size, scale, softcap=softcap),
        with_lse=return_lse if type(return_lse) is bool else as_bool(return_lse),
        out=out,
    )


#: A cache's mark on its table and its lengths decides whether both are read in place.
_calls = NativeCalls(with_extra_key=(3, 4), extra_key=MARK)

PAGED = Operation(name="paged", function="sdpa_paged", call=PagedCall, reference_call=ReferencePagedCall)
