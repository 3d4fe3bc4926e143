"""From-scratch CUDA attention: kernels of this library's own, for what cuDNN lacks, and to be read."""

from cudnn_sdpa.kernels.attention import CUDAAttention, attention
from cudnn_sdpa.kernels.reference import reference_attention

__all__ = ["CUDAAttention", "attention", "reference_attention"]
