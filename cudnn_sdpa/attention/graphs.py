"""Builders of cuDNN's attention graphs: functions of symbolic tensors and static options, and of nothing else.

The operations are described in NVIDIA's documentation of the cuDNN frontend, "Attention".
"""

from __future__ import annotations

from typing import Any

from cudnn_sdpa.attention.options import BOTTOM_RIGHT
from cudnn_sdpa.runtime.graph_op import graph_op


@graph_op
def sdpa_forward(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    seq_len_q: Any = None,
    seq_len_kv: Any = None,
    *,
    causal: str | None,
    with_lse: bool,
) -> Any:
    """O = softmax(scale · Q Kᵀ + mask) V, and on request the log-sum-exp of the masked scores."""
    options: dict[str, Any] = {}
    if causal is not None:
        alignment = g.types.diagonal_alignment
        options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if causal == BOTTOM_RIGHT else alignment.TOP_LEFT
        options["diagonal_band_right_bound"] = 0
    if seq_len_q is not None:
        options.update(use_padding_mask=True, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    o, lse = g.sdpa(name="sdpa", q=q, k=k, v=v, attn_scale=scale, generate_stats=with_lse, **options)
    return (o, lse) if with_lse else o
