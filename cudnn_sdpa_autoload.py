"""Registers cudnn_sdpa with Hugging Face Transformers in every process, if the environment asks for it.

PyTorch calls `autoload` at the end of its own import, since the package has an entry point in `torch.backends`. So this
module stands outside the package, imports nothing slow, and raises nothing: what it raised would be PyTorch's failure.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "CUDNN_SDPA_TRANSFORMERS"
_MODELS = "transformers.modeling_utils"
#: Checks the name of the attention before it imports models; is imported when PyTorch is.
_SERVER = "transformers.cli.serving.model_manager"


def autoload() -> None:
    """Has `register()` called when transformers' models are imported, if `CUDNN_SDPA_TRANSFORMERS` is 1."""
    has_watch = any(isinstance(finder, _Watch) for finder in sys.meta_path)  # two installations have two entry points
    if os.environ.get(VARIABLE, "") not in ("", "0") and not has_watch:
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """A finder that sees what is imported."""

    def __init__(self) -> None:
        self._has_registered = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._has_registered:
            return None
        if name != _MODELS:
            # They were being imported when PyTorch was, or another plug-in of it did.
            if _is_imported(_MODELS) or _is_imported(_SERVER):
                self._register()
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _register(self) -> None:
        if self._has_registered or not _is_imported("torch"):
            return
        self._has_registered = True
        try:
            _register()
        except Exception as error:  # noqa: BLE001 - of a broken installation, say; models run without it
            text = 'attn_implementation="cudnn_sdpa" is not registered, which'
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"{text} {VARIABLE}={os.environ.get(VARIABLE)} asks for: {why}", RuntimeWarning, stacklevel=2)


def _register() -> None:
    if os.environ.get(VARIABLE) != "1":
        raise ValueError("the variable may be 1 or 0")
    from cudnn_sdpa.integrations.transformers import register

    register()


def _is_imported(name: str) -> bool:
    """Whether a module is there, and not about to be."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
