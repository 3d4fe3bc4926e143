"""`autotune`: enables timing of plan candidates, and reports the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.key import Operand, PlanKey, Role

DEFAULT_CANDIDATES = 8


@dataclass(frozen=True)
class AutotuneCandidate:
    """One of the plans for a key.

    Attributes:
        engine: cuDNN's engine.
        knobs: The engine's settings.
        microseconds: Median device time of a launch; None if it was not timed.
        reason: Why it was discarded; empty if it was not.
    """

    engine: str
    knobs: dict[str, int]
    microseconds: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        return " ".join([self.engine, *(f"{name}={value}" for name, value in self.knobs.items())])


@dataclass(frozen=True)
class AutotuneEntry:
    """The result for one plan.

    Attributes:
        key: The plan's key, as text.
        candidates: The proposals of cuDNN's heuristics, in order.
        winner: Index of the candidate that is used from now on.
        reason: Why candidates were not compared, so that the first one stays; empty if they were.
    """

    key: str
    candidates: tuple[AutotuneCandidate, ...]
    winner: int = 0
    reason: str = ""

    @property
    def gain(self) -> float:
        """Speedup of the winner over the first candidate; 1 if the first one won."""
        first, best = self.candidates[0].microseconds, self.candidates[self.winner].microseconds
        return first / best if first and best else 1.0

    def __str__(self) -> str:
        lines = [self.key]
        for index, candidate in enumerate(self.candidates):
            sign = ">" if index == self.winner else " "
            time = "" if candidate.microseconds is None else f"{candidate.microseconds:.1f} µs"
            notes = ["cuDNN's first choice"] * (index == 0) + [f"gain {self.gain:.2f}"] * (index == self.winner > 0)
            notes += [f"discarded: {candidate.reason}"] * bool(candidate.reason)
            lines.append(f"  {sign} {time:>10}  {candidate}" + (f"  ({'; '.join(notes)})" if notes else ""))
        return "\n".join(lines + [f"    not compared: {self.reason}"] * bool(self.reason))


@dataclass
class AutotuneReport:
    """The results of `autotune`; `print` it, or read the entries.

    Attributes:
        entries: One per plan, in the order in which they were tuned.
    """

    entries: list[AutotuneEntry] = field(default_factory=list)

    def __str__(self) -> str:
        entries = list(self.entries)
        compared = sum(not entry.reason for entry in entries)
        faster = sum(entry.winner > 0 for entry in entries)
        total = (
            f"{compared} plan{'' if compared == 1 else 's'} compared, of which {faster} gained; "
            f"{len(entries) - compared} not compared"
        )
        return "\n".join([total, *map(str, entries)])


@dataclass(frozen=True, eq=False)
class _Use:
    """One active `autotune` context: its arguments and its report."""

    candidates: int
    report: AutotuneReport = field(default_factory=AutotuneReport)


#: Active `autotune` contexts, the latest last; threads may leave theirs in any order.
_in_force: list[_Use] = []


def is_in_force() -> bool:
    return bool(_in_force)


def max_candidates() -> int:
    """Maximum number of candidates built per key."""
    return next((use.candidates for use in reversed(_in_force)), 1)


def note(key: PlanKey, candidates: Sequence[AutotuneCandidate], winner: int = 0, reason: str = "") -> None:
    """Adds an `AutotuneEntry` to the reports of all active contexts."""
    entry = AutotuneEntry(str(key), tuple(candidates), winner, reason)
    for use in tuple(_in_force):
        use.report.entries.append(entry)


def autotune(*, candidates: int = DEFAULT_CANDIDATES) -> AbstractContextManager[AutotuneReport]:
    """While active, process-wide, new plans are chosen by measured time instead of cuDNN's heuristics.

    For a missing plan, up to `candidates` proposals of cuDNN's heuristics are built. The first launch runs them on its
    operands. Candidates whose results differ from those of cuDNN's first choice by more than rounding error are
    discarded, with `deterministic` also those that differ between two runs. The others are timed. The fastest one
    replaces cuDNN's first choice in the plan cache and the plan store if it is at least 2 % faster; the launch returns
    its results.

    That launch waits for the GPU, takes tens of milliseconds and several times the memory of its results. Later
    launches, and those after the `with` statement, are ordinary ones.

    Plans already in the plan cache are not tuned: call `plan_cache.clear()` first. A plan in the plan store is loaded
    only if it was saved tuned; later processes load the winner with or without `autotune`. `warmup` launches nothing,
    so it tunes nothing, and neither do other processes' builds.

    Not tuned, with a reason in the report: plans for packed sequences, and plans with sequence lengths or other integer
    operands, because one launch does not show which candidate is correct or fast for other values; and plans whose
    first results are all zeros. A launch into a CUDA graph uses the first choice without tuning; the first launch
    outside tunes, unless `deterministic` forbids that results change.

    Args:
        candidates: Maximum number of plans built per key, including cuDNN's first choice.

    Returns:
        A context manager whose value is an `AutotuneReport`, to which entries are added as plans are tuned.

    Raises:
        OptionError: `candidates` is not an integer of at least 2.

    Examples:
        >>> import cudnn_sdpa
        >>> with cudnn_sdpa.autotune() as report:
        ...     pass  # run the model on each kind of input that it will see
        >>> print(report)
        0 plans compared, of which 0 gained; 0 not compared
    """
    if type(candidates) is not int or candidates < 2:
        raise OptionError("candidates", repr(candidates), "an integer of at least 2")
    return _tuning(_Use(candidates))


@contextmanager
def _tuning(use: _Use) -> Iterator[AutotuneReport]:
    _in_force.append(use)
    try:
        yield use.report
    finally:
        _in_force.remove(use)


def not_tunable(key: PlanKey) -> str:
    """Why the plan of `key` is not tuned; empty if it is."""
    packed = [operand.name for operand in (*key.inputs, *key.outputs) if operand.ragged]
    if packed:
        return f"it is for packed sequences: the sizes of {', '.join(packed)} are data"
    decisive = [operand.name for operand in key.inputs if _is_decisive(operand)]
    return f"its work depends on the values of {', '.join(decisive)}, which change between launches" if decisive else ""


def must_not_change(key: PlanKey) -> bool:
    """Whether every launch of the plan must be bitwise identical."""
    return key.deterministic or key.option_values.get("deterministic") is True


def _is_decisive(operand: Operand) -> bool:
    """Whether an operand holds lengths, page ids or the like; a single int64 is a generator's seed or offset."""
    layout = operand.layout
    if operand.role is not Role.TENSOR:
        return False
    return layout.dtype is torch.int32 or (layout.dtype is torch.int64 and math.prod(layout.shape) > 1)
