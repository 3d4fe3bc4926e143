"""SGLang's attention on this library: what registers the backend, as a plugin of SGLang 0.5.23."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from typing import Any

__all__ = ["register"]

#: What `--attention-backend` takes, and the version of SGLang whose classes the backend has.
NAME, VERSION = "cudnn_sdpa", "0.5.23"

_BACKEND = "cudnn_sdpa.integrations.sglang_backend"

_log = logging.getLogger("cudnn_sdpa")


@functools.cache
def register() -> None:
    """Registers the attention backend `cudnn_sdpa` with SGLang 0.5.23.

    SGLang calls it in each of its processes, as this package is a plugin of it (entry point `sglang.srt.plugins`);
    `--attention-backend cudnn_sdpa` then chooses the backend. It raises nothing: another version of SGLang, or one that
    cannot be imported, is named in a warning of the logger `cudnn_sdpa`, and SGLang runs as without this package.
    Further calls in a process do nothing.

    Examples:
        >>> import importlib.util
        >>> from cudnn_sdpa.integrations.sglang import register
        >>> if importlib.util.find_spec("sglang"):
        ...     register()
    """
    try:
        installed = importlib.metadata.version("sglang")
        if installed.split(".")[:3] != VERSION.split("."):
            _log.warning(
                "SGLang has no attention backend %s: this version of cudnn_sdpa has one for sglang %s; sglang %s is "
                "installed. All else works. Try: pip install sglang==%s",
                NAME,
                VERSION,
                installed,
                VERSION,
            )
            return
        choices = importlib.import_module("sglang.srt.arg_groups.choices")
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        registry.register_attention_backend(NAME)(_create)
        if NAME not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([NAME])
    except Exception as error:  # noqa: BLE001 - a plugin must not end the engine
        _log.warning("SGLang has no attention backend %s, as registering it failed: %r", NAME, error)


def _create(runner: Any) -> Any:
    return importlib.import_module(_BACKEND).create(runner)  # whose kernels a plugin need not import
