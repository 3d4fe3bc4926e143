"""Python files of serving engines, for tests against their own classes where the engines cannot be installed.

    python scripts/engines.py unpack WHEELS FOLDER          # what is Python of the wheels in a folder
    python scripts/engines.py pack FOLDER FILE MODULE...    # of that, what importing the modules takes, as a tar file

The second makes few files of thousands, for another machine; for the backend of vLLM:

    python scripts/engines.py pack .engines vllm.tar.gz cudnn_sdpa.integrations.vllm_backend \
        vllm.v1.attention.backends.registry vllm.v1.kv_cache_interface
"""

from __future__ import annotations

import importlib
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(wheels: Path, folder: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [x for x in archive.namelist() if x.endswith((".py", ".dist-info/METADATA"))])


def pack(folder: Path, file: Path, modules: list[str]) -> None:
    folder = folder.resolve()
    sys.path.insert(0, str(folder))
    for name in modules:
        importlib.import_module(name)
    origins = [Path(x.__file__) for x in list(sys.modules.values()) if getattr(x, "__file__", None)]
    taken = {x for x in origins if folder in x.parents}
    for package in {x.relative_to(folder).parts[0] for x in taken}:
        taken |= set(folder.glob(f"{package}-*.dist-info/METADATA"))
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(taken):
            archive.add(path, path.relative_to(folder))


if __name__ == "__main__":
    command, first, second, *modules = sys.argv[1:]
    if command == "unpack":
        unpack(Path(first), Path(second))
    elif command == "pack":
        pack(Path(first), Path(second), modules)
    else:
        sys.exit(f"no command {command}: unpack or pack")
