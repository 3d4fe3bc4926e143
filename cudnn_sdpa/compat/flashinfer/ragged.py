"""Attention of packed sequences as FlashInfer has it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import SoftmaxOptions
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.compat.flashinfer.arguments import (
    HND,
    PagedCache,
    Result,
    Wrapper,
    bound_of_queries,
    called,
    check_lse,
    check_output_dtype,
    dtype_of,
    finished,
    refuse_encoding,
    refuse_given,
    softmax_options,
    with_scales,
)
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor
from cudnn_sdpa.errors import OptionError, ShapeError


class _Plan(NamedTuple):
    """A plan of runs on packed sequences, which `plan` makes."""

    heads: tuple[int, int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    offsets: tuple[Tensor, Tensor]
    tokens: tuple[int, int]
    max_seqlens: tuple[int, int]
    softmax: SoftmaxOptions


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attention of packed sequences, with keys and values packed likewise.

    `plan` reads offsets on the host. `run` reads nothing there, and is `cudnn_sdpa.sdpa_varlen`.

    Keys are (tokens, heads, head dim) if `kv_layout` is "NHD". Other arguments and errors are those of
    `BatchPrefillWithPagedKVCacheWrapper`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import BatchPrefillWithRaggedKVCacheWrapper
        >>> ends = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 10, 4, 64, dtype=torch.bfloat16)
        >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
        >>> wrapper.plan(ends, ends, 4, 4, 64, causal=True, q_data_type=torch.bfloat16)
        >>> wrapper.run(q, k, v).shape
        torch.Size([10, 4, 64])
    """

    _plan: _Plan | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse_given(type(self).__name__, jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask)
        buffers = {"qo_indptr": ("qo_indptr_buf", qo_indptr_buf), "kv_indptr": ("kv_indptr_buf", kv_indptr_buf)}
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Prepares runs with sequences of these lengths.

        `qo_indptr` and `kv_indptr` say where the new tokens and the keys of each sequence begin and end, (B + 1,).
        Other arguments and errors are those of `BatchPrefillWithPagedKVCacheWrapper.plan`; `v_indptr` and `o_indptr`
        are None.
        """
        refuse_encoding("plan", pos_encoding_mode)
        refuse_given(
            "plan",
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        dtype_q = dtype_of("q_data_type", q_data_type)
        check_output_dtype("o_data_type", o_data_type, dtype_q)
        queries, tokens, max_seqlen_q = self._sequences(
            "qo_indptr",
            qo_indptr,
            bound_of_queries(max_token_per_sequence, uniform_q_len),
            lengths=("seq_lens_q", seq_lens_q),
            non_blocking=non_blocking,
        )
        keys, tokens_kv, max_seqlen_kv = self._sequences(
            "kv_indptr",
            kv_indptr,
            bound=("max_sequence_kv", max_sequence_kv),
            lengths=("seq_lens", seq_lens),
            non_blocking=non_blocking,
        )
        if keys.shape != queries.shape:
            raise ShapeError("kv_indptr", f"{keys.shape[0]} entries", f"{queries.shape[0]}, as qo_indptr")
        self._plan = _Plan(
            heads=(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            dtypes=(dtype_q, dtype_of("kv_data_type", kv_data_type or q_data_type)),
            offsets=(queries, keys),
            tokens=(tokens, tokens_kv),
            max_seqlens=(max_seqlen_q, max_seqlen_kv),
            softmax=softmax_options(
                causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
            ),
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Result:
        """The attention, as planned.

        `k` and `v` are (tokens, heads, head dim), or (heads, tokens, head dim) if `kv_layout` is "HND". Other
        arguments, results and errors are those of `BatchPrefillWithPagedKVCacheWrapper.run`; `o_scale` is None.
        """
        refuse_given("run", args=args, kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        plan = self._plan
        if plan is None:
            raise OptionError("run", "a call before plan", "a call of plan first")
        check_are_tensors({"q": q, "k": k, "v": v})
        if self._kv_layout == HND:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        (tokens, tokens_kv), (heads, heads_kv, dim, dim_v), (dtype_q, dtype_kv) = plan.tokens, plan.heads, plan.dtypes
        shapes = {"q": (tokens, heads, dim), "k": (tokens_kv, heads_kv, dim), "v": (tokens_kv, heads_kv, dim_v)}
        for (name, shape), x in zip(shapes.items(), (q, k, v), strict=True):
            dtype, meaning = dtype_q if name == "q" else dtype_kv, "(tokens, heads, head dim), as planned"
            check_tensor(name, x, q, dtype=dtype, shape=shape, meaning=meaning, hint="Plan with it.")
        check_lse(lse, q, lse_base, lse_layout)
        result = called(
            *(sdpa_varlen, q, k, v),
            names={},
            cu_seqlens_q=plan.offsets[0],
            cu_seqlens_kv=plan.offsets[1],
            max_seqlen_q=plan.max_seqlens[0],
            max_seqlen_kv=plan.max_seqlens[1],
            return_lse=return_lse,
            out=out,
            **with_scales(plan.softmax, dim, q_scale=q_scale, k_scale=k_scale),
        )
        return finished(result, v_scale, lse, base=lse_base, layout=lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool,
    ) -> Result:
        """A run with other options than planned, which stay."""
        refuse_encoding("forward", pos_encoding_mode)
        softmax = softmax_options(
            causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
        )
        if self._plan is not None:
            self._plan = self._plan._replace(softmax=softmax)
        return self.run(q, k, v, return_lse=return_lse)

    forward = functools.partialmethod(_forward, return_lse=False)
    forward_return_lse = functools.partialmethod(_forward, return_lse=True)
