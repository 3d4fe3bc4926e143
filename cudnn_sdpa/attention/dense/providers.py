"""The keys of a dense call's plans: cuDNN's, or those of another provider that `providers` names."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT


def key_of(spec: ForwardSpec | BackwardSpec, target: Target, device: int | None) -> PlanKey:
    """The key of a call's plan, of the first provider in force that serves it."""
    names = providers.Setting.names or providers.active()
    if names[0] in (DEFAULT, CUDNN):
        return spec.key(target, device)
    from cudnn_sdpa.attention.flash4 import serving  # few programs name other providers

    return serving.key_of(spec, target, device, names)


def ready(key: PlanKey, of_cudnn: Callable[[Target, int | None], PlanKey]) -> PlanKey:
    """A key of another provider's, or that of cuDNN's plan while a kind is still compiled and cuDNN may serve the call.

    Once it is compiled, in a thread, calls find their plans again.
    """
    if key.provider is None:
        return key
    from cudnn_sdpa.attention.flash4 import serving

    return serving.ready(key, of_cudnn)


def choice(spec: ForwardSpec | BackwardSpec, target: Target) -> str:
    """Who serves a call and why, or would under "fastest", for `explain`; empty where only cuDNN may."""
    names = providers.active()
    if names[0] == CUDNN:
        return ""
    from cudnn_sdpa.attention.flash4 import serving

    return serving.choice(spec, target, names)
