"""Builders of cuDNN's FP8 attention graphs: functions of symbolic tensors and static options only.

The operations are described in NVIDIA's documentation of the cuDNN frontend, "Attention", sections "FP8". What they
compute is in the frontend's headers `node/scaled_dot_product_flash_attention.h` and `node/sdpa_fp8_bwd.h`;
`fp8.reference` follows them. `band` is that of `dense.graphs`.

Every scale is data: a float32 tensor of one element on the GPU. The amax values are always results, because a frontend
that is asked for none of them leaves them out of the graph.
"""

from __future__ import annotations

from cudnn_sdpa.graph.backend import GraphBuilder, Results, Symbol
from cudnn_sdpa.graph.definition import GraphDefinition


@GraphDefinition
def sdpa_fp8_forward(
    g: GraphBuilder,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    scale: Symbol,
    descale_q: Symbol,
    descale_k: Symbol,
    descale_v: Symbol,
    descale_s: Symbol,
    scale_s: Symbol,
    scale_o: Symbol,
    seq_len_q: Symbol | None = None,
    seq_len_kv: Symbol | None = None,
    table_k: Symbol | None = None,
    table_v: Symbol | None = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
    with_lse: bool,
) -> Results:
    """O, the amax of the probabilities and of O, and on request the LSE of the scores.

    With tables, k and v are pages, and the page of key j of sequence b is `table_k[b, j // page size]`.
    """
    pages: dict[str, object] = {}
    if table_k is not None:
        pages.update(paged_attention_k_table=table_k, paged_attention_v_table=table_v)
        pages["paged_attention_max_seq_len_kv"] = table_k.get_dim()[2] * k.get_dim()[2]
    o, lse, amax_s, amax_o = g.sdpa_fp8(
        name="sdpa_fp8",
        q=q,
        k=k,
        v=v,
        descale_q=descale_q,
        descale_k=descale_k,
        descale_v=descale_v,
        descale_s=descale_s,
        scale_s=scale_s,
        scale_o=scale_o,
        attn_scale=scale,
        generate_stats=with_lse,
        **pages,
        **masks(g, band, seq_len_q, seq_len_kv),
    )
    return (o, amax_s, amax_o, lse) if with_lse else (o, amax_s, amax_o)


@GraphDefinition
def sdpa_fp8_backward(
    g: GraphBuilder,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    out: Symbol,
    grad_out: Symbol,
    lse: Symbol,
    scale: Symbol,
    descale_q: Symbol,
    descale_k: Symbol,
    descale_v: Symbol,
    descale_o: Symbol,
    descale_do: Symbol,
    descale_s: Symbol,
    descale_dp: Symbol,
    scale_s: Symbol,
    scale_dq: Symbol,
    scale_dk: Symbol,
    scale_dv: Symbol,
    scale_dp: Symbol,
    seq_len_q: Symbol | None = None,
    seq_len_kv: Symbol | None = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
    deterministic: bool,
) -> Results:
    """The gradients of q, k and v, their amax values, and that of the scores' gradient."""
    return tuple(
        g.sdpa_fp8_backward(
            name="sdpa_fp8_backward",
            q=q,
            k=k,
            v=v,
            o=out,
            dO=grad_out,
            stats=lse,
            descale_q=descale_q,
            descale_k=descale_k,
            descale_v=descale_v,
            descale_o=descale_o,
            descale_dO=descale_do,
            descale_s=descale_s,
            descale_dP=descale_dp,
            scale_s=scale_s,
            scale_dQ=scale_dq,
            scale_dK=scale_dk,
            scale_dV=scale_dv,
            scale_dP=scale_dp,
            attn_scale=scale,
            use_deterministic_algorithm=deterministic,
            **masks(g, band, seq_len_q, seq_len_kv),
        )
    )


def masks(
    g: GraphBuilder,
    band: tuple[int | None, int | None, bool] | None,
    seq_len_q: Symbol | None,
    seq_len_kv: Symbol | None,
    *,
    prefix: str = "",
) -> dict[str, object]:
    """cuDNN's options of the mask; `prefix` is that of the bounds' names."""
    options: dict[str, object] = {}
    if band is not None:
        left, right, bottom_right = band
        alignment = g.types.diagonal_alignment
        options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if bottom_right else alignment.TOP_LEFT
        options[f"{prefix}right_bound"] = right
        if left is not None:  # cuDNN masks the keys from this distance on
            options[f"{prefix}left_bound"] = left + 1
    if seq_len_q is not None:
        options.update(use_padding_mask=True, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    return options
