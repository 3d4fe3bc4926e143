"""Whose kernels serve a call of attention, where `providers` names others than cuDNN: keys, and what `explain` says.

A provider besides cuDNN has a module with `reasons_of` a call against it, and `key_of` a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.flash4.installed import installed as installed_flash4
from cudnn_sdpa.attention.flash4.preferences import Spec, preference_of
from cudnn_sdpa.attention.frontend.installed import installed as installed_frontend
from cudnn_sdpa.attention.paged_varlen.plans import PagedForward
from cudnn_sdpa.attention.providers.choices import choices
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import interpreter
from cudnn_sdpa.offline.functions import CompiledOp
from cudnn_sdpa.plans import autotune
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, FLASH4, FRONTEND, OWN, other

_FUNCTIONS = {
    ForwardSpec: "sdpa",
    BackwardSpec: "the gradient of sdpa",
    PackedForward: "sdpa_varlen",
    PackedBackward: "the gradient of sdpa_varlen",
    PagedForward: "sdpa_paged_varlen",
}

#: The providers of plans, as messages name them, and as they end "… serve it".
_WORDS = {CUDNN: "cuDNN's engines", OWN: "own kernels", FLASH4: "FlashAttention-4", FRONTEND: "cuDNN's frontend"}
_DO_NOT = {CUDNN: "do not", OWN: "do not", FLASH4: "does not", FRONTEND: "does not"}

#: Names for which cuDNN's engines may serve a call.
_OF_CUDNN = (CUDNN, DEFAULT, FASTEST)


def examine(names: Sequence[str]) -> None:
    """Examines what is installed of the named providers ahead of a first call, as hashing its files takes 20 ms."""
    if not {FLASH4, FASTEST}.isdisjoint(names):
        installed_flash4()
    if FRONTEND in names:
        installed_frontend()


def key_of(spec: Spec, target: Target, device: int | None, names: Sequence[str]) -> PlanKey:
    """The key of a call's plan, of the first of these providers that serves it."""
    refused: UnsupportedError | None = None
    reasons: list[str] = []
    for name in _concerned(spec, names):
        served = _fastest(spec, target) if name == FASTEST else name
        if served in _OF_CUDNN:
            try:
                found = spec.key(target, device)
            except UnsupportedError as error:
                refused = refused or error
                continue
            if name == FASTEST and _is_to_be_compared(spec):
                choices.offer(found, _compared(spec, target, device))
            return found
        if not (against := _against(served, spec, target)):
            of_other: PlanKey = other(served).key_of(spec, target, device)
            return of_other
        reasons += [f"{_WORDS[served]}: {reason}" for reason in against]
    if refused is not None and not reasons:
        raise refused
    if refused is not None:
        raise UnsupportedError(refused.what, [*refused.reasons, *reasons], refused.suggestion)
    names = ", ".join(map(repr, [*names, _usual(spec)]))
    raise UnsupportedError(_FUNCTIONS[type(spec)], reasons, f"providers({names})")


def choice(spec: Spec, key: PlanKey, names: Sequence[str]) -> str:
    """Why its provider serves a call, and who would under "fastest", for `explain`; empty where only one may."""
    target, by = key.target, f"by providers({', '.join(map(repr, names))})"
    names, usual = _concerned(spec, names), _WORDS[_usual(spec)]
    row = preference_of(spec, target)
    prefers = row is not None and row.prefers_flash4
    if set(names) <= {CUDNN, DEFAULT}:
        would = names[0] == DEFAULT and prefers and not _against(FLASH4, spec, target)
        return f"{usual}; providers({FASTEST!r}) would take FlashAttention-4: {row}" if would else ""
    is_tuned = FASTEST in names and _tuned(spec, target) == (key.provider or CUDNN)
    row = row if FASTEST in names else None
    served = _WORDS[key.provider or CUDNN]
    if key.provider in (FLASH4, FRONTEND):
        is_measured = key.provider == FLASH4 and (is_tuned or row is not None)
        measured = "" if not is_measured else ", as autotune measured" if is_tuned else f": {row}"
        operation = find_operation(key.operation)
        assert isinstance(operation, CompiledOp)
        is_ready = operation.functions.are_ready(operation.functions.kind_of(key))
        return f"{served}, {by}{measured}" + ("" if is_ready else f"; {_until_compiled(spec, names)}")
    if is_tuned:
        return f"{served}, {by}, as autotune measured"
    if row is not None and prefers and _is_to_be_compared(spec) and not _against(FLASH4, spec, target):
        return f"{served}, {by}, until autotune has compared FlashAttention-4"
    by_it = (OWN,) if key.provider == OWN != _usual(spec) else _OF_CUDNN
    before = [*itertools.takewhile(lambda name: name not in by_it, names)]
    before += [FLASH4] * (row is not None and prefers and FLASH4 not in before)
    before = [CUDNN if name in _OF_CUDNN else name for name in before]
    reasons = {name: _against(name, spec, target) for name in before}
    if any(reasons.values()):
        refused = (f"{_WORDS[x]} {_DO_NOT[x]} serve it, as {'; '.join(y)}" for x, y in reasons.items() if y)
        return f"{served}: {', and '.join(refused)}"
    return f"{served}, {by}: FlashAttention-4 {row}" if row else f"{served}, {by}"


def _fastest(spec: Spec, target: Target) -> str:
    """The provider of a call under "fastest": by what `autotune` has measured of it, or by the table.

    While `autotune` is in force, and compares the call, it is cuDNN's until then.
    """
    if tuned := _tuned(spec, target):
        return tuned
    row = preference_of(spec, target)
    prefers = row is not None and row.prefers_flash4 and not _is_to_be_compared(spec)
    return FLASH4 if prefers and not _against(FLASH4, spec, target) else FASTEST


def _tuned(spec: Spec, target: Target) -> str | None:
    """The provider that `autotune` has found to be faster at a call; None if it was not asked."""
    compared = _compared(spec, target, None)
    return choices.of(compared) if compared else None


def _is_to_be_compared(spec: Spec) -> bool:
    """Whether `autotune` is in force, and compares dense calls; work on packed ones depends on data."""
    return bool(autotune.in_force) and isinstance(spec, (ForwardSpec, BackwardSpec))


def _compared(spec: Spec, target: Target, device: int | None) -> tuple[PlanKey, ...]:
    """The keys of plans that `autotune` compares with cuDNN's, whose operands they take; own ones have other masks."""
    if not isinstance(spec, (ForwardSpec, BackwardSpec)):
        return ()
    names = (FLASH4,) if spec.dense.attn_mask is not None else (FLASH4, OWN)
    return tuple(other(name).key_of(spec, target, device) for name in names if not _against(name, spec, target))


def _concerned(spec: Spec, names: Sequence[str]) -> Sequence[str]:
    """The providers that have kernels for calls of a function; cuDNN if none of them has."""
    if isinstance(spec, (ForwardSpec, BackwardSpec)):
        return names
    if isinstance(spec, PagedForward):  # its plans by other names are all the own kernel's
        names = [CUDNN if name == OWN else name for name in names]
    return [name for name in names if name not in (OWN, FRONTEND)] or [CUDNN]


def _usual(spec: Spec) -> str:
    """The provider of calls by default."""
    return OWN if isinstance(spec, PagedForward) else CUDNN


def _against(name: str, spec: Spec, target: Target) -> list[str]:
    """Why a provider cannot serve a call; empty if it can."""
    if name == CUDNN:
        try:
            spec.key(target, None)
        except UnsupportedError as error:
            return [*error.reasons]
        return []
    found: list[str] = other(name).reasons_of(spec, target)
    return found


def _until_compiled(spec: Spec, names: Sequence[str]) -> str:
    """The provider of a call until its kind is compiled."""
    serve = "own kernels serve" if isinstance(spec, PagedForward) else "cuDNN serves"
    if not {CUDNN, DEFAULT, FASTEST} & set(names):
        return "its first call waits until its kind is compiled"
    why = interpreter.why_no_helper()
    return f"{serve} it: {why}" if why else f"{serve} it until its kind is compiled"
