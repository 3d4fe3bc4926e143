"""Calls that may go straight to their plans, past the checks and PyTorch's dispatcher.

Two ways lead there. The last plain call served is recognized by a guard, one C call of 0.4 µs; the layers of one model
mostly look alike. Any other is found by its signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import autograd, debug, lookup, tracking, training
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.calls import ForwardCall, Result
from cudnn_sdpa.attention.lookup import Last, Run
from cudnn_sdpa.runtime.eager import Guard, is_bare, is_deterministic, is_profiling, needs_gradient, tensor_guard


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
) -> Run | None:
    """What runs a call with these plain arguments, without `seq_lens_q` and `out`, if it may skip the dispatcher."""
    if debug.enabled:
        return None
    try:
        may_differ = lookup.may_differ(q)
        if may_differ and is_deterministic():
            return None  # `find_any` knows the plans that give the same bits in every run
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        with_lse = return_lse or trains
        call: ForwardCall | None = lookup.calls.get(
            lookup.plain_signature(q, k, v, None, seq_lens_kv, is_causal, causal_alignment, scale, with_lse, None)
        )
    except (AttributeError, IndexError, TypeError, RuntimeError):  # not tensors, nested: the checks will say so
        return None
    if call is None or (trains and (return_lse or seq_lens_kv is not None)):
        return None
    holder: Any = call
    if trains:
        holder = training.prepare(call, (is_causal, causal_alignment, -1, -1, scale, 0.0, None, False))
        if holder is None:
            return None
    run: Run = holder.run
    tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
    known: Last | None = holder.last
    if known is None or not known.check(*tensors) or is_profiling() or forward_ad._current_level >= 0:
        if not is_bare(q, k, v):
            return None
        if not _can_be_guarded(tensors, trains=trains):
            return run
        of_call = (is_causal, causal_alignment, scale, return_lse, seq_lens_kv is not None)
        guard = tensor_guard(*tensors)
        holder.last = known = Last(run, _unless_deterministic(guard) if may_differ else guard, *of_call)
    lookup.calls.remember_last(known, call.plan)
    if not call.plan.held:
        call.last = None  # it refers back to the call, and an evicted plan must not wait for the garbage collector
    return run


def find_any(call: ForwardArguments, deterministic: bool | None) -> Callable[[ForwardArguments], Result] | None:
    """What runs a call with any arguments, if it is known and may skip the checks and the dispatcher."""
    tensors = (*call.tensors, call.out)
    if debug.enabled or type(call.dropout_p) is not float or call.dropout_p or not is_bare(*tensors):
        return None
    trains = needs_gradient(*tensors)
    if (trains and call.out is not None) or not (deterministic is None or type(deterministic) is bool):
        return None
    wanted = call if call.with_lse or not trains else call._replace(with_lse=True)
    exactly = is_deterministic() if deterministic is None else deterministic
    try:
        signature = lookup.signature(wanted._replace(deterministic=True) if exactly else wanted)
        prepared: ForwardCall | None = lookup.calls.get(signature)
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None
    if prepared is None or not trains:
        return None if deterministic and prepared is not None and prepared.may_be_replaced else prepared
    by_mask = call.attn_mask is not None and call.attn_mask.requires_grad
    if (signature, by_mask, exactly) not in lookup.differentiable:
        return None
    return functools.partial(_train, prepared, exactly)


def _train(prepared: ForwardCall, deterministic: bool, call: ForwardArguments) -> Result:
    """A call that autograd follows and whose two passes are prepared."""
    of_both = call._replace(deterministic=deterministic, with_lse=True)
    try:
        out, lse = autograd.Attention.apply(*call[:5], of_both, prepared)  # type: ignore[no-untyped-call]
    except RuntimeError:
        tracking.refuse_inference_tensors(call)
        raise
    return (out, lse) if call.with_lse else out


def _unless_deterministic(guard: Guard) -> Guard:
    """A guard for calls that the switch for determinism leads to another plan."""
    return lambda *tensors: guard(*tensors) and not is_deterministic()


def _can_be_guarded(tensors: tuple[Tensor, ...], *, trains: bool) -> bool:
    """Whether a guard may stand for these tensors.

    No guard takes one tensor twice, as with k is v. None sees whether gradients are enabled: what trains does no harm
    without them, but what does not train must not stand for calls that do.
    """
    return len(set(map(id, tensors))) == len(tensors) and (
        trains or not any(tensor.requires_grad for tensor in tensors)
    )
