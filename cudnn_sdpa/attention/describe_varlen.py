"""Descriptions of calls over packed sequences for `explain`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from cudnn_sdpa.attention import (
    arguments,
    describe,
    graphs,
    memory,
    pieces,
    tracking,
    varlen,
    varlen_calls,
    verification,
)
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import is_deterministic
from cudnn_sdpa.attention.operators import MIN_SCALE
from cudnn_sdpa.attention.options import BOTTOM_RIGHT
from cudnn_sdpa.attention.passes import dense_like
from cudnn_sdpa.attention.varlen import sdpa_varlen
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.describe import Description, describes
from cudnn_sdpa.runtime.eager import needs_gradient
from cudnn_sdpa.runtime.layouts import TensorLayout


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
    longest_q, longest_kv = arguments.as_int(max_seqlen_q), arguments.as_int(max_seqlen_kv)
    given = VarlenArguments(
        *(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, None, longest_q, longest_kv),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap),
        *(cu_seqlens_q is cu_seqlens_kv, False, return_lse, out),
    )
    arguments.check_types(ForwardArguments(q, k, v, sinks=sinks, out=out, with_lse=return_lse))
    given = given._replace(deterministic=is_deterministic(deterministic))
    call = describe.as_cast(given)
    varlen.check(call)
    refused = UnsupportedError.of(tracking.check, "sdpa_varlen", out, q=q, k=k, v=v, sinks=sinks)
    if refused is not None:
        return Description(graphs.sdpa_forward, partial(describe.refuse, refused), describe.device_of(q))
    trains = needs_gradient(q, k, v, sinks)
    given = given._replace(with_lse=return_lse or trains)
    launched, of_scale = with_positive_scale(call)
    memory.check_strides(*launched.as_dense()[:3])
    memory.check_memory(launched.q, launched.k, launched.v, out)
    packed, layout = varlen_calls.packed(launched), varlen_calls.output_layout(call)
    is_empty = 0 in q.shape or 0 in k.shape
    notes = [*describe.notes_on_casts(given, call), *of_scale, *packed.extra_kernels(with_lse=given.with_lse)]
    return Description(
        operation=graphs.sdpa_forward,
        key=partial(packed.forward_key, layout, given.with_lse),
        device=describe.device_of(q),
        is_empty=is_empty,
        extra_kernels=[] if is_empty else notes,
        backward=_describe_backward(given, describe.without_data(call), layout) if trains else None,
        verify=lambda differentiate: verification.errors_varlen(given, differentiate=differentiate),
    )


def with_positive_scale(call: VarlenArguments) -> tuple[VarlenArguments, list[str]]:
    """The call that is launched, as cuDNN computes only positive scales, and what that takes."""
    if call.scale_value >= MIN_SCALE:
        return call, []
    sign = 0.0 if call.scale_value > -MIN_SCALE else -1.0
    q = describe.without_data(call).q * sign
    return call._replace(q=q), [f"q is multiplied by {sign:.0f} into a copy, as the scale is not positive"]


def _describe_backward(given: VarlenArguments, call: VarlenArguments, out: TensorLayout) -> Description:
    """The backward pass for a gradient that lies in memory as the output does."""
    device, is_empty = describe.device_of(given.q), 0 in call.q.shape or 0 in call.k.shape
    is_cut = not is_empty and pieces.is_too_large(*call[:3], out)
    try:
        part, of_part, number = _first_piece(call) if is_cut else (call, out, 1)
    except UnsupportedError as error:
        return Description(graphs.sdpa_backward, partial(describe.refuse, error), device)
    launched, of_scale = with_positive_scale(part)
    packed = varlen_calls.packed(launched)
    as_launched = replace(packed, q=dense_like(packed.q))
    notes = [
        *([describe.note_on_pieces(number)] if is_cut else []),
        *(f"{note}, and so are the gradients of q and k" for note in of_scale),
        *packed.backward_kernels(sink_gradient=given.sinks is not None and given.sinks.requires_grad),
        *describe.notes_on_casts(given, call, back=True),
    ]
    return Description(
        operation=graphs.sdpa_backward,
        key=partial(as_launched.backward_key, of_part, of_part, call.deterministic),
        device=device,
        is_empty=is_empty,
        extra_kernels=[] if is_empty else notes,
    )


def _first_piece(call: VarlenArguments) -> tuple[VarlenArguments, TensorLayout, int]:
    """The first of the calls that compute the gradients of a large one, its output, and how many they are.

    Raises:
        UnsupportedError: It cannot be cut.
    """
    dense = call.as_dense()
    pieces.check(dense, mask_gradient=False)
    first, *others = pieces.cut(*dense[:3])
    q = call.q[:, first.heads].contiguous()
    k, v = (pieces.near(x[:, first.heads_kv]) for x in (call.k, call.v))
    of_part = TensorLayout.contiguous((*q.shape[:2], v.shape[2]), q.dtype)
    return call._replace(q=q, k=k, v=v), of_part, 1 + len(others)
