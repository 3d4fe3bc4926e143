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

from benchmarks.tools.output import Row

#: The name of the candidate that has everything on one GPU.
ALONE = "one GPU"
#: What is raised by a candidate that cannot run.
ERRORS = (RuntimeError, NotImplementedError, ValueError)


class Timing(NamedTuple):
    """How candidates are timed.

    Attributes:
        repeats: Timed runs of each.
        seconds: What a run should take, of several steps back to back: as in a deep model, the host is ahead of the
            GPU.
        steps: Minimum and maximum number of steps of a run.
    """

    repeats: int
    seconds: float
    steps: tuple[int, int]


FULL = Timing(repeats=7, seconds=0.4, steps=(3, 20))
SMALL = Timing(repeats=2, seconds=0.0, steps=(1, 1))


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


def compared(label: str, timing: Timing, candidates: dict[str, Candidate], *, is_host_timed: bool = False) -> list[Row]:
    """A row for each candidate, which has no number that was not measured; they run in turns.

    "Of linear scaling" is the time of one GPU for a sequence, divided by that of all ranks times their number. All GPUs
    compute what one does alone, and the quickest of them counts; of what they compute together, the slowest. "Host" is
    the time until a step is launched, with idle GPUs: where it is as long as the step, GPUs wait for the host.
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
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        peaks[name] = _peak(candidate)
        least, most = timing.steps
        wanted = math.ceil(timing.seconds / _seconds(candidate, steps=1))
        steps[name] = max(least, min(most, wanted))
    for _ in range(timing.repeats):
        for name in (name for name in times if name not in failed):
            times[name].append(_seconds(candidates[name], steps[name], is_alone=name == ALONE))
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
        if is_host_timed and torch.cuda.is_available():
            row["host, ms"] = _host_seconds(candidates[name], timing.repeats) * 1e3
        if (peak := peaks[name]) is not None:
            row["memory, MiB"] = peak
        rows.append(row)
    return rows


def _seconds(candidate: Candidate, steps: int, *, is_alone: bool = False) -> float:
    """The time of a step, of several that all ranks begin together: the longest; if alone, the shortest."""
    with candidate.within():
        _synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            candidate.step()
        _synchronize()
        seconds = (time.perf_counter() - start) / steps
    of_ranks = torch.tensor([seconds], dtype=torch.float64, device=device())
    dist.all_reduce(of_ranks, dist.ReduceOp.MIN if is_alone else dist.ReduceOp.MAX)
    return float(of_ranks)


def _host_seconds(candidate: Candidate, repeats: int) -> float:
    """The time until the host has launched a step of idle GPUs: the best of several, of the slowest rank."""
    found: list[float] = []
    with candidate.within():
        for _ in range(repeats):
            _synchronize()
            dist.barrier()
            _synchronize()
            start = time.perf_counter()
            candidate.step()
            found.append(time.perf_counter() - start)
        _synchronize()
    of_ranks = torch.tensor([min(found)], dtype=torch.float64, device=device())
    dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
    return float(of_ranks)


def _peak(candidate: Candidate) -> float | None:
    """MiB that a step needs beyond its tensors; None on the CPU, where nobody counts."""
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
