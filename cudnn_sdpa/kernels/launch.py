"""Calls of `kernels.attention` bound to their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import warn_of_order
from cudnn_sdpa.attention.bias import mask_gradient
from cudnn_sdpa.engine.dispatch_state import is_lazy
from cudnn_sdpa.engine.launch import BoundPlan, LaunchExtras, Prepared, SingleLaunch, new_tensor
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.kernels.arguments import Gradient, KernelArguments, Needs, check, check_memory
from cudnn_sdpa.kernels.plans import Spec, attention_backward, attention_forward, has_vectors, results
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.plan import Plan

BackwardT = TypeVar("BackwardT", bound=Gradient)


def prepare(call: KernelArguments) -> Prepared:
    warn_of_order(call)
    spec = Spec.of(call)
    if spec.is_empty:
        return Prepared(without_keys, None)
    bound, plan = bind(spec, call.q.get_device(), call.scale_value)
    return Prepared(SingleLaunch(bound), plan)


def prepare_gradients(of: Gradient) -> Prepared:
    check(of.call)  # a saved-tensor hook may have changed a tensor
    check_memory(of.call)
    spec = Spec.of_gradient(of)
    if spec.is_empty:
        return Prepared(lambda of: tuple(x.zero_() for x in of.fake_gradients()), None)
    bound, plan = bind(spec, of.call.q.get_device(), of.call.scale_value)
    needs, names = Needs(*of.needs), [x.name for x in spec.outputs()]
    wanted = [place for place, name in enumerate(names) if getattr(needs, name.removeprefix("grad_"), False)]
    places = {name: name if name in Gradient._fields else f"call.{name}" for name in bound.operands}
    if not needs.mask:
        return Prepared(SingleLaunch(bound, wanted, of=places), plan)
    run_all = SingleLaunch(bound, range(len(bound.results)), of=places)

    def run(of: Gradient) -> tuple[Tensor, ...]:
        """The mask's gradient is summed over the dimensions that were broadcast."""
        assert of.call.mask is not None
        found = run_all(of)
        return *(found[place] for place in wanted), mask_gradient(found[-1], of.call.mask, 0)

    return Prepared(run, plan)


def bind(spec: Spec, device: int, scale: float) -> tuple[BoundPlan, Plan]:
    operation = attention_forward if spec.needs is None else attention_backward
    key = spec.key(live_target(device), device)
    plan = plan_cache.get(key, lambda key: build_plan(operation, key))
    operands = [x.name for x in spec.inputs()[:-1]]
    read_by_element = operands if not spec.vectors else [x for x in operands if x in ("mask", "statistics")]

    def by_element(*launch: Any) -> list[Tensor]:
        """Launches a call whose addresses allow no vectors, though its layouts do."""
        return bind(replace(spec, vectors=False), device, scale)[0](*launch)

    with torch.cuda.device(device):
        bound = BoundPlan(
            plan,
            operands,
            results=[(x.layout.shape, x.layout.stride, x.layout.dtype) for x in spec.outputs()],
            numbers={"scale": scale},
            extras=LaunchExtras(unaligned_ok=tuple(read_by_element)),
            unaligned_plan=by_element if spec.vectors else None,
        )
    return bound, plan


def readable(of: BackwardT) -> BackwardT:
    """The backward call with a copy of a gradient whose memory does not hold its elements, or alone hinders vectors."""
    grad_out = of.grad_out
    if is_lazy(grad_out) or grad_out.dtype != of.out.dtype:
        return of._replace(grad_out=torch.zeros_like(of.out).copy_(grad_out))
    return of._replace(grad_out=torch.empty_like(of.out).copy_(grad_out)) if _hinders_vectors(of) else of


def _hinders_vectors(of: Gradient) -> bool:
    """Whether all operands but the gradient can be read 16 bytes at a time; an expanded one, as of a sum, cannot."""
    if has_vectors(TensorLayout.of(of.grad_out)):
        return False
    return Spec.of_gradient(of._replace(grad_out=of.out)).vectors


def without_keys(call: KernelArguments) -> Tensor | tuple[Tensor, Tensor]:
    """The results where there are no queries or no keys."""
    out, statistics = (new_tensor(layout, call.q.device).zero_() for layout in results(call))
    return (out, statistics) if call.with_statistics else out
