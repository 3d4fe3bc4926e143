"""The file format of a stored plan: a line with the format, a line of JSON with its description, and its bytes.

Nothing is unpickled or evaluated. The description holds the whole key, so that plans are never confused, and the digest
of the bytes, so that a damaged file is detected before cuDNN reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass

from cudnn_sdpa.plans.private_folders import is_private

#: Format version, part of every file name; changes whenever files of older versions could be misread.
FORMAT = 1
_MAGIC = f"cudnn_sdpa plan, format {FORMAT}\n".encode()

#: Begins the names of files that are being written.
TEMPORARY = ".writing-"

#: Larger files are not read; plans take 60 to 300 KB.
MAX_BYTES = 64 << 20


#: The facts of a plan in its description, with their types.
_FACTS = {"engine": (str,), "knobs": (dict,), "workspace": (int,), "build_seconds": (int, float)}


class BadPlanFileError(Exception):
    pass


@dataclass(frozen=True)
class StoredPlan:
    """A compiled plan and its description; files of older versions lack `tuned`."""

    identity: dict[str, object]
    engine: str
    knobs: dict[str, int]
    workspace: int
    build_seconds: float
    data: bytes
    tuned: bool = False

    def encode(self) -> bytes:
        facts = {name: getattr(self, name) for name in (*_FACTS, "tuned")}
        line = canonical({"key": self.identity, "size": len(self.data), **facts})
        return b"".join([_MAGIC, _digest(line, self.data).encode(), b"\n", line, b"\n", self.data])

    @classmethod
    def decode(cls, contents: bytes) -> StoredPlan:
        if not contents.startswith(_MAGIC):
            raise BadPlanFileError("it is not a plan in this version's format")
        digest, _, rest = contents[len(_MAGIC) :].partition(b"\n")
        line, _, data = rest.partition(b"\n")
        if digest != _digest(line, data).encode():
            raise BadPlanFileError("its contents do not match its digest")
        description = json.loads(line)
        facts = {name: description[name] for name in _FACTS}
        wrong = [name for name, allowed in _FACTS.items() if type(facts[name]) not in allowed]
        wrong += ["key"] if type(description["key"]) is not dict else []
        if not wrong and any(type(value) is not int for value in description["knobs"].values()):
            wrong.append("knobs")
        if wrong or description["workspace"] < 0:
            raise BadPlanFileError(f"its description is not a plan's: {', '.join(wrong) or 'workspace'}")
        return cls(identity=description["key"], data=data, tuned=description.get("tuned") is True, **facts)


def canonical(description: object) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def name_of(identity: dict[str, object]) -> str:
    return hashlib.sha256(canonical({"format": FORMAT, "key": identity})).hexdigest() + ".plan"


def _digest(line: bytes, data: bytes) -> str:
    return hashlib.sha256(line + b"\n" + data).hexdigest()


def read(name: str, folder: int) -> bytes | None:
    """The contents of a file in an open folder; None if it is missing.

    A file that another user could have written, a special one and a far too large one is a `BadPlanFileError`.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadPlanFileError("it is not a regular file")
        if not is_private(status):
            raise BadPlanFileError("it belongs to another user, or others may write to it")
        if status.st_size > MAX_BYTES:
            raise BadPlanFileError(f"it has {status.st_size} bytes, more than any plan")
        return file.read(MAX_BYTES)


def write(name: str, folder: int, contents: bytes) -> None:
    """Writes a file of an open folder, complete or not at all, readable for all who may read the folder."""
    temporary = TEMPORARY + os.urandom(8).hex()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), 0o600 | os.fstat(folder).st_mode & 0o044)
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a file system may refuse times
            touch(temporary, folder)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def touch(name: str, folder: int) -> None:
    """Sets a file's time by the clock that it is compared with; the file system's own is some milliseconds behind."""
    now = time.time_ns()
    os.utime(name, ns=(now, now), dir_fd=folder)
