"""Names of the originals that modules of `cudnn_sdpa.compat` lack: why, and what works in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from opcode import opmap
from typing import NoReturn

from cudnn_sdpa.errors import UnsupportedError


class MissingError(UnsupportedError, AttributeError):
    """A name of the original has no counterpart. It is an `AttributeError`, so `hasattr` is False."""


def missing(
    module: str, names: Mapping[str, tuple[str, str]], *, imported: str = ""
) -> Callable[[str], Callable[..., NoReturn]]:
    """The `__getattr__` of a module, given patterns of names, each with the reason and with what works.

    `from … import` raises `ImportError` with the same words: those of an `AttributeError` Python would drop. Names of
    the pattern `imported` raise when they are called: engines import them at the top of their files.
    """

    def refuse(name: str) -> Callable[..., NoReturn]:
        known = next((x for pattern, x in names.items() if fnmatchcase(name, pattern)), None)
        if known is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if fnmatchcase(name, imported):
            return partial(_raise, f"{module}.{name}", *known)
        error, caller = MissingError(f"{module}.{name}", [known[0]], known[1]), sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
            raise ImportError(str(error)) from error
        raise error

    return refuse


def _raise(name: str, reason: str, works: str, /, *_: object, **__: object) -> NoReturn:
    raise MissingError(name, [reason], works)
