"""Descriptions of attention calls for `explain`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, graphs
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import drop_in_arguments, scaled_dot_product_attention, sdpa
from cudnn_sdpa.attention.forward import MIN_SCALE, Forward
from cudnn_sdpa.attention.options import TOP_LEFT
from cudnn_sdpa.runtime.describe import Description, describes


@describes(sdpa)
def describe_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = TOP_LEFT,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa` with these arguments runs on a GPU; tensors may also be on the CPU."""
    call = ForwardArguments(q, k, v, seq_lens_q, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, out)
    arguments.check_types(call)
    arguments.check(call)
    arguments.check_strides(q, k, v)
    negated = scale is not None and scale <= -MIN_SCALE
    forward = Forward.of(call._replace(q=torch.empty_like(q, device="meta")) if negated else call)
    return Description(
        operation=graphs.sdpa_forward,
        key=forward.key,
        device=q.get_device() if q.is_cuda else None,
        is_empty=forward.is_empty,
        extra_kernels=(["q is negated into a copy, for the negative scale"] if negated else [])
        + forward.extra_kernels(),
    )


@describes(scaled_dot_product_attention)
def describe_drop_in(*args: Any, **kwargs: Any) -> Description:
    """The same for `scaled_dot_product_attention`."""
    q, k, v, options = drop_in_arguments(*args, **kwargs)
    return describe_sdpa(q, k, v, **options)
