"""Calls of dense attention that cuDNN's frontend serves, where `providers` names it: reasons against, and keys.

It has no gradients here. Providers that are named before it come first, those after it serve what it declines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.flash4 import serving as flash4
from cudnn_sdpa.attention.flash4.preferences import Spec
from cudnn_sdpa.attention.frontend.plans import frontend_forward, functions, kind_of, reasons_against
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, FLASH4, FRONTEND, OWN


def key_of(spec: Spec, target: Target, device: int | None, names: Sequence[str]) -> PlanKey:
    """The key of a call's plan, of the first of these providers that serves it."""
    before, after = _around(names)
    refused = None
    if before:
        try:
            return _of_others(spec, target, device, before)
        except UnsupportedError as error:
            refused = error
    against = reasons_of(spec, target)
    if isinstance(spec, ForwardSpec) and not against:
        return _frontend_key(spec, target, device)
    if after:
        return _of_others(spec, target, device, after)
    reasons = [f"cuDNN's frontend: {reason}" for reason in against]
    if refused is not None:
        raise UnsupportedError(refused.what, [*refused.reasons, *reasons], refused.suggestion)
    raise UnsupportedError(flash4.Call.of(spec).function, reasons, f"providers({FRONTEND!r}, {CUDNN!r})")


def ready(key: PlanKey, of_cudnn: Callable[[Target, int | None], PlanKey]) -> PlanKey:
    """See `dense.specs.ready`."""
    return functions.ready(key, kind_of(key), of_cudnn)


def choice(spec: Spec, target: Target, names: Sequence[str]) -> str:
    """Who serves a call and why, for `explain`."""
    before, after = _around(names)
    if before:
        try:
            _of_others(spec, target, None, before)
            return _choice_of_others(spec, target, before, names)
        except UnsupportedError:
            pass
    against = reasons_of(spec, target)
    if isinstance(spec, ForwardSpec) and not against:
        kind = kind_of(_frontend_key(spec, target, None))
        served = f"cuDNN's frontend, {_by(names)}"
        return served if functions.are_ready(kind) else f"{served}; {_until_compiled(names)}"
    if not after:
        return ""
    why = f"its frontend does not serve it, as {'; '.join(against)}"
    others = _choice_of_others(spec, target, after, names)
    return f"{others}; {why}" if FLASH4 in after or FASTEST in after else f"cuDNN's engines: {why}"


def reasons_of(spec: Spec, target: Target) -> list[str]:
    """Why the frontend cannot serve a call; empty if it can."""
    if isinstance(spec, BackwardSpec):
        return ["it has no gradients on compute capability 9.0"]
    if not isinstance(spec, ForwardSpec):
        return ["its packed sequences are not used"]
    dense = spec.dense
    deterministic = dense.deterministic or torch.are_deterministic_algorithms_enabled()
    lacking = {
        "it has no attn_mask": dense.bias is not None,
        "its sequence lengths are not used": dense.has_lengths,
        "it has no dropout": dense.dropout_p > 0,
        "it has no ALiBi": dense.alibi,
        "it has no soft cap": dense.is_capped,
        "it does not promise deterministic results": deterministic,
    }
    if reasons := [reason for reason, is_wanted in lacking.items() if is_wanted]:
        return reasons
    return reasons_against(flash4.Call.of(spec).layouts, dense.mask.band, target)


def _frontend_key(spec: ForwardSpec, target: Target, device: int | None) -> PlanKey:
    call = flash4.Call.of(spec)  # which has the same operands
    return frontend_forward.key(call.inputs, call.outputs, {"band": spec.dense.mask.band}, target, device=device)


def _around(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The providers before the frontend and after it, without own kernels, which are not planned by key."""
    place = names.index(FRONTEND)
    before, after = ([name for name in part if name not in (OWN, FRONTEND)] for part in (names[:place], names[place:]))
    return before, after


def _of_others(spec: Spec, target: Target, device: int | None, names: Sequence[str]) -> PlanKey:
    if {FLASH4, FASTEST} & set(names):
        return flash4.key_of(spec, target, device, names)
    return spec.key(target, device)


def _choice_of_others(spec: Spec, target: Target, names: Sequence[str], all_names: Sequence[str]) -> str:
    """What `explain` says of a call that providers besides the frontend serve."""
    found = flash4.choice(spec, target, names).replace(_by(names), _by(all_names))
    return found or f"cuDNN's engines, {_by(all_names)}"


def _by(names: Sequence[str]) -> str:
    return f"by providers({', '.join(map(repr, names))})"


def _until_compiled(names: Sequence[str]) -> str:
    """What happens to a call whose kind has not been compiled yet."""
    if not {CUDNN, DEFAULT, FASTEST} & set(names):
        return "its first call waits until its kind is compiled"
    why = interpreter.why_no_helper()
    return f"cuDNN serves it: {why}" if why else "cuDNN serves it until its kind is compiled"
