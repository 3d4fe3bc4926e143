"""Providers: whose kernels serve a call for which there are several."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any, Final, Literal

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.settings import Override, Overrides, renewed_in_children

Provider = Literal["default", "cudnn", "own", "fa4", "frontend", "fastest"]
DEFAULT: Final = "default"
CUDNN: Final = "cudnn"
OWN: Final = "own"
FLASH4: Final = "fa4"
FRONTEND: Final = "frontend"
FASTEST: Final = "fastest"
PROVIDERS = (DEFAULT, CUDNN, OWN, FLASH4, FRONTEND, FASTEST)

#: The modules of what providers besides cuDNN serve of calls of attention, of layers above this one.
_SERVING = {
    OWN: "cudnn_sdpa.kernels.serving",
    FLASH4: "cudnn_sdpa.attention.flash4.serving",
    FRONTEND: "cudnn_sdpa.attention.frontend.serving",
}

#: Environment variable that names providers, with commas between them.
VARIABLE = "CUDNN_SDPA_PROVIDERS"

_lock = renewed_in_children(threading.RLock())


class ProvidersUse(Override[tuple[str, ...]]):
    """The result of `providers`: ignore it, or use it in a `with` statement to restore the previous providers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(_overrides, names)

    def __enter__(self) -> tuple[str, ...]:
        self._enter()
        return self.names


class Setting:
    names: tuple[str, ...] = ()


def active() -> tuple[str, ...]:
    """The providers in force, in order."""
    names = Setting.names
    if not names and is_compiling():  # Dynamo traces no lock
        return of_environment()
    if not names:
        named = of_environment()
        with _lock:
            names = Setting.names = Setting.names or named
    return names


def of_environment() -> tuple[str, ...]:
    """The providers that the environment variable names.

    Raises:
        OptionError: One of them does not exist.
    """
    return _checked(tuple(x.strip() for x in (os.environ.get(VARIABLE) or DEFAULT).split(",")), VARIABLE)


def _checked(names: tuple[str, ...], argument: str) -> tuple[str, ...]:
    for name in names:
        if name not in PROVIDERS:
            raise OptionError(argument, repr(name), f"one of {', '.join(map(repr, PROVIDERS))}")
    if not names:
        raise OptionError(argument, "no name", f"one or more of {', '.join(map(repr, PROVIDERS))}")
    return names


def may_be_others() -> bool:
    """Whether a provider is in force that may serve packed calls in place of cuDNN or of the own kernel for pages."""
    names = Setting.names or active()
    return FLASH4 in names or FASTEST in names


def chooser() -> Any:
    """The module that chooses between providers of calls of attention, imported where one besides cuDNN is named."""
    return importlib.import_module("cudnn_sdpa.attention.providers.choosing")


def other(provider: str) -> Any:
    """The module of what a provider besides cuDNN serves of calls of attention."""
    return importlib.import_module(_SERVING[provider])


def providers(*names: Provider) -> ProvidersUse:
    """Sets whose kernels serve a call for which there are several: the first of these that can.

    - "default": cuDNN, and for pages, norms and gates own kernels where cuDNN has none or took longer in a table of
      measurements. Where an activation in a convolution's kernel did, PyTorch's follows.
    - "cudnn": cuDNN's kernels.
    - "own": CUDA kernels of this library.
    - "fa4": FlashAttention-4's, for `sdpa`, the drop-in, `sdpa_varlen` and `sdpa_paged_varlen` on Hopper, if it is
      installed. A helper process compiles each kind of call once; until then cuDNN, or for pages the own kernel, serves
      the call if it is named, too, or the call waits.
    - "frontend": those of cuDNN's frontend, for calls of `sdpa` and the drop-in without gradients on Hopper, with head
      dims above 256. A helper process compiles each shape once, up to 64; until then cuDNN serves the call if it is
      named, too, or the call waits.
    - "fastest": as "default", and FlashAttention-4 for calls of `sdpa`, `sdpa_varlen` and `sdpa_paged_varlen` for which
      it took less time in a table of measurements.

    `sdpa_paged`, norms and gates have the first three. `sdpa` and the drop-in have own kernels: those of
    `kernels.attention`, which take float32 without TF32, any head dim (above 128 with memory for all scores) and any
    strides, and are deterministic; they have masks, the log-sum-exp and gradients, but no other option. A function
    for which none of the named providers has kernels is served as if "cudnn" were named.

    Providers change no meaning of a call, and its results by rounding alone. Each pass of a call chooses for itself.
    `explain` says who serves a call, and why. A call that each of the named providers
    that have kernels for its function declines raises `UnsupportedError`.

    The setting is process-wide, and ends with the `with` statement if it is used in one. Calls find their plans again
    when it changes; those that other threads make meanwhile may take either. Without a call, the environment variable
    `CUDNN_SDPA_PROVIDERS` names the providers, as in `fa4,default`. This function compares the installed files of
    FlashAttention-4 and the frontend with their wheels' lists when it names "fa4", "frontend" or "fastest" first, in
    some 50 ms; if the variable names them, the first call does.

    Args:
        *names: "default", "cudnn", "own", "fa4", "frontend" or "fastest", in order of preference.

    Returns:
        A context manager whose value are the names.

    Raises:
        OptionError: There is no name, or no such provider.

    Examples:
        >>> import cudnn_sdpa
        >>> with cudnn_sdpa.providers("cudnn", "own") as names:
        ...     names
        ('cudnn', 'own')
    """
    checked = _checked(names, "names")
    if not {CUDNN, DEFAULT, OWN}.issuperset(checked):
        chooser().examine(checked)
    return ProvidersUse(checked)


def _set(names: tuple[str, ...]) -> None:
    with _lock:
        changed, Setting.names = Setting.names != names, names
    if changed:
        plan_cache.forget_calls()


def _value() -> tuple[str, ...]:
    """The providers in force; none while the environment names an unknown one, which the next call raises."""
    try:
        return active()
    except OptionError:
        return ()


_overrides = Overrides(_value, _set)
