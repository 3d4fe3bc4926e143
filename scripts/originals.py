"""The libraries whose functions `cudnn_sdpa.compat` has: their sources, their signatures and their tests.

    python scripts/originals.py fetch         # sources into .originals, by git
    python scripts/originals.py signatures    # writes tests/unit/compat/originals.json from there
    python scripts/originals.py test          # runs 20 cases of each of their tests on our modules, on a GPU
    python scripts/originals.py test --device cpu --each 100 flashinfer xformers -- -k sliding -x
    python scripts/originals.py test --report report.json    # leaves versions, counts, and skips with their reasons

Nothing of .originals is committed, imported by the package or shipped. A folder that is there is taken as it is.
Tests need none of the originals' kernels: `originals_plugin.py` gives our modules their names.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / ".originals"
STAMP = ".fetched"
NOTES = ROOT / "tests" / "unit" / "compat" / "originals.json"

#: Methods that are public, and what SGLang replaces of FlashInfer's wrapper for decodes.
OF_METHODS = "(__init__|_plan_impl|[a-z].*)$"


class Original(NamedTuple):
    """A repository at a commit or a tag.

    Attributes:
        modules: For each module of `cudnn_sdpa.compat`, the files of its original and the names of them that count.
        tests: The files of its tests of these.
    """

    repository: str
    commit: str
    modules: dict[str, tuple[list[str], str]]
    tests: tuple[str, ...]


ORIGINALS = {
    "flash-attention": Original(
        "https://github.com/Dao-AILab/flash-attention",
        "0251105a2fb19d2957484b7f023cd8c115286ced",
        {
            "flash_attn": (["flash_attn/flash_attn_interface.py"], "flash_attn_"),
            "flash_attn_interface": (["hopper/flash_attn_interface.py"], "flash_attn_"),
        },
        ("tests/test_flash_attn.py", "hopper/test_flash_attn.py"),
    ),
    "flashinfer": Original(
        "https://github.com/flashinfer-ai/flashinfer",
        "v0.7.2.post1",
        {
            "flashinfer": (
                [f"flashinfer/{x}.py" for x in ("decode", "prefill", "attention/_core", "page", "cascade")],
                "single_|merge_|append_paged_kv|get_(batch_ind|seq_len)|fast_dec|Batch(Att|Dec|Pre)|CUDAGraph",
            )
        },
        (
            *(f"tests/attention/test_{x}_kernels.py" for x in ("batch_decode", "batch_prefill", "shared_prefix")),
            *(f"tests/attention/test_non_contiguous_{x}.py" for x in ("decode", "prefill")),
            *(f"tests/attention/test_{x}.py" for x in ("single_prefill", "page", "logits_cap", "sliding_window")),
            *(f"tests/attention/test_{x}.py" for x in ("batch_attention", "batch_invariant_fa2", "decode_prefill_lse")),
            *("tests/attention/test_tensor_cores_decode.py", "tests/utils/test_triton_cascade.py"),
        ),
    ),
    "xformers": Original(
        "https://github.com/facebookresearch/xformers",
        "v0.0.35",
        {
            "xformers": (
                ["xformers/ops/fmha/__init__.py", "xformers/ops/fmha/attn_bias.py"],
                "memory_efficient_|(Paged)?BlockDiagonal|L[ao]|AttentionBias",
            )
        },
        ("tests/test_mem_eff_attention.py",),
    ),
    "einops": Original("https://github.com/arogozhnikov/einops", "v0.8.2", {}, ()),  # FlashAttention's tests import it
}


def fetch(names: Iterable[str]) -> None:
    """The sources of each repository that is not there, at its commit, without its history."""
    for name in names:
        original = ORIGINALS[name]
        if (SOURCES / name).is_dir():
            continue
        shutil.rmtree(to := SOURCES / f"{name}.part", ignore_errors=True)
        to.mkdir(parents=True)
        for step in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", original.repository, original.commit],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", "-C", str(to), *step], check=True)
        (to / STAMP).write_text(original.commit)
        to.rename(SOURCES / name)


def is_fetched(name: str) -> bool:
    """Whether the sources that `fetch` brings are there, and not a folder with others."""
    stamp = SOURCES / name / STAMP
    return stamp.is_file() and stamp.read_text() == ORIGINALS[name].commit


def parameters_of(function: ast.FunctionDef) -> str:
    """Parameters as they are written, without types."""
    given = function.args
    for x in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if x is not None:
            x.annotation = None
    return ast.unparse(given)


def signatures_in(path: Path, pattern: str) -> dict[str, str]:
    """Those of functions and of methods, as `Class.method`; of overloaded ones that of the last, which has the body."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and re.match(pattern, node.name):
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = [x for x in inner if isinstance(x, ast.FunctionDef) and re.match(OF_METHODS, x.name)]
            found |= {prefix + x.name: parameters_of(x) for x in functions}
    return found


def notes_of(name: str) -> dict[str, dict[str, object]]:
    """The notes of an original: of each module, where that is from, and its signatures."""
    repository, commit, modules, _ = ORIGINALS[name]
    found = {}
    for module, (files, pattern) in modules.items():
        each = {key: x for file in files for key, x in signatures_in(SOURCES / name / file, pattern).items()}
        found[module] = {"repository": repository, "commit": commit, "signatures": dict(sorted(each.items()))}
    return found


def test(names: list[str], device: str, each: int, report: Path | None, options: list[str]) -> int:
    """Each library's tests in a process of its own, as all call their folders `tests`."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH"))))
    codes = []
    if report is not None:
        report.unlink(missing_ok=True)
    for name in names:
        folder = SOURCES / name
        files = [str(folder / x) for x in ORIGINALS[name].tests]
        of_pytest = [
            "-m",
            "pytest",
            "-p",
            "originals_plugin",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
            "--noconftest",
        ]
        chosen = ["--original", name, "--device", device, "--each", str(each)]
        chosen += [] if report is None else ["--report", str(report.resolve())]
        command = [sys.executable, *of_pytest, "-q", "-rfEs", "-p", "no:cacheprovider", *chosen, *files, *options]
        codes.append(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)
    return max(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch")
    commands.add_parser("signatures")
    tests = commands.add_parser("test")
    tests.add_argument("names", nargs="*", help=f"of {', '.join(x for x, y in ORIGINALS.items() if y.tests)}")
    tests.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    tests.add_argument("--each", type=int, default=20, help="of each test function, run so many cases")
    tests.add_argument("--report", type=Path, help="a JSON file to write")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given, options = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    names = getattr(given, "names", None) or [name for name, original in ORIGINALS.items() if original.tests]
    fetch([*names, "einops"])
    if given.command == "signatures":
        notes = {module: of for name in ORIGINALS for module, of in notes_of(name).items()}
        NOTES.write_text(json.dumps(notes, indent=1) + "\n")
    if given.command == "test":
        return test(names, given.device, given.each, given.report, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
