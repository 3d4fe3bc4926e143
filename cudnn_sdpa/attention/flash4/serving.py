"""Calls of dense attention that others than cuDNN serve, where `providers` names them: reasons against, and keys.

FlashAttention-4 takes a mask as a window that ends at the last query and the last key. Options that it lacks, or takes
in another way, are refused here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.attention.flash4.plans import flash4_backward, flash4_forward, functions, kind_of, reasons_against
from cudnn_sdpa.attention.flash4.preferences import preference_of
from cudnn_sdpa.attention.flash4.programs import Window
from cudnn_sdpa.attention.spec import SCALE, SOFTCAP
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import Operand, PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, FLASH4, OWN

Spec = ForwardSpec | BackwardSpec


def key_of(spec: Spec, target: Target, device: int | None, names: Sequence[str]) -> PlanKey:
    """The key of a call's plan, of the first of these providers that serves it."""
    refused: UnsupportedError | None = None
    reasons: list[str] = []
    for name in names:
        served = _first_choice(name, spec, target)
        if served == CUDNN:
            try:
                return spec.key(target, device)
            except UnsupportedError as error:
                refused = refused or error
        elif against := against_other(served, spec, target):
            reasons += [f"{WORDS[served]}: {reason}" for reason in against]
        else:
            found: PlanKey = (_flash4_key if served == FLASH4 else providers.own().key_of)(spec, target, device)
            return found
    what = "sdpa" if isinstance(spec, ForwardSpec) else "the gradient of sdpa"
    raise refused or UnsupportedError(what, reasons, f"providers({', '.join(map(repr, [*names, CUDNN]))})")


def _first_choice(name: str, spec: Spec, target: Target) -> str:
    """Whose kernels a name stands for."""
    if name == FASTEST:
        row = preference_of(spec, target)
        return FLASH4 if row and row.prefers_flash4 and not reasons_of(spec, target) else CUDNN
    return CUDNN if name == DEFAULT else name


def against_other(name: str, spec: Spec, target: Target) -> list[str]:
    """Why a provider besides cuDNN cannot serve a call; empty if it can."""
    found: list[str] = (reasons_of if name == FLASH4 else providers.own().reasons_of)(spec, target)
    return found


def ready(key: PlanKey, of_cudnn: Callable[[Target, int | None], PlanKey]) -> PlanKey:
    """See `dense.specs.ready`."""
    kind = kind_of(key)
    has_other, is_ready = bool({CUDNN, DEFAULT, FASTEST} & set(providers.active())), functions.are_ready(kind)
    may_build = not (plan_cache.builds_are_forbidden or torch.cuda.is_current_stream_capturing())
    if not has_other or plan_cache.peek(key) is not None or (is_ready and may_build):
        return key
    try:
        other = of_cudnn(key.target, key.device)
    except UnsupportedError:
        return key
    if may_build:
        functions.compile_in_background(kind)
        return other
    return other if plan_cache.find(other) is not None else key  # what was warmed up before a kind was compiled


def choice(spec: Spec, key: PlanKey, names: Sequence[str]) -> str:
    """Why its provider serves a call, and who would under "fastest", for `explain`; empty where only one may."""
    target = key.target
    if names[0] == DEFAULT and key.provider is None:
        row = preference_of(spec, target)
        would = row is not None and row.prefers_flash4 and not reasons_of(spec, target)
        return f"cuDNN's engines; providers({FASTEST!r}) would take FlashAttention-4: {row}" if would else ""
    if not {OWN, FLASH4, FASTEST} & set(names):
        return ""
    by = f"by providers({', '.join(map(repr, names))})"
    row = preference_of(spec, target) if FASTEST in names else None
    if key.provider == FLASH4:
        measured = "" if row is None else f": {row}"
        is_ready = functions.are_ready(kind_of(key))
        return f"FlashAttention-4, {by}{measured}" + ("" if is_ready else f"; {_until_compiled(names)}")
    served, is_served = WORDS[key.provider or CUDNN], (OWN,) if key.provider == OWN else (CUDNN, DEFAULT, FASTEST)
    before = [*itertools.takewhile(lambda name: name not in is_served, names)]
    before += [FLASH4] * (row is not None and row.prefers_flash4)
    for name in (FLASH4, OWN):
        if name in before and (against := against_other(name, spec, target)):
            return f"{served}: {WORDS[name]} {_DO_NOT[name]} serve it, as {'; '.join(against)}"
    return f"{served}, {by}: FlashAttention-4 {row}" if row else f"{served}, {by}"


#: The providers of plans, as `explain` names them.
WORDS = {CUDNN: "cuDNN's engines", OWN: "own kernels", FLASH4: "FlashAttention-4"}
_DO_NOT = {OWN: "do not", FLASH4: "does not"}


def _until_compiled(names: Sequence[str]) -> str:
    """What happens to a call whose kind has not been compiled yet."""
    if not {CUDNN, DEFAULT, FASTEST} & set(names):
        return "its first call waits until its kind is compiled"
    why = interpreter.why_no_helper()
    return f"cuDNN serves it: {why}" if why else "cuDNN serves it until its kind is compiled"


def _flash4_key(spec: Spec, target: Target, device: int | None) -> PlanKey:
    inputs, outputs = _operands(spec)
    options: dict[str, object] = {"window": _window(spec.dense)}
    operation = flash4_forward if isinstance(spec, ForwardSpec) else flash4_backward
    return operation.key(inputs, outputs, options, target, device=device)


def _operands(spec: Spec) -> tuple[list[Operand], list[Operand]]:
    """The inputs and the outputs of a plan, as those of cuDNN's without what FlashAttention-4 lacks."""
    dense = spec.dense
    out = dense.visible(spec.out)
    lse = Operand("lse", _lse_layout(out))
    if isinstance(spec, ForwardSpec):
        inputs = [*dense.qkv(), *dense.operands(full_lengths=False, is_forward=True)]
        return inputs, [Operand("out", out), *([lse] if spec.plan_has_lse else [])]
    grad_out = Operand("grad_out", dense.visible(spec.grad_out))
    numbers = [SCALE, *[SOFTCAP] * dense.is_capped]
    return [*dense.qkv(), Operand("out", out), grad_out, lse, *numbers], spec.outputs()


def reasons_of(spec: Spec, target: Target) -> list[str]:
    """Why FlashAttention-4 cannot serve a call; empty if it can."""
    dense = spec.dense
    deterministic = dense.deterministic or torch.are_deterministic_algorithms_enabled()
    lacking = {
        "it has no attn_mask": dense.bias is not None,
        "it has no sequence lengths": dense.has_lengths,
        "it has no dropout": dense.dropout_p > 0,
        "it has no ALiBi": dense.alibi,
        "it does not promise deterministic results": deterministic,
    }
    if reasons := [reason for reason, is_wanted in lacking.items() if is_wanted] + spec.dense.unreadable(spec.out):
        return reasons
    inputs, outputs = _operands(spec)
    layouts = {operand.name: operand.layout for operand in (*inputs, *outputs)}
    return reasons_against(layouts, _window(dense), target)


def _window(dense: DenseSpec) -> Window:
    """The mask as FlashAttention-4 takes it: relative to the diagonal that ends at the last query and the last key."""
    if dense.mask.band is None:
        return None, None
    left, right, bottom_right = dense.mask.band
    shift = 0 if bottom_right else dense.skv - dense.rows
    return None if left is None else left + shift, None if right is None else right - shift


def _lse_layout(out: TensorLayout) -> TensorLayout:
    return TensorLayout.contiguous((*out.shape[:3], 1), torch.float32)
