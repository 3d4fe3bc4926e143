"""Parts of the commands `python -m cudnn_sdpa bench …`."""

from __future__ import annotations

from enum import Enum


class HostPart(str, Enum):
    """Parts of `bench host`."""

    HOST = "host"
    PARTS = "parts"
    LAUNCHES = "launches"
    TRAINING = "training"
    KERNELS = "kernels"
    MEMORY = "memory"


class ColdPart(str, Enum):
    """Parts of `bench coldstart`."""

    CALLS = "calls"
    WARMUP = "warmup"
    IMPORTS = "imports"


class ShapesPart(str, Enum):
    """Parts of `bench shapes`."""

    PASSES = "passes"
    TAKEOVER = "takeover"
    BUCKETS = "buckets"


class DecodePart(str, Enum):
    """Parts of `bench decode`."""

    BANDWIDTH = "bandwidth"
    CHUNKS = "chunks"
    DRAFTS = "drafts"
    MIXED = "mixed"
    HOST = "host"


class NormPart(str, Enum):
    """Parts of `bench norm`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FUSED = "fused"
    HOST = "host"
    PROPOSALS = "proposals"


class SiluPart(str, Enum):
    """Parts of `bench silu`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    VIEWS = "views"
    HOST = "host"
    PROPOSALS = "proposals"


class ConvPart(str, Enum):
    """Parts of `bench conv`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PROPOSALS = "proposals"


class LlamaPart(str, Enum):
    """Parts of `bench llama`."""

    PREFILL = "prefill"
    DECODE = "decode"


class Fp8Part(str, Enum):
    """Parts of `bench fp8`."""

    FORWARD = "forward"
    TRAINING = "training"
    HOST = "host"
    LAYER = "layer"


class AttentionPart(str, Enum):
    """Parts of `bench attention`."""

    KERNELS = "kernels"
    OPTIONS = "options"
    VARLEN = "varlen"
    MEMORY = "memory"
    AUTOTUNE = "autotune"


class PeersPart(str, Enum):
    """Parts of `bench peers`."""

    OVERVIEW = "overview"
    PAGES = "pages"
    FORWARD = "forward"
    TRAINING = "training"


class ProviderPart(str, Enum):
    """Parts of `bench provider`."""

    HOST = "host"
    KERNELS = "kernels"
    SHAPES = "shapes"


class KernelsPart(str, Enum):
    """Parts of `bench kernels`."""

    FLOAT32 = "float32"
    HALF = "half"
    MEMORY = "memory"
    ERRORS = "errors"


class DistributedPart(str, Enum):
    """Parts of `bench distributed`."""

    WEAK = "weak"
    STRONG = "strong"
    TENSOR = "tensor"
    MODEL = "model"
