"""An installation that looks like flash-attn-4's without its code: files, metadata, and libraries that are empty."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cudnn_sdpa.attention.flash4 import installed as installations
from cudnn_sdpa.attention.flash4.installed import TESTED

SOURCES = {"flash_attn/cute/__init__.py": "", "flash_attn/cute/interface.py": "def _flash_attn_fwd(): ...\n"}


def record_of(contents: dict[str, str]) -> str:
    def digest(text: str) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")

    return "".join(f"{name},sha256={digest(text)},{len(text)}\n" for name, text in contents.items())


def write(folder: Path, versions: dict[str, str] = TESTED, *, libraries: bool = True) -> None:
    """Writes the files of an installation into a folder of packages."""
    files = dict(SOURCES)
    if libraries:
        files |= {
            "tvm_ffi/__init__.py": "",
            "tvm_ffi/lib/libtvm_ffi.so": "",
            "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so": "",
        }
    for name, version in versions.items():
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        of_package = dict(SOURCES) if name == "flash-attn-4" else {}
        about = f"{name.replace('-', '_')}-{version}.dist-info"
        files |= {f"{about}/METADATA": metadata, f"{about}/RECORD": record_of(of_package)}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def on_the_search_path(folder: Path) -> Iterator[None]:
    """What is installed there, first on the search path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in [x for x in sys.modules if x.partition(".")[0] in ("flash_attn", "tvm_ffi")]:
            patch.delitem(sys.modules, name)
        installations.installed.cache_clear()
        try:
            yield
        finally:
            installations.installed.cache_clear()
