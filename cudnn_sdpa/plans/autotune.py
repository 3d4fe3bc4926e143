"""`autotune`: compares and times cuDNN's proposals for a plan in its first launch, and keeps the fastest."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.plan import Plan, current_raw_stream, stored_form
from cudnn_sdpa.settings import renewed_in_children

DEFAULT_CANDIDATES = 8

#: Tolerance ‖a − b‖ / ‖b‖ of two correct results by dtype: both are rounded, as are intermediate results. Other
#: dtypes must be equal.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-3,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 8e-2,
    torch.float8_e5m2: 1.6e-1,
}
ROW_FACTOR = 5  #: Tolerances by which a single row may differ; one wrong row of thousands hardly changes the norm.
MARGIN = 0.02  #: Smaller gains are noise, which must not decide what runs.
ROUNDS = 11
HEAD_START = 1_000_000  #: Cycles that the GPU waits in each round, so that timings include no CPU overhead.
_CHUNK_ELEMENTS = 1 << 22

#: Keys of cuDNN's, and what makes the plans of other providers that are compared with theirs when these are built.
offered: dict[PlanKey, Callable[[], list[Alternative]]] = {}

#: Is called when a context ends: calls that were cuDNN's until a comparison find their plans again.
on_leaving: list[Callable[[], None]] = []

#: Candidates timed concurrently would disturb each other.
_measuring = renewed_in_children(threading.RLock())


@dataclass(frozen=True)
class AutotuneCandidate:
    """One of the plans for a key.

    Attributes:
        engine: cuDNN's engine.
        knobs: The engine's settings.
        microseconds: Median device time of a launch; None if it was not timed.
        reason: The reason for its exclusion; empty if there is none.
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
        reason: The reason for keeping the first candidate without a comparison; empty if there was one.
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
        if self.reason:
            return f"{self.key}: not compared: {self.reason}"
        lines = [f"{self.key}: gain {self.gain:.2f}"]
        for index, candidate in enumerate(self.candidates):
            outcome = candidate.reason or f"{candidate.microseconds:.1f} µs"
            lines.append(f"  {'>' if index == self.winner else ' '} {candidate}: {outcome}")
        return "\n".join(lines)


@dataclass(eq=False)
class AutotuneReport:
    """The results of `autotune`; `print` it, or read the entries.

    Attributes:
        entries: One per plan, in the order in which they were tuned.
    """

    entries: list[AutotuneEntry] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


#: (candidates per key, report) of each active context, the latest last; threads may leave theirs in any order. Read by
#: other modules to see whether tuning is in force.
in_force: list[tuple[int, AutotuneReport]] = []


def max_candidates() -> int:
    return next((candidates for candidates, _ in reversed(in_force)), 1)


def note(key: PlanKey, candidates: Sequence[AutotuneCandidate], winner: int = 0, reason: str = "") -> None:
    for _, report in tuple(in_force):
        report.entries.append(AutotuneEntry(str(key), tuple(candidates), winner, reason))


def autotune(*, candidates: int = DEFAULT_CANDIDATES) -> AbstractContextManager[AutotuneReport]:
    """While active, process-wide, new plans are chosen by measured time instead of cuDNN's heuristics.

    For a missing plan, up to `candidates` proposals of cuDNN's heuristics are built. The first launch runs them on its
    operands, discards those whose results differ from the first proposal's by more than rounding error, and times the
    others. The fastest one, if it is at least 2 % faster, replaces the first in the plan cache and the plan store. That
    launch waits for the GPU, and takes tens of milliseconds and several times the memory of its results.

    Under `providers("fastest")`, FlashAttention-4's and own kernels are candidates, too, where they can serve a call of
    `sdpa`. FlashAttention-4's are compiled then, and compared with float64 on fixed cases of their kind, once. Who was
    faster is in the plan store, and counts more than the table of measurements.

    Plans in the plan cache are not tuned: call `plan_cache.clear()` first. A plan in the plan store is loaded only if
    it was saved tuned. Not tuned, with a reason in the report: deterministic plans; plans with integer operands such as
    sequence lengths, offsets of packed sequences or page ids, because one launch does not show which candidate is
    correct or fast for other values; and plans whose first results are all zeros. A launch into a CUDA graph is not
    tuned; the first one outside is.

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
        >>> [entry.gain for entry in report.entries]  # no plan was built here
        []
    """
    if type(candidates) is not int or candidates < 2:
        raise OptionError("candidates", repr(candidates), "an integer of at least 2")
    return _tuning(candidates)


@contextmanager
def _tuning(candidates: int) -> Iterator[AutotuneReport]:
    context = candidates, AutotuneReport()
    in_force.append(context)
    try:
        yield context[1]
    finally:
        in_force.remove(context)
        for leave in on_leaving:
            leave()


def not_tunable(key: PlanKey) -> str:
    if key.deterministic or key.option_values.get("deterministic") is True:
        return "it is deterministic, and times would decide its rounding"
    decisive = [operand.name for operand in key.inputs if operand.role is Role.TENSOR and _is_decisive(operand.layout)]
    return f"its work depends on the values of {', '.join(decisive)}, which change between launches" if decisive else ""


def _is_decisive(layout: TensorLayout) -> bool:
    """Lengths, offsets or page ids are decisive; a single int64 is a generator's seed or offset."""
    return layout.dtype is torch.int32 or (layout.dtype is torch.int64 and math.prod(layout.shape) > 1)


class Alternative:
    """Another provider's plan among the candidates for a key of cuDNN's, whose operands it takes.

    Attributes:
        settled: Is called with whether it is the fastest, once that is known, and why it was discarded; that of the
            fastest last.
    """

    def __init__(self, key: PlanKey, plan: Plan, settled: Callable[[bool, str], None]) -> None:
        names = [operand.name for operand in (*key.inputs, *key.outputs)]
        self._places = [names.index(operand.name) for operand in (*plan.key.inputs, *plan.key.outputs)]
        self.plan, self.settled = plan, settled
        self.engine, self.knobs = plan.engine, plan.knobs

    def launch(self, pointers: Sequence[int]) -> None:
        self.plan.launch([pointers[place] for place in self._places])


class UntunedPlan(Plan):
    """cuDNN's first choice for a key, until its first launch under `autotune` has selected the fastest candidate.

    The fastest of cuDNN's replaces this plan in the cache. A call bound to this plan keeps it, and launches the fastest
    through it. If that is another provider's, its key is the one that calls find from then on.
    """

    __slots__ = ("_alternatives", "_candidates", "fastest", "on_tuned")

    def __init__(self, candidates: list[Plan], alternatives: Sequence[Alternative] = ()) -> None:
        first = candidates[0]
        super().__init__(first.key, first.built, first.constants)
        self._candidates, self._alternatives = candidates, alternatives
        self.fastest: Plan | Alternative | None = None
        self.on_tuned: Callable[[UntunedPlan, Plan], None] = lambda *_: None

    def launch(self, pointers: Sequence[int]) -> None:
        if self.fastest is None and not (current_raw_stream(self.device) and torch._C._cuda_isCurrentStreamCapturing()):
            with _measuring, relaxed_capture():  # plans are also freed here
                if self.fastest is None:
                    self._settle(pointers)
        if self.fastest is None:  # the first launch outside the capture decides
            super().launch(pointers)
        else:
            self.fastest.launch(pointers)

    def _settle(self, pointers: Sequence[int]) -> None:
        fastest = self._select_fastest(pointers) if in_force else self._candidates[0]
        plan = fastest if isinstance(fastest, Plan) else self._candidates[0]
        plan.build_seconds = self.build_seconds
        if plan.tuned and (store := default_store.active()) is not None:
            store.save(self.key, stored_form(plan))
        self.on_tuned(self, plan)
        self.fastest, self._candidates, self._alternatives = fastest, [], ()

    def _select_fastest(self, pointers: Sequence[int]) -> Plan | Alternative:
        plans: list[Plan | Alternative] = [*self._candidates, *self._alternatives]
        why_not = ""
        results: list[tuple[float | None, str]] = [(None, "")] * len(plans)
        addresses, device = pointers[len(self.key.inputs) :], torch.device("cuda", self.device)
        try:
            outputs = [tensor_at(at, x.layout, device) for at, x in zip(addresses, self.key.outputs, strict=True)]
            results = compare([functools.partial(plan.launch, pointers) for plan in plans], outputs)
        except Exception as error:  # noqa: BLE001 - a launch must not fail because plans cannot be compared
            why_not = str(error) or type(error).__name__
        candidates = [AutotuneCandidate(x.engine, x.knobs, *result) for x, result in zip(plans, results, strict=True)]
        winner = fastest(candidates)
        note(self.key, candidates, winner, why_not)
        best = plans[winner]
        if isinstance(best, Plan):
            best.tuned = not why_not
        reasons = {} if why_not else dict(zip(plans, (x.reason for x in candidates), strict=True))
        for each in sorted(self._alternatives if reasons else (), key=lambda each: each is best):
            each.settled(each is best, reasons[each])
        return best


def tensor_at(address: int, layout: TensorLayout, device: torch.device) -> Tensor:
    """A tensor over the memory at an address, without owning it."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    storage = torch._C._construct_storage_from_data_pointer(address, device, (last + 1) * layout.dtype.itemsize)
    return torch.empty(0, dtype=layout.dtype, device=device).set_(storage, 0, layout.shape, layout.stride)


def compare(launches: Sequence[Callable[[], None]], outputs: list[Tensor]) -> list[tuple[float | None, str]]:
    """The device time of each candidate in microseconds, or None and the reason for which it was discarded.

    The first candidate is taken as correct. The contents of the outputs are restored afterwards.
    """
    before = [output.clone() for output in outputs]
    try:
        expected = _run(launches[0], outputs)
        if not all(map(_is_informative, expected)):
            raise RuntimeError("the results of its first launch are all zeros, or not finite")
        reasons = ["", *(_reason_to_discard(each, outputs, expected) for each in launches[1:])]
        times = iter(device_times([launch for launch, reason in zip(launches, reasons, strict=True) if not reason]))
        return [(None, reason) if reason else (next(times), "") for reason in reasons]
    finally:
        for output, old in zip(outputs, before, strict=True):
            output.copy_(old)


def fastest(candidates: Sequence[AutotuneCandidate]) -> int:
    times = [math.inf if each.microseconds is None else each.microseconds for each in candidates]
    best = times.index(min(times))
    return best if times[best] < times[0] * (1 - MARGIN) else 0


def device_times(launches: Sequence[Callable[[], None]]) -> list[float]:
    """Median device time of each launch, in microseconds, over interleaved rounds. Waits for the GPU."""
    import statistics  # with fractions and decimals, which nothing else needs

    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
    for _ in range(ROUNDS):
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        for launch, pairs in zip(launches, spans, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            launch()
            end.record()
            pairs.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs) for pairs in spans]


def differs(result: Tensor, expected: Tensor) -> bool:
    """Compares two results, in the norm and in each row of the last dimension, beyond rounding error.

    The norm of a typical row is added to that of each row, so that a row of nearly zeros need not match in all digits.
    """
    errors, norms = [], []
    for a, b in zip(_rows(result), _rows(expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        errors.append(torch.where(same, 0.0, a - b).norm(dim=1))
        norms.append(torch.where(b.isfinite(), b, 0.0).norm(dim=1))
    error, norm, tolerance = torch.cat(errors), torch.cat(norms), TOLERANCE.get(result.dtype, 0.0)
    row_limits = ROW_FACTOR * tolerance * (norm + norm.square().mean().sqrt())
    return not ((error.norm() <= tolerance * norm.norm()) & (error <= row_limits).all())  # NaN differs, too


def _reason_to_discard(launch: Callable[[], None], outputs: list[Tensor], expected: list[Tensor]) -> str:
    try:
        is_wrong = any(map(differs, _run(launch, outputs), expected))
    except Exception as error:  # noqa: BLE001 - after any error the plan is not used
        return f"it cannot be launched: {error}"
    return "its results differ from the first choice's" if is_wrong else ""


def _run(launch: Callable[[], None], outputs: list[Tensor]) -> list[Tensor]:
    for output in outputs:
        output.fill_(math.nan if output.is_floating_point() else -1)
    launch()
    return [output.clone() for output in outputs]


def _is_informative(result: Tensor) -> bool:
    """Zeros and non-finite results would agree with those of many wrong candidates."""
    return any(bool((rows.isfinite() & (rows != 0)).any()) for rows in _rows(result))


def _rows(result: Tensor) -> Iterator[Tensor]:
    """Rows of the last dimension in float64, in chunks: all of them would take several times the memory."""
    rows = result.reshape(-1, result.shape[-1] if result.dim() else 1)
    chunks = rows.split(max(1, _CHUNK_ELEMENTS // rows.shape[1]))  # type: ignore[no-untyped-call]
    return (chunk.double() for chunk in chunks)
