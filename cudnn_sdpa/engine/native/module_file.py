"""The file of a compiled module: the library as the linker wrote it, and behind it what it was made from and a digest.

The dynamic loader ignores what follows a library. With one file, renamed into place, there is never a library without
its description, or one that does not belong to it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from cudnn_sdpa.plans.file_format import canonical

_MAGIC = b"\ncudnn_sdpa native, format 1\n"
_LENGTH, _DIGEST = 8, 32


class BadModuleError(Exception):
    """A file that is not a module, or not the expected one; the message says why."""


@dataclass(frozen=True)
class ModuleFile:
    """A compiled module and its description.

    Attributes:
        identity: What it was made from and for; see `build.ModuleSources.identity`.
        compiler: The command that compiled it.
        library: The shared library.
    """

    identity: dict[str, object]
    compiler: list[str]
    library: bytes

    def encode(self) -> bytes:
        """The contents of a file."""
        line = canonical({"identity": self.identity, "compiler": self.compiler})
        contents = self.library + line + len(line).to_bytes(_LENGTH, "little")
        return contents + hashlib.sha256(contents).digest() + _MAGIC

    @classmethod
    def decode(cls, contents: bytes) -> ModuleFile:
        """The module in a file's contents.

        Raises:
            BadModuleError: They are not a module, or damaged.
        """
        if not contents.endswith(_MAGIC):
            raise BadModuleError("it is incomplete, or not a module in this version's format")
        rest, digest = _split(contents[: -len(_MAGIC)], _DIGEST)
        if hashlib.sha256(rest).digest() != digest:
            raise BadModuleError("its contents do not match its digest")
        rest, length = _split(rest, _LENGTH)
        library, line = _split(rest, int.from_bytes(length, "little"))
        try:
            description = json.loads(line)
            return cls(description["identity"], description["compiler"], library)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadModuleError("its description cannot be read") from error


def _split(contents: bytes, length: int) -> tuple[bytes, bytes]:
    """The contents before the last `length` bytes, and these."""
    at = max(0, len(contents) - length)
    return contents[:at], contents[at:]
