"""Dense calls in parts, where one launch cannot compute them: which, what each computes, and what cannot be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.arguments import (
    DENSE_AXES,
    ForwardArguments,
    GradientCall,
    Needs,
    output_layout,
    outputs_without_data,
    results,
)
from cudnn_sdpa.attention.bias import new_gradient
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec, key_of
from cudnn_sdpa.attention.parts import GRADIENTS, Limits, Part, Whole
from cudnn_sdpa.engine.launch import Result, new_tensor
from cudnn_sdpa.engine.tensor_checks import aligned, without_data, without_memory
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target

# The forward pass.


def split_forward(call: ForwardArguments) -> list[Part]:
    """The parts of a forward call; none if one launch computes it."""
    dense = ForwardSpec.of(call).dense
    if dense.is_empty or dense.has_no_plan:
        return []
    is_single = dense.rows == 1
    limits = Limits(batch=is_single, heads=is_single or call.q.shape[1] != call.k.shape[1])
    reasons = limits.exceeded(call.q)
    return split_or_refuse(call, limits, reasons, "sdpa") if reasons else []


def forward_calls(call: ForwardArguments) -> list[ForwardArguments]:
    """The forward calls that each need one plan: the call itself, or its parts, without data."""
    found = split_forward(call)
    if not found:
        return [call]
    call, out = without_data(call), new_tensor(results(call)[0], "meta")
    return [forward_part(call, part, out[part.entries, part.heads]) for part in found]


def forward_part(call: ForwardArguments, part: Part, out: Tensor) -> ForwardArguments:
    """One part of a forward call, whose output goes into its part of the whole."""
    return parts.part_of_call(call, part, DENSE_AXES)._replace(out=out)


def run_forward(call: ForwardArguments, run: Callable[[ForwardArguments], Result]) -> Result:
    """The results of a forward call that needs several launches, given what runs a part of it."""
    return parts.attend(
        split_forward(call),
        lambda part, out: run(forward_part(call, part, out)),
        call=call,
        results=results(call),
    )


def keys(call: ForwardArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a forward call: its exact-shape plan, or those of its parts."""
    for part in forward_calls(call):
        forward = ForwardSpec.of(part)
        if not (forward.dense.is_empty or forward.dense.has_no_plan):
            yield key_of(forward, target, device)


# The backward pass.


def split_gradient(of: GradientCall) -> list[Part]:
    """The parts of a backward call; none if one launch computes it, or none at all."""
    reasons = GRADIENTS.exceeded(*of.call.qkv, of.out, of.grad_out)
    if not reasons or not has_gradient_plan(of.call):
        return []
    return split_or_refuse(of.call, GRADIENTS, reasons, "the gradient of sdpa")


def has_gradient_plan(call: ForwardArguments) -> bool:
    spec = DenseSpec.of(call)
    return not (spec.is_empty or spec.is_one_by_one or spec.has_no_plan)


def gradient_calls(of: GradientCall) -> list[GradientCall]:
    """The backward calls that each need one plan: the call itself, its parts, or none."""
    if not has_gradient_plan(of.call):
        return []
    return [gradient_part(of, part) for part in split_gradient(of)] or [of]


def gradient_keys(of: GradientCall, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a backward call that kernels can read."""
    for part in gradient_calls(of):
        yield key_of(BackwardSpec.of(part), target, device)


def check_gradient(call: ForwardArguments, target: Target, device: int | None = None) -> None:
    """Refuses a call whose gradients are known to be unsupported, also when split."""
    needs = Needs(*(x is not None and x.requires_grad for x in call.differentiable))
    of = GradientCall(**outputs_without_data(output_layout(call)), call=without_data(call), needs=needs)
    for key in gradient_keys(of, target, device):
        known_issues.check(key)


def run_gradients(of: GradientCall, run: Callable[[GradientCall], Sequence[Tensor]]) -> list[Tensor]:
    """The needed gradients of a backward call that needs several launches, given what runs a part of it."""
    wholes = [
        Whole.gradient(name, new_gradient(name, without_memory(x)), DENSE_AXES)
        for name, x, need in zip(Needs._fields, of.call.differentiable, of.needs, strict=True)
        if need and x is not None
    ]
    return parts.merge(split_gradient(of), lambda part: run(gradient_part(of, part)), wholes, of.out.device)


def gradient_part(of: GradientCall, part: Part) -> GradientCall:
    entries, heads, _ = part
    call = parts.part_of_call(of.call, part, DENSE_AXES)
    q, k, v = map(parts.compact, call.qkv)
    return of._replace(
        grad_out=parts.compact(of.grad_out[entries, heads]),
        out=parts.compact(of.out[entries, heads]),
        lse=aligned("lse", of.lse[entries, heads]),
        call=call._replace(q=q, k=k, v=v),
    )


# Both passes.


def split_or_refuse(call: ForwardArguments, limits: Limits, reasons: list[str], what: str) -> list[Part]:
    """The parts of a call that one launch cannot compute."""
    found = parts.split(*call.qkv, limits)
    if call.softmax.dropout_p > 0 and len(found) > 1:  # a single part is a copy of what spans too much memory
        reasons = [*reasons, "calls with dropout cannot be split: an entry's place decides its random numbers"]
        fewer = f"calls with fewer tokens, and with at most {known_issues.MAX_GRID} batch entries and heads"
        raise UnsupportedError(f"{what} with dropout_p", reasons, f"{fewer}, or dropout_p=0.0")
    if call.softmax.alibi and any(part.heads != found[0].heads for part in found):
        reasons = [*reasons, "calls with alibi cannot be split along heads, whose number decides their slopes"]
        raise UnsupportedError(f"{what} with alibi", reasons, "the biases in attn_mask, or calls with fewer heads")
    return found
