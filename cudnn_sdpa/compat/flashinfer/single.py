"""Attention of one sequence as FlashInfer has it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import FP8_DTYPES, SoftmaxOptions
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.compat.flashinfer.arguments import (
    HND,
    Result,
    called,
    check_layout,
    check_output_dtype,
    finished,
    refuse_encoding,
    refuse_given,
    softmax_options,
    with_scales,
)
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of one token, by the kernel for pages: a plan serves any number of keys.

    Args:
        q: Queries (heads, head dim), float16 or bfloat16.
        k: Keys (tokens, heads, head dim), or (heads, tokens, head dim) if `kv_layout` is "HND"; in FP8, too.
        v: Values, likewise.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_tensor_cores: A hint, not needed.
        q_scale: A factor of the scores.
        k_scale: Another factor of the scores.
        v_scale: A factor of the output.
        window_left: The number of keys before the last one that are seen; -1 is all.
        logits_soft_cap: Logit soft-capping, if positive.
        sm_scale: The scale of the scores; None is 1/sqrt(head dim).
        rope_scale: Of no meaning without rotation.
        rope_theta: Of no meaning without rotation.
        return_lse: Also return the log-sum-exp.

    Returns:
        The output (heads, head dim), and with `return_lse` the log-sum-exp to the base of 2, (heads,) float32.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: No kernel does it, with the reasons.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import single_decode_with_kv_cache
        >>> q, (k, v) = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(2, 100, 2, 64, dtype=torch.bfloat16)
        >>> single_decode_with_kv_cache(q, k, v).shape
        torch.Size([8, 64])
    """
    refuse_encoding("single_decode_with_kv_cache", pos_encoding_mode)
    check_are_tensors({"q": q, "k": k, "v": v})
    check_tensor("q", q, q, shape=("heads", "head dim"))
    options = softmax_options(causal=False, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
    options = with_scales(options, q.shape[1], q_scale=q_scale, k_scale=k_scale)
    k, v = _in_tokens_order(k, v, kv_layout)
    result = _on_pages("single_decode_with_kv_cache", (q.unsqueeze(0), k, v), options, return_lse=return_lse)
    found = finished(result, v_scale)
    return found.squeeze(0) if isinstance(found, Tensor) else (found[0].squeeze(0), found[1].squeeze(0))


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | Tensor | None = None,
) -> Result:
    """Attention of new tokens of one sequence, which are its last ones.

    `cudnn_sdpa.sdpa_varlen` serves it, with `custom_mask` `cudnn_sdpa.sdpa`, and keys in FP8 the kernel for pages.

    Args:
        q: Queries (new tokens, heads, head dim), float16 or bfloat16.
        k: Keys (tokens, heads, head dim), or (heads, tokens, head dim) if `kv_layout` is "HND"; in FP8, too.
        v: Values, likewise.
        scale_q: None: queries are not in FP8.
        scale_k: None.
        scale_v: None.
        o_dtype: The dtype of the queries.
        custom_mask: Whether each new token sees each key, (new tokens, tokens) bool. `causal` is then not read.
        packed_custom_mask: None.
        causal: Hide later keys from each new token.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_fp16_qk_reduction: A hint: scores are summed in float32.
        sm_scale: The scale of the scores; None is 1/sqrt(head dim).
        window_left: The number of keys before its own that each token sees; -1 is all.
        logits_soft_cap: Logit soft-capping, if positive.
        rope_scale: Of no meaning without rotation.
        rope_theta: Of no meaning without rotation.
        backend: A hint: `cudnn_sdpa.providers` chooses kernels.
        return_lse: Also return the log-sum-exp.
        kv_cache_sf: None: no kernel reads NVFP4.
        k_scale: A factor of the scores.
        v_scale: A factor of the output.

    Returns:
        The output (new tokens, heads, head dim), and with `return_lse` the log-sum-exp to the base of 2, (new tokens,
        heads) float32.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: No kernel does it, with the reasons.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import single_prefill_with_kv_cache
        >>> q, k, v = (torch.randn(n, 4, 64, dtype=torch.bfloat16) for n in (5, 100, 100))
        >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
        torch.Size([5, 4, 64])
    """
    name = "single_prefill_with_kv_cache"
    refuse_encoding(name, pos_encoding_mode)
    refuse_given(name, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    refuse_given(name, packed_custom_mask=packed_custom_mask)
    check_are_tensors({"q": q, "k": k, "v": v})
    check_tensor("q", q, q, shape=("new tokens", "heads", "head dim"))
    check_output_dtype("o_dtype", o_dtype, q.dtype)
    options = softmax_options(
        causal=causal and custom_mask is None,
        window_left=window_left,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
    )
    options = with_scales(options, q.shape[2], k_scale=k_scale)
    k, v = _in_tokens_order(k, v, kv_layout)
    if custom_mask is not None:
        dense = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out, lse = called(sdpa, *dense, names={}, attn_mask=custom_mask, return_lse=True, **options)
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
        return finished((out, lse) if return_lse else out, v_scale)
    if k.dtype in FP8_DTYPES:
        return finished(_on_pages(name, (q, k, v), options, return_lse=return_lse), v_scale)
    tokens, keys = q.shape[0], k.shape[0]
    result = called(
        *(sdpa_varlen, q, k, v),
        names={},
        cu_seqlens_q=_ends(tokens, q),
        cu_seqlens_kv=_ends(keys, q),
        max_seqlen_q=tokens,
        max_seqlen_kv=keys,
        return_lse=return_lse,
        **options,
    )
    return finished(result, v_scale)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def _in_tokens_order(k: Tensor, v: Tensor, kv_layout: str) -> tuple[Tensor, Tensor]:
    is_heads_first = check_layout(kv_layout) == HND
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, x, shape=("heads", "tokens", "head dim") if is_heads_first else ("tokens", "heads", ""))
    return (k.transpose(0, 1), v.transpose(0, 1)) if is_heads_first else (k, v)


def _ends(tokens: int, like: Tensor) -> Tensor:
    return torch.arange(2, dtype=torch.int32, device=like.device) * tokens


def _on_pages(
    function: str, qkv: tuple[Tensor, Tensor, Tensor], options: SoftmaxOptions, *, return_lse: bool
) -> Result:
    """Attention of queries (new tokens, Hq, D) on keys (tokens, Hkv, D), taken as pages of one token."""
    q, k, v = qkv
    keys = k.shape[0]
    result: Result = called(
        *(sdpa_paged_varlen, q, k.unsqueeze(1), v.unsqueeze(1)),
        names={"k_pages": "k", "v_pages": "v", "sdpa_paged_varlen": function},
        page_table=torch.arange(keys, dtype=torch.int32, device=q.device).unsqueeze(0),
        seq_lens_kv=torch.full((1,), keys, dtype=torch.int32, device=q.device),
        cu_seqlens_q=_ends(q.shape[0], q),
        max_seqlen_q=q.shape[0],
        page_layout="NHD",
        return_lse=return_lse,
        **options,
    )
    return result
