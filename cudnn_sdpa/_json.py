"""The type of objects of JSON files and messages."""

from __future__ import annotations

from typing import Any, TypeAlias

#: Whoever reads a value checks it.
JsonObject: TypeAlias = dict[str, Any]
