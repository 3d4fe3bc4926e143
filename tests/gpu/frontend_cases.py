"""Calls that the GPU tests of the frontend's kernel make, and a program that compiles for them beforehand.

    python tests/gpu/frontend_cases.py FOLDER --workers 8

The kernels of all kinds that the tests and `benchmarks providers` need are compiled into a plan store, without a GPU,
for machines where that cannot be done. `CUDNN_SDPA_TEST_PLANS` names it for tests,
`CUDNN_SDPA_PLAN_DIR` for the benchmark.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

#: (query heads, key heads, queries, keys, head dim, its of values)
Shape = tuple[int, int, int, int, int, int]
SHAPES: list[Shape] = [
    (8, 2, 300, 300, 512, 512),
    (2, 2, 256, 130, 320, 320),
    (4, 2, 90, 333, 512, 384),
    (8, 1, 5, 200, 264, 264),
    (4, 4, 128, 192, 264, 512),
]

#: Options by their names in the tests' reports.
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "causal to the last key": {"is_causal": True, "causal_alignment": "bottom_right"},
    "no bound to the left": {"window_size": (-1, 3), "causal_alignment": "bottom_right"},
    "no bound to the right": {"window_size": (40, -1), "causal_alignment": "bottom_right"},
    "window": {"window_size": (33, 5), "causal_alignment": "bottom_right"},
    "window from the first key": {"window_size": (33, 5)},
    "causal window": {"is_causal": True, "window_size": (70, 0), "causal_alignment": "bottom_right"},
}

#: (shape, mask) of calls that the frontend declines: windows with more queries than keys.
DECLINED = {(SHAPES[1], mask) for mask in ("no bound to the right", "window", "window from the first key")}

CASES = [case for case in itertools.product(SHAPES, MASKS) if case not in DECLINED]

#: Of the tests that are named after them.
MEMORY = ("bhsd", "sbhd", "packed", "padded", "every second")
WITH_SINKS = ("none", "causal", "causal window")
WITHOUT_KEYS: Shape = (8, 2, 300, 60, 512, 512)
FEW_KEYS: Shape = (2, 2, 70, 1, 512, 512)
CAPTURED_FIRST: Shape = (8, 2, 301, 301, 512, 512)
LONG: Shape = (8, 2, 3000, 3000, 512, 512)

#: Shape, dtype, layout in memory, batch and options.
Call = tuple[Shape, torch.dtype, str, int, dict[str, Any]]


def calls() -> Iterator[Call]:
    """All calls of the tests and of the benchmark."""
    for shape, mask in CASES:
        yield shape, torch.bfloat16, "bshd", 2, MASKS[mask]
    for layout in MEMORY:
        yield SHAPES[0], torch.float16, layout, 2, MASKS["causal"]
    for mask in WITH_SINKS:
        yield SHAPES[0], torch.bfloat16, "bshd", 2, {"sinks": torch.empty(8, device="meta"), **MASKS[mask]}
    yield SHAPES[0], torch.bfloat16, "bshd", 1, MASKS["causal"]
    yield FEW_KEYS, torch.bfloat16, "bshd", 2, {}
    yield WITHOUT_KEYS, torch.bfloat16, "bshd", 2, MASKS["causal to the last key"]
    for shape in (CAPTURED_FIRST, LONG):
        yield shape, torch.bfloat16, "bshd", 2, MASKS["causal"]
    from benchmarks.providers import LARGE

    for one in LARGE:
        shape = *one.heads, one.lengths[0], one.keys or one.lengths[0], one.dim, one.dim
        options: dict[str, Any] = {"is_causal": one.causal}
        options["window_size"] = None if one.left is None else (one.left, 0)
        options["causal_alignment"] = "top_left" if one.keys is None else "bottom_right"
        yield shape, torch.bfloat16, "bshd", len(one.lengths), options


def problem(
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bshd",
    batch: int = 2,
    device: str = "cuda",
) -> list[torch.Tensor]:
    """Queries, keys and values."""
    from attention_checks import LAYOUTS

    heads, heads_kv, sq, skv, dim, dim_v = shape
    sizes = (heads, sq, dim), (heads_kv, skv, dim), (heads_kv, skv, dim_v)
    return [LAYOUTS[layout](batch, h, s, d, dtype=dtype, device=device) for h, s, d in sizes]


def kinds() -> list[tuple[Any, ...]]:
    """What is to be compiled for those calls, with LSE and without."""
    import cudnn_sdpa
    from cudnn_sdpa.attention.frontend import serving
    from cudnn_sdpa.attention.frontend.plans import functions
    from cudnn_sdpa.engine import explain

    found: dict[tuple[Any, ...], None] = {}
    explain._plan = lambda *_: None  # type: ignore[assignment]
    os.environ[explain.TARGET_VARIABLE] = "h100"
    make_key = serving.key_of

    def noted(*given: Any) -> Any:
        key = make_key(*given)
        found[tuple(functions.kind_of(key))] = None
        return key

    serving.key_of = noted
    with cudnn_sdpa.providers("frontend"):
        for (shape, dtype, layout, batch, options), return_lse in itertools.product(calls(), (False, True)):
            made = problem(shape, dtype, layout, batch, "meta")
            described = cudnn_sdpa.explain(cudnn_sdpa.sdpa, *made, return_lse=return_lse, **options)
            if not described.supported:
                sys.exit(f"{shape}, {options}: {described.reasons}")
    return list(found)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    from compiled_functions import compile_all

    compile_all("cudnn_sdpa.attention.frontend", kinds, __doc__.splitlines()[0])
