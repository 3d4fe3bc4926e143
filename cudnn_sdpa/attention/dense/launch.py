"""Calls of both passes bound to their plans: what a launch reads besides its tensors, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, sink_scores
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall, GradientT, Needs, numbers_of
from cudnn_sdpa.attention.bias import BiasKernel, mask_gradient
from cudnn_sdpa.attention.dense import graphs, parts, reference, specs
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec, key_of, ready
from cudnn_sdpa.attention.lengths import LENGTHS, LengthsKernel, RowLimitsKernel
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.engine import tensor_checks
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
from cudnn_sdpa.engine.operation.call import BackwardCall
from cudnn_sdpa.engine.tensor_checks import multiplied
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, contiguous_stride, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.providers import OWN

Run = Callable[[ForwardArguments], Result]


def bind_forward(forward: ForwardSpec, plan: Plan, call: ForwardArguments, scale: float) -> Run:
    """Binds calls like this one to `plan`, whose GPU is the current device. The scale is positive."""
    spec, has_lse = forward.dense, forward.plan_has_lse
    results: list[Layout] = [(forward.out.shape, forward.out.stride, forward.out.dtype)]
    if has_lse:
        rows = (*forward.out.shape[:2], spec.rows)
        results.append((rows, contiguous_stride(rows), torch.float32))
    queries = {"q": spec.q, "out": forward.out}
    bound = bind_plan(
        spec,
        plan,
        call,
        operands=("q", "k", "v"),
        results=results,
        numbers=numbers_of(call, scale),
        queries=queries,
        decode=forward.is_decode and not spec.is_capped,
    )
    has_sinks_after = spec.sink_use is SinkUse.AFTER_PLAN
    overflows = plan.key.provider is not None
    raises_lse = spec.sink_use is SinkUse.IN_PLAN and has_lse and (spec.can_have_masked_rows or overflows)
    if spec.mask.masked_rows or has_sinks_after or raises_lse:
        return _Completed(forward, bound)
    return SingleLaunch(bound)


def bind_plan(
    spec: DenseSpec,
    plan: Plan,
    call: ForwardArguments,
    *,
    operands: Sequence[str],
    results: Sequence[Layout],
    numbers: Mapping[str, float | None],
    queries: Mapping[str, TensorLayout],
    decode: bool = False,
) -> BoundPlan:
    """A plan of the current device, bound with the launch's extra operands: bias, lengths, and those of options.

    `operands` are those that all calls have. `queries` are the operands with one row for each query, as the caller sees
    them: fully masked rows are not given to cuDNN, so these begin behind them.
    """
    rows, device, batch = spec.mask.masked_rows, plan.device, spec.q.shape[0]
    behind = {name: Address(name, rows * x.stride[2] * x.dtype.itemsize) for name, x in queries.items() if rows}
    more = LaunchExtras(addresses=behind)
    for operand in plan.key.inputs:
        if operand.name in EXTRAS_OF_OPTIONS:
            more += EXTRAS_OF_OPTIONS[operand.name]
    given: list[str] = []
    made: RowLimitsKernel | LengthsKernel | None = None
    if spec.has_lengths:
        given = [name for name in LENGTHS if getattr(call, name) is not None]
        if spec.is_capped:
            made = RowLimitsKernel(
                batch=batch, device=device, rows=spec.sq, band=spec.mask.band, max_q=spec.sq, max_kv=spec.skv
            )
        else:
            made = LengthsKernel(
                batch=batch, device=device, sq=spec.sq, has_kv=spec.lengths_kv, decode=decode, skv=spec.skv
            )
    with_lengths = more if made is None else more + made.extras(given)
    bound_plan = partial(BoundPlan, plan, operands, results=results, numbers=numbers)
    if plan.key.provider == OWN:
        return bound_plan(extras=with_lengths + _extras_of_own(plan.key))
    if not call.is_for_cudnn:  # `providers` names own kernels: what cuDNN cannot read where it lies is served, too
        copied = LaunchExtras(copy_if_unaligned=_copied(plan.key))
        more, with_lengths = more + copied, with_lengths + copied
    if call.attn_mask is None:
        return bound_plan(extras=with_lengths)
    bias = BiasKernel(call.attn_mask, call.q, spec.skv, rows)
    converted = bias.extras(reads_mask=False) if made is None else bias.extras_with(made, given)
    bound = bound_plan(extras=more + converted)
    if bias.reads_mask_at is not None:
        bound = bound_plan(extras=with_lengths + bias.extras(reads_mask=True), unaligned_plan=bound)
    return bound


def _extras_of_own(key: PlanKey) -> LaunchExtras:
    """Own kernels read masks as they are, and tensors at any address where they read element by element."""
    mask = ("attn_mask",) if any(operand.name == "mask" for operand in key.inputs) else ()
    addresses = {"mask": Address("attn_mask")} if mask else {}
    if key.option_values["vectors"]:
        copied = _copied(key)
        return LaunchExtras(operands=mask, unaligned_ok=mask, addresses=addresses, copy_if_unaligned=copied)
    return LaunchExtras(operands=mask, unaligned_ok=(*mask, *OPERANDS), addresses=addresses)


def _copied(key: PlanKey) -> tuple[str, ...]:
    """Operands that are copied where kernels cannot read their address."""
    layouts = {operand.name: operand.layout for operand in key.inputs}
    return tuple(name for name in OPERANDS if name not in layouts or not _is_expanded(layouts[name]))


def _is_expanded(layout: TensorLayout) -> bool:
    return any(size > 1 and not stride for size, stride in zip(layout.shape, layout.stride, strict=True))


#: Launch extras of options, by the first operand of a plan that they have.
EXTRAS_OF_OPTIONS = {
    "sink": sink_scores.EXTRAS,
    "seed": LaunchExtras(
        operands=("rng",),
        unaligned_ok=("rng",),
        addresses={"seed": Address("rng"), "offset": Address("rng", torch.int64.itemsize)},
    ),
}


class _Completed:
    """Runs calls whose results the plan does not write in full: fully masked rows, and what `sink_scores` completes."""

    __slots__ = ("_bound", "_forward", "_overflows", "_tensors_of")

    def __init__(self, forward: ForwardSpec, bound: BoundPlan) -> None:
        self._forward = forward
        self._bound = bound
        self._overflows = bound.plan.key.provider is not None
        self._tensors_of = items_by_name(bound.operands)

    def __call__(self, call: ForwardArguments) -> Result:
        forward, spec = self._forward, self._forward.dense
        masked_rows = spec.mask.masked_rows
        out, *others = self._bound(self._tensors_of(call), call.out)
        if masked_rows:
            out[:, :, :masked_rows].zero_()
        if not others:
            return out
        (lse,) = others
        if masked_rows:
            lse = torch.nn.functional.pad(lse, (masked_rows, 0), value=-torch.inf)
        sink_scores.complete(call, out, lse, spec.sink_use, overflows=self._overflows)
        return (out, lse) if forward.with_lse else out


OPERANDS = ("q", "k", "v", "out", "grad_out", "lse")  #: of all backward plans


def readable(of: GradientT) -> GradientT:
    out = readable_gradient(of.out, of.out)
    grad_out, lse = readable_gradient(of.grad_out, out), tensor_checks.aligned("lse", of.lse)
    if grad_out is of.grad_out and lse is of.lse and out is of.out:
        return of
    return of._replace(grad_out=grad_out, out=out, lse=lse)


def prepare_gradients(of: GradientCall) -> Prepared:
    """A backward call that cuDNN can read, bound to its plan."""
    call = of.call
    spec = DenseSpec.of(call)
    if spec.is_empty:
        return Prepared(zero_gradients, None)
    if spec.is_one_by_one or spec.has_no_plan:
        return Prepared(lambda of: tuple(reference.gradients(of)), None)
    if parts.split_gradient(of):
        return Prepared(lambda of: tuple(parts.run_gradients(of, gradients)), None)
    call.softmax.check()
    arguments.check(call)
    device, backward = call.q.get_device(), BackwardSpec.of(of)
    key = key_of(backward, live_target(device), device)
    if key.provider is not None:
        key = ready(key, backward.key)
    plan = plan_cache.get(key, partial(build_plan, graphs.sdpa_backward))
    spec = backward.dense
    layouts = [*map(dense_like, (spec.q, spec.k, spec.v)), *(x.layout for x in key.outputs[3:])]
    results: list[Layout] = [(x.shape, x.stride, x.dtype) for x in layouts]
    queries = {"q": spec.q, "out": backward.out, "grad_out": backward.grad_out, "grad_q": dense_like(spec.q)}
    with torch.cuda.device(device):
        bound = bind_plan(
            spec,
            plan,
            call,
            operands=OPERANDS,
            results=results,
            numbers=numbers_of(call, specs.as_launched_backward(of).scale_value),
            queries=queries,
        )
    factor, needs = specs.query_factor_backward(of), Needs(*of.needs)
    masks_lse = key.provider != OWN and (spec.bias is not None or spec.is_capped)
    is_plain = factor is None and not (
        spec.mask.masked_rows or masks_lse or backward.bias_gradient or sink_scores.is_needed(of)
    )
    if is_plain:
        fields = {name: name if name in of._fields else f"call.{name}" for name in bound.operands}
        return Prepared(SingleLaunch(bound, [place for place, need in enumerate(needs[:3]) if need], of=fields), plan)
    return Prepared(_Gradients(backward, bound, factor, masks_lse=masks_lse), plan)


def gradients(of: GradientCall) -> list[Tensor]:
    """The needed gradients of a backward call; its binding is not remembered."""
    of = readable(of)
    return list(prepare_gradients(of).run(of))


class _Gradients:
    __slots__ = ("_backward", "_bound", "_factor", "_masks_lse", "_others_of")

    def __init__(self, backward: BackwardSpec, bound: BoundPlan, factor: float | None, *, masks_lse: bool) -> None:
        self._backward = backward
        self._bound = bound
        self._factor = factor
        self._others_of = items_by_name(bound.operands[len(OPERANDS) :])
        self._masks_lse = masks_lse

    def __call__(self, of: GradientCall) -> tuple[Tensor, ...]:
        call, lse, factor = of.call, of.lse, self._factor
        masked_rows = self._backward.dense.mask.masked_rows
        if masked_rows:
            lse = tensor_checks.aligned("lse", lse[:, :, masked_rows:])
        if self._masks_lse:  # fully masked rows: exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        q = call.q if factor is None else multiplied(call.q, factor)
        tensors = (q, call.k, call.v, of.out, of.grad_out, lse, *self._others_of(call))
        grad_q, grad_k, grad_v, *grad_bias = self._bound(tensors)
        if masked_rows:
            grad_q[:, :, :masked_rows].zero_()
        if factor is not None:
            grad_q.mul_(factor)
        if factor == 0:  # scores that are all 0 do not depend on q and k
            grad_q.zero_()
            grad_k.zero_()
        needs = Needs(*of.needs)
        found = [x for x, need in ((grad_q, needs.q), (grad_k, needs.k), (grad_v, needs.v)) if need]
        if needs.attn_mask and call.attn_mask is not None:
            found.append(mask_gradient(grad_bias[0], call.attn_mask, masked_rows))
        return (*found, *sink_scores.needed_gradient(of))


def zero_gradients(of: BackwardCall[Any]) -> tuple[Tensor, ...]:
    return tuple(x.zero_() for x in of.fake_gradients())


def is_readable(grad_out: Tensor) -> bool:
    """Whether cuDNN can read a gradient without a copy.

    It cannot if the negative bit is set, so that memory has the other sign, or for a ZeroTensor, which has no memory.
    """
    return has_readable_memory(grad_out) and has_readable_layout(grad_out)


def has_readable_memory(tensor: Tensor) -> bool:
    address = tensor.data_ptr()
    return address != 0 and address % ALIGNMENT == 0 and not tensor.is_neg()


def has_readable_layout(tensor: Tensor) -> bool:
    """Whether cuDNN can read the strides of an output or of its gradient, dense or packed."""
    alignment = ALIGNMENT // tensor.element_size()
    *sizes, dim = tensor.shape
    *strides, last = tensor.stride()
    return (last == 1 or dim == 1) and all(
        size == 1 or (stride % alignment == 0 and stride != 0) for size, stride in zip(sizes, strides, strict=True)
    )


def is_as_copied(tensor: Tensor, out: Tensor) -> bool:
    """Whether a copy of an output or its gradient would have the same strides."""
    return tensor.stride() == dense_stride_like(out.shape, out.shape, out.stride())


def readable_gradient(grad_out: Tensor, out: Tensor) -> Tensor:
    """`grad_out` itself if kernels can read it, otherwise a copy in the memory order of `out`.

    cuDNN cannot read such a copy either if head vectors are no multiple of 16 bytes; own kernels can.
    """
    if is_readable(grad_out):
        return grad_out
    if has_readable_memory(grad_out) and is_as_copied(grad_out, out) and grad_out.dtype == out.dtype:
        return grad_out
    stride = dense_stride_like(out.shape, out.shape, out.stride())
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device).copy_(grad_out)
