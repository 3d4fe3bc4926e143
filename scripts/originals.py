"""The libraries whose functions `cudnn_sdpa.compat` has: fetches their sources, and notes their signatures.

    python scripts/originals.py fetch         # into .originals, by git
    python scripts/originals.py signatures    # writes tests/unit/compat/originals.json from there

Nothing of .originals is committed, imported or shipped. With sources there, tests compare the notes with them.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / ".originals"
NOTES = ROOT / "tests" / "unit" / "compat" / "originals.json"

FLASH = "https://github.com/Dao-AILab/flash-attention", "0251105a2fb19d2957484b7f023cd8c115286ced"
XFORMERS = "https://github.com/facebookresearch/xformers", "v0.0.35"

#: Each module of `cudnn_sdpa.compat`: where its original is, and the files and the names of it that count.
ORIGINALS = {
    "flash_attn": (FLASH, ["flash_attn/flash_attn_interface.py"], "flash_attn_"),
    "flash_attn_interface": (FLASH, ["hopper/flash_attn_interface.py"], "flash_attn_"),
    "xformers": (XFORMERS, ["xformers/ops/fmha/__init__.py", "xformers/ops/fmha/attn_bias.py"], "memory_efficient_"),
}


def folder(repository: str) -> Path:
    return SOURCES / repository.rpartition("/")[2]


def fetch() -> None:
    """The sources of each repository at its commit, without its history."""
    for repository, commit in (FLASH, XFORMERS):
        to = folder(repository)
        git = ["git", "-C", str(to)]
        to.mkdir(parents=True, exist_ok=True)
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "fetch", "--quiet", "--depth", "1", repository, commit], check=True)
        subprocess.run([*git, "checkout", "--quiet", "--force", "FETCH_HEAD"], check=True)


def signature(function: ast.FunctionDef) -> list[str]:
    """Each parameter but `self` and `cls`, with its default; `*` stands before those that are keywords only."""
    of = function.args
    assert not of.posonlyargs
    defaults: list[ast.expr | None] = [None] * (len(of.args) - len(of.defaults))
    found = [_parameter(*each) for each in zip(of.args, defaults + of.defaults, strict=True)]
    found += ["*"] * bool(of.kwonlyargs)
    found += [_parameter(*each) for each in zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    return [x for x in found if x not in ("self", "cls")]


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def signatures_of(path: Path, prefix: str) -> dict[str, list[str]]:
    """Those of functions with a prefix, and of what makes biases: constructors and methods `from_…` and `make_…`."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith(prefix):
            found[node.name] = signature(node)
        elif isinstance(node, ast.ClassDef) and node.name[0].isupper() and path.name == "attn_bias.py":
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            makers = [x for x in methods if x.name.startswith(("__init__", "from_", "make_", "split", "add_"))]
            found |= {f"{node.name}.{x.name}": signature(x) for x in makers}
    return found


def signatures() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for module, ((repository, commit), paths, prefix) in ORIGINALS.items():
        of = {}
        for path in paths:
            of |= signatures_of(folder(repository) / path, prefix)
        found[module] = {"repository": repository, "commit": commit, "files": paths, "signatures": of}
    return found


def as_text(found: dict[str, dict[str, object]]) -> str:
    """JSON with a line for each function."""
    modules = []
    for module, each in found.items():
        head = {key: value for key, value in each.items() if key != "signatures"}
        functions = each["signatures"]
        assert isinstance(functions, dict)
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(functions[name])}" for name in sorted(functions))
        modules.append(f' {json.dumps(module)}: {json.dumps(head)[:-1]}, "signatures": {{\n{lines}\n }}}}')
    return "{\n" + ",\n".join(modules) + "\n}\n"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch"]:
            fetch()
        case ["signatures"]:
            NOTES.write_text(as_text(signatures()))
        case _:
            sys.exit(__doc__)
