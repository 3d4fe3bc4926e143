"""Descriptions of calls over packed sequences for `explain`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cudnn_sdpa.attention import sharding, sink_scores
from cudnn_sdpa.attention.arguments import (
    ForwardArguments,
    as_launched,
    cast_for_autocast,
    output_layout,
    outputs_without_data,
)
from cudnn_sdpa.attention.dense import explain, graphs
from cudnn_sdpa.attention.dense.specs import key_of
from cudnn_sdpa.attention.varlen import reference as in_pytorch
from cudnn_sdpa.attention.varlen import specs
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments, VarlenGradientCall
from cudnn_sdpa.attention.varlen.call import VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN, call_of, sdpa_varlen, sdpa_varlen_backward
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward
from cudnn_sdpa.attention.verify import Results, compare, exact_inputs, run_detached
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.engine.tensor_checks import without_data
from cudnn_sdpa.errors import UnsupportedError


@describes(sdpa_varlen, sharding.varlen)
def describe_varlen(**given: Any) -> Description:
    checked = VARLEN.checked(call_of(**given), explain.as_cast)
    original, call, refused, trains = checked.call, checked.cast, checked.refused, checked.trains
    device = explain.device_of(original.q)
    if refused is not None:
        return Description.refused(graphs.sdpa_forward, refused, device)
    original = original._replace(with_lse=original.with_lse or trains)
    forward, layout = PackedForward.of(call._replace(with_lse=original.with_lse)), output_layout(call)
    notes = [
        *explain.notes_on_casts(original, call),
        *sink_scores.notes_on_conversion(given),
        *explain.notes_on_scale(call),
    ]
    notes += forward.packed.extra_kernels(with_lse=original.with_lse)
    needs = explain.needs_of_described(original)
    of = VarlenGradientCall(**outputs_without_data(layout), call=without_data(call), needs=needs)
    back = [*explain.notes_on_casts(original, call, back=True), *sink_scores.notes_on_converted_gradient(given, of)]
    described = Description(
        operation=graphs.sdpa_forward,
        key=partial(key_of, forward),
        device=device,
        is_empty=call.is_empty,
        extra_kernels=notes,
        backward=describe_backward_call(of, device, back) if trains else None,
        verify=lambda differentiate: errors_varlen(original, differentiate=differentiate),
    )
    return described if described.is_empty else explain.with_choice(described, forward)


@describes(sdpa_varlen_backward)
def describe_varlen_backward(**given: Any) -> Description:
    of, notes = explain.checked_backward(VARLEN, call_of, given)
    return describe_backward_call(explain.as_read(of), explain.device_of(of.call.q), notes)


def describe_backward_call(of: VarlenGradientCall, device: int | None, notes: list[str]) -> Description:
    """A backward call without data that kernels can read, but for its queries."""
    is_empty = of.call.is_empty
    try:
        parts = [] if is_empty else specs.split_gradient(of)
    except UnsupportedError as error:
        return Description.refused(graphs.sdpa_backward, error, device)
    first = specs.part_of(of, parts[0]) if parts else of
    backward = PackedBackward.of(first._replace(call=specs.dense_queries(first.call)))
    notes = [
        *notes,
        *([explain.note_on_parts("the gradient", len(parts))] if parts else []),
        *(f"{note}, and so are the gradients of q and k" for note in explain.notes_on_scale(first.call)),
        *specs.spec_of(as_launched(first.call)).backward_kernels(),
        *sink_scores.notes_on_gradient(of),
    ]
    described = Description(
        operation=graphs.sdpa_backward,
        key=partial(key_of, backward),
        device=device,
        is_empty=is_empty,
        extra_kernels=notes,
    )
    return described if is_empty else explain.with_choice(described, backward)


def errors_varlen(call: VarlenCall, *, differentiate: bool) -> dict[str, float]:
    """Relative errors of a call over packed sequences, as `dense.explain.errors_of`."""
    actual, grad_out = run_detached(call, VARLEN, differentiate=differentiate)
    cast = cast_for_autocast(ForwardArguments(call.q, call.k, call.v))
    exact = exact_inputs(call._replace(q=cast.q, k=cast.k, v=cast.v))
    out, lse = in_pytorch.attention(exact, torch.float64)
    needs = tuple(name in actual.gradients for name in call._fields[: len(call.differentiable)])
    of = VarlenGradientCall(grad_out=grad_out.double(), out=out, lse=lse, call=exact, needs=needs)
    gradients = dict(zip(actual.gradients, in_pytorch.gradients(of) if any(needs) else (), strict=True))
    return compare(_of_sequences(actual, call), _of_sequences(Results(out, lse, gradients), call))


def _of_sequences(results: Results, call: VarlenArguments) -> Results:
    """The results without the rows past the last sequence."""
    rows_q, rows_kv = (slice(0, max(0, int(ends[-1]))) for ends in call.offsets)
    rows = {"q": rows_q, "k": rows_kv, "v": rows_kv}
    gradients = {name: x[rows[name]] if name in rows else x for name, x in results.gradients.items()}
    return Results(results.out[rows_q], None if results.lse is None else results.lse[rows_q], gradients)
