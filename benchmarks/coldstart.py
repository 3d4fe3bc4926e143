"""`benchmarks coldstart`: imports, warm-up, and the first calls of a process with and without stored plans.

Every number is measured in new processes with a temporary plan store. The files of PyTorch and cuDNN are in the
system's cache.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from rich.progress import track

from benchmarks.programs.first_call import LENGTHS, SHAPES
from benchmarks.tools import processes
from benchmarks.tools.output import Row
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.plans.default_store import OFF

#: The first two calls.
LABEL = f"{SHAPES[0].label}, then S={SHAPES[1].length}"

#: Names of these calls in the table.
CALLS = ("first call", "another shape")

_IMPORTS = """
import json, time
start = time.perf_counter()
import torch
between = time.perf_counter()
import cudnn_sdpa
end = time.perf_counter()
print(json.dumps({"torch": (between - start) * 1e3, "cudnn_sdpa": (end - between) * 1e3}))
"""


def calls(repeats: int) -> list[Row]:
    """CPU time of the first two calls of a process, of two shapes, and of PyTorch's cuDNN backend."""
    processes_by_row: dict[str, list[list[dict[str, float]]]] = {}
    _first_call("sdpa", store=OFF)  # the first process may wait for a disk
    for _ in track(range(repeats), "first calls", transient=True):
        with tempfile.TemporaryDirectory() as folder:
            for name, program, store, source in (
                ("sdpa, no store", "sdpa", OFF, "builds"),
                ("sdpa, empty store", "sdpa", folder, "builds"),
                ("sdpa, warm store", "sdpa", folder, "loads"),
                ("pytorch cudnn", "pytorch", OFF, None),
            ):
                measured = _first_call(program, store=store)["calls"]
                if source is not None:
                    _check_plans(name, measured, source)
                processes_by_row.setdefault(name, []).append(measured)
    rows: list[Row] = []
    for name, measurements in processes_by_row.items():
        for number, call in enumerate(CALLS):
            times = [measured[number] for measured in measurements]
            rows.append(
                {
                    "call": f"{name}: {call}",
                    **_median_and_worst("returns", "ms", [time["returned_ms"] for time in times]),
                    **_median_and_worst("GPU done", "ms", [time["done_ms"] for time in times]),
                    "processes": len(times),
                }
            )
    return rows


def _check_plans(name: str, measured: list[dict[str, float]], source: str) -> None:
    """Checks that each call has built or loaded its plan, as the row says.

    Raises:
        RuntimeError: It has not.
    """
    other = "loads" if source == "builds" else "builds"
    for call, counts in zip(CALLS, measured, strict=True):
        if counts[source] < 1 or counts[other] > 0:
            raise RuntimeError(f"{name}, {call}: {counts['builds']} plans were built and {counts['loads']} loaded")


def warmup(repeats: int) -> list[Row]:
    """Time of `warmup` for a manifest whose plans are all stored."""
    with tempfile.TemporaryDirectory() as folder:
        manifest, store = str(Path(folder) / "plans.json"), str(Path(folder) / "plans")
        _first_call("record", manifest, store=store)
        seconds = []
        for _ in track(range(repeats), "warm-up", transient=True):
            report = _first_call("warmup", manifest, store=store)
            if report["loaded"] != len(LENGTHS):
                raise RuntimeError(f"not all of {len(LENGTHS)} stored plans were loaded: {report}")
            seconds.append(report["seconds"])
    row = {"warmup() of": f"{len(LENGTHS)} stored plans", **_median_and_worst("takes", "s", seconds)}
    return [{**row, "a plan, ms": statistics.median(seconds) / len(LENGTHS) * 1e3, "processes": repeats}]


def imports(repeats: int) -> list[Row]:
    """Time of `import torch`, and then of `import cudnn_sdpa`."""
    times = [
        processes.run_code(_IMPORTS, "importing", store=OFF) for _ in track(range(repeats), "imports", transient=True)
    ]
    names = {"torch": "torch", "cudnn_sdpa": "cudnn_sdpa, after torch"}
    return [
        {"import": label, **_median_and_worst("takes", "ms", [time[name] for time in times]), "processes": repeats}
        for name, label in names.items()
    ]


def _median_and_worst(column: str, unit: str, values: list[float]) -> dict[str, float]:
    return {f"{column}, {unit}": statistics.median(values), f"{column}, worst": max(values)}


def _first_call(*arguments: str, store: str) -> JsonObject:
    return processes.run_module("benchmarks.programs.first_call", *arguments, store=store)
