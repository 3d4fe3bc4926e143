"""Descriptions of attention calls for `explain`."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, graphs, memory, operators
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import is_deterministic, sdpa
from cudnn_sdpa.attention.drop_in import drop_in_arguments, scaled_dot_product_attention
from cudnn_sdpa.attention.operators import MIN_SCALE
from cudnn_sdpa.attention.options import TOP_LEFT
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.runtime.describe import Description, describes


@describes(sdpa)
def describe_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = TOP_LEFT,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa` with these arguments runs on a GPU; tensors may also be on the CPU."""
    left, right = arguments.window_bounds(window)
    rng = torch.empty(2, dtype=torch.int64, device=q.device) if dropout_p else None
    call = ForwardArguments(
        *(q, k, v, attn_mask, sinks, seq_lens_q, seq_lens_kv, rng),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap, alibi),
        *(is_deterministic(deterministic), return_lse, out),
    )
    arguments.check_types(call)
    arguments.check(call)
    memory.check_strides(q, k, v)
    memory.check_memory(q, k, v, out)
    negated = scale is not None and scale <= -MIN_SCALE
    layouts = call
    if negated:
        layouts = call._replace(
            q=torch.empty_like(q, device="meta"), out=operators.new_output(_without_data(q), v) if out is None else out
        )
    forward = Forward.of(layouts)
    return Description(
        operation=graphs.sdpa_forward,
        key=forward.key,
        device=q.get_device() if q.is_cuda else None,
        is_empty=forward.is_empty,
        extra_kernels=(["q is negated into a copy, for the negative scale"] if negated else [])
        + forward.extra_kernels(),
    )


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@describes(scaled_dot_product_attention)
def describe_drop_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Description:
    """The same for `scaled_dot_product_attention`."""
    q, k, v, options = drop_in_arguments(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return describe_sdpa(q, k, v, dropout_p=dropout_p, **options)
