"""Descriptions of dense attention calls for `explain`.

Checked calls take their real path with meta tensors; only `verify` computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference, sharding, sink_scores
from cudnn_sdpa.attention.arguments import (
    AttentionGradientCall,
    ForwardArguments,
    GradientCall,
    GradientT,
    Needs,
    Scaled,
    cast_for_autocast,
    output_layout,
    outputs_without_data,
    query_factor,
)
from cudnn_sdpa.attention.backward_arguments import backward_call_of
from cudnn_sdpa.attention.dense import graphs, parts
from cudnn_sdpa.attention.dense import reference as in_pytorch
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.drop_in import drop_in_tensors, lifted, scaled_dot_product_attention
from cudnn_sdpa.attention.dense.forward import Bucket
from cudnn_sdpa.attention.dense.launch import has_readable_layout, is_as_copied
from cudnn_sdpa.attention.dense.sdpa import SDPA, call_of, sdpa, sdpa_backward
from cudnn_sdpa.attention.dense.specs import (
    CONVERTED_MASK,
    REPLACED_LSE,
    BackwardSpec,
    ForwardSpec,
    key_of,
    query_factor_backward,
)
from cudnn_sdpa.attention.flash4.preferences import Spec
from cudnn_sdpa.attention.providers.choosing import choice
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.specs import TOKEN_MAJOR
from cudnn_sdpa.attention.verify import Results, compare, exact_inputs, run_detached
from cudnn_sdpa.engine.dispatch_state import cast_tensor
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.engine.operation import Operation
from cudnn_sdpa.engine.operation.call import CallT
from cudnn_sdpa.engine.tensor_checks import without_data
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.providers import FLASH4, OWN

#: The arguments of one call of any kind of attention: a NamedTuple with `q`.
Call = TypeVar("Call", bound=NamedTuple)

#: Inputs that autocast casts.
TO_CAST = ("q", "k", "v", "attn_mask")


@describes(sdpa, sharding.dense)
def describe_sdpa(**given: Any) -> Description:
    """The launches of an `sdpa` call on a GPU; its tensors may be on the CPU."""
    checked = SDPA.checked(call_of(**given), as_cast)
    original, call, refused, trains = checked.call, checked.cast, checked.refused, checked.trains
    device = device_of(original.q)
    if refused is not None:
        return Description.refused(graphs.sdpa_forward, refused, device)
    original = original._replace(with_lse=original.with_lse or trains)
    call = without_data(call._replace(with_lse=original.with_lse))
    try:
        first, *others = parts.forward_calls(call)
    except UnsupportedError as error:
        return Description.refused(graphs.sdpa_forward, error, device)
    forward = ForwardSpec.of(first)
    notes = [*notes_on_casts(original, call), *sink_scores.notes_on_conversion(given)]
    notes += [note_on_parts("the call", 1 + len(others))] * bool(others)
    notes += [*notes_on_scale(call), *forward.extra_kernels()]
    described = Description(
        operation=graphs.sdpa_forward,
        key=partial(key_of, forward),
        device=device,
        is_empty=forward.dense.is_empty or forward.dense.has_no_plan,
        extra_kernels=notes,
        backward=_describe_backward(original, call, given) if trains else None,
        bucket=None if query_factor(call) is not None else partial(_key_of_bucket, forward),
        verify=lambda differentiate: errors_of(original, differentiate=differentiate),
    )
    return described if described.is_empty else with_choice(described, forward)


def with_choice(described: Description, spec: Spec) -> Description:
    """A description that says who serves the call, dense or packed, and why."""

    def on_target(target: Target) -> Description:
        try:
            key = described.key(target, described.device)
        except UnsupportedError:
            return described
        notes = described.extra_kernels
        if key.provider == OWN and isinstance(spec, (ForwardSpec, BackwardSpec)):
            kept = [note for note in notes if note not in (CONVERTED_MASK, REPLACED_LSE)]
            notes = kept + providers.other(OWN).notes_on(spec)
        elif key.provider == FLASH4:
            notes = [note for note in notes if not note.endswith(TOKEN_MAJOR)] + providers.other(FLASH4).notes_on(spec)
        return replace(described, choice=choice(spec, key, providers.active()), extra_kernels=notes)

    return replace(described, on_target=on_target)


def _key_of_bucket(forward: ForwardSpec, target: Target, device: int | None) -> PlanKey | None:
    bucket = None if forward.dense.is_empty else Bucket.of(forward)
    return None if bucket is None else bucket.key(target, device)


@describes(sdpa_backward)
def describe_backward(**given: Any) -> Description:
    of, notes = checked_backward(SDPA, call_of, given)
    return describe_backward_call(as_read(of), device_of(of.call.q), notes)


def checked_backward(
    operation: Operation[CallT], call_of: Callable[..., CallT], given: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The checked call of a backward function with these arguments, and the notes on what runs around it."""
    of_backward = {name: given.pop(name) for name in ("grad_out", "out", "lse", "wanted")}
    of = backward_call_of(operation, call_of(**given, dropout_p=0.0, return_lse=True, out=None), **of_backward)
    of.check_types()
    of.call.check_options()
    of.check()
    of.call.check_strides()
    of.call.check_memory()
    return of, [
        *sink_scores.notes_on_conversion(given),
        *notes_on_copies(of),
        *sink_scores.notes_on_converted_gradient(given, of),
    ]


def as_read(of: GradientT) -> GradientT:
    """A backward call without data, with the layouts that kernels read: those of copies where there are any."""
    out = of.out if _is_read(of.out, of.out) else torch.empty_like(of.out, memory_format=torch.contiguous_format)
    grad_out = of.grad_out if _is_read(of.grad_out, out) else out
    lse = torch.empty(of.lse.shape, dtype=of.lse.dtype, device="meta")
    return of._replace(grad_out=_like(grad_out, "meta"), out=_like(out, "meta"), lse=lse, call=without_data(of.call))


def _is_read(tensor: Tensor, out: Tensor) -> bool:
    return has_readable_layout(tensor) or is_as_copied(tensor, out)


def notes_on_copies(of: AttentionGradientCall) -> list[str]:
    """The copies of what a caller gave to a backward function and cuDNN cannot read."""
    copied = [name for name in ("grad_out", "out") if not _is_read(getattr(of, name), of.out)]
    copied += [] if of.lse.is_contiguous() else ["lse"]
    return [f"{name} is copied, as cuDNN cannot read its layout" for name in copied]


def describe_backward_call(of: GradientCall, device: int | None, notes: list[str]) -> Description:
    """A backward call without data that kernels can read."""
    try:
        calls = parts.gradient_calls(of)
    except UnsupportedError as error:
        return Description.refused(graphs.sdpa_backward, error, device)
    first = calls[0] if calls else of
    backward = BackwardSpec.of(first)
    notes = [*notes, *([] if first is of else [note_on_parts("the gradient", len(calls))])]
    notes += [*_notes_on_factor(first), *backward.extra_kernels(), *sink_scores.notes_on_gradient(of)]
    described = Description(
        operation=graphs.sdpa_backward,
        key=partial(key_of, backward),
        device=device,
        is_empty=not calls,
        extra_kernels=notes,
    )
    return with_choice(described, backward) if calls else described


def _describe_backward(original: ForwardArguments, call: ForwardArguments, given: Mapping[str, Any]) -> Description:
    needs = needs_of_described(original)
    of = GradientCall(**outputs_without_data(output_layout(call)), call=call, needs=needs)
    notes = [*notes_on_casts(original, call, back=True), *sink_scores.notes_on_converted_gradient(given, of)]
    return describe_backward_call(of, device_of(original.q), notes)


def needs_of_described(call: ForwardArguments | VarlenArguments) -> tuple[bool, ...]:
    return tuple(x is not None and x.requires_grad for x in call.differentiable)


def _notes_on_factor(of: GradientCall) -> list[str]:
    factor = query_factor_backward(of)
    if factor is None:
        return []
    if factor == 0:
        return ["q is replaced by zeros, and the gradients of q and k are filled with zeros, for the scale of 0"]
    return [f"q is multiplied by {factor:g} into a copy, and its gradient as well"]


@describes(scaled_dot_product_attention)
def describe_drop_in(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool, **options: Any
) -> Description:
    query, key, value = lifted(query, key, value, attn_mask)
    q, k, v, mask = drop_in_tensors(query, key, value, attn_mask, is_causal=options["is_causal"], enable_gqa=enable_gqa)
    try:
        return describe_sdpa(q, k, v, attn_mask=mask, **options)
    except ArgumentError as error:
        raise error.renamed({"q": "query", "k": "key", "v": "value"}) from None


def device_of(q: Tensor) -> int | None:
    """Index of the GPU that `q` is on, None elsewhere."""
    return q.get_device() if q.is_cuda else None


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def as_cast(call: Call) -> Call:
    """The call as autocast casts it; the cast tensors have undefined values."""
    fields = call._asdict()
    tensors: dict[str, Tensor] = {name: x for name in TO_CAST if (x := fields.get(name)) is not None}
    probes = {name: x.new_empty(0) for name, x in tensors.items()}
    dtypes = {name: cast_tensor(x, probes["q"]).dtype for name, x in probes.items()}
    layouts = {name: _like(x, "meta").to(dtypes[name]) for name, x in tensors.items() if x.dtype != dtypes[name]}
    cast: dict[str, object] = {name: _like(x, tensors["q"].device) for name, x in layouts.items()}
    return call._replace(**cast)


def notes_on_casts(original: Call, cast: Call, *, back: bool = False) -> list[str]:
    """The casts that autocast runs in the forward pass, or in the backward pass, to make `cast` of `original`."""
    tensors, cast_tensors = original._asdict(), cast._asdict()
    changed = [
        (name, x) for name in TO_CAST if (x := tensors.get(name)) is not None and x.dtype != cast_tensors[name].dtype
    ]
    if back:
        return [f"the gradient of {name} is cast back, under autocast" for name, x in changed if x.requires_grad]
    dtype = str(cast_tensors["q"].dtype).removeprefix("torch.")
    return [f"{name} is cast to {dtype}, under autocast" for name, _ in changed]


def notes_on_scale(call: Scaled) -> list[str]:
    """The copy of q that calls with a scale of 0 or less make, as cuDNN's scale must be positive."""
    factor = query_factor(call)
    return [] if factor is None else [f"q is multiplied by {factor:.0f} into a copy, as the scale is not positive"]


def note_on_parts(what: str, number: int) -> str:
    if number == 1:
        return f"{what} is computed from copies of tensors that span too much memory, and its results are copied"
    return f"{what} is computed in {number} parts, as one launch cannot: this is the plan of the first"


def errors_of(call: SdpaCall, *, differentiate: bool) -> dict[str, float]:
    """Relative errors of a dense call's output, of its LSE if returned, and of its gradients.

    Args:
        call: The call as the caller made it.
        differentiate: Whether to differentiate it with respect to the inputs that require grad.
    """
    actual, grad_out = run_detached(call, SDPA, differentiate=differentiate)
    exact_call = exact_inputs(cast_for_autocast(call))
    out, lse = reference.attention(exact_call)
    if not actual.gradients:
        return compare(actual, Results(out, lse, {}))
    needs = tuple(name in actual.gradients for name in Needs._fields)
    of = GradientCall(grad_out=grad_out.double(), out=out, lse=lse, call=exact_call, needs=needs)
    return compare(actual, Results(out, lse, dict(zip(actual.gradients, in_pytorch.gradients(of), strict=True))))
