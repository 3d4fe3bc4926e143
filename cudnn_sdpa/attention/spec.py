"""The common part of the specs of dense and of packed calls (`AttentionSpec`), and inputs of their plans."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_sdpa.attention.mask import Mask
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.graph.key import HOST_SCALAR, ONE_INT64, Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout

SCALE = Operand("scale", HOST_SCALAR, Role.SCALAR)
SOFTCAP = Operand("softcap", HOST_SCALAR, Role.SCALAR)  #: with `is_capped`
DROPOUT = [Operand("seed", ONE_INT64), Operand("offset", ONE_INT64)]  #: with `dropout_p`


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The layouts and options that both passes of a call share, without data.

    Attributes:
        q: Queries (B, Hq, Sq, D), or (Tq, Hq, D) of packed sequences.
        k: Keys (B, Hkv, Skv, D) or (Tkv, Hkv, D).
        v: Values, likewise.
        mask: The normalized band, and the number of fully masked rows.
        is_capped: Whether there is logit soft-capping; its value is data.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    mask: Mask
    sink_use: SinkUse = SinkUse.ABSENT
    dropout_p: float = 0.0
    is_capped: bool = False
    alibi: bool = False
    deterministic: bool = False
