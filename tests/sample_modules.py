"""The programs of samples/ as modules, each imported once: a process registers an operation's operators once."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SAMPLES = Path(__file__).parent.parent / "samples"


@functools.cache
def sample(path: str) -> ModuleType:
    """The program at a path in samples/."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, SAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
