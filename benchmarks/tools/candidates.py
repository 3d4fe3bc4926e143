"""Candidates of a comparison: those that run and agree with float64 are timed in one interleaved run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from benchmarks.tools import cases
from benchmarks.tools.timing import Call, device_times
from cudnn_sdpa.plans.providers import Provider, providers

REPEATS = 30

#: Of calls that are timed cold: they are short, and vary by more of their time.
REPEATS_COLD = 150

#: What stands for a time that was not measured.
NOTHING = "–"


class Timed:
    """Candidates that run and agree with float64, and why others do not."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.reasons: dict[str, str] = {}

    def add(
        self,
        name: str,
        call: Callable[[], Sequence[Tensor]],
        part: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        expected: Sequence[Tensor],
        tolerance: float = cases.TOLERANCE,
    ) -> None:
        """Adds a candidate, of whose results `part` is what `expected` has in float64."""
        try:
            cases.check_agreement([name] * len(expected), part(call()), expected, "float64", tolerance=tolerance)
        except Exception as error:  # noqa: BLE001 - whatever other packages raise
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            self.reasons[name] = textwrap.shorten(words, 120, placeholder=" …")
        else:
            self.calls[name] = call

    def measure(self, *, cold: bool = False) -> dict[str, float]:
        """Microseconds of device time, interleaved."""
        return device_times(self.calls, repeats=REPEATS_COLD if cold else REPEATS, cold=cold) if self.calls else {}

    @property
    def why_not(self) -> str:
        """Why candidates have no time."""
        return "; ".join(f"{name}: {why}" for name, why in self.reasons.items()) or NOTHING


def ratio(times: Mapping[str, float], name: str, base: str) -> float | str:
    """The time of one candidate over that of another, if both were measured."""
    return times[name] / times[base] if {name, base} <= times.keys() else NOTHING


def served_by(provider: Provider, call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """A call that one provider serves, or that raises."""
    with providers(provider):
        return call()
