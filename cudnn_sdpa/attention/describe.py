"""Descriptions of attention calls for `explain`."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, graphs, memory, operators, varlen, varlen_calls, verification
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import is_deterministic, sdpa
from cudnn_sdpa.attention.drop_in import drop_in_arguments, scaled_dot_product_attention
from cudnn_sdpa.attention.operators import MIN_SCALE
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.passes import Backward, Forward
from cudnn_sdpa.attention.varlen import sdpa_varlen
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.runtime.describe import Description, describes
from cudnn_sdpa.runtime.eager import needs_gradient


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
            q=torch.empty_like(q, device="meta").requires_grad_(q.requires_grad),
            out=operators.new_output(_without_data(q), v) if out is None else out,
        )
    forward = Forward.of(layouts)
    return Description(
        operation=graphs.sdpa_forward,
        key=forward.key,
        device=q.get_device() if q.is_cuda else None,
        is_empty=forward.is_empty,
        extra_kernels=(["q is negated into a copy, for the negative scale"] if negated else [])
        + forward.extra_kernels(),
        backward=_describe_backward(layouts, forward) if needs_gradient(*call.tensors) else None,
        verify=lambda: verification.errors(call._replace(rng=None)),
    )


def _describe_backward(call: ForwardArguments, forward: Forward) -> Description:
    """The backward pass for a gradient that lies in memory as the output does."""
    of_mask = call.attn_mask is not None and call.attn_mask.requires_grad
    of_sinks = call.sinks is not None and call.sinks.requires_grad
    backward = Backward(forward.problem, forward.out, forward.out, call.deterministic, of_mask, of_sinks)
    return Description(
        operation=graphs.sdpa_backward,
        key=backward.key,
        device=call.q.get_device() if call.q.is_cuda else None,
        is_empty=forward.is_empty or forward.problem.is_single,
        extra_kernels=backward.extra_kernels(),
    )


@describes(sdpa_varlen)
def describe_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = BOTTOM_RIGHT,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa_varlen` with these arguments runs on a GPU."""
    left, right = arguments.window_bounds(window)
    call = VarlenArguments(
        *(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, None, max_seqlen_q, max_seqlen_kv),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap),
        *(cu_seqlens_q is cu_seqlens_kv, is_deterministic(deterministic), return_lse, out),
    )
    arguments.check_types(ForwardArguments(q, k, v, sinks=sinks, out=out, with_lse=return_lse))
    varlen.check(call)
    packed, device = varlen_calls.packed(call), q.get_device() if q.is_cuda else None
    trains = needs_gradient(q, k, v, sinks)
    layout = varlen_calls.output_layout(call)
    is_empty = 0 in q.shape or 0 in k.shape
    backward = Description(
        operation=graphs.sdpa_backward,
        key=lambda target, device: packed.backward_key(layout, layout, call.deterministic, target, device),
        device=device,
        is_empty=is_empty,
    )
    return Description(
        operation=graphs.sdpa_forward,
        key=lambda target, device: packed.forward_key(layout, return_lse or trains, target, device),
        device=device,
        is_empty=is_empty,
        extra_kernels=packed.extra_kernels(),
        backward=backward if trains else None,
        verify=lambda: verification.errors_varlen(call),
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
