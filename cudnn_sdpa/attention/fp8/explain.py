"""`explain` for `sdpa_fp8`, its backward pass and `fp8_attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.arguments import ForwardArguments, grouped
from cudnn_sdpa.attention.dense.explain import as_cast, device_of, note_on_parts, notes_on_casts
from cudnn_sdpa.attention.fp8 import arguments as fp8_arguments
from cudnn_sdpa.attention.fp8 import fp8_attention, graphs, specs
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardArguments, Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.call import Fp8BackwardCall, Fp8Call
from cudnn_sdpa.attention.fp8.scaling import Fp8Scaling
from cudnn_sdpa.attention.fp8.sdpa_fp8 import FP8, FP8_BACKWARD, sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.fp8.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.engine.tensor_checks import without_data
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.scalars import as_bool
from cudnn_sdpa.graph.target import Target


@describes(sdpa_fp8, sharding.fp8)
def describe_sdpa_fp8(scales: Fp8Scales, return_lse: bool, **given: Any) -> Description:
    fp8_arguments.check_scales_type(scales, Fp8Scales)
    call = Fp8Call(**scales._asdict(), **grouped(given), with_lse=as_bool(return_lse))
    refused = FP8.checked(call, lambda call: call).refused
    if refused is not None:
        return Description.refused(graphs.sdpa_fp8_forward, refused, device_of(call.q))
    forward = ForwardSpec.of(call)
    return Description(
        operation=graphs.sdpa_fp8_forward,
        key=forward.key,
        device=device_of(call.q),
        is_empty=forward.dense.is_empty,
        extra_kernels=forward.extra_kernels(),
    )


@describes(sdpa_fp8_backward, sharding.fp8_backward)
def describe_sdpa_fp8_backward(scales: Fp8BackwardScales, **given: Any) -> Description:
    fp8_arguments.check_scales_type(scales, Fp8BackwardScales)
    call = Fp8BackwardCall(**scales._asdict(), **grouped(given))
    refused = FP8_BACKWARD.checked(call, lambda call: call).refused
    if refused is not None:
        return Description.refused(graphs.sdpa_fp8_backward, refused, device_of(call.q))
    return _describe_backward_call(call, device_of(call.q), [])


def _describe_backward_call(call: Fp8BackwardArguments, device: int | None, around: list[str]) -> Description:
    try:
        parts = specs.split_backward(call)
    except UnsupportedError as error:
        return Description.refused(graphs.sdpa_fp8_backward, error, device)
    backward = BackwardSpec.of(specs.part_of(without_data(call), parts[0]) if parts else call)
    notes = [*around, *([note_on_parts("the gradient", len(parts))] if parts else []), *backward.extra_kernels()]
    return Description(
        operation=graphs.sdpa_fp8_backward,
        key=lambda target, device: backward.part(target).key(target, device),
        device=device,
        is_empty=backward.dense.is_empty,
        extra_kernels=notes,
    )


# `fp8_attention`: its plans, and the kernels around them.


TABLE = "a table of scales and amax values is zeroed"


@describes(fp8_attention.fp8_attention, sharding.fp8_attention)
def describe_fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: Fp8Scaling | None, grad_dtype: torch.dtype | None, **options: Any
) -> Description:
    lengths = {"seq_lens_q": options["seq_lens_q"], "seq_lens_kv": options["seq_lens_kv"]}
    fp8_arguments.check_tensors({"q": q, "k": k, "v": v, **lengths})
    given = ForwardArguments(q, k, v, **grouped(options))
    call, device = as_cast(given), device_of(q)
    refused = UnsupportedError.of(fp8_attention.check, call)
    grad_dtype = fp8_attention.check_scaling(scaling, grad_dtype, q)
    if refused is not None:
        return Description.refused(graphs.sdpa_fp8_forward, refused, device)
    trains = needs_gradient(q, k, v)
    of = fp8_attention.in_fp8(call, with_lse=trains)
    forward, backward = ForwardSpec.of(of), None
    if trains:
        around = [*_notes_backward(scaling, grad_dtype), *notes_on_casts(given, call, back=True)]
        backward = _describe_backward_call(fp8_attention.gradient_in_fp8(of, grad_dtype), device, around)

    def key(target: Target, device: int | None) -> PlanKey:
        if not trains and fp8_attention.has_half_output(of, target):
            return replace(forward, out=replace(forward.out, dtype=call.q.dtype)).key(target, device)
        return forward.key(target, device)

    around = [*notes_on_casts(given, call), *_notes(call, scaling, trains=trains)]
    return Description(
        operation=graphs.sdpa_fp8_forward,
        key=key,
        device=device,
        is_empty=forward.dense.is_empty,
        extra_kernels=[*around, *forward.extra_kernels()],
        backward=backward,
    )


def _notes(call: ForwardArguments, scaling: Fp8Scaling | None, *, trains: bool) -> list[str]:
    if scaling is not None and scaling.would_update():
        reduced = "" if scaling.process_group is None else ", reduced over all ranks,"
        updates = [f"one kernel ends the previous step: amax values{reduced} become scales"]
    else:
        updates = []
    half = str(call.q.dtype).removeprefix("torch.")
    if scaling is not None and scaling.knows_forward and scaling.inputs == "delayed":
        quantizes = "one kernel quantizes q, k and v with scales from the history, and computes their amax"
    else:
        quantizes = "one kernel computes the amax of q, k and v, and another quantizes with scales from it"
    back = f"one kernel converts the output to {half}"
    if not trains:
        back += ", except on data-center Blackwell, where cuDNN writes it directly"
    return [*updates, TABLE, quantizes, back]


def _notes_backward(scaling: Fp8Scaling | None, dtype: torch.dtype) -> list[str]:
    knows = scaling is not None and scaling.knows_backward
    if knows and scaling is not None and scaling.inputs == "delayed":
        quantizes = "one kernel quantizes the output's gradient with a scale from the history, and computes its amax"
    else:
        quantizes = "one kernel computes the amax of the output's gradient, and another quantizes with a scale from it"
    times = "two" if dtype == torch.float8_e5m2 else "three"
    first = [f"the plan runs {times} times, to find the amax of its results"]
    return [TABLE, quantizes, *([] if knows else first), "one kernel converts the gradients to 16 bits"]
