"""Descriptions of calls over packed sequences for `explain`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, memory, reference
from cudnn_sdpa.attention.arguments import MIN_SCALE, ForwardArguments, cast_for_autocast
from cudnn_sdpa.attention.dense import explain, graphs, large_backward
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.varlen import launch
from cudnn_sdpa.attention.varlen import sdpa_varlen as sdpa_varlen_module
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.sdpa_varlen import run as run_varlen
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.attention.verify import PACKED, Results, compare, exact_inputs, run_anew
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import is_deterministic
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like


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
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa_varlen` with these arguments runs on a GPU."""
    left, right = arguments.window_bounds(window_size)
    max_seqlen_q, max_seqlen_kv = arguments.as_int(max_seqlen_q), arguments.as_int(max_seqlen_kv)
    given = VarlenArguments(
        *(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, None, max_seqlen_q, max_seqlen_kv),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap),
        *(cu_seqlens_q is cu_seqlens_kv, False, return_lse, out),
    )
    arguments.check_types(ForwardArguments(q, k, v, sinks=sinks, out=out, with_lse=return_lse))
    given = given._replace(deterministic=is_deterministic(deterministic))
    call = explain.as_cast(given)
    sdpa_varlen_module.check(call)
    refused = UnsupportedError.of(autograd_checks.check, "sdpa_varlen", out, q=q, k=k, v=v, sinks=sinks)
    if refused is not None:
        return Description(graphs.sdpa_forward, partial(explain.refuse, refused), explain.device_of(q))
    trains = needs_gradient(q, k, v, sinks)
    given = given._replace(with_lse=return_lse or trains)
    launched, of_scale = with_positive_scale(call)
    memory.check_strides(*launched.as_dense()[:3])
    memory.check_memory(launched.q, launched.k, launched.v, out)
    packed, layout = launch.packed(launched), launch.output_layout(call)
    is_empty = 0 in q.shape or 0 in k.shape
    notes = [*explain.notes_on_casts(given, call), *of_scale, *packed.extra_kernels(with_lse=given.with_lse)]
    return Description(
        operation=graphs.sdpa_forward,
        key=partial(packed.forward_key, layout, given.with_lse),
        device=explain.device_of(q),
        is_empty=is_empty,
        extra_kernels=[] if is_empty else notes,
        backward=_describe_backward(given, explain.without_data(call), layout) if trains else None,
        verify=lambda differentiate: errors_varlen(given, differentiate=differentiate),
    )


def with_positive_scale(call: VarlenArguments) -> tuple[VarlenArguments, list[str]]:
    """The call that is launched, as cuDNN computes only positive scales, and what that takes."""
    if call.scale_value >= MIN_SCALE:
        return call, []
    sign = 0.0 if call.scale_value > -MIN_SCALE else -1.0
    q = explain.without_data(call).q * sign
    return call._replace(q=q), [f"q is multiplied by {sign:.0f} into a copy, as the scale is not positive"]


def _describe_backward(given: VarlenArguments, call: VarlenArguments, out: TensorLayout) -> Description:
    """The backward pass for a gradient that lies in memory as the output does."""
    device, is_empty = explain.device_of(given.q), 0 in call.q.shape or 0 in call.k.shape
    is_cut = not is_empty and large_backward.is_too_large(*call[:3], out)
    try:
        part, of_part, number = _first_piece(call) if is_cut else (call, out, 1)
    except UnsupportedError as error:
        return Description(graphs.sdpa_backward, partial(explain.refuse, error), device)
    launched, of_scale = with_positive_scale(part)
    packed = launch.packed(launched)
    as_launched = replace(packed, q=dense_like(packed.q))
    notes = [
        *([explain.note_on_pieces(number)] if is_cut else []),
        *(f"{note}, and so are the gradients of q and k" for note in of_scale),
        *packed.backward_kernels(sink_gradient=given.sinks is not None and given.sinks.requires_grad),
        *explain.notes_on_casts(given, call, back=True),
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
    large_backward.check(dense, mask_gradient=False)
    first, *others = large_backward.split(*dense[:3])
    q = call.q[:, first.heads].contiguous()
    k, v = (large_backward.compact(x[:, first.heads_kv]) for x in (call.k, call.v))
    of_part = TensorLayout.contiguous((*q.shape[:2], v.shape[2]), q.dtype)
    return call._replace(q=q, k=k, v=v), of_part, 1 + len(others)


def errors_varlen(call: VarlenArguments, *, differentiate: bool) -> dict[str, float]:
    """The same for a call over packed sequences.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    found, grad_out = run_anew(call, PACKED, run_varlen, differentiate=differentiate)
    cast = cast_for_autocast(ForwardArguments(call.q, call.k, call.v))
    exact_call = exact_inputs(call._replace(q=cast.q, k=cast.k, v=cast.v), PACKED)
    exact = _exact_varlen(exact_call, grad_out.double() if found.gradients else None)
    return compare(*(_of_sequences(results, call) for results in (found, exact)))


def _exact_varlen(call: VarlenArguments, grad_out: Tensor | None) -> Results:
    """The results in float64, sequence by sequence: each is a dense call."""
    out = call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    lse = out.new_full(out.shape[:2], -torch.inf)
    gradients = {name: torch.zeros_like(x) for name in PACKED if (x := getattr(call, name)) is not None}
    ends = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_kv.tolist()), strict=True)
    for rows, columns in ((slice(*of_q), slice(*of_kv)) for of_q, of_kv in ends):
        one = call._replace(q=call.q[rows], k=call.k[columns], v=call.v[columns], out=None).as_dense()
        of_one, lse_of_one = reference.attention(one)
        out[rows], lse[rows] = of_one[0].transpose(0, 1), lse_of_one[0].transpose(0, 1)
        if grad_out is None:
            continue
        *by_qkv, _, by_sinks = reference.gradients(grad_out[rows].transpose(0, 1).unsqueeze(0), of_one, one)
        for name, where, found in zip("qkv", (rows, columns, columns), by_qkv, strict=True):
            gradients[name][where] = found[0].transpose(0, 1)
        if by_sinks is not None:
            gradients["sinks"] += by_sinks
    return Results(out, lse, gradients)


def _of_sequences(results: Results, call: VarlenArguments) -> Results:
    """The results without the rows past the last sequence, which belong to nobody."""
    of_q, of_kv = (slice(0, max(0, int(ends[-1]))) for ends in (call.cu_seqlens_q, call.cu_seqlens_kv))
    rows = {"q": of_q, "k": of_kv, "v": of_kv}
    gradients = {name: x[rows[name]] if name in rows else x for name, x in results.gradients.items()}
    return Results(results.out[of_q], None if results.lse is None else results.lse[of_q], gradients)
