"""Which lines of a builder's file have added which operations to a graph: cuDNN names neither in its reasons."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A call of one of a graph's methods."""

    operation: str
    file: str
    line: int


def recording(name: str, method: Any, places: list[Place]) -> Any:
    """A graph's method that notes where it was called; what is no method is as it is."""
    if not callable(method):
        return method

    def call(*operands: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        places.append(Place(name, caller.f_code.co_filename, caller.f_lineno))
        return method(*operands, **options)

    return call


def in_words(places: Sequence[Place], file: str) -> str:
    """The operations that code of this file has added, with its lines."""
    return ", ".join(f"{place.operation} ({file}, line {place.line})" for place in places if place.file == file)
