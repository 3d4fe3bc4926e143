"""Attention of one sequence on many GPUs: context parallelism over `torch.distributed`."""

from cudnn_sdpa.distributed.parallel_attention import context_parallel, context_parallel_varlen
from cudnn_sdpa.distributed.zigzag import shard, unshard

__all__ = [
    "context_parallel",
    "context_parallel_varlen",
    "shard",
    "unshard",
]
