"""Writes tests/unit/compat/signatures.json: parameters of other libraries' functions that `cudnn_sdpa.compat` has.

    python scripts/compat_signatures.py FOLDER ...            # of the packages in these folders: unpacked wheels
    python scripts/compat_signatures.py --check FOLDER ...    # exit with 1 if the file has others

Sources are parsed, never imported. Without folders, packages are looked for where Python finds them, and in the folders
of `.engines`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "unit" / "compat" / "signatures.json"


class Source(NamedTuple):
    """The package that a module has the names of.

    Attributes:
        distribution: Its name on PyPI.
        names: Functions, and methods as `Class.method`, by the file that has them.
    """

    package: str
    distribution: str
    names: dict[str, str]


SOURCES = {
    "cudnn_sdpa.compat.flashinfer": Source(
        "flashinfer",
        "flashinfer_python",
        {
            "decode.py": (
                "single_decode_with_kv_cache fast_decode_plan BatchDecodeWithPagedKVCacheWrapper.__init__"
                " BatchDecodeWithPagedKVCacheWrapper.plan BatchDecodeWithPagedKVCacheWrapper._plan_impl"
                " BatchDecodeWithPagedKVCacheWrapper.run BatchDecodeWithPagedKVCacheWrapper.forward"
                " BatchDecodeWithPagedKVCacheWrapper.forward_return_lse"
                " BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer"
                " CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__"
            ),
            "prefill.py": (
                "single_prefill_with_kv_cache BatchPrefillWithPagedKVCacheWrapper.__init__"
                " BatchPrefillWithPagedKVCacheWrapper.plan BatchPrefillWithPagedKVCacheWrapper.run"
                " BatchPrefillWithPagedKVCacheWrapper.forward BatchPrefillWithPagedKVCacheWrapper.forward_return_lse"
                " BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer"
                " BatchPrefillWithRaggedKVCacheWrapper.__init__ BatchPrefillWithRaggedKVCacheWrapper.plan"
                " BatchPrefillWithRaggedKVCacheWrapper.run BatchPrefillWithRaggedKVCacheWrapper.forward"
                " BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse"
                " BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer"
            ),
            "attention/_core.py": "BatchAttention.__init__ BatchAttention.plan BatchAttention.run",
            "page.py": "append_paged_kv_cache get_batch_indices_positions get_seq_lens",
            "cascade.py": "merge_state merge_state_in_place merge_states",
        },
    ),
}


def parameters_of(function: ast.FunctionDef) -> str:
    """Parameters as they are written, without types."""
    given = function.args
    for x in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if x is not None:
            x.annotation = None
    return ast.unparse(given)


def functions_of(tree: ast.Module) -> dict[str, str]:
    """The parameters of all functions and methods; of overloaded ones those of the last, which has the body."""
    found = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + x.name: parameters_of(x) for x in inner if isinstance(x, ast.FunctionDef)}
    return found


def signatures_in(folder: Path, source: Source) -> dict[str, object]:
    """The entry of a module in the file, from the package in a folder."""
    (distribution,) = metadata.distributions(name=source.distribution, path=[str(folder)])
    signatures = {}
    for file, names in source.names.items():
        functions = functions_of(ast.parse((folder / source.package / file).read_text()))
        signatures[file] = {name: functions[name] for name in names.split()}
    return {"package": source.package, "version": distribution.version, "signatures": signatures}


def folder_of(source: Source, folders: list[Path] | None = None) -> Path | None:
    """The folder that has a package: of those given, or an unpacked wheel, or where it is installed."""
    for folder in folders or sorted((ROOT / ".engines").glob("*")):
        if (folder / source.package).is_dir():
            return folder
    spec = None if folders else importlib.util.find_spec(source.package)
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def main(arguments: list[str]) -> int:
    folders = [Path(x) for x in arguments if not x.startswith("-")]
    kept = json.loads(FILE.read_text()) if FILE.is_file() else {}
    found = {}
    for module, source in SOURCES.items():
        folder = folder_of(source, folders)
        if folder is None:
            print(f"{source.package} was not found; kept as it is")
        else:
            found[module] = signatures_in(folder, source)
    stale = [module for module in found if found[module] != kept.get(module)]
    if stale and "--check" in arguments:
        print(f"other signatures than those of {', '.join(stale)}; run: python scripts/compat_signatures.py FOLDER")
        return 1
    if stale:
        FILE.write_text(json.dumps(dict(sorted({**kept, **found}.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
