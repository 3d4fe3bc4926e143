"""Registers cudnn_sdpa with Hugging Face Transformers in every process, if the environment asks for it.

PyTorch calls `autoload` at the end of its own import, since the package has an entry point in `torch.backends`. So this
module stands outside the package, imports nothing slow, and raises nothing: what it raised would be PyTorch's failure.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VARIABLE = "CUDNN_SDPA_TRANSFORMERS"
_MODELS = "transformers.modeling_utils"
#: Checks the name of the attention before it imports models; is imported when PyTorch is.
SERVER = "transformers.cli.serving.model_manager"


def autoload() -> None:
    """Has `register()` called when transformers' models are imported, if `CUDNN_SDPA_TRANSFORMERS` is 1."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        watch(_MODELS, _register_or_warn, or_when=SERVER)


def watch(name: str, act: Callable[[], bool], *, or_when: str = "") -> None:
    """Has a function called once a module has been imported; another call for the same module changes nothing.

    Args:
        name: The module.
        act: The function. It returns False to be called again, at the next import.
        or_when: Another module, whose import will do.
    """
    if not any(isinstance(finder, _Watch) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(name, act, or_when))


class _Watch:
    """A finder that sees what is imported."""

    def __init__(self, name: str, act: Callable[[], bool], or_when: str) -> None:
        self.name = name
        self._act, self._or_when = act, or_when
        self._is_done = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._is_done:
            return None
        if name != self.name:
            # They were being imported when PyTorch was, or another plug-in of it did.
            if is_imported(self.name) or is_imported(self._or_when):
                self._do()
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._do()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _do(self) -> None:
        if not self._is_done:
            self._is_done = True  # first: the function imports
            self._is_done = self._act()


def is_imported(name: str) -> bool:
    """Whether a module is there, and not about to be."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _register_or_warn() -> bool:
    if not is_imported("torch"):
        return False
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - of a broken installation, say; models run without it
        text = 'attn_implementation="cudnn_sdpa" is not registered, which'
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"{text} {VARIABLE}={os.environ.get(VARIABLE)} asks for: {why}", RuntimeWarning, stacklevel=2)
    return True


def _register() -> None:
    if os.environ.get(VARIABLE) != "1":
        raise ValueError("the variable may be 1 or 0")
    from cudnn_sdpa.integrations.transformers import register

    register()
