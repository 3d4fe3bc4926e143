"""`attention/paged_varlen/paged.cu` as C++ for `emulation/block.h`; `emulation/paged.h` has its instructions.

`PagedKernel` (`paged_kernel`) is a formula of what the kernel computes; this runs how it does so, in seconds rather
than milliseconds. Copies and products take effect as late as they may, blocks run one after the other.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import fake_gpu

from cudnn_sdpa.plans import nvrtc

INSTRUCTIONS = Path(__file__).with_name("emulation") / "paged.h"

#: Statements within functions that are more than an instruction, by a word of theirs, and what stands for them.
_STATEMENTS = {
    "cp.async.cg": "copy_to(to + i * 2048 + e * N * 128, y + e * 128, size);",
    "cp.async.wait_all": "emulation::finish_copies();",
    "fence": "",
    "barrier.red": "all = all_of(2 + role, ready);",
}

_HEAD = re.compile(r"(?:^template <[^\n]*>\n)?^(?:extern \"C\" )?__(?:device|global)__[^;{]*\{", re.MULTILINE)
_ASM = re.compile(r'asm volatile\((?:[^"]|"(?:[^"\\]|\\.)*")*?\);')


@functools.cache
def _emulated(source: Path, defines: tuple[tuple[str, int], ...]) -> Any:
    text = INSTRUCTIONS.read_text() + as_cpp(source.read_text())
    options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", f"-I{fake_gpu.nvrtc.HEADERS}"]
    options += [f"-D{name}={value}" for name, value in defines]
    return fake_gpu._library(source, fake_gpu.BLOCK.read_text(), options, text)


class EmulatedPagedKernel(fake_gpu.EmulatedKernel):
    """The kernel, run thread by thread on the CPU."""

    def __init__(self, kernel: nvrtc.Kernel) -> None:
        self.library = _emulated(kernel.path, tuple(sorted(kernel.defines.items())))
        self.kernel, self.shared = getattr(self.library, kernel.name), kernel.shared
        assert kernel.shared <= 227 << 10


def as_cpp(source: str) -> str:
    """The kernel, without the functions that are instructions alone."""
    source = re.sub(r"^typedef long long number;$|^extern __shared__.*$", "", source, flags=re.MULTILINE)
    source = source.replace("__grid_constant__ ", "").replace("__noinline__", "")
    declared = "static unsigned char* const shared = emulation::shared;\n"
    made, at = "", 0
    for found in _HEAD.finditer(source):
        end = _end_of(source, found.end())
        made += source[at : found.start()] + _on_the_cpu(source[found.start() : end])
        at = end
    made += source[at:]
    assert "asm" not in re.sub(r"/\*.*?\*/", "", made, flags=re.DOTALL)
    return made.replace("constexpr int M =", declared + "constexpr int M =", 1)


def _end_of(source: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        at += 1
    return at


def _on_the_cpu(function: str) -> str:
    name = re.search(r"(\w+)\(", function)
    assert name
    if name[1] in ("load_items", "all_ready"):
        return _ASM.sub(lambda found: next(y for x, y in _STATEMENTS.items() if x in found[0]), function)
    is_given = re.search(rf"\b{name[1]}\(", INSTRUCTIONS.read_text()) is not None
    return "" if is_given and name[1] not in ("high", "attend") else function
