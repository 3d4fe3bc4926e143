"""Compiles a model with AOTInductor, loads and compares it, in a separate process because PyTorch's loader may crash.

python aot_inductor.py FOLDER relu|ours|attention
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from attention_checks import error
from float64_reference import attend as exact
from torch.export import Dim, export

from cudnn_sdpa import plan_cache, sdpa
from tests.unit.small_model import model_and_reference

WIDTH = 256


HERE = Path(__file__).parent


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
    """Causal attention with head dims of 128, of 8 query heads and 2 key heads that are one tensor of tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return sdpa(*heads_of(tokens), is_causal=True)


def heads_of(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.unflatten(2, (-1, 128)).transpose(1, 2) for x in tokens.split([1024, 256, 256], dim=2))


def attention(folder: str) -> None:
    tokens = [torch.randn(*sizes, 1536, device="cuda", dtype=torch.bfloat16) for sizes in ((2, 90), (3, 270))]
    shapes = {"tokens": {0: Dim("batch", min=2), 1: Dim("length", min=2)}}
    program = export(Attention(), (tokens[0],), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/attention.pt2")
    loaded = torch._inductor.aoti_load_package(package)
    for x in tokens:
        with plan_cache.watch_uses() as keys:
            out = loaded(x)
        assert error(out, exact(*heads_of(x), is_causal=True)[0]) < 1e-2
        print("served by", {key.provider for key in keys})


def main(folder: str, which: str) -> None:
    if which == "attention":
        attention(folder)
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
