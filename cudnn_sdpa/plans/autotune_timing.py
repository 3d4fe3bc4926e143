"""Compares and times the candidates of `autotune` on the operands of one launch."""

from __future__ import annotations

import functools
import math
import statistics
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.graph.heuristics import Other
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import autotune, default_store
from cudnn_sdpa.plans.autotune import AutotuneCandidate
from cudnn_sdpa.plans.device_memory import relaxed_capture
from cudnn_sdpa.plans.plan import Plan, current_raw_stream, stored_form
from cudnn_sdpa.settings import renewed_in_children

Launch = Callable[[], None]

#: Tolerance ‖a − b‖ / ‖b‖ of two correct results by dtype: both are rounded, as are intermediate results.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-3,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 8e-2,
    torch.float8_e5m2: 1.6e-1,
}

#: A single row may differ by this many tolerances. Among thousands of rows, one wrong row hardly changes the norm.
ROW_FACTOR = 5

#: Smaller gains are noise, which must not decide what runs.
MARGIN = 0.02

WARM_LAUNCHES = 2

ROUNDS = 11

#: Cycles that the GPU waits in each round, so that the host has enqueued the round before it starts; otherwise timings
#: of short kernels would include CPU overhead.
HEAD_START = 1_000_000

_CHUNK_ELEMENTS = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UndecidedError(Exception):
    """This launch does not show which plans are correct; the message says why."""


class Measurement(NamedTuple):
    """A candidate's time per launch, or why it was discarded."""

    microseconds: float | None
    reason: str = ""


#: Candidates timed concurrently would disturb each other.
_measuring = renewed_in_children(threading.RLock())


class UntunedPlan(Plan):
    """cuDNN's first choice for a key, until its first launch under `autotune` has selected the fastest candidate.

    Plans are immutable: the fastest replaces this one in the plan cache. A call bound to this one keeps it, and it then
    launches the fastest.

    Attributes:
        fastest: The plan to launch; None until it is known.
        on_tuned: Callback with this plan and the fastest; set by the cache.
    """

    __slots__ = ("_first", "_others", "fastest", "on_tuned")

    def __init__(self, first: Plan, others: list[Other]) -> None:
        for name in Plan.__slots__:
            setattr(self, name, getattr(first, name))
        self._first, self._others = first, others
        self.fastest: Plan | None = None
        self.on_tuned: Callable[[UntunedPlan, Plan], None] | None = None

    def launch(self, pointers: Sequence[int]) -> None:
        """As `Plan.launch`. The first one under `autotune` waits for the GPU and returns the fastest plan's results."""
        if self.fastest is None:
            with _measuring:
                if self.fastest is None:
                    self._select_fastest(pointers)
        (self.fastest or self._first).launch(pointers)

    def launch_kept(self, operands: array[int], workspace: int) -> None:
        """As `launch`: the fastest may need a different workspace."""
        del workspace
        self.launch(operands)

    def _select_fastest(self, pointers: Sequence[int]) -> None:
        stream = current_raw_stream(self.device)
        capturing = stream and torch._C._cuda_isCurrentStreamCapturing()
        if capturing and not autotune.must_not_change(self.key):
            return  # the first launch outside the capture decides
        self._first.build_seconds = self.build_seconds
        with relaxed_capture():  # plans are also freed here
            fastest = self._first
            if capturing:
                why = "it was first launched into a CUDA graph, and must not change"
                autotune.note(self.key, self._candidates(), reason=why)
            elif autotune.is_in_force():
                fastest = self._measured(pointers)
            if self.on_tuned is not None:
                self.on_tuned(self, fastest)
            self.fastest, self._others = fastest, []

    def _measured(self, pointers: Sequence[int]) -> Plan:
        others = (other.built for other in self._others)
        plans = [self._first, *(x if isinstance(x, str) else Plan(self.key, x, self.constants) for x in others)]
        launches = [plan if isinstance(plan, str) else functools.partial(plan.launch, pointers) for plan in plans]
        try:
            outputs = output_tensors(self.key, pointers, torch.device("cuda", self.device))
            measurements = compare(launches, outputs, repeatable=autotune.must_not_change(self.key))
        except Exception as error:  # noqa: BLE001 - a launch must not fail because plans cannot be compared
            autotune.note(self.key, self._candidates(), reason=str(error) or type(error).__name__)
            return self._first
        winner = fastest(measurements)
        autotune.note(self.key, self._candidates(measurements), winner)
        plan = plans[winner]
        assert isinstance(plan, Plan)
        plan.build_seconds, plan.tuned = self.build_seconds, True
        if (plan_store := default_store.active()) is not None:
            plan_store.save(self.key, stored_form(plan))
        return plan

    def _candidates(self, measurements: Sequence[Measurement] = ()) -> list[AutotuneCandidate]:
        configurations = [(self.engine, self.knobs), *(other.configuration for other in self._others)]
        measurements = measurements or [Measurement(None)] * len(configurations)
        return [
            AutotuneCandidate(engine, knobs, measurement.microseconds, measurement.reason)
            for (engine, knobs), measurement in zip(configurations, measurements, strict=True)
        ]


def output_tensors(key: PlanKey, pointers: Sequence[int], device: torch.device) -> list[Tensor]:
    """The outputs of a launch as tensors that do not own their memory.

    Raises:
        UndecidedError: An output overlaps an input, so that a second launch would read what the first wrote.
    """
    addresses = dict(zip((*key.inputs, *key.outputs), pointers, strict=True))
    inputs = [operand for operand in key.inputs if operand.role is Role.TENSOR]
    for output in key.outputs:
        for other in inputs:
            if _overlap((output, addresses[output]), (other, addresses[other])):
                raise UndecidedError(f"{output.name} overlaps {other.name}")
    return [tensor_at(addresses[output], output.layout, device) for output in key.outputs]


def tensor_at(address: int, layout: TensorLayout, device: torch.device) -> Tensor:
    """The memory at an address as a tensor that does not own it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, _extent(layout))
    return torch.empty(0, dtype=layout.dtype, device=device).set_(storage, 0, layout.shape, layout.stride)


def compare(launches: Sequence[Launch | str], outputs: list[Tensor], *, repeatable: bool) -> list[Measurement]:
    """Runs candidates, and times those whose results are correct.

    Args:
        launches: First that of cuDNN's first choice, taken as correct. A string is why a candidate cannot be built.
        outputs: The tensors that each of them writes; their contents are restored afterwards.
        repeatable: Whether to discard candidates that are not bitwise repeatable.

    Raises:
        UndecidedError: The first one's results are not usable for comparison.
    """
    before = [_copy(output) for output in outputs]
    try:
        first, *others = launches
        assert not isinstance(first, str)
        expected = _run(first, outputs)
        if not all(map(_is_informative, expected)):
            raise UndecidedError("the results of its first launch are all zeros, or not finite")
        correct, reasons = [first], [""]
        for other in others:
            if isinstance(other, str):
                reasons.append(other)
                continue
            reasons.append(_reason_to_discard(other, outputs, expected, repeatable=repeatable))
            if not reasons[-1]:
                correct.append(other)
        times = iter(device_times(correct) if len(correct) > 1 else [None])
        return [Measurement(None, reason) if reason else Measurement(next(times)) for reason in reasons]
    finally:
        for output, old in zip(outputs, before, strict=True):
            output.copy_(old.view(output.shape))


def fastest(measurements: Sequence[Measurement]) -> int:
    """The index of the candidate to use: the first one unless another takes clearly less time."""
    times = [math.inf if each.microseconds is None else each.microseconds for each in measurements]
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < times[0] * (1 - MARGIN) else 0


def device_times(launches: Sequence[Launch]) -> list[float]:
    """Median device time of each, in microseconds, over several interleaved rounds. Waits for the GPU."""
    for launch in launches:
        for _ in range(WARM_LAUNCHES):
            launch()
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
    order = list(range(len(launches)))
    for _ in range(ROUNDS):
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        for index in order:
            start, end = _event(), _event()
            start.record()
            launches[index]()
            end.record()
            spans[index].append((start, end))
        order.append(order.pop(0))  # rotate, so that none always runs after the same other
    torch.cuda.current_stream().synchronize()
    return [statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs) for pairs in spans]


def difference(result: Tensor, expected: Tensor) -> float:
    """The error of a result in units of its dtype's tolerance; infinite or NaN if one has nonfinite elements.

    It is the relative error in the norm or, if larger, that of the worst row divided by `ROW_FACTOR`. The row's norm
    has a typical row's added, so that a row of nearly zeros need not match in all digits.

    Args:
        result: A result, as rows of its last dimension.
        expected: The result of a correct plan, likewise.
    """
    if result.dtype not in TOLERANCE:
        return 0.0 if torch.equal(result, expected) else float("inf")
    errors, norms = [], []
    for a, b in zip(_chunks(result), _chunks(expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        errors.append(torch.where(same, 0.0, a - b).norm(dim=1))
        norms.append(torch.where(b.isfinite(), b, 0.0).norm(dim=1))
    error, norm = torch.cat(errors), torch.cat(norms)
    typical = norm.square().mean().sqrt()
    worst = (error / (norm + typical)).max()
    return float(torch.maximum(error.norm() / norm.norm(), worst / ROW_FACTOR)) / TOLERANCE[result.dtype]


def _reason_to_discard(launch: Launch, outputs: list[Tensor], expected: list[Tensor], *, repeatable: bool) -> str:
    """Why a plan is discarded; empty if it is correct."""
    try:
        results = _run(launch, outputs)
        differences = [difference(a, b) for a, b in zip(results, expected, strict=True)]
        if repeatable and not all(map(_same_bits, results, _run(launch, outputs))):
            return "two runs of it differ"
    except Exception as error:  # noqa: BLE001 - after any error the plan is not used
        return f"it cannot be launched: {error}"
    if not all(map(math.isfinite, differences)):
        return "its nonfinite elements differ from the first choice's"
    if max(differences) > 1:
        return f"its results differ from the first choice's by {max(differences):.3g} times the rounding tolerance"
    return ""


def _run(launch: Launch, outputs: list[Tensor]) -> list[Tensor]:
    """The results of a launch; elements that it does not write are NaN."""
    for output in outputs:
        _bits(output).fill_(-1)  # all bits set: NaN in every floating-point format
    launch()
    return [_copy(output) for output in outputs]


def _copy(output: Tensor) -> Tensor:
    """A copy as rows of its last dimension."""
    copy = output.clone(memory_format=torch.contiguous_format)
    return copy.view(-1, output.shape[-1]) if output.dim() else copy.view(1, 1)


def _is_informative(result: Tensor) -> bool:
    """Whether comparing with this result can reveal a wrong one."""
    if result.dtype not in TOLERANCE:
        return True
    return any(bool((chunk.isfinite() & (chunk != 0)).any()) for chunk in _chunks(result))


def _chunks(result: Tensor) -> Iterator[Tensor]:
    """The rows in float64."""
    rows = max(1, _CHUNK_ELEMENTS // result.shape[1])
    return (chunk.double() for chunk in result.split(rows))  # type: ignore[no-untyped-call]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _extent(layout: TensorLayout) -> int:
    """Bytes from the first element to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    return (last + 1) * layout.dtype.itemsize


def _overlap(a: tuple[Operand, int], b: tuple[Operand, int]) -> bool:
    """Whether the memory of two operands, each with its address, overlaps."""
    (operand_a, address_a), (operand_b, address_b) = a, b
    return address_a < address_b + _extent(operand_b.layout) and address_b < address_a + _extent(operand_a.layout)


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
