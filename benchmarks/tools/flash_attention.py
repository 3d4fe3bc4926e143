"""FlashAttention-3 and -4, where they are installed: packages that are measured beside this library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

#: Distributions that give `flash_attn_interface` (FlashAttention-3) or `flash_attn.cute` (FlashAttention-4).
DISTRIBUTIONS = ("tokenspeed-fa3", "fa3-fwd", "flash-attn-3", "flash-attn-4")

V3, V4 = "FlashAttention-3", "FlashAttention-4"
MODULES = {V3: "flash_attn_interface", V4: "flash_attn.cute"}


def module(name: str) -> Any:
    """The module of `V3` or `V4`.

    Raises:
        ImportError: It is not installed, or a package that it needs is not.
    """
    return importlib.import_module(MODULES[name])


def is_installed(name: str) -> bool:
    """Whether the module of `V3` or `V4` can be imported."""
    try:
        module(name)
    except ImportError:
        return False
    return True


def first(function: Callable[..., Any], *args: object, **options: object) -> Any:
    """The output of a function that returns it alone or with the log-sum-exp."""
    result = function(*args, **options)
    return result[0] if isinstance(result, tuple) else result
