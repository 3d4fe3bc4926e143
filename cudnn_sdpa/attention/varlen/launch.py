"""Calls over packed sequences bound to their plans."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.arguments import sign_of_scale, with_positive_scale
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense import launch as dense_backward
from cudnn_sdpa.attention.dense.launch import apply_sinks, sink_gradient, with_sinks_and_rng, zero_gradients
from cudnn_sdpa.attention.lengths import RowLimitsKernel
from cudnn_sdpa.attention.parts import packed_gradient_limits
from cudnn_sdpa.attention.reference import fill_without_keys
from cudnn_sdpa.attention.varlen import plans
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments, VarlenGradientCall
from cudnn_sdpa.attention.varlen.packing import MADE, PackingKernel, is_of_keys
from cudnn_sdpa.attention.varlen.plans import VarlenSpec
from cudnn_sdpa.engine.launch import (
    Address,
    BoundPlan,
    LaunchExtras,
    Layout,
    Prepared,
    Result,
    SingleLaunch,
    items_by_name,
)
from cudnn_sdpa.engine.tensor_checks import check_present, like_in_memory, multiplied, without_memory
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache

BackwardT = TypeVar("BackwardT", bound=VarlenGradientCall)


def prepare(call: VarlenArguments, spec: VarlenSpec | None = None) -> Prepared:
    """A forward call bound to its plan, or to that of `spec`."""
    if call.is_empty:
        return Prepared(lambda call: fill_without_keys(call, plans.results(call)), None)
    device, sign = call.q.get_device(), sign_of_scale(call)
    launched = with_positive_scale(call)
    spec = plans.spec_of(launched) if spec is None else spec
    key = spec.forward_key(plans.output_layout(call), call.with_lse, live_target(device), device)
    bound = _bind(operation=graphs.sdpa_forward, key=key, call=launched, spec=spec, operands=("q", "k", "v"))
    sinks_outside = spec.sinks_outside
    if sign is None and (call.sinks is None or not (call.with_lse or sinks_outside)):
        return Prepared(SingleLaunch(bound), bound.plan)
    others_of = items_by_name(bound.operands[1:])

    def run(call: VarlenArguments) -> Result:
        q = call.q if sign is None else multiplied(call.q, sign)
        out, *lse = bound((q, *others_of(call)), call.out)
        if not lse:
            return out
        if call.sinks is not None and sinks_outside:
            check_present("sinks", call.sinks)  # PyTorch's kernel would read a null pointer
            apply_sinks(out, lse[0], call.sinks)
        elif call.sinks is not None:  # queries without keys see the sink alone
            torch.maximum(lse[0], call.sinks, out=lse[0])
        return (out, lse[0]) if call.with_lse else out

    return Prepared(run, bound.plan)


def readable(of: BackwardT) -> BackwardT:
    call = of.call
    limits = packed_gradient_limits(deterministic=call.softmax.deterministic)
    if call.is_empty or limits.exceeded(*call.qkv, of.out, of.grad_out):
        return of
    of, layout = dense_backward.readable(of), TensorLayout.of(call.q)
    if layout != (dense := dense_like(layout)):
        # cuDNN 9.19 cannot launch gradients of packed queries that are views of a larger tensor.
        q = torch.empty_strided(dense.shape, dense.stride, dtype=dense.dtype, device=call.q.device)
        of = of._replace(call=call._replace(q=q.copy_(call.q)))
    return of


def prepare_gradients(of: VarlenGradientCall) -> Prepared:
    call = of.call
    if call.is_empty:
        return Prepared(zero_gradients, None)
    if plans.split_gradient(of):
        return Prepared(_gradients_in_parts, None)
    device, sign = call.q.get_device(), sign_of_scale(call)
    launched = with_positive_scale(call)
    spec = plans.spec_of(launched)
    key = plans.backward_key(of, live_target(device), device)
    bound = _bind(
        operation=graphs.sdpa_backward,
        key=key,
        call=launched,
        spec=spec,
        operands=dense_backward.OPERANDS,
    )
    wanted = [dense_like(layout) for layout in (spec.q, spec.k, spec.v)]
    in_order = [layout.stride == found[1] for layout, found in zip(wanted, _results(key, call), strict=True)]

    needs_sinks = of.needs[3] and call.sinks is not None
    if sign is None and all(in_order) and not spec.is_capped and not needs_sinks:
        fields = {name: name if name in of._fields else f"call.{name}" for name in bound.operands}
        return Prepared(SingleLaunch(bound, [place for place in range(3) if of.needs[place]], of=fields), bound.plan)
    others_of = items_by_name(bound.operands[len(dense_backward.OPERANDS) :])

    def run(of: VarlenGradientCall) -> tuple[Tensor, ...]:
        call, lse = of.call, of.lse
        if spec.is_capped:  # a row that sees nothing: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        q = call.q if sign is None else multiplied(call.q, sign)
        found = bound((q, call.k, call.v, of.out, of.grad_out, lse, *others_of(call)))
        for place, layout in enumerate(wanted):
            if not in_order[place]:  # cuDNN sums the gradients of grouped heads only token-major
                moved = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=call.q.device)
                found[place] = moved.copy_(found[place])
        if sign is not None:
            grad_q, grad_k, grad_v = found
            found = [grad_q * sign, grad_k * abs(sign), grad_v]
        return _needed(of, found)

    return Prepared(run, bound.plan)


def _needed(of: VarlenGradientCall, found: list[Tensor]) -> tuple[Tensor, ...]:
    """The needed gradients, given those of q, k and v; those of the sinks are computed here."""
    *needs_qkv, needs_sinks = of.needs
    needed = [x for x, need in zip(found, needs_qkv, strict=True) if need]
    if needs_sinks and of.call.sinks is not None:
        grad_out, out, lse = (x.transpose(0, 1).unsqueeze(0) for x in (of.grad_out, of.out, of.lse))
        needed.append(sink_gradient(grad_out, out, lse, of.call.sinks, queries=of.call.cu_seqlens_q[-1]))
    return tuple(needed)


def _gradients_in_parts(of: VarlenGradientCall) -> tuple[Tensor, ...]:
    """The needed gradients of a call that one launch cannot compute: some heads at a time."""
    inputs = zip(of.call.differentiable, ("heads", "heads_kv", "heads_kv", "heads"), of.needs, strict=True)
    wholes = [_whole(x, heads) for x, heads, need in inputs if need and x is not None]
    found = parts.merge(
        plans.split_gradient(of), lambda part: gradients(plans.part_of(of, part)), wholes, of.out.device
    )
    return tuple(found)


def _whole(tensor: Tensor, heads: str) -> parts.Whole:
    like = like_in_memory(without_memory(tensor))
    dims = (heads,) if tensor.dim() == 1 else (None, heads)
    return parts.Whole((tuple(like.shape), like.stride(), like.dtype), dims)


def gradients(of: VarlenGradientCall) -> list[Tensor]:
    """The needed gradients of a backward call; its binding is not remembered."""
    of = readable(of)
    return list(prepare_gradients(of).run(of))


def _bind(
    operation: GraphDefinition, key: PlanKey, call: VarlenArguments, spec: VarlenSpec, operands: tuple[str, ...]
) -> BoundPlan:
    """A plan with what it reads besides tensors: where the sequences begin and end, and what only some calls have."""
    plan = plan_cache.get(key, partial(build_plan, operation))
    names = {operand.name for operand in (*key.inputs, *key.outputs)}
    with torch.cuda.device(plan.device):
        packing = PackingKernel(spec, plan, call)
        offsets = tuple(name for name in ("cu_seqlens_q", "cu_seqlens_kv") if getattr(call, name) is not None)
        more = LaunchExtras(
            operands=offsets,
            unaligned_ok=offsets,
            kernels=(packing,),
            addresses={name: Address(MADE, offset) for name, offset in packing.offsets.items() if name in names},
        )
        if spec.is_capped:
            lengths = [Address(MADE, packing.offsets[name]) for name in ("seq_len_q", "seq_len_kv")]
            more += RowLimitsKernel(
                batch=spec.sequences,
                rows=spec.max_seqlen_q,
                band=spec.mask.band,
                device=plan.device,
                lengths=lengths,
            ).extras()
    if call.sinks is not None or call.rng is not None:
        more = with_sinks_and_rng(more, call, key)
    numbers = {"scale": call.scale_value, "softcap": call.softmax.softcap}
    return BoundPlan(plan=plan, operands=operands, results=_results(key, call), numbers=numbers, extras=more)


def _results(key: PlanKey, call: VarlenArguments) -> list[Layout]:
    """Shape, stride and dtype of a plan's outputs, as the caller sees them."""
    return [_unpacked(output, (call.k if is_of_keys(output) else call.q).shape[0]) for output in key.outputs]


def _unpacked(output: Operand, rows: int) -> Layout:
    _, heads, _, dim = output.layout.shape
    _, head, row, _ = output.layout.stride
    if output.name == "lse":
        return (rows, heads), (row, head), output.layout.dtype
    return (rows, heads, dim), (row, head, 1), output.layout.dtype
