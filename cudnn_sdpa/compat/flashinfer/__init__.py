"""FlashInfer's attention, caches and merges, by the kernels of this library.

Code that imports these names of `flashinfer` runs on them unchanged: parameters have the names, the order and the
defaults of FlashInfer 0.7.2, pages are "NHD" or "HND" in one tensor or two, log-sum-exps are to the base of 2, and
masks and windows are aligned with the last key. Workspaces, backends and other hints are accepted and not needed. What
no kernel does (positions within attention, masks of one's own, NVFP4, kernels from given source) raises
`UnsupportedError`, which is a `NotImplementedError`, with the reason and with what works. So does what is missing here:
wrappers when they are made; the import of others raises `ImportError`. Queries that see no key get zeros, and an LSE of
minus infinity.

Examples:
    >>> import torch
    >>> from cudnn_sdpa.compat import flashinfer
    >>> q, (k, v) = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(2, 100, 2, 64, dtype=torch.bfloat16)
    >>> out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, window_left=31, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([8, 64]), torch.Size([8]))
"""

from typing import TYPE_CHECKING

from cudnn_sdpa.compat.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from cudnn_sdpa.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from cudnn_sdpa.compat.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from cudnn_sdpa.compat.flashinfer.prefill import BatchAttention, BatchPrefillWithPagedKVCacheWrapper
from cudnn_sdpa.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from cudnn_sdpa.compat.flashinfer.single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from cudnn_sdpa.compat.missing import missing

__all__ = [
    "BatchAttention",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

#: The version whose names these are.
__version__ = "0.7.2"

if not TYPE_CHECKING:  # which would take any name for one of this module
    _CASCADE = ("levels are not planned together", "a wrapper for each level, and merge_state of what they return")
    _ON_PAGES = "the wrappers of this module, or `cudnn_sdpa.sdpa_paged_varlen`, which takes block tables"
    _MISSING = {
        "*SharedPrefix*": _CASCADE,
        "MultiLevelCascadeAttentionWrapper": _CASCADE,
        "BatchMLAPaged*": ("there is no such wrapper", "`cudnn_sdpa.sdpa_paged_varlen` with head dims of 576 and 512"),
        "*AttentionSink*": ("sinks need no wrapper of their own", "`sinks` of the `run` of wrappers of paged caches"),
        "*BidirectionalRanges*": ("packed sequences have causal masks and windows", "`cudnn_sdpa.sdpa` with attn_mask"),
        "*Sparse*": (
            "no kernel leaves blocks of keys out",
            "page tables of the blocks, or `cudnn_sdpa.sdpa` with attn_mask",
        ),
        "*POD*": ("prompts and decodes are one call", "BatchAttention, or `cudnn_sdpa.sdpa_paged_varlen`"),
        "*_with_jit_module": ("kernels are not compiled from given source", "the function without jit_module"),
        "trtllm_*": ("TensorRT-LLM's kernels are not here", _ON_PAGES),
        "xqa*": ("TensorRT-LLM's kernels are not here", _ON_PAGES),
        "cudnn_batch_*": ("cuDNN is called by this library's own functions", _ON_PAGES),
        "*packbits": ("masks are not packed", "custom_mask of single_prefill_with_kv_cache"),
    }
    __getattr__ = missing(__name__, _MISSING, imported="*Wrapper")
