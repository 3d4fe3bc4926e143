"""Calls of dense attention that cuDNN's frontend serves, where `providers` names it: reasons against, and keys.

It has no gradients here.
"""

from __future__ import annotations

from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.frontend.plans import frontend_forward, reasons_against
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target


def reasons_of(spec: ForwardSpec | BackwardSpec, target: Target) -> list[str]:
    """Why the frontend cannot serve a call; empty if it can."""
    if isinstance(spec, BackwardSpec):
        return ["it has no gradients on compute capability 9.0"]
    dense = spec.dense
    lacking = {
        "it has no attn_mask": dense.bias is not None,
        "its sequence lengths are not used": dense.has_lengths,
        "it has no dropout": dense.dropout_p > 0,
        "it has no ALiBi": dense.alibi,
        "it has no soft cap": dense.is_capped,
        "it does not promise deterministic results": dense.deterministic,
    }
    if reasons := [reason for reason, is_wanted in lacking.items() if is_wanted] + dense.unreadable(spec.out):
        return reasons
    layouts = {operand.name: operand.layout for operand in (*spec.plain_inputs(), *spec.outputs())}
    found = reasons_against(layouts, dense.mask.band, target)
    return found or known_issues.reasons_against(key_of(spec, target, None))


def key_of(spec: ForwardSpec, target: Target, device: int | None) -> PlanKey:
    options = {"band": spec.dense.mask.band}
    return frontend_forward.key(spec.plain_inputs(), spec.outputs(), options, target, device=device)
