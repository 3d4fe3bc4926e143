"""Compiles a model with AOTInductor, loads and compares it, in a separate process because PyTorch's loader may crash.

python aot_inductor.py FOLDER relu|ours|attention|large
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_checks import error, served_by
from float64_reference import attend as exact
from torch.export import Dim, ExportedProgram, export

from cudnn_sdpa import sdpa
from tests.unit.small_model import model_and_reference

WIDTH = 256

#: Programs of attention: head dims, and numbers of sequences and tokens; for any numbers if there are several. "large"
#: makes a call of `frontend_cases`.
ATTENTION = {"attention": (128, ((2, 90), (3, 270))), "large": (512, ((2, 300),))}

HERE = Path(__file__).parent


def printed(which: str, folder: Path, **variables: str) -> str:
    """What this program prints, unless PyTorch's loader crashes with a ReLU alone, too: the test is then skipped."""
    with ThreadPoolExecutor() as pool:
        done, relu = pool.map(lambda each: ahead_of_time(each, folder, **variables), (which, "relu"))
    if done.returncode < 0 and relu.returncode < 0:
        pytest.skip("this PyTorch crashes when it loads what AOTInductor has made of a ReLU")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def printed_with(provider: str, which: str, folder: Path) -> str:
    """The same under a provider, with the given compiled functions."""
    plans = os.environ.get("CUDNN_SDPA_TEST_PLANS", "off")
    return printed(which, folder, CUDNN_SDPA_PROVIDERS=provider, CUDNN_SDPA_PLAN_DIR=plans)


def ahead_of_time(which: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs this program with these variables in the environment."""
    search_path = os.pathsep.join([str(HERE), *map(str, HERE.parents[:2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder), which],
        env=os.environ | {"PYTHONPATH": search_path} | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


class Attention(torch.nn.Module):
    """Causal attention of 8 query heads and 2 key heads, which are one tensor of tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return sdpa(*heads_of(tokens), is_causal=True)


def heads_of(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dim = tokens.shape[2] // 12
    return tuple(x.unflatten(2, (-1, dim)).transpose(1, 2) for x in tokens.split([8 * dim, 2 * dim, 2 * dim], dim=2))


def exported(which: str) -> tuple[ExportedProgram, list[torch.Tensor]]:
    """A program of attention, and tokens for it."""
    dim, sizes = ATTENTION[which]
    tokens = [torch.randn(*each, 12 * dim, device="cuda", dtype=torch.bfloat16) for each in sizes]
    shapes = {"tokens": {0: Dim("batch", min=2), 1: Dim("length", min=2)}} if len(sizes) > 1 else None
    return export(Attention(), (tokens[0],), dynamic_shapes=shapes), tokens


def providers_of(program: Callable[[torch.Tensor], torch.Tensor], tokens: list[torch.Tensor]) -> list[set[str | None]]:
    """The providers of a program of attention, in each of its calls, whose values are right."""
    found = []
    for x in tokens:
        out, by = served_by(lambda x=x: program(x))
        assert error(out, exact(*heads_of(x), is_causal=True)[0]) < 1e-2
        found.append(by)
    return found


def attention(folder: str, which: str) -> None:
    program, tokens = exported(which)
    package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/{which}.pt2")
    for by in providers_of(torch._inductor.aoti_load_package(package), tokens):
        print("served by", by)


def main(folder: str, which: str) -> None:
    if which in ATTENTION:
        attention(folder, which)
        return
    ours, theirs = (
        (torch.nn.ReLU(), torch.nn.ReLU()) if which == "relu" else model_and_reference("cuda", torch.bfloat16, WIDTH)
    )
    ours, exactly = ours.eval().requires_grad_(False), theirs.eval().double()
    shapes = {"input" if which == "relu" else "x": {0: Dim("batch", min=2), 1: Dim("length", min=2)}}
    xs = [torch.randn(*sizes, WIDTH, device="cuda", dtype=torch.bfloat16) for sizes in ((2, 9), (3, 70))]
    program = export(ours, (xs[0],), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/{which}.pt2")
    loaded = torch._inductor.aoti_load_package(package)
    for x in xs:
        assert error(loaded(x), exactly(x.double())) < 1e-2
    print("loaded and right")


if __name__ == "__main__":
    main(*sys.argv[1:])
