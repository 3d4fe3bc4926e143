"""FlashInfer's attention, caches and merges, by the kernels of this library.

Code that imports these names of `flashinfer` runs on them unchanged: parameters have the names, the order and the
defaults of FlashInfer 0.7.2, pages are "NHD" or "HND" in one tensor or two, log-sum-exps are to the base of 2, and
masks and windows are aligned with the last key. Workspaces, backends and other hints are accepted and not needed. What
no kernel does (positions within attention, masks of one's own, NVFP4, kernels from given source) raises
`UnsupportedError`, which is a `NotImplementedError`, with the reason and with what works. Queries that see no key get
zeros, and an LSE of minus infinity.

Examples:
    >>> import torch
    >>> from cudnn_sdpa.compat import flashinfer
    >>> q, (k, v) = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(2, 100, 2, 64, dtype=torch.bfloat16)
    >>> out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, window_left=31, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([8, 64]), torch.Size([8]))
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from cudnn_sdpa.compat.flashinfer_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from cudnn_sdpa.compat.flashinfer_merges import merge_state, merge_state_in_place, merge_states
from cudnn_sdpa.compat.flashinfer_pages import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from cudnn_sdpa.compat.flashinfer_prefill import BatchAttention, BatchPrefillWithPagedKVCacheWrapper
from cudnn_sdpa.compat.flashinfer_ragged import BatchPrefillWithRaggedKVCacheWrapper
from cudnn_sdpa.compat.flashinfer_single import (
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from cudnn_sdpa.errors import UnsupportedError

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

_CASCADE = "a wrapper for each level, and merge_state of what they return"
#: Wrappers that can be imported and not be made, and what works in their place.
_REFUSED = {
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "BatchMLAPagedAttentionWrapper": "`cudnn_sdpa.sdpa_paged_varlen` with head dims of 576 and 512",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": _CASCADE,
    "MultiLevelCascadeAttentionWrapper": _CASCADE,
}


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise UnsupportedError(name, ["there is no such wrapper"], _REFUSED[name])


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in _REFUSED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_refuse, name)
