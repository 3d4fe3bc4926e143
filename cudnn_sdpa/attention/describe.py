"""Descriptions of attention calls for `explain`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, graphs, operators
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import check_drop_in_options, drop_in_arguments, scaled_dot_product_attention, sdpa
from cudnn_sdpa.attention.forward import MIN_SCALE, Forward
from cudnn_sdpa.attention.options import TOP_LEFT
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.describe import Description, describes
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.target import Target


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
    arguments.check_memory(q, k, v, out)
    negated = scale is not None and scale <= -MIN_SCALE
    layouts = call
    if negated:
        layouts = call._replace(
            q=torch.empty_like(q, device="meta"), out=operators.new_output(_without_data(q), v) if out is None else out
        )
    forward = Forward.of(layouts)
    refused = UnsupportedError.of(arguments.check_no_gradient, q=q, k=k, v=v, out=out)
    return Description(
        operation=graphs.sdpa_forward,
        key=lambda target, device: _key(forward, target, device, refused),
        device=q.get_device() if q.is_cuda else None,
        is_empty=forward.is_empty and refused is None,
        extra_kernels=(["q is negated into a copy, for the negative scale"] if negated else [])
        + forward.extra_kernels(),
    )


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _key(forward: Forward, target: Target, device: int | None, refused: UnsupportedError | None) -> PlanKey:
    """The key, or one error with all that speaks against the call."""
    try:
        key = forward.key(target, device)
    except UnsupportedError as error:
        raise (error if refused is None else refused.joined(error)) from None
    if refused is not None:
        raise refused
    return key


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
    q, k, v, options = drop_in_arguments(query, key, value, is_causal, scale, enable_gqa)
    description = describe_sdpa(q, k, v, **options)
    refused = UnsupportedError.of(check_drop_in_options, attn_mask, dropout_p)
    if refused is None:
        return description

    def no_key(target: Target, device: int | None) -> PlanKey:
        try:
            description.key(target, device)
        except UnsupportedError as error:
            raise refused.joined(error) from None
        raise refused

    return dataclasses.replace(description, key=no_key, is_empty=False)
