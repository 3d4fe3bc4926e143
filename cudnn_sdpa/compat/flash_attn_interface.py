"""FlashAttention-3's functions on this library, under the name of its module: `flash_attn_interface`.

Parameters, layouts and results are those of `hopper/flash_attn_interface.py` in FlashAttention's repository. What a
function cannot do raises `UnsupportedError`. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` are hints
about the schedule of FlashAttention's kernels, without effect here but for `num_splits=1` of `flash_attn_with_kvcache`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cudnn_sdpa.compat import calls
from cudnn_sdpa.compat.calls import Cache, Result, options_of, rotary_of, unbound
from cudnn_sdpa.compat.missing import missing
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, raise_if_unsupported

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Output = Tensor | tuple[Tensor, ...]

if not TYPE_CHECKING:  # which would take any name for one of this module
    _MISSING = {
        "_*flash_attn_*": calls.PRIVATE,
        "flash_attn_combine": ("no function here returns the parts of a split", "`cudnn_sdpa.merge_states`, on lists"),
        "get_scheduler_metadata": ("no kernel here takes a schedule", "`scheduler_metadata=None`"),
    }
    __getattr__ = missing(__name__, _MISSING)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Attention as FlashAttention-3's function of this name computes it, by `sdpa`. Differentiable.

    Args:
        q: Queries (B, Sq, Hq, D).
        k: Keys (B, Skv, Hkv, D).
        v: Values (B, Skv, Hkv, Dv).
        softmax_scale: Factor of the scores; None is 1/sqrt(D).
        causal: Mask later keys; the last query is aligned with the last key.
        qv: None; others are refused.
        q_descale: None; others are refused, as is FP8.
        k_descale: None, likewise.
        v_descale: None, likewise.
        window_size: (left, right) bounds around the same diagonal; -1 is unbounded.
        attention_chunk: 0; others are refused.
        softcap: Logit soft-capping; 0 or less is none.
        num_splits: A hint, without effect.
        pack_gqa: A hint, without effect.
        deterministic: Whether gradients are bit-exact. False follows `torch.use_deterministic_algorithms`.
        sm_margin: A hint, without effect.
        return_attn_probs: Also return the LSE.

    Returns:
        The output (B, Sq, Hq, Dv), or it and the LSE (B, Hq, Sq). Rows without keys are zeros, with an LSE of minus
        infinity.

    Raises:
        ArgumentError: An argument is wrong; the message says which and how.
        UnsupportedError: An option is one of those that are refused, or no kernel here can run the call.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn_interface import flash_attn_func
        >>> q = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 2, 48, 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _refuse(qv=qv, descales=(q_descale, k_descale, v_descale), attention_chunk=attention_chunk)
    found = calls.dense(
        (q, k, v),
        options_of(softmax_scale, causal, window_size, softcap),
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
    )
    return _result(found)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` with queries, keys and values in one tensor, of which it takes views.

    `qkv` is (B, S, 3, H, D), or with `num_heads_q` heads of queries those of all, (B, S, Hq + 2 · Hkv, D). Other
    arguments, results and errors are those of `flash_attn_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn_interface import flash_attn_qkvpacked_func
        >>> qkv = torch.randn(2, 16, 8 + 2 + 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=8).shape
        torch.Size([2, 16, 8, 64])
    """
    if qkv.dim() == 4:
        heads_kv, rest = divmod(qkv.shape[2] - (num_heads_q or 0), 2)
        if num_heads_q is None or rest or heads_kv < 1:
            expected = f"how many of the {qkv.shape[2]} heads are queries, as qkv has rank 4"
            raise OptionError("num_heads_q", repr(num_heads_q), expected)
        q, k, v = torch.split(qkv, [num_heads_q, heads_kv, heads_kv], dim=2)
    else:
        q, k, v = unbound("qkv", qkv, 2)
    return flash_attn_func(
        q=q,
        k=k,
        v=v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
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
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Attention of packed sequences as FlashAttention-3's function of this name computes it, by `sdpa_varlen`.

    Differentiable. Queries are (Tq, Hq, D), keys (Tkv, Hkv, D), values (Tkv, Hkv, Dv), one sequence after the other.
    `cu_seqlens_q` and `cu_seqlens_k` say where sequences begin, and at last where they end, (B + 1,) int32;
    `max_seqlen_q` and `max_seqlen_k` are the lengths of the longest, or more. `seqused_q` and `seqused_k` are
    refused. Other arguments are those of `flash_attn_func`.

    Returns:
        The output (Tq, Hq, Dv), or it and the LSE (Hq, Tq).

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: As from `flash_attn_func`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn_interface import flash_attn_varlen_func
        >>> q = k = v = torch.randn(10, 4, 16, dtype=torch.bfloat16)
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
        torch.Size([10, 4, 16])
    """
    given = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    reasons = {f"{name}: sequences are all between their offsets": x is not None for name, x in given.items()}
    instead = "packing the used tokens alone, or flash_attn_with_kvcache with page_table and cache_seqlens"
    raise_if_unsupported("flash_attn_varlen_func", reasons, instead)
    _refuse(qv=qv, descales=(q_descale, k_descale, v_descale), attention_chunk=attention_chunk)
    found = calls.packed(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        options_of(softmax_scale, causal, window_size, softcap),
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
    )
    return _result(found)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """Attention to a KV cache as FlashAttention-3's function of this name computes it, by the kernels for pages.

    Arguments are those of FlashAttention-2's function in `cudnn_sdpa.compat.flash_attn`, where `page_table` is
    `block_table`, of which `cache_batch_idx` may name the row of each sequence, and these: queries may be packed, (T,
    Hq, D), with `cu_seqlens_q` (B + 1,) int32 and `max_seqlen_q`, and are then not rotated. `rotary_seqlens` (B,) are
    the positions of the first new tokens, if they are not `cache_seqlens`. A cache may be in FP8 with queries in half
    precision, which FlashAttention does not have: `k_descale` and `v_descale` are the value of a stored 1, (B, Hkv)
    float32, the same in all sequences: expanded from (1, Hkv) or one number. `qv`, `q_descale`, `cache_leftpad`,
    `attention_chunk`, and with k `cu_seqlens_k_new` are refused. `num_splits=1` computes each sequence in the same
    order whatever the others are; other numbers, `scheduler_metadata`, `pack_gqa` and `sm_margin` are hints without
    effect.

    Returns:
        The output in the shape of q, with Dv; or it, the LSE (B, Hq, Sq) or (Hq, T), and two empty tensors in place of
        the parts of a split. Rows without keys are zeros, with an LSE of minus infinity.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: An option is one of those that are refused, an input requires a gradient, or no kernel here
            can run it.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flash_attn_interface import flash_attn_with_kvcache
        >>> k_cache = v_cache = torch.randn(8, 16, 2, 64, dtype=torch.bfloat16)  # 8 pages of 16 tokens
        >>> table = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)
        >>> lengths, ends = torch.tensor([20, 9], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
        >>> q = torch.randn(4, 8, 64, dtype=torch.bfloat16)  # one query, and three
        >>> of_queries = {"cu_seqlens_q": ends, "max_seqlen_q": 3, "causal": True}
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, **of_queries).shape
        torch.Size([4, 8, 64])
    """
    reasons = {
        "cache_leftpad: keys begin at the first token of a cache": cache_leftpad is not None,
        "cu_seqlens_k_new: new keys are padded, (B, new tokens, Hkv, D)": k is not None
        and cu_seqlens_k_new is not None,
        "rotary_seqlens without rotary_cos": rotary_seqlens is not None and rotary_cos is None,
    }
    instead = "a page_table, which leaves out pages before a sequence; append_paged_kv for packed keys"
    raise_if_unsupported("flash_attn_with_kvcache", reasons, instead)
    _refuse(qv=qv, descales=(q_descale,), attention_chunk=attention_chunk)
    found = calls.on_cache(
        q,
        Cache(
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            page_table=page_table,
            table_name="page_table",
            scales=(_of_heads("k_descale", k_descale), _of_heads("v_descale", v_descale)),
        ),
        options_of(softmax_scale, causal, window_size, softcap),
        rotary=rotary_of(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        offsets=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )
    out, lse = found
    return out if lse is None else (out, lse, lse.new_empty(0), lse.new_empty(0))


def _refuse(*, qv: Tensor | None, descales: tuple[Tensor | None, ...], attention_chunk: int) -> None:
    has_scales = any(x is not None for x in descales)
    if qv is None and not has_scales and not attention_chunk:
        return
    reasons = {
        "qv: no kernel here adds scores of the values": qv is not None,
        "q_descale, k_descale, v_descale: FP8 has one scale for a whole tensor here": has_scales,
        "attention_chunk: no kernel here has masks of chunks": attention_chunk != 0,
    }
    instead = (
        "cudnn_sdpa.sdpa_fp8 or Fp8Attention for FP8; for chunks an attn_mask of cudnn_sdpa.sdpa, or packed sequences"
    )
    raise_if_unsupported("this call of FlashAttention-3", reasons, instead)


def _of_heads(name: str, descale: Tensor | None) -> Tensor | None:
    """Scales (B, Hkv) that are the same in all sequences, as (Hkv,)."""
    if descale is None:
        return None
    if descale.dim() != 2:
        raise ShapeError(name, shape_of(descale), "(batch, key heads)")
    differ = descale.shape[0] != 1 and descale.stride(0) != 0
    reasons = {f"{name}: pages in FP8 have a scale for each key head, the same in all sequences": differ}
    raise_if_unsupported(name, reasons, f"scales that are expanded: {name}[:1].expand(batch, -1)")
    return descale[0]


def _result(found: Result) -> Output:
    out, lse = found
    return out if lse is None else (out, lse)
