"""Times of steps that all ranks of a process group take together, in turns, and what scaling is linear."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist

from cudnn_sdpa.bench.tools.output import Row

#: The name of the candidate that has everything on one GPU.
ALONE = "one GPU"
#: Maximum number of steps of a timed run.
MAX_STEPS = 20

#: What is raised by a candidate that cannot run.
ERRORS = (RuntimeError, NotImplementedError, ValueError)


class Timing(NamedTuple):
    """How candidates are timed.

    Attributes:
        repeats: Timed runs of each.
        seconds: What a run takes at least, of several steps back to back: as in a deep model, the host is ahead
            of the GPU.
    """

    repeats: int
    seconds: float


FULL = Timing(repeats=7, seconds=0.4)
SMALL = Timing(repeats=2, seconds=0.0)


class Candidate(NamedTuple):
    """What is timed.

    Attributes:
        step: A forward and a backward pass.
        within: The context that it needs, which is entered before the clock starts.
        sequences: Sequences that a step of all ranks computes.
    """

    step: Callable[[], None]
    within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    sequences: int = 1


def device() -> torch.device:
    """This rank's GPU; without one, the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def compared(label: str, timing: Timing, candidates: dict[str, Candidate]) -> list[Row]:
    """A row for each candidate, which has no number that was not measured; they run in turns.

    "Of linear scaling" is the time of one GPU for a sequence, over that of a sequence by all ranks, over their number.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    peaks: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    steps: dict[str, int] = {}
    for name, candidate in candidates.items():
        try:
            with candidate.within():
                candidate.step()
        except ERRORS as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        peaks[name] = _peak(candidate)
        wanted = math.ceil(timing.seconds / _seconds(candidate, steps=1))
        steps[name] = max(1, min(MAX_STEPS, wanted))
    for _ in range(timing.repeats):
        for name in (name for name in times if name not in failed):
            times[name].append(_seconds(candidates[name], steps[name]))
    alone = statistics.median(times[ALONE]) if times[ALONE] else None
    rows: list[Row] = []
    for name, found in times.items():
        ranks = 1 if name == ALONE else dist.get_world_size()
        row: Row = {"call": f"{label}: {name}", "GPUs": ranks}
        if name in failed:
            rows.append({**row, "not run": failed[name]})
            continue
        seconds = statistics.median(found)
        row["ms"] = seconds * 1e3
        if alone is not None:
            row["of linear scaling"] = alone * candidates[name].sequences / seconds / ranks
        if (peak := peaks[name]) is not None:
            row["memory, MiB"] = peak
        rows.append(row)
    return rows


def _seconds(candidate: Candidate, steps: int) -> float:
    """The time of a step, of several back to back, on the slowest rank, which all begin together."""
    with candidate.within():
        _synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            candidate.step()
        _synchronize()
        seconds = (time.perf_counter() - start) / steps
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _peak(candidate: Candidate) -> float | None:
    """MiB that a step allocates beyond its tensors; None on the CPU, where nobody counts."""
    with candidate.within():
        if not torch.cuda.is_available():
            candidate.step()
            return None
        _synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        candidate.step()
        _synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
