"""FlashAttention-2's functions on this library: `from cudnn_sdpa.compat import flash_attn`, or its functions by name.

Parameters, layouts and results are those of `flash_attn` 2.8. What a function cannot do raises `UnsupportedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cudnn_sdpa.compat import calls
from cudnn_sdpa.compat.calls import Cache, Result, options_of, rotary_of, unbound
from cudnn_sdpa.compat.missing import missing
from cudnn_sdpa.errors import UnsupportedError, raise_if_unsupported

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: The version whose functions these are.
__version__ = "2.8.3"

Output = Tensor | tuple[Tensor, ...]

if not TYPE_CHECKING:  # which would take any name for one of this module
    __getattr__ = missing(__name__, {"_*flash_attn_*": calls.PRIVATE})


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Attention as FlashAttention-2's function of this name computes it, by `sdpa`. Differentiable.

    Args:
        q: Queries (B, Sq, Hq, D). Head dims that are no multiple of 8 are padded, which copies.
        k: Keys (B, Skv, Hkv, D).
        v: Values (B, Skv, Hkv, D).
        dropout_p: Dropout probability, with PyTorch's random numbers: other ones than FlashAttention draws.
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        causal: Mask later keys; the last query is aligned with the last key.
        window_size: (left, right) bounds around the same diagonal; -1 is unbounded.
        softcap: Logit soft-capping; 0 or less is none.
        alibi_slopes: Slopes (Hq,) or (B, Hq) of a bias −slope · |i + Skv − Sq − j|, which is materialized in float32:
            4 · Hq · Sq · Skv bytes for each row of slopes.
        deterministic: Whether gradients are bit-exact. False follows `torch.use_deterministic_algorithms`.
        return_attn_probs: Also return the LSE, and an empty tensor in place of S_dmask.

    Returns:
        The output (B, Sq, Hq, D), or it, the LSE (B, Hq, Sq) and an empty tensor. Rows without keys are zeros, with an
        LSE of plus infinity, as FlashAttention-2 has it.

    Raises:
        ArgumentError: An argument is wrong; the message says which and how.
        UnsupportedError: No kernel here can run it; or dropout's pattern is wanted, `return_attn_probs` with dropout.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_func
        >>> q = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 48, 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _check_dropout(dropout_p, return_attn_probs)
    found = calls.dense(
        (q, k, v),
        options_of(softmax_scale, causal, window_size, softcap),
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    return _result(found)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with keys and values in one tensor (B, Skv, 2, Hkv, D), of which it takes views.

    Other arguments, results and errors are those of `flash_attn_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_kvpacked_func
        >>> q, kv = torch.randn(2, 16, 8, 64).bfloat16(), torch.randn(2, 48, 2, 4, 64).bfloat16()
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 16, 8, 64])
    """
    k, v = unbound("kv", kv, 2)
    return flash_attn_func(
        q=q,
        k=k,
        v=v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with queries, keys and values in one tensor (B, S, 3, H, D), of which it takes views.

    Other arguments, results and errors are those of `flash_attn_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_qkvpacked_func
        >>> qkv = torch.randn(2, 16, 3, 8, 64, dtype=torch.bfloat16)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    q, k, v = unbound("qkv", qkv, 2)
    return flash_attn_func(
        q=q,
        k=k,
        v=v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """Attention of packed sequences as FlashAttention-2's function of this name computes it, by `sdpa_varlen`.

    Differentiable without a block table. With one, it is `sdpa_paged_varlen`.

    Args:
        q: Queries (Tq, Hq, D), one sequence after the other.
        k: Keys (Tkv, Hkv, D), or their pages (P, page size, Hkv, D).
        v: Values, likewise.
        cu_seqlens_q: Where the sequences of queries begin, and at last where they end, (B + 1,) int32.
        cu_seqlens_k: The same of keys. With a block table, the sums of the numbers of keys.
        max_seqlen_q: The length of the longest sequence of queries, or more.
        max_seqlen_k: The same of keys. Without effect with a block table.
        dropout_p: As in `flash_attn_func`, and so are the others.
        softmax_scale: Factor of the scores.
        causal: Mask later keys.
        window_size: (left, right) bounds.
        softcap: Logit soft-capping.
        alibi_slopes: None; others are refused.
        deterministic: Whether gradients are bit-exact.
        return_attn_probs: Also return the LSE, (Hq, Tq).
        block_table: Page ids of each sequence, (B, max pages) int32. Pages of any size.

    Returns:
        The output (Tq, Hq, D), or it, the LSE and an empty tensor.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: As from `flash_attn_func`; or there are slopes, or dropout or gradients on pages.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_varlen_func
        >>> q = k = v = torch.randn(10, 4, 16, dtype=torch.bfloat16)
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
        torch.Size([10, 4, 16])
    """
    reasons = {
        "alibi_slopes: packed sequences take no bias": alibi_slopes is not None,
        "dropout_p: attention on pages has no dropout": block_table is not None and dropout_p != 0,
    }
    raise_if_unsupported("flash_attn_varlen_func", reasons, "flash_attn_func, padded, or without these options")
    _check_dropout(dropout_p, return_attn_probs)
    options = options_of(softmax_scale, causal, window_size, softcap) | {"return_lse": return_attn_probs}
    if block_table is not None:
        found = calls.packed_on_pages(
            (q, k, v),
            page_table=block_table,
            seq_lens_kv=cu_seqlens_k.diff(),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=int(max_seqlen_q),
            **options,
        )
    else:
        found = calls.packed(
            (q, k, v),
            (cu_seqlens_q, cu_seqlens_k),
            (max_seqlen_q, max_seqlen_k),
            options,
            deterministic=deterministic or None,
            dropout_p=dropout_p,
        )
    return _result(found)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with keys and values in one tensor (Tkv, 2, Hkv, D), of which it takes views.

    Other arguments, results and errors are those of `flash_attn_varlen_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_varlen_kvpacked_func
        >>> q, kv = torch.randn(10, 4, 16).bfloat16(), torch.randn(10, 2, 4, 16).bfloat16()
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7).shape
        torch.Size([10, 4, 16])
    """
    k, v = unbound("kv", kv, 1)
    return flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor (T, 3, H, D), of which it takes views.

    `cu_seqlens` and `max_seqlen` are of all three. Other arguments, results and errors are those of
    `flash_attn_varlen_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> qkv = torch.randn(10, 3, 4, 16, dtype=torch.bfloat16)
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(qkv, offsets, 7).shape
        torch.Size([10, 4, 16])
    """
    q, k, v = unbound("qkv", qkv, 1)
    return flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """Attention to a KV cache as FlashAttention-2's function of this name computes it, by `sdpa_paged`. No gradients.

    New keys and values are first written into the cache, in place, behind those that are there. A contiguous cache is
    read as pages of its whole length. What is not used of a cache may hold anything.

    Args:
        q: Queries (B, Sq, Hq, D) of the newest tokens.
        k_cache: Keys (B or more, Skv, Hkv, D), or with a block table pages (P, page size, Hkv, D) of any size.
        v_cache: Values, likewise.
        k: New keys (B, new tokens, Hkv, D), for which the cache must have room. What does not fit is not written on a
            GPU, and refused on the CPU and if the environment variable `CUDNN_SDPA_DEBUG` is 1.
        v: New values, likewise.
        rotary_cos: Cosines (positions, rotary dim / 2): the new keys and the queries are rotated, by PyTorch's kernels.
            Only with k.
        rotary_sin: Sines, likewise.
        cache_seqlens: The number of keys of each sequence before the new ones, (B,) int32, or one number for all. None
            is the whole cache.
        cache_batch_idx: The row of the cache of each sequence, (B,) int32. Not with a block table.
        cache_leftpad: None; others are refused.
        block_table: Page ids of each sequence, (B, max pages) int32.
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        causal: Mask later keys; the last query is aligned with the last key.
        window_size: (left, right) bounds around the same diagonal; -1 is unbounded.
        softcap: Logit soft-capping; 0 or less is none.
        rotary_interleaved: Whether pairs are neighbors, or halves of the rotary dim.
        alibi_slopes: None; others are refused.
        num_splits: 1 computes each sequence in the same order whatever the others are, as `batch_invariant` of
            `sdpa_paged_varlen`. Other numbers are hints without effect: the kernels decide.
        return_softmax_lse: Also return the LSE.

    Returns:
        The output (B, Sq, Hq, D), or it and the LSE (B, Hq, Sq). Rows without keys are zeros, with an LSE of plus
        infinity, as FlashAttention-2 has it.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: `cache_leftpad` or `alibi_slopes` is given, an input requires a gradient, or no kernel here
            can run it.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 2, 32, dtype=torch.bfloat16)
        >>> q, (k, v) = torch.randn(2, 1, 8, 32).bfloat16(), torch.randn(2, 2, 1, 2, 32).bfloat16()
        >>> lengths = torch.tensor([10, 3], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True).shape
        torch.Size([2, 1, 8, 32])
        >>> torch.equal(k_cache[0, 10], k[0, 0])
        True
    """
    reasons = {
        "cache_leftpad: keys begin at the first token of a cache": cache_leftpad is not None,
        "alibi_slopes: attention on pages takes no bias": alibi_slopes is not None,
    }
    instead = "a block_table, which leaves out pages before a sequence; flash_attn_func for slopes"
    raise_if_unsupported("flash_attn_with_kvcache", reasons, instead)
    found = calls.on_cache(
        q,
        Cache(
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            page_table=block_table,
            table_name="block_table",
        ),
        options_of(softmax_scale, causal, window_size, softcap),
        rotary=rotary_of(rotary_cos, rotary_sin, rotary_interleaved),
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    result = _result(found)
    return result[:2] if return_softmax_lse else result


def _check_dropout(dropout_p: float, return_attn_probs: bool) -> None:
    if return_attn_probs and dropout_p > 0:
        reasons = ["cuDNN does not return which probabilities dropout keeps (S_dmask)"]
        instead = "dropout_p=0.0, or no return_attn_probs"
        raise UnsupportedError("return_attn_probs with dropout_p", reasons, instead)


def _result(found: Result) -> Output:
    """FlashAttention-2's results: an LSE of plus infinity for rows without keys, and an empty S_dmask."""
    out, lse = found
    if lse is None:
        return out
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), out.new_empty(0)
