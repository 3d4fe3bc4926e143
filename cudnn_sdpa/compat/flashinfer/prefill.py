"""Attention of new tokens of a batch on a paged cache as FlashInfer has it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.compat.flashinfer.arguments import (
    PagedCache,
    Result,
    bound_of_queries,
    check_output_dtype,
    dtype_of,
    refuse_encoding,
    refuse_given,
    softmax_options,
)
from cudnn_sdpa.compat.flashinfer.paged import PagedWrapper, PagesPlan
from cudnn_sdpa.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from cudnn_sdpa.compat.flashinfer.single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from cudnn_sdpa.errors import OptionError

__all__ = [
    "BatchAttention",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any numbers of new tokens on a paged cache, where their keys are, too.

    `plan` fills a page table from FlashInfer's lists, and reads `qo_indptr` and `paged_kv_indptr` on the host. `run`
    reads nothing there, and is `cudnn_sdpa.sdpa_paged_varlen`.

    Args:
        float_workspace_buffer: Any tensor on the device; its memory is not used.
        kv_layout: "NHD" for pages (pages, page size, heads, head dim), or "HND".
        use_cuda_graph: Copy plans into the buffers, so that a captured `run` reads the next plans, too: those with as
            many sequences, and no more tokens than the first. The page table is then made once, with room for the
            `max_sequence_kv` of the first plan; without it, as for decodes.
        qo_indptr_buf: int32 on the device, (B + 1,).
        paged_kv_indptr_buf: int32, (B + 1,).
        paged_kv_indices_buf: int32, with room for the pages of all sequences.
        paged_kv_last_page_len_buf: int32, (B,).
        custom_mask_buf: Not used, as there are no such masks.
        mask_indptr_buf: Not used, either.
        backend: A hint: `cudnn_sdpa.providers` chooses kernels.
        jit_args: None: kernels are not compiled from given source.
        jit_kwargs: None.
        variant_owns_mask: False.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: No kernel does it, with the reasons.

    Examples:
        A prompt of 20 tokens, and one new token after 10 others:

        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import BatchPrefillWithPagedKVCacheWrapper
        >>> cache = torch.randn(8, 2, 16, 2, 64, dtype=torch.bfloat16)  # 8 pages of 16 tokens, 2 heads
        >>> new, indptr, pages, last = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 21], [0, 2, 3], [5, 1, 7], [4, 11])
        ... )
        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
        >>> wrapper.plan(new, indptr, pages, last, 8, 2, 64, 16, causal=True, q_data_type=torch.bfloat16)
        >>> wrapper.run(torch.randn(21, 8, 64, dtype=torch.bfloat16), cache).shape
        torch.Size([21, 8, 64])
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse_given(type(self).__name__, jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask)
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "paged_kv_indptr": ("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "paged_kv_indices": ("paged_kv_indices_buf", paged_kv_indices_buf),
            "paged_kv_last_page_len": ("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Prepares runs with these new tokens on these pages.

        Args:
            qo_indptr: Where the new tokens of each sequence begin and end, (B + 1,), on any device.
            paged_kv_indptr: Where its pages do, (B + 1,).
            paged_kv_indices: The pages of all sequences, end to end.
            paged_kv_last_page_len: The number of keys in the last page of each, (B,).
            num_qo_heads: Number of query heads.
            num_kv_heads: Number of key heads.
            head_dim_qk: Head dim of queries and keys.
            page_size: Tokens per page.
            head_dim_vo: Head dim of values; None is that of keys.
            custom_mask: None.
            packed_custom_mask: None.
            causal: Hide later keys from each new token; the last one of a sequence sees its last key.
            pos_encoding_mode: "NONE".
            use_fp16_qk_reduction: A hint: scores are summed in float32.
            sm_scale: The scale of the scores; None is 1/sqrt(head dim).
            window_left: The number of keys before its own that each token sees; -1 is all.
            logits_soft_cap: Logit soft-capping, if positive.
            rope_scale: Of no meaning without rotation.
            rope_theta: Of no meaning without rotation.
            q_data_type: The dtype of queries.
            kv_data_type: The dtype of pages; None is that of queries.
            o_data_type: The dtype of queries.
            non_blocking: Whether copies to the device may end later.
            prefix_len_ptr: None: items are not scored together.
            token_pos_in_items_ptr: None.
            token_pos_in_items_len: 0.
            max_item_len_ptr: None.
            seq_lens: The number of keys of each sequence, if not as the pages say.
            seq_lens_q: The number of new tokens of each, as `qo_indptr` says.
            block_tables: A page table (B, pages) int32, read instead of `paged_kv_indices`.
            max_token_per_sequence: A bound of the new tokens of a sequence, in this plan and with `use_cuda_graph` in
                all; it need not be given.
            max_sequence_kv: The same of keys.
            fixed_split_size: If given, results of a sequence are independent of the rest of the batch.
            disable_split_kv: The same.
            uniform_q_len: The same as `max_token_per_sequence`, where all sequences have as many.

        Raises:
            ArgumentError: An argument is wrong; the subclass and the message say which and how.
            UnsupportedError: No kernel does it, with the reasons.
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
        )
        dtype_q = dtype_of("q_data_type", q_data_type)
        dtype_kv = dtype_of("kv_data_type", kv_data_type or q_data_type)
        check_output_dtype("o_data_type", o_data_type, dtype_q)
        offsets, tokens, max_seqlen_q = self._sequences(
            "qo_indptr",
            qo_indptr,
            bound_of_queries(max_token_per_sequence, uniform_q_len),
            lengths=("seq_lens_q", seq_lens_q),
            non_blocking=non_blocking,
        )
        table, lengths = self._fill(
            ("paged_kv_indptr", paged_kv_indptr),
            ("paged_kv_indices", paged_kv_indices),
            ("paged_kv_last_page_len", paged_kv_last_page_len),
            page_size=page_size,
            non_blocking=non_blocking,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_seqlen=max_sequence_kv,
            offsets=offsets,
        )
        dim_v = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._plan = PagesPlan(
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim_qk, dim_v),
            page_size=page_size,
            dtypes=(dtype_q, dtype_kv),
            table=table,
            lengths=lengths,
            cu_seqlens_q=offsets,
            tokens=tokens,
            max_seqlen_q=max_seqlen_q,
            softmax=softmax_options(
                causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
            ),
            batch_invariant=fixed_split_size is not None or disable_split_kv,
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """The attention, as planned.

        Args:
            q: Queries (tokens, heads, head dim).
            paged_kv_cache: A pair of pages of keys and of values, or one tensor (pages, 2, …).
            *args: None.
            q_scale: A factor of the scores.
            k_scale: Another one; or of pages in FP8 a float32 tensor on the device, for all heads or for each.
            v_scale: The same of values, a factor of the output.
            out: Where the output is written.
            lse: Where the log-sum-exp is written.
            return_lse: Also return the log-sum-exp.
            lse_base: "log2", or "ln" for natural logarithms.
            lse_layout: "NH" for (tokens, heads), or "HN".
            enable_pdl: A hint, not needed.
            window_left: As planned.
            sinks: A score of each query head without a value, (heads,).
            kv_cache_sf: None.
            skip_softmax_threshold_scale_factor: None.
            use_fp16_softmax: A hint: the softmax is in float32.
            uses_spcompress: None.

        Returns:
            The output (tokens, heads, head dim), and with `return_lse` the log-sum-exp, float32.

        Raises:
            ArgumentError: An argument is wrong; the subclass and the message say which and how.
            UnsupportedError: No kernel does it, with the reasons.
        """
        skip = skip_softmax_threshold_scale_factor
        refuse_given(
            "run",
            args=args,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip,
            uses_spcompress=uses_spcompress,
        )
        return self._run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
            window_left=window_left,
            sinks=sinks,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        self._set(causal=causal, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
        return self._run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward = functools.partialmethod(_forward, return_lse=False)
    forward_return_lse = functools.partialmethod(_forward, return_lse=True)


class BatchAttention(PagedWrapper):
    """Attention of any numbers of new tokens on a paged cache, with its lengths given.

    Args:
        kv_layout: "NHD" for pages (pages, page size, heads, head dim), or "HND".
        device: Where tables are.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import BatchAttention
        >>> cache = torch.randn(8, 2, 16, 2, 64, dtype=torch.bfloat16)  # 8 pages of 16 tokens, 2 heads
        >>> new, indptr, pages, lengths = (
        ...     torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 21], [0, 2, 3], [5, 1, 7], [20, 11])
        ... )
        >>> wrapper = BatchAttention(device="cpu")
        >>> wrapper.plan(new, indptr, pages, lengths, 8, 2, 64, 64, 16, causal=True)
        >>> out, lse = wrapper.run(torch.randn(21, 8, 64, dtype=torch.bfloat16), cache)
        >>> out.shape, lse.shape
        (torch.Size([21, 8, 64]), torch.Size([21, 8]))
    """

    _cache_name = "kv_cache"

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout, None)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Prepares runs, as `BatchPrefillWithPagedKVCacheWrapper.plan` does.

        `kv_indptr` and `kv_indices` are lists of pages as there, and `kv_len_arr` (B,) the numbers of keys. Other
        arguments and errors are those of that.
        """
        refuse_given("plan", use_profiler=use_profiler)
        offsets, tokens, max_seqlen_q = self._sequences("qo_indptr", qo_indptr)
        table, lengths = self._fill(
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_len_arr", kv_len_arr),  # beyond a page: lengths are given
            page_size=page_size,
            seq_lens=kv_len_arr,
            offsets=offsets,
        )
        dtype_q, dtype_kv = dtype_of("q_data_type", q_data_type), dtype_of("kv_data_type", kv_data_type)
        self._plan = PagesPlan(
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim_qk, head_dim_vo),
            page_size=page_size,
            dtypes=(dtype_q, dtype_kv),
            table=table,
            lengths=lengths,
            cu_seqlens_q=offsets,
            tokens=tokens,
            max_seqlen_q=max_seqlen_q,
            softmax=softmax_options(causal=causal, window_left=-1, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap),
        )

    def run(
        self,
        q: Tensor,
        kv_cache: PagedCache,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Result:
        """The attention, as planned.

        Arguments and errors are those of `BatchPrefillWithPagedKVCacheWrapper.run`; `logits_soft_cap` is the planned
        one, or 0, and `profiler_buffer` None. The log-sum-exp is returned, too, to the base of 2.
        """
        refuse_given("run", profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        planned = None if self._plan is None else self._plan.softmax.get("softcap")
        if logits_soft_cap and logits_soft_cap != planned:
            raise OptionError("logits_soft_cap", logits_soft_cap, f"{planned}, as planned, or 0")
        return self._run(q, kv_cache, out=out, lse=lse, k_scale=k_scale, v_scale=v_scale, return_lse=True)
