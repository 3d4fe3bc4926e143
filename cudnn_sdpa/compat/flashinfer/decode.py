"""Decodes of a batch as FlashInfer has them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.compat.flashinfer.arguments import (
    PagedCache,
    Result,
    check_output_dtype,
    dtype_of,
    refuse_encoding,
    refuse_given,
    softmax_options,
)
from cudnn_sdpa.compat.flashinfer.paged import PagedWrapper, PagesPlan
from cudnn_sdpa.compat.flashinfer.single import single_decode_with_kv_cache
from cudnn_sdpa.errors import OptionError, raise_if_unsupported
from cudnn_sdpa.graph.scalars import is_integer

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]

#: Options of a decode's `plan` that code for older versions gives by position, in their order.
_BY_POSITION = [
    *("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type"),
    *("sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size"),
    *("disable_split_kv", "q_len_per_req"),
]


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of as many new tokens of each sequence, one by default, on a paged cache.

    `plan` fills a page table from FlashInfer's lists, and reads `indptr` on the host unless there are `block_tables`.
    `run` reads nothing on the host, and is `cudnn_sdpa.sdpa_paged_varlen`.

    Args:
        float_workspace_buffer: Any tensor on the device; its memory is not used.
        kv_layout: "NHD" for pages (pages, page size, heads, head dim), or "HND".
        use_cuda_graph: Copy plans into the buffers, so that a captured `run` reads the next plans, too. The page table
            is then made once. In it each sequence has room for all entries of `paged_kv_indices_buffer`, up to 256 MB
            of them, or else for its share of them at least; pass `block_tables` to have another.
        use_tensor_cores: A hint, not needed.
        paged_kv_indptr_buffer: int32 on the device, (B + 1,).
        paged_kv_indices_buffer: int32, with room for the pages of all sequences.
        paged_kv_last_page_len_buffer: int32, (B,).
        backend: A hint: `cudnn_sdpa.providers` chooses kernels.
        jit_args: None: kernels are not compiled from given source.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: No kernel does it, with the reasons.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper
        >>> cache = torch.randn(8, 2, 16, 2, 64, dtype=torch.bfloat16)  # 8 pages of 16 tokens, 2 heads
        >>> indptr, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [5, 1, 7], [3, 16]))
        >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
        >>> wrapper.plan(indptr, pages, last, 8, 2, 64, 16, q_data_type=torch.bfloat16)
        >>> wrapper.run(torch.randn(2, 8, 64, dtype=torch.bfloat16), cache).shape
        torch.Size([2, 8, 64])
    """

    _offsets: Tensor | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_given(type(self).__name__, jit_args=jit_args)
        buffers = {
            "indptr": ("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
            "indices": ("paged_kv_indices_buffer", paged_kv_indices_buffer),
            "last_page_len": ("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
        }
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)
        self._use_tensor_cores = use_tensor_cores

    @property
    def use_tensor_cores(self) -> bool:
        """The hint of the same name."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Prepares runs on these pages.

        Args:
            indptr: Where the pages of each sequence begin and end, (B + 1,), on any device.
            indices: The pages of all sequences, end to end.
            last_page_len: The number of keys in the last page of each, (B,).
            num_qo_heads: Number of query heads.
            num_kv_heads: Number of key heads.
            head_dim: The head dim.
            page_size: Tokens per page.
            *deprecated_positional_args: Options, in the order of older versions.
            **kwargs: `window_left`, `logits_soft_cap`, `sm_scale`, `q_data_type` ("float16" if not given),
                `kv_data_type`, `data_type`, `q_len_per_req`, `non_blocking`. `block_tables` is read instead of
                `indices`, and `seq_lens` instead of the lengths that follow from these. `fixed_split_size` and
                `disable_split_kv` make results independent of the rest of the batch.

        Raises:
            ArgumentError: An argument is wrong; the subclass and the message say which and how.
            UnsupportedError: No kernel does it, with the reasons.
        """
        if len(deprecated_positional_args) > len(_BY_POSITION):
            raise OptionError(
                "plan", f"{len(deprecated_positional_args)} options by position", f"at most {len(_BY_POSITION)}"
            )
        by_position: dict[str, Any] = dict(zip(_BY_POSITION, deprecated_positional_args, strict=False))
        self._plan_impl(
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            **by_position,
            **kwargs,
        )

    begin_forward = plan

    def _plan_impl(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        host_indptr: Tensor | None = None,
    ) -> None:
        refuse_encoding("plan", pos_encoding_mode)
        reason = "a draft of a decode is causal, up to its last token"
        is_other_mask = window_right != 0 or is_causal not in (None, q_len_per_req > 1)
        raise_if_unsupported("plan with window_right or is_causal", {reason: is_other_mask}, "the prefill wrapper")
        if not is_integer(q_len_per_req) or q_len_per_req < 1:
            raise OptionError("q_len_per_req", repr(q_len_per_req), "an int of at least 1")
        of_q = q_data_type or data_type
        dtype_q, dtype_kv = dtype_of("q_data_type", of_q), dtype_of("kv_data_type", kv_data_type or data_type or of_q)
        check_output_dtype("o_data_type", o_data_type, dtype_q)
        if self.is_cuda_graph_enabled and self._plan is not None and self._plan.max_seqlen_q != q_len_per_req:
            expected = f"{self._plan.max_seqlen_q}, as captured runs have it"
            raise OptionError("q_len_per_req", q_len_per_req, expected, "Use another wrapper.")
        table, lengths = self._fill(
            ("indptr", indptr),
            ("indices", indices),
            ("last_page_len", last_page_len),
            page_size=page_size,
            non_blocking=non_blocking,
            block_tables=block_tables,
            seq_lens=seq_lens,
            host_indptr=host_indptr,
        )
        batch = lengths.shape[0]
        if self._offsets is None or not self.is_cuda_graph_enabled:
            self._offsets = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * q_len_per_req
        self._plan = PagesPlan(
            heads=(num_qo_heads, num_kv_heads),
            dims=(head_dim, head_dim),
            page_size=page_size,
            dtypes=(dtype_q, dtype_kv),
            table=table,
            lengths=lengths,
            cu_seqlens_q=self._offsets,
            tokens=batch * q_len_per_req,
            max_seqlen_q=q_len_per_req,
            softmax=softmax_options(
                causal=True, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
            ),
            batch_invariant=fixed_split_size is not None or disable_split_kv,
        )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Result:
        """The attention, as planned.

        Queries are (B · q_len_per_req, heads, head dim), as planned. Other arguments, results and errors are those of
        `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        skip = skip_softmax_threshold_scale_factor
        refuse_given("run", args=args, kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip)
        if q_len_per_req is not None and self._plan is not None and q_len_per_req != self._plan.max_seqlen_q:
            raise OptionError("q_len_per_req", q_len_per_req, f"{self._plan.max_seqlen_q}, as planned")
        return self._run(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._set(causal=True, window_left=window_left, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap)
        return self._run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward = functools.partialmethod(_forward, return_lse=False)
    forward_return_lse = functools.partialmethod(_forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper for decodes with `use_cuda_graph`.

    Arguments and errors are those of that; the buffers must be given.
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """The `plan` of a wrapper for decodes, without a copy to the host if `indptr` is there, too.

    Arguments are those of `plan`; `global_override_indptr_cpu` is `indptr` on the host.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: No kernel does it, with the reasons.
    """
    self._plan_impl(
        indptr,
        indices,
        last_page_len,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type or data_type or "float16",
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
        host_indptr=global_override_indptr_cpu,
    )
