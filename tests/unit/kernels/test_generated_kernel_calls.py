"""The generated calls of `kernels.attention`, by the kernels themselves, run thread by thread on the CPU."""

from __future__ import annotations

from dataclasses import replace

import generators
import pytest
import torch
from fake_gpu import gpu_on_the_cpu


def drawn(seed: int) -> generators.Case:
    """The call of a seed as a GPU can run it."""
    case = generators.draw("kernels.attention", seed)
    dtype = torch.float32 if case.dtype == torch.float64 else case.dtype
    given = case.tensors
    tensors = {n: replace(x, dtype=dtype) if n in "qkv" or x.dtype == torch.float64 else x for n, x in given.items()}
    facts = case.facts | {"way": "module" if seed % 4 == 0 else "function"}
    return replace(case, dtype=dtype, tensors=tensors, facts=facts, mode="eager", settings={})


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(240))
def test_kernels_compute_generated_calls(number):
    case = drawn(number)
    with gpu_on_the_cpu():
        outcome = generators.run(case)
    allowed = ("right", "declined") if case.refusable else ("right",)
    found = "\n    ".join([f"{case.line()} on the kernels", *outcome.problems, *outcome.reasons])
    assert outcome.kind in allowed, found
