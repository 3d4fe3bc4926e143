"""Parts of the commands `python -m benchmarks …`."""

from __future__ import annotations

from enum import Enum


class HostPart(str, Enum):
    """Parts of `benchmarks host`."""

    HOST = "host"
    PARTS = "parts"
    LAUNCHES = "launches"
    RECORDED = "recorded"
    TRAINING = "training"
    KERNELS = "kernels"
    MEMORY = "memory"


class ColdPart(str, Enum):
    """Parts of `benchmarks coldstart`."""

    CALLS = "calls"
    WARMUP = "warmup"
    IMPORTS = "imports"


class ShapesPart(str, Enum):
    """Parts of `benchmarks shapes`."""

    PASSES = "passes"
    TAKEOVER = "takeover"
    BUCKETS = "buckets"


class DecodePart(str, Enum):
    """Parts of `benchmarks decode`."""

    STEPS = "steps"
    APPEND = "append"
    PLANS = "plans"
    HOST = "host"


class NormPart(str, Enum):
    """Parts of `benchmarks norm`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FUSED = "fused"
    HOST = "host"
    PROPOSALS = "proposals"


class SiluPart(str, Enum):
    """Parts of `benchmarks silu`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    VIEWS = "views"
    HOST = "host"
    PROPOSALS = "proposals"


class FusedPart(str, Enum):
    """Parts of `benchmarks fused`."""

    NORMS = "norms"
    GATES = "gates"
    ROTATIONS = "rotations"
    FEW_ROWS = "few_rows"
    NORMS_FP8 = "norms_fp8"
    ROPE_APPEND = "rope_append"
    ROPE_IN_PLACE = "rope_in_place"


class ConvPart(str, Enum):
    """Parts of `benchmarks conv`."""

    FORWARD = "forward"
    ACTIVATIONS = "activations"
    PEERS = "peers"
    BACKWARD = "backward"
    PROPOSALS = "proposals"


class LlamaPart(str, Enum):
    """Parts of `benchmarks llama`."""

    PREFILL = "prefill"
    DECODE = "decode"
    BATCHING = "batching"


class Fp8Part(str, Enum):
    """Parts of `benchmarks fp8`."""

    FORWARD = "forward"
    TRAINING = "training"
    HOST = "host"
    LAYER = "layer"
    ROTATIONS = "rotations"


class AttentionPart(str, Enum):
    """Parts of `benchmarks attention`."""

    KERNELS = "kernels"
    OPTIONS = "options"
    VARLEN = "varlen"
    MEMORY = "memory"
    AUTOTUNE = "autotune"


class PeersPart(str, Enum):
    """Parts of `benchmarks peers`."""

    OVERVIEW = "overview"
    FORWARD = "forward"
    TRAINING = "training"


class ProvidersPart(str, Enum):
    """Parts of `benchmarks providers`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TRAINING = "training"
    LENGTHS = "lengths"
    BACKWARD_LENGTHS = "backward_lengths"
    LARGE = "large"
    HOST = "host"
    FIRST_CALLS = "first_calls"


class ReplacementsPart(str, Enum):
    """Parts of `benchmarks replacements`."""

    HOST = "host"
    KERNELS = "kernels"
    SHAPES = "shapes"


class KernelsPart(str, Enum):
    """Parts of `benchmarks kernels`."""

    FLOAT32 = "float32"
    HALF = "half"
    MEMORY = "memory"
    ERRORS = "errors"


class DistributedPart(str, Enum):
    """Parts of `benchmarks distributed`."""

    WEAK = "weak"
    STRONG = "strong"
    TENSOR = "tensor"
    MODEL = "model"
