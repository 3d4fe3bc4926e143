"""Attention of packed queries on a paged cache: `sdpa_paged_varlen`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import SoftmaxOptions, softmax_of
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.paged.arguments import PageLayout
from cudnn_sdpa.attention.paged_varlen.call import PagedVarlenCall, ReferencePagedVarlenCall
from cudnn_sdpa.attention.sink_scores import as_sinks
from cudnn_sdpa.engine import autograd_checks, value_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.graph.scalars import as_bool, as_int, is_compiling

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedVarlenOptions(SoftmaxOptions, total=False):
    """The options of `sdpa_paged_varlen` but `page_layout` and `return_lse`."""

    page_table_v: Tensor | None
    tree_mask: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    batch_invariant: bool
    out: Tensor | None


@overload
def sdpa_paged_varlen(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    page_layout: PageLayout,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedVarlenOptions],
) -> Tensor: ...


@overload
def sdpa_paged_varlen(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    page_layout: PageLayout,
    return_lse: Literal[True],
    **options: Unpack[PagedVarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa_paged_varlen(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    page_layout: PageLayout,
    return_lse: bool,
    **options: Unpack[PagedVarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def sdpa_paged_varlen(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    page_layout: PageLayout | None = None,
    page_table_v: Tensor | None = None,
    is_causal: bool = True,
    causal_alignment: Alignment = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed new tokens on a paged KV cache. For inference only: it has no gradients.

    One launch serves any mixture of decodes, drafts and chunks of prompts: each sequence has as many new tokens as
    `cu_seqlens_q` says, 0 included, and their keys are in the cache. Key j of sequence b is in slot `j % page_size` of
    page `page_table[b, j // page_size]`. Tables, lengths and offsets are data on the GPU: the host never reads them,
    and new values never build a plan. Options shared with `sdpa_paged` mean the same here.

    A kernel of this library's own reads pages where they are: of any size, in any memory order with dense head vectors
    at multiples of 16 bytes, keys and values apart, side by side or interleaved. A tile of it holds the new tokens of a
    sequence and the query heads that share a key head, so a few tokens read the keys once; the keys of long sequences
    are divided among blocks. It needs compute capability 8.0, and 8.9 for pages in FP8. Results are the same from run
    to run. In multi-head latent attention, with head dims of 576 and 512, `v_pages` may be `k_pages[..., :512]`: each
    key is then read once. That needs a GPU with 110 KB of shared memory for a block, those of data centers. No slot
    that belongs to no sequence is used, nor one left of the windows of all new tokens of its sequence: they may hold
    NaN, and page ids there may be -1. `providers("fa4", "own")` has FlashAttention-4 serve calls on Hopper, if it is
    installed, but for what it lacks: it is for chunks of prompts.

    On the GPU, lengths beyond the table and offsets beyond the tokens are clamped, and pages beyond the cache count as
    zeros, or as other pages under "fa4": wrong values give wrong results, but no GPU error and no out-of-bounds read.
    They are checked on the CPU, and on GPUs if the environment variable `CUDNN_SDPA_DEBUG` is 1.

    Args:
        q: Queries (T, Hq, D) of the new tokens, one sequence after the other, float16 or bfloat16. D is a multiple of
            8, at most 256, or 576 with Dv of 512. Under `torch.autocast` they are cast if autocast's dtype is that of
            the pages, or these are in FP8.
        k_pages: Keys, in the order of `page_layout`, in q's dtype, float8_e4m3fn or float8_e5m2. Those of the new
            tokens are there, too.
        v_pages: Values, likewise, in the dtype of the keys, with Dv. They may be a part of `k_pages`.
        page_table: Page ids of each sequence, (B, max_pages) int32, in order. Entries past a sequence's last page are
            ignored. Rows may have any stride.
        seq_lens_kv: Number of keys of each sequence, those of its new tokens included, (B,) int32. May be 0.
        cu_seqlens_q: Where the new tokens of each sequence begin, and at last where they end, (B + 1,) int32. Tokens
            before the first offset and behind the last, as in the padding of a captured graph, get zeros.
        max_seqlen_q: Number of new tokens of the longest sequence, or more. No tensor, which would have to be read
            back.
        page_layout: "HND" for pages (P, Hkv, page_size, D), "NHD" for (P, page_size, Hkv, D). Required: the wrong one
            may fit the sizes, and gives wrong results.
        page_table_v: The page table of the values, if it differs.
        is_causal: Hide later keys from each query.
        causal_alignment: "bottom_right" aligns the last new token of a sequence with its last key, "top_left" the first
            with the first.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores; None is 1/sqrt(D).
        softcap: Logit soft-capping: scores become softcap · tanh(score / softcap).
        sinks: Attention sinks (Hq,), one score for each query head without a value. float32; half precision is
            converted.
        tree_mask: Whether token t sees the j-th new token of its own sequence, (T, n) bool with n of at least
            `max_seqlen_q`, for drafts that branch. It replaces the causal mask among the new tokens; all keys before
            them are seen. Not with a window.
        k_scale: What the stored numbers of keys in FP8 are multiplied by, float32: one number, () or (1,), or one for
            each head, (Hkv,). None is 1.
        v_scale: The same of values.
        batch_invariant: Compute each sequence in the same order of operations whatever the others of the batch are, so
            that its results are the same to the last bit, in page tables of one width. May be slower where few
            sequences are long.
        return_lse: Also return the log-sum-exp of the scores, for `merge_states`.
        out: Buffer for the result, (T, Hq, Dv), in which the kernel writes; it must not overlap an input.

    Returns:
        The output (T, Hq, Dv) in q's dtype and memory order. With `return_lse` also the log-sum-exp (T, Hq) float32,
        natural logarithm. For a token that sees no key the output is zeros, and the log-sum-exp is minus infinity or
        the sink; for a token of no sequence it is minus infinity.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: An input requires a gradient, or this GPU has no kernel for it.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        A decode of one token, a draft of three, and a prompt of nine, on pages of 16 tokens:

        >>> import torch, cudnn_sdpa
        >>> k_pages = v_pages = torch.randn(8, 16, 2, 64, dtype=torch.bfloat16)  # 8 pages, 2 heads of 64
        >>> table = torch.tensor([[5, 2], [7, 0], [3, 1]], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 12, 9], dtype=torch.int32)
        >>> ends = torch.tensor([0, 1, 4, 13], dtype=torch.int32)
        >>> q = torch.randn(13, 8, 64, dtype=torch.bfloat16)
        >>> cudnn_sdpa.sdpa_paged_varlen(q, k_pages, v_pages, table, lengths, ends, 9, page_layout="NHD").shape
        torch.Size([13, 8, 64])
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_paged_varlen")
    given = (
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens_kv,
        cu_seqlens_q,
        max_seqlen_q,
        page_layout,
        page_table_v,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        softcap,
        sinks,
        tree_mask,
        k_scale,
        v_scale,
        batch_invariant,
        return_lse,
        out,
    )
    if not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    call = call_of(*given)
    result: Tensor | tuple[Tensor, Tensor] = PAGED_VARLEN(call, NativeKey(_calls, given))
    return result


def call_of(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    page_layout: PageLayout | None,
    page_table_v: Tensor | None,
    is_causal: bool,
    causal_alignment: Alignment,
    window_size: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    batch_invariant: bool,
    return_lse: bool,
    out: Tensor | None,
) -> PagedVarlenCall:
    """The call that arguments of `sdpa_paged_varlen` make; they have not been checked."""
    return PagedVarlenCall(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        page_table_v=None if page_table_v is page_table else page_table_v,
        seq_lens_kv=seq_lens_kv,
        cu_seqlens_q=cu_seqlens_q,
        sinks=None if sinks is None else as_sinks(sinks),
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        max_seqlen_q=as_int(max_seqlen_q),
        page_layout=page_layout,  # type: ignore[arg-type]  # None is refused by the check of types
        batch_invariant=batch_invariant if type(batch_invariant) is bool else as_bool(batch_invariant),
        # Results are the same from run to run, so the plan need not know whether they have to be.
        softmax=softmax_of(is_causal, causal_alignment, window_size, scale, softcap=softcap, deterministic=False),
        with_lse=return_lse if type(return_lse) is bool else as_bool(return_lse),
        out=out,
    )


_calls = NativeCalls()

PAGED_VARLEN = Operation(
    name="paged_varlen",
    function="sdpa_paged_varlen",
    call=PagedVarlenCall,
    reference_call=ReferencePagedVarlenCall,
)
