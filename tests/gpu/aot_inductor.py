"""Compiles a model with AOTInductor, loads and compares it, in a separate process because PyTorch's loader may crash.

python aot_inductor.py FOLDER relu|ours
"""

from __future__ import annotations

import sys

import torch
from attention_checks import error
from torch.export import Dim, export

from tests.unit.small_model import model_and_reference

WIDTH = 256


def main(folder: str, which: str) -> None:
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
