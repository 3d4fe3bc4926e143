"""Calls that the GPU tests of FlashAttention-4 make, and a program that compiles for them beforehand.

    python tests/gpu/flash4_cases.py FOLDER --workers 8

The functions of all kinds that the tests and `benchmarks providers` need are compiled into a plan store, without a GPU,
for machines where FlashAttention-4 cannot be imported. `CUDNN_SDPA_TEST_PLANS` names it for tests: for those of its
provider, and for all if `CUDNN_SDPA_PROVIDERS` is set. `CUDNN_SDPA_PLAN_DIR` names it for benchmarks.
"""

from __future__ import annotations

import contextlib
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
    (8, 2, 300, 300, 128, 128),
    (2, 2, 257, 130, 64, 64),
    (4, 2, 90, 333, 256, 256),
    (3, 3, 90, 333, 128, 128),
    (3, 3, 200, 200, 192, 128),
]

#: Options by their names in the tests' reports.
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "causal to the last key": {"is_causal": True, "causal_alignment": "bottom_right"},
    "no bound to the left": {"window_size": (-1, 0), "causal_alignment": "bottom_right"},
    "no bound to the right": {"window_size": (40, -1), "causal_alignment": "bottom_right"},
    "window": {"window_size": (33, 5), "causal_alignment": "bottom_right"},
    "causal window": {"is_causal": True, "window_size": (70, 0), "causal_alignment": "bottom_right"},
}

#: (shape, mask) of calls that FlashAttention-4 declines: top-left with more keys than queries.
DECLINED = {(shape, "causal") for shape in SHAPES if shape[3] > shape[2]}

CASES = [case for case in itertools.product(SHAPES, MASKS) if case not in DECLINED]

#: Operations whose random calls FlashAttention-4 may serve, and how many calls of each are made.
RANDOM = {"sdpa": 120, "scaled_dot_product_attention": 120, "sdpa_varlen": 120, "sdpa_paged_varlen": 400}

#: Shapes with sinks and with a soft cap.
WITH_SINKS: Shape = (8, 2, 300, 300, 64, 64)
CAPPED: list[Shape] = [(8, 2, 300, 300, 128, 128), (4, 2, 300, 300, 256, 256)]

#: Packed sequences: some without queries or keys, some with more queries than keys, and ends of tiles.
LENGTHS = ((70, 0, 5, 333, 128, 1), (90, 8, 0, 33, 128, 257))

#: Changes of `packed_calls.plain`, by name.
PACKED: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"is_causal": False},
    "window": {"is_causal": False, "window_size": (33, 5)},
    "causal window": {"window_size": (70, 0)},
    "one head dim of 64": {"dims": (64, 64), "heads": (3, 3)},
    "256": {"dims": (256, 256)},
    "latent": {"dims": (192, 128), "heads": (3, 3)},
    "sinks": {"dims": (64, 64), "sinks": True},
    "sinks far above or below all scores": {"dims": (64, 64), "sinks": 300.0},
    "soft cap": {"softcap": 20.0, "scale": 0.9},
    "negative scale": {"scale": -0.3},
    "packed views": {"views": "packed"},
    "heads first": {"views": "heads first"},
    "top-left": {
        **dict.fromkeys(("lengths_q", "lengths_kv"), (300, 1, 64, 129, 0, 7)),
        "same": True,
        "causal_alignment": "top_left",
    },
    "float16": {"dtype": torch.float16, "is_causal": False},
}


#: New tokens and keys of sequences on pages: some have none of either, or fewer keys than new tokens.
CHUNKS = (1, 300, 4, 0, 130, 150, 3, 70), (900, 700, 64, 9, 129, 151, 0, 2000)

#: Settings of `paged_varlen_checks.drawn`, by name.
PAGES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"is_causal": False},
    "window": {"is_causal": False, "window_size": (33, 5)},
    "no bound to the left": {"is_causal": False, "window_size": (-1, 9)},
    "no bound to the right": {"is_causal": False, "window_size": (40, -1)},
    "causal window": {"window_size": (70, 0)},
    "64": {"dims": (64, 64), "heads_kv": 1},
    "64, sinks": {"dims": (64, 64), "heads_kv": 1, "sinks": True},
    "64, sinks, causal window": {"dims": (64, 64), "heads_kv": 1, "sinks": True, "window_size": (128, 0)},
    "256": {"dims": (256, 256)},
    "256, soft cap, causal window": {"dims": (256, 256), "softcap": 20.0, "window_size": (200, 0)},
    "latent": {"dims": (192, 128), "heads": 4, "heads_kv": 4},
    "latent, causal window": {"dims": (192, 128), "heads": 4, "heads_kv": 4, "window_size": (70, 0)},
    "soft cap": {"softcap": 20.0, "scale": 0.9},
    "three query heads of a key head": {"heads": 6},
    "float16": {"dtype": torch.float16},
}


def packed(name: str) -> dict[str, Any]:
    """The changes of `packed_calls.plain` of a case."""
    return {"lengths_q": LENGTHS[0], "lengths_kv": LENGTHS[1], "dims": (128, 128), **PACKED[name]}


def calls() -> Iterator[tuple[Shape, torch.dtype, dict[str, Any]]]:
    """Shapes, dtypes and options of the tests' and the benchmark's calls."""
    for shape, mask in CASES:
        yield shape, torch.bfloat16, MASKS[mask]
    yield SHAPES[0], torch.float16, MASKS["causal"]
    for mask in ("causal", "causal window"):
        yield WITH_SINKS, torch.bfloat16, {"sinks": torch.empty(8, device="meta"), **MASKS[mask]}
    for shape, mask in itertools.product(CAPPED, ("none", "causal", "window")):
        yield shape, torch.bfloat16, {"softcap": 20.0, **MASKS[mask]}
    from benchmarks import providers

    for one in (*providers.FORWARD, *providers.TRAINING, *providers.LENGTHS):
        heads, heads_kv = one.heads
        dims = one.dim, one.dim_v or one.dim
        options: dict[str, Any] = {"is_causal": one.causal, "softcap": one.softcap}
        options["window_size"] = None if one.left is None else (one.left, 0)
        options["causal_alignment"] = "top_left" if one.keys is None else "bottom_right"
        options["sinks"] = torch.empty(heads, device="meta") if one.sinks else None
        if one.packed:
            continue
        yield (heads, heads_kv, one.lengths[0], one.keys or one.lengths[0], *dims), torch.bfloat16, options
    small = providers.SMALL
    yield (small.heads_q, small.heads_kv, *[small.length] * 2, *[small.dim] * 2), torch.bfloat16, MASKS["causal"]


def packed_calls_to_describe() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments without data of the packed calls of the tests and of the benchmark, with gradients and without."""
    import packed_calls

    from benchmarks import providers

    made = [packed_calls.plain(**packed(name)) for name in PACKED]
    options = [{name: getattr(c, name) for name in _PACKED_OPTIONS} for c in made]
    for x in (x for x in (*providers.FORWARD, *providers.TRAINING) if x.packed):
        made.append(
            packed_calls.plain(lengths_q=x.lengths, lengths_kv=x.lengths, heads=x.heads, dims=(x.dim, x.dim), same=True)
        )
        options.append({"is_causal": True, "window_size": None if x.left is None else (x.left, 0)})
    for (c, more), trains, return_lse in itertools.product(
        zip(made, options, strict=True), (False, True), (False, True)
    ):
        rows, columns = sum(c.lengths_q), sum(c.lengths_kv)
        sizes = (rows, c.heads[0], c.dims[0]), (columns, c.heads[1], c.dims[0]), (columns, c.heads[1], c.dims[1])
        q, k, v = (torch.empty(*size, dtype=c.dtype, device="meta", requires_grad=trains) for size in sizes)
        ends = torch.empty(len(c.lengths_q) + 1, dtype=torch.int32, device="meta")
        of_keys = ends if c.same else torch.empty_like(ends)
        sinks = torch.empty(c.heads[0], device="meta") if c.sinks else None
        given = (q, k, v, ends, of_keys, max(c.lengths_q), max(c.lengths_kv))
        yield given, {**more, "sinks": sinks, "return_lse": return_lse}


def calls_on_pages() -> Iterator[dict[str, Any]]:
    """Arguments without data of the calls on pages of the tests and of `benchmarks decode`."""
    from paged_varlen_checks import drawn

    from benchmarks import decode

    steps = [step for step in decode.STEPS if not step.is_latent and step.pages == torch.bfloat16]
    of_steps = [{"heads": step.heads[0], "heads_kv": step.heads[1], "dims": step.dims} for step in steps]
    for settings in (*PAGES.values(), *of_steps):
        yield drawn(((3,), (5,)), device="cpu", **settings)


_PACKED_OPTIONS = ("is_causal", "causal_alignment", "window_size", "scale", "softcap")


def kinds() -> list[tuple[Any, ...]]:
    """What is to be compiled, for those calls and the random ones, with and without gradients and LSE."""
    import generators

    import cudnn_sdpa
    from cudnn_sdpa.attention.flash4 import serving
    from cudnn_sdpa.attention.flash4.plans import functions
    from cudnn_sdpa.engine import explain

    found: dict[tuple[Any, ...], None] = {}
    make_key = serving.Call.key

    def noted(*given: Any) -> Any:
        key = make_key(*given)
        kind = functions.kind_of(key)
        found[tuple(kind)] = None
        if not (kind.is_backward or kind.is_on_pages):  # random calls run with gradients and without
            found[tuple(kind._replace(has_lse=not kind.has_lse))] = None
        return key

    serving.Call.key, explain._plan = noted, lambda *_: None  # type: ignore[assignment]
    os.environ[explain.TARGET_VARIABLE] = "h100"
    with cudnn_sdpa.providers("fa4", "cudnn"):
        for (heads, heads_kv, sq, skv, dim, dim_v), dtype, options in calls():
            sizes = (heads, sq, dim), (heads_kv, skv, dim), (heads_kv, skv, dim_v)
            for trains, return_lse in itertools.product((False, True), repeat=2):
                made = (torch.empty(2, *x, dtype=dtype, device="meta", requires_grad=trains) for x in sizes)
                cudnn_sdpa.explain(cudnn_sdpa.sdpa, *made, return_lse=return_lse, **options)
        for given, options in packed_calls_to_describe():
            cudnn_sdpa.explain(cudnn_sdpa.sdpa_varlen, *given, **options)
        for made in calls_on_pages():
            cudnn_sdpa.explain(cudnn_sdpa.sdpa_paged_varlen, **made)
        for name, count in RANDOM.items():
            for seed in range(count):
                described = generators.OPERATIONS[name].explained(generators.draw(name, seed, "cuda"))
                if described is not None:
                    function, given, more = described
                    with contextlib.suppress(cudnn_sdpa.CudnnSdpaError):
                        cudnn_sdpa.explain(function, *given, **more)
    return list(found)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    from compiled_functions import compile_all

    compile_all("cudnn_sdpa.attention.flash4", kinds, __doc__.splitlines()[0])
