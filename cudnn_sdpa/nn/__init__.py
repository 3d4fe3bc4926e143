"""Modules: functions of this library with their arguments, parameters and caches.

They are the building blocks of LLaMA-like models and vision transformers. Parameters are ordinary ones, and no module
holds plans. `from_torch` copies the weights of PyTorch's module.
"""

from cudnn_sdpa.nn.attention import Attention
from cudnn_sdpa.nn.feed_forward import FeedForward, SwiGLU
from cudnn_sdpa.nn.fp8 import Fp8Attention
from cudnn_sdpa.nn.kv_cache import KVCache, KVStep
from cudnn_sdpa.nn.norms import LayerNorm, RMSNorm
from cudnn_sdpa.nn.parallel import parallel_plan
from cudnn_sdpa.nn.rotary import RotaryEmbedding
from cudnn_sdpa.nn.transformer import TransformerLayer
from cudnn_sdpa.nn.vision import PatchEmbed, VisionEncoder

__all__ = [
    "Attention",
    "FeedForward",
    "Fp8Attention",
    "KVCache",
    "KVStep",
    "LayerNorm",
    "PatchEmbed",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "TransformerLayer",
    "VisionEncoder",
    "parallel_plan",
]
