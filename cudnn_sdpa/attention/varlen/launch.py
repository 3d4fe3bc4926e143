"""Calls over packed sequences bound to their plans."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts, sink_scores
from cudnn_sdpa.attention.arguments import (
    as_launched,
    numbers_of,
    output_layout,
    query_factor,
    results,
    scale_of,
)
from cudnn_sdpa.attention.dense import graphs
from cudnn_sdpa.attention.dense import launch as dense_backward
from cudnn_sdpa.attention.dense.launch import EXTRAS_OF_OPTIONS, zero_gradients
from cudnn_sdpa.attention.dense.specs import ready
from cudnn_sdpa.attention.lengths import RowLimitsKernel
from cudnn_sdpa.attention.parts import Whole, packed_gradient_limits
from cudnn_sdpa.attention.reference import fill_without_keys
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.varlen import specs
from cudnn_sdpa.attention.varlen.arguments import PACKED_AXES, VarlenArguments, VarlenGradientCall
from cudnn_sdpa.attention.varlen.packing import MADE, PackingKernel, is_of_keys
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward, VarlenSpec
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
from cudnn_sdpa.engine.tensor_checks import like_in_memory, multiplied, without_memory
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache

BackwardT = TypeVar("BackwardT", bound=VarlenGradientCall)


def prepare(call: VarlenArguments, spec: VarlenSpec | None = None) -> Prepared:
    """A forward call bound to its plan, or to that of `spec`."""
    if call.is_empty:
        return Prepared(lambda call: fill_without_keys(call, results(call)), None)
    device, factor = call.q.get_device(), query_factor(call)
    launched, target = as_launched(call), live_target(device)
    if spec is None:
        forward = PackedForward(specs.spec_of(launched), output_layout(call), call.with_lse)
        spec, key = forward.packed, specs.chosen_key(forward, target, device)
        key = key if key.provider is None else ready(key, forward.key)
    else:
        key = spec.forward_key(output_layout(call), call.with_lse, target, device)
    bound = _bind(operation=graphs.sdpa_forward, key=key, call=launched, spec=spec, operands=("q", "k", "v"))
    sink_use = spec.sink_use
    is_completed = sink_use is SinkUse.AFTER_PLAN or (sink_use is SinkUse.IN_PLAN and call.with_lse)
    lse_is_head_major = key.provider is not None
    if factor is None and not is_completed and not (lse_is_head_major and call.with_lse):
        return Prepared(SingleLaunch(bound), bound.plan)
    others_of = items_by_name(bound.operands[1:])

    def run(call: VarlenArguments) -> Result:
        q = call.q if factor is None else multiplied(call.q, factor)
        out, *lse = bound((q, *others_of(call)), call.out)
        if not lse:
            return out
        of_rows = lse[0].t().contiguous() if lse_is_head_major else lse[0]
        sink_scores.complete(call, out, of_rows, sink_use, overflows=lse_is_head_major)
        return (out, of_rows) if call.with_lse else out

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
    if specs.split_gradient(of):
        return Prepared(_gradients_in_parts, None)
    device, factor = call.q.get_device(), query_factor(call)
    launched, backward = as_launched(call), PackedBackward.of(of)
    spec, key = backward.packed, specs.chosen_key(backward, live_target(device), device)
    key = key if key.provider is None else ready(key, backward.key)
    bound = _bind(
        operation=graphs.sdpa_backward,
        key=key,
        call=launched,
        spec=spec,
        operands=dense_backward.OPERANDS,
    )
    lse_is_head_major = key.provider is not None
    wanted = [dense_like(layout) for layout in (spec.q, spec.k, spec.v)]
    in_order = [layout.stride == found[1] for layout, found in zip(wanted, _results(key, call), strict=True)]

    is_plain = factor is None and all(in_order) and not (spec.is_capped or lse_is_head_major)
    if is_plain and not sink_scores.is_needed(of):
        fields = {name: name if name in of._fields else f"call.{name}" for name in bound.operands}
        return Prepared(SingleLaunch(bound, [place for place in range(3) if of.needs[place]], of=fields), bound.plan)
    others_of = items_by_name(bound.operands[len(dense_backward.OPERANDS) :])

    def run(of: VarlenGradientCall) -> tuple[Tensor, ...]:
        call, lse = of.call, of.lse
        if spec.is_capped:  # a row that sees nothing: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if lse_is_head_major:
            lse = lse.t().contiguous()
        q = call.q if factor is None else multiplied(call.q, factor)
        found = bound((q, call.k, call.v, of.out, of.grad_out, lse, *others_of(call)))
        for place, layout in enumerate(wanted):
            if not in_order[place]:  # cuDNN sums the gradients of grouped heads only token-major
                moved = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=call.q.device)
                found[place] = moved.copy_(found[place])
        if factor is not None:
            grad_q, grad_k, grad_v = found
            found = [grad_q * factor, grad_k * abs(factor), grad_v]
        needed = [x for x, need in zip(found, of.needs, strict=False) if need]
        return (*needed, *sink_scores.needed_gradient(of, call.cu_seqlens_q))

    return Prepared(run, bound.plan)


def _gradients_in_parts(of: VarlenGradientCall) -> tuple[Tensor, ...]:
    """The needed gradients of a call that one launch cannot compute: some heads at a time."""
    inputs = zip(of.call._fields, of.call.differentiable, of.needs, strict=False)
    wholes = [
        Whole.gradient(name, like_in_memory(without_memory(x)), PACKED_AXES)
        for name, x, need in inputs
        if need and x is not None
    ]
    found = parts.merge(
        specs.split_gradient(of), lambda part: gradients(specs.part_of(of, part)), wholes, of.out.device
    )
    return tuple(found)


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
        if "lowest" in names:
            lengths = [Address(MADE, packing.offsets[name]) for name in ("seq_len_q", "seq_len_kv")]
            more += RowLimitsKernel(
                batch=spec.sequences,
                rows=spec.max_seqlen_q,
                band=spec.mask.band,
                device=plan.device,
                lengths=lengths,
            ).extras()
    for operand in key.inputs:
        if operand.name in EXTRAS_OF_OPTIONS:
            more += EXTRAS_OF_OPTIONS[operand.name]
    numbers = numbers_of(call, scale_of(call))
    return BoundPlan(plan=plan, operands=operands, results=_results(key, call), numbers=numbers, extras=more)


def _results(key: PlanKey, call: VarlenArguments) -> list[Layout]:
    return [_unpacked(output, (call.k if is_of_keys(output) else call.q).shape[0]) for output in key.outputs]


def _unpacked(output: Operand, rows: int) -> Layout:
    if not output.ragged:
        return output.layout.shape, output.layout.stride, output.layout.dtype
    _, heads, _, dim = output.layout.shape
    _, head, row, _ = output.layout.stride
    if output.name == "lse":
        return (rows, heads), (row, head), output.layout.dtype
    return (rows, heads, dim), (row, head, 1), output.layout.dtype
