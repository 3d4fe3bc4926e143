"""Dense calls in parts, where one launch cannot compute them: which, what each computes, and what cannot be split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall, outputs_without_data
from cudnn_sdpa.attention.bias import new_gradient
from cudnn_sdpa.attention.dense import plans
from cudnn_sdpa.attention.dense.plans import BackwardSpec, DenseSpec, ForwardSpec, Needs
from cudnn_sdpa.attention.parts import GRADIENTS, Limits, Part, Whole
from cudnn_sdpa.engine.launch import Result
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
    call, (shape, stride, dtype) = without_data(call), plans.results(call)[0]
    out = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return [forward_part(call, part, out[part.entries, part.heads]) for part in found]


def forward_part(call: ForwardArguments, part: Part, out: Tensor) -> ForwardArguments:
    """One part of a forward call, whose output goes into its part of the whole."""
    return _part(call, part)._replace(out=out)


def run_forward(call: ForwardArguments, run: Callable[[ForwardArguments], Result]) -> Result:
    """The results of a forward call that needs several launches, given what runs a part of it."""
    return parts.attend(
        split_forward(call),
        lambda part, out: run(forward_part(call, part, out)),
        call=call,
        results=plans.results(call),
    )


def keys(call: ForwardArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a forward call: its exact-shape plan, or those of its parts."""
    for part in forward_calls(call):
        forward = ForwardSpec.of(part)
        if not (forward.dense.is_empty or forward.dense.has_no_plan):
            yield forward.key(target, device)


# The backward pass.


def split_gradient(of: GradientCall) -> list[Part]:
    """The parts of a backward call; none if one launch computes it, or none at all."""
    reasons = GRADIENTS.exceeded(*of.call.qkv, of.out, of.grad_out)
    if not reasons or not has_gradient_plan(of.call):
        return []
    return split_or_refuse(of.call, GRADIENTS, reasons, "the gradient of sdpa")


def has_gradient_plan(call: ForwardArguments) -> bool:
    spec = DenseSpec.of(call)
    return not (spec.is_empty or spec.is_single or spec.has_no_plan)


def gradient_calls(of: GradientCall) -> list[GradientCall]:
    """The backward calls that each need one plan: the call itself, its parts, or none."""
    if not has_gradient_plan(of.call):
        return []
    return [gradient_part(of, part) for part in split_gradient(of)] or [of]


def gradient_keys(of: GradientCall, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a backward call that kernels can read."""
    for part in gradient_calls(of):
        yield BackwardSpec.of(part).key(target, device)


def check_gradient(call: ForwardArguments, target: Target, device: int | None = None) -> None:
    """Refuses a call whose gradients are known to be unsupported, also when split."""
    needs = Needs(*(x is not None and x.requires_grad for x in call.differentiable))
    of = GradientCall(**outputs_without_data(plans.output_layout(call)), call=without_data(call), needs=needs)
    for key in gradient_keys(of, target, device):
        known_issues.check(key)


def run_gradients(of: GradientCall, run: Callable[[GradientCall], Sequence[Tensor]]) -> list[Tensor]:
    """The needed gradients of a backward call that needs several launches, given what runs a part of it."""
    wholes = [
        _whole(name, x)
        for name, x, need in zip(Needs._fields, of.call.differentiable, of.needs, strict=True)
        if need and x is not None
    ]
    found = parts.merge(split_gradient(of), lambda part: run(gradient_part(of, part)), wholes, of.out.device)
    if Needs(*of.needs).attn_mask and of.call.attn_mask is not None:
        place = sum(of.needs[:3])
        found[place] = found[place][(0,) * (4 - of.call.attn_mask.dim())]
    return found


def gradient_part(of: GradientCall, part: Part) -> GradientCall:
    entries, heads, _ = part
    call = _part(of.call, part)
    q, k, v = map(parts.compact, call.qkv)
    return of._replace(
        grad_out=parts.compact(of.grad_out[entries, heads]),
        out=parts.compact(of.out[entries, heads]),
        lse=aligned("lse", of.lse[entries, heads]),
        call=call._replace(q=q, k=k, v=v),
    )


def _whole(name: str, tensor: Tensor) -> Whole:
    """The gradient of an input, where that of `attn_mask` has rank 4."""
    gradient = new_gradient(name, without_memory(tensor))
    if name == "sinks":
        return Whole((tuple(gradient.shape), gradient.stride(), gradient.dtype), ("heads",))
    missing = 4 - gradient.dim()
    shape, stride = (1,) * missing + tuple(gradient.shape), (1,) * missing + gradient.stride()
    dims = ("entries", "heads" if name in ("q", "attn_mask") else "heads_kv")
    return Whole(
        (shape, stride, gradient.dtype), tuple(None if n == 1 else x for x, n in zip(dims, shape, strict=False))
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


def _part(call: ForwardArguments, part: Part) -> ForwardArguments:
    entries, heads, heads_kv = part
    lengths_q, lengths_kv = (None if x is None else x[entries] for x in (call.seq_lens_q, call.seq_lens_kv))
    return call._replace(
        q=call.q[entries, heads],
        k=call.k[entries, heads_kv],
        v=call.v[entries, heads_kv],
        attn_mask=None if call.attn_mask is None else _part_of_mask(call.attn_mask, entries, heads),
        sinks=None if call.sinks is None else call.sinks[heads],
        seq_lens_q=lengths_q,
        seq_lens_kv=lengths_kv,
    )


def _part_of_mask(mask: Tensor, entries: slice, heads: slice) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    return mask[entries if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None)]
