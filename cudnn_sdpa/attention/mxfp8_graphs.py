"""The builder of cuDNN's attention in MXFP8: blocks of 32 numbers with a scale each. Not run on hardware yet.

`g.sdpa_mxfp8` of the cuDNN frontend; what it wants of its operands stands in the header
`node/scaled_dot_product_flash_attention.h`. Scales are powers of two in 8 bits (E8M0), in the memory order that cuDNN
calls F8_128x4; see `mxfp8.in_tiles`.
"""

from __future__ import annotations

from typing import Any

from cudnn_sdpa.runtime.graph_op import graph_op


@graph_op
def sdpa_mxfp8_forward(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    descale_q: Any,
    descale_k: Any,
    descale_v: Any,
    seq_len_q: Any = None,
    seq_len_kv: Any = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
    with_lse: bool,
) -> Any:
    """O and the largest |O|, and on request the log-sum-exp of the scores."""
    for descale in (descale_q, descale_k, descale_v):
        descale.set_reordering_type(g.types.tensor_reordering.F8_128x4)
    options: dict[str, Any] = {}
    if band is not None:
        left, right, bottom_right = band
        alignment = g.types.diagonal_alignment
        options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if bottom_right else alignment.TOP_LEFT
        options["diagonal_band_right_bound"] = right
        if left is not None:  # cuDNN hides the keys from this distance on
            options["diagonal_band_left_bound"] = left + 1
    if seq_len_q is not None:
        options.update(use_padding_mask=True, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    o, lse, amax_o = g.sdpa_mxfp8(
        name="sdpa_mxfp8",
        q=q,
        k=k,
        v=v,
        descale_q=descale_q,
        descale_k=descale_k,
        descale_v=descale_v,
        attn_scale=scale,
        generate_stats=with_lse,
        **options,
    )
    return (o, amax_o, lse) if with_lse else (o, amax_o)
