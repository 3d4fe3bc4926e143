"""Descriptions of calls over packed sequences for `explain`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference, sharding
from cudnn_sdpa.attention.arguments import ForwardArguments, cast_for_autocast, grouped, with_positive_scale
from cudnn_sdpa.attention.dense import explain, graphs
from cudnn_sdpa.attention.varlen import plans
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments, VarlenGradientCall
from cudnn_sdpa.attention.varlen.call import VarlenCall
from cudnn_sdpa.attention.varlen.reference import sequences
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN, backward_call_of, call_of, sdpa_varlen, sdpa_varlen_backward
from cudnn_sdpa.attention.verify import PACKED, Results, compare, exact_inputs, run_detached
from cudnn_sdpa.engine.call import without_data
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like


@describes(sdpa_varlen, sharding.varlen)
def describe_varlen(sinks: Tensor | None, **given: Any) -> Description:
    checked = VARLEN.checked(call_of(**grouped(given), sinks=sinks), explain.as_cast)
    original, call, refused, trains = checked.call, checked.cast, checked.refused, checked.trains
    device = explain.device_of(original.q)
    if refused is not None:
        return Description.refused(graphs.sdpa_forward, refused, device)
    original = original._replace(with_lse=original.with_lse or trains)
    launched, scale_notes = with_positive_scale(call), explain.notes_on_scale(call)
    packed, layout = plans.spec_of(launched), plans.output_layout(call)
    is_empty = 0 in call.q.shape or 0 in call.k.shape
    notes = [*explain.notes_on_casts(original, call), *explain.notes_on_sinks(sinks), *scale_notes]
    notes += packed.extra_kernels(with_lse=original.with_lse)
    back = explain.notes_on_sink_gradient(sinks, sinks is not None and sinks.requires_grad)
    return Description(
        operation=graphs.sdpa_forward,
        key=partial(packed.forward_key, layout, original.with_lse),
        device=device,
        is_empty=is_empty,
        extra_kernels=notes,
        backward=_describe_backward(original, without_data(call), layout, back) if trains else None,
        verify=lambda differentiate: errors_varlen(original, differentiate=differentiate),
    )


@describes(sdpa_varlen_backward)
def describe_varlen_backward(sinks: Tensor | None, **given: Any) -> Description:
    of = backward_call_of(**grouped(given), sinks=sinks)
    call = of.call
    call.check_types()
    of.check_types()
    call.check_options()
    of.check()
    call.check_strides()
    call.check_memory()
    original = call._replace(sinks=None if sinks is None else sinks.detach().requires_grad_(of.needs[-1]))
    is_readable = explain.is_readable_layout(of.out, 3)
    layout = TensorLayout.of(of.out) if is_readable else TensorLayout.contiguous(of.out.shape, of.out.dtype)
    notes = [*explain.notes_on_sinks(sinks), *explain.notes_on_copies(of, dims=3)]
    notes += explain.notes_on_sink_gradient(sinks, of.needs[-1])
    return _describe_backward(original, without_data(call), layout, notes)


def _describe_backward(
    original: VarlenArguments, call: VarlenArguments, out: TensorLayout, notes: list[str]
) -> Description:
    """The backward pass for a gradient with the layout of the output, given the notes on what runs around it."""
    device, is_empty = explain.device_of(original.q), 0 in call.q.shape or 0 in call.k.shape
    try:
        part, part_out, number = (call, out, 0) if is_empty else _first_part(call, out)
    except UnsupportedError as error:
        return Description.refused(graphs.sdpa_backward, error, device)
    launched, scale_notes = with_positive_scale(part), explain.notes_on_scale(part)
    packed = plans.spec_of(launched)
    as_launched = replace(packed, q=dense_like(packed.q))
    notes = [
        *notes,
        *([explain.note_on_parts("the gradient", number)] if number else []),
        *(f"{note}, and so are the gradients of q and k" for note in scale_notes),
        *packed.backward_kernels(sink_gradient=original.sinks is not None and original.sinks.requires_grad),
        *explain.notes_on_casts(original, call, back=True),
    ]
    return Description(
        operation=graphs.sdpa_backward,
        key=partial(as_launched.backward_key, part_out, part_out, call.softmax.deterministic),
        device=device,
        is_empty=is_empty,
        extra_kernels=notes,
    )


def _first_part(call: VarlenArguments, out: TensorLayout) -> tuple[VarlenArguments, TensorLayout, int]:
    """The first part of a backward call, its output, and the number of parts: 0 if one launch computes it."""
    grad_out = torch.empty_strided(out.shape, out.stride, dtype=out.dtype, device="meta")
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device="meta")
    of = VarlenGradientCall(grad_out, grad_out, lse, call, needs=(True, True, True, False))
    parts = plans.split_gradient(of)
    if not parts:
        return call, out, 0
    part = plans.part_of(of, parts[0])
    return part.call, TensorLayout.of(part.out), len(parts)


def errors_varlen(call: VarlenCall, *, differentiate: bool) -> dict[str, float]:
    """Relative errors of a call over packed sequences, as `dense.explain.errors_of`."""
    actual, grad_out = run_detached(call, PACKED, VARLEN, differentiate=differentiate)
    cast = cast_for_autocast(ForwardArguments(call.q, call.k, call.v))
    exact_call = exact_inputs(call._replace(q=cast.q, k=cast.k, v=cast.v), PACKED)
    exact = _exact_varlen(exact_call, grad_out.double() if actual.gradients else None)
    return compare(*(_of_sequences(results, call) for results in (actual, exact)))


def _exact_varlen(call: VarlenArguments, grad_out: Tensor | None) -> Results:
    """The results in float64, sequence by sequence: each is a dense call."""
    out = call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    lse = out.new_full(out.shape[:2], -torch.inf)
    gradients = {name: torch.zeros_like(x) for name in PACKED if (x := getattr(call, name)) is not None}
    for rows, columns, one in sequences(call):
        out_one, lse_one = reference.attention(one)
        out[rows], lse[rows] = out_one[0].transpose(0, 1), lse_one[0].transpose(0, 1)
        if grad_out is None:
            continue
        *grad_qkv, _, grad_sinks = reference.gradients(grad_out[rows].transpose(0, 1).unsqueeze(0), out_one, one)
        for name, span, gradient in zip("qkv", (rows, columns, columns), grad_qkv, strict=True):
            gradients[name][span] = gradient[0].transpose(0, 1)
        if grad_sinks is not None:
            gradients["sinks"] += grad_sinks
    return Results(out, lse, gradients)


def _of_sequences(results: Results, call: VarlenArguments) -> Results:
    """The results without the rows past the last sequence."""
    rows_q, rows_kv = (slice(0, max(0, int(ends[-1]))) for ends in call.offsets)
    rows = {"q": rows_q, "k": rows_kv, "v": rows_kv}
    gradients = {name: x[rows[name]] if name in rows else x for name, x in results.gradients.items()}
    return Results(results.out[rows_q], None if results.lse is None else results.lse[rows_q], gradients)
