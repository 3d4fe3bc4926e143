"""`bench coldstart`: the first calls of a process, without stored plans and with them, and getting ready for them.

Every number is taken in processes that do nothing else, with a plan store of their own that is gone afterwards. The
files of PyTorch and of cuDNN are in the system's cache by then.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import track

from cudnn_sdpa.bench.programs.first_call import LENGTHS, SHAPES
from cudnn_sdpa.bench.tools import processes
from cudnn_sdpa.plans.default_store import OFF

#: What is called first, and then.
LABEL = f"{SHAPES[0].label}, then S={SHAPES[1].length}"

#: How the calls of a process are named in the table.
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


def calls(repeats: int) -> list[dict[str, Any]]:
    """Host time of the first two calls of a process, of two shapes, beside PyTorch's cuDNN backend."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    _first_call("sdpa", store=OFF)  # the first one may wait for a disk
    for _ in track(range(repeats), "first calls", transient=True):
        with tempfile.TemporaryDirectory() as folder:
            for name, what, store, source in (
                ("sdpa, no store", "sdpa", OFF, "builds"),
                ("sdpa, empty store", "sdpa", folder, "builds"),
                ("sdpa, warm store", "sdpa", folder, "loads"),
                ("pytorch cudnn", "pytorch", OFF, None),
            ):
                of_process = _first_call(what, store=store)["calls"]
                if source is not None:
                    _check_plans(name, of_process, source)
                found.setdefault(name, []).append(of_process)
    rows = []
    for name, of_processes in found.items():
        for place, call in enumerate(CALLS):
            times = [of_process[place] for of_process in of_processes]
            rows.append(
                {
                    "call": f"{name}: {call}",
                    **_middle_and_worst("returns", "ms", [time["returned_ms"] for time in times]),
                    **_middle_and_worst("GPU done", "ms", [time["done_ms"] for time in times]),
                    "processes": len(times),
                }
            )
    return rows


def _check_plans(name: str, of_process: list[dict[str, Any]], source: str) -> None:
    """Whether each call got its plan, and from where the row says.

    Raises:
        RuntimeError: It did not.
    """
    other = "loads" if source == "builds" else "builds"
    for call, found in zip(CALLS, of_process, strict=True):
        if found[source] < 1 or found[other] > 0:
            raise RuntimeError(f"{name}, {call}: {found['builds']} plans were built and {found['loads']} loaded")


def warmup(repeats: int) -> list[dict[str, Any]]:
    """Seconds that `warmup` takes for a manifest whose plans are all stored."""
    with tempfile.TemporaryDirectory() as folder:
        manifest, store = str(Path(folder) / "plans.json"), str(Path(folder) / "plans")
        _first_call("record", manifest, store=store)
        seconds = []
        for _ in track(range(repeats), "warm-up", transient=True):
            report = _first_call("warmup", manifest, store=store)
            if report["loaded"] != len(LENGTHS):
                raise RuntimeError(f"of {len(LENGTHS)} stored plans not all were loaded: {report}")
            seconds.append(report["seconds"])
    row = {"warmup() of": f"{len(LENGTHS)} stored plans", **_middle_and_worst("takes", "s", seconds)}
    return [{**row, "a plan, ms": statistics.median(seconds) / len(LENGTHS) * 1e3, "processes": repeats}]


def imports(repeats: int) -> list[dict[str, Any]]:
    """Time of `import torch`, and after it of `import cudnn_sdpa`."""
    times = [
        processes.run_code(_IMPORTS, "importing", store=OFF) for _ in track(range(repeats), "imports", transient=True)
    ]
    names = {"torch": "torch", "cudnn_sdpa": "cudnn_sdpa, after torch"}
    return [
        {"import": shown, **_middle_and_worst("takes", "ms", [time[name] for time in times]), "processes": repeats}
        for name, shown in names.items()
    ]


def _middle_and_worst(what: str, unit: str, values: list[float]) -> dict[str, float]:
    return {f"{what}, {unit}": statistics.median(values), f"{what}, worst": max(values)}


def _first_call(*arguments: str, store: str) -> dict[str, Any]:
    return processes.run_module("cudnn_sdpa.bench.programs.first_call", *arguments, store=store)
