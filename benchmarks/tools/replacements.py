"""What replaces PyTorch's attention operators while they are measured."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_sdpa.integrations.pytorch import register, unregister

OURS, FRONTENDS, PYTORCH = "cudnn_sdpa", "cudnn-frontend", "pytorch"
REPLACEMENTS = (OURS, FRONTENDS, PYTORCH)

#: The frontend's module, which no other part of this library uses.
_MODULE = "cudnn.torch.sdpa_provider"


@contextmanager
def replaced_by(name: str) -> Iterator[None]:
    """PyTorch's operators are implemented by one of `REPLACEMENTS`.

    Raises:
        ImportError: The installed frontend has no such module.
    """
    if name == OURS:
        register()
        try:
            yield
        finally:
            unregister()
    elif name == FRONTENDS:
        installed = importlib.import_module(_MODULE).install_sdpa_overrides()
        try:
            yield
        finally:
            installed.remove()
    else:
        yield
