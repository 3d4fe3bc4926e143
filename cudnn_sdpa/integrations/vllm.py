"""vLLM's attention on this library: what registers the backend, as a plugin of vLLM 0.33."""

from __future__ import annotations

import functools
import importlib
import logging

__all__ = ["register"]

#: What `--attention-backend` takes, and the class that vLLM imports for it.
NAME, BACKEND = "CUDNN_SDPA", "cudnn_sdpa.integrations.vllm_backend.CudnnSdpaBackend"

#: The versions of vLLM whose classes the backend has: no contract holds from one minor version to the next.
SERIES = (0, 33)

_log = logging.getLogger("cudnn_sdpa")


@functools.cache
def register() -> None:
    """Registers the attention backend `CUDNN_SDPA` with vLLM `>=0.33,<0.34`.

    vLLM calls it in each of its processes, as this package is a plugin of it (entry point `vllm.general_plugins`);
    `--attention-backend CUDNN_SDPA` then chooses the backend. It raises nothing: another version of vLLM, or one that
    cannot be imported, is named in a warning of the logger `cudnn_sdpa`, and vLLM runs as without this package. Further
    calls in a process do nothing.

    Examples:
        >>> import importlib.util
        >>> from cudnn_sdpa.integrations.vllm import register
        >>> if importlib.util.find_spec("vllm"):
        ...     register()
    """
    try:
        vllm = importlib.import_module("vllm")
        if vllm.__version_tuple__[:2] != SERIES:
            _log.warning(
                "vLLM has no attention backend %s: this version of cudnn_sdpa has one for vLLM >=0.33,<0.34; "
                "vllm %s is installed. All else works. Try: pip install 'vllm>=0.33,<0.34'",
                NAME,
                vllm.__version__,
            )
            return
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        if NAME not in registry.AttentionBackendEnum.__members__:
            registry.register_backend(NAME, BACKEND)
    except Exception as error:  # noqa: BLE001 - a plugin must not end the engine
        _log.warning("vLLM has no attention backend %s, as registering it failed: %r", NAME, error)
