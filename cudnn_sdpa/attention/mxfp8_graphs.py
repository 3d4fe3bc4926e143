"""The builders of cuDNN's attention in MXFP8: blocks of 32 numbers with a scale each. Not run on hardware yet.

`g.sdpa_mxfp8` and `g.sdpa_mxfp8_backward` of the cuDNN frontend; what they want of their operands stands in the headers
`node/scaled_dot_product_flash_attention.h` and `node/sdpa_fp8_bwd.h`. Scales are powers of two in 8 bits (E8M0), in the
memory order that cuDNN calls F8_128x4; see `mxfp8.in_tiles`.
"""

from __future__ import annotations

from typing import Any

from cudnn_sdpa.attention.fp8_graphs import masks
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
        **masks(g, band, seq_len_q, seq_len_kv, prefix="diagonal_band_"),
    )
    return (o, amax_o, lse) if with_lse else (o, amax_o)


@graph_op
def sdpa_mxfp8_backward(
    g: Any,
    q: Any,
    q_t: Any,
    k: Any,
    k_t: Any,
    v: Any,
    out: Any,
    grad_out: Any,
    do: Any,
    do_t: Any,
    lse: Any,
    scale: Any,
    descale_q: Any,
    descale_q_t: Any,
    descale_k: Any,
    descale_k_t: Any,
    descale_v: Any,
    descale_do: Any,
    descale_do_t: Any,
    seq_len_q: Any = None,
    seq_len_kv: Any = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
) -> Any:
    """The gradients by q, k and v, and their largest absolute values.

    `do` is `grad_out` in MXFP8. What is called `_t` is not transposed: its blocks lie along the sequence, and those of
    the others, of `v` too, along the head dim. On Blackwell there is the deterministic algorithm alone.
    """
    descales = (descale_q, descale_q_t, descale_k, descale_k_t, descale_v, descale_do, descale_do_t)
    for descale in descales:
        descale.set_reordering_type(g.types.tensor_reordering.F8_128x4)
    names = ("q", "q_T", "k", "k_T", "v", "dO", "dO_T")
    return tuple(
        g.sdpa_mxfp8_backward(
            name="sdpa_mxfp8_backward",
            **dict(zip(names, (q, q_t, k, k_t, v, do, do_t), strict=True)),
            o_f16=out,
            dO_f16=grad_out,
            stats=lse,
            **{f"descale_{name}": descale for name, descale in zip(names, descales, strict=True)},
            attn_scale=scale,
            use_deterministic_algorithm=True,
            **masks(g, band, seq_len_q, seq_len_kv),
        )
    )
