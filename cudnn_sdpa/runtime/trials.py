"""Which of several plans of one key are right, and how long each takes, found out on the operands of one launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.runtime.key import Operand, PlanKey, Role
from cudnn_sdpa.runtime.layouts import TensorLayout

Launch = Callable[[], None]
Measure = Callable[[Sequence[Launch]], list[float]]

#: By how much two right results of a dtype may differ, ‖a − b‖ / ‖b‖. Both are rounded, and so is what is between.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-3,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 8e-2,
    torch.float8_e5m2: 1.6e-1,
}

#: One row may differ by so many times the tolerance. A result of thousands of rows may lack one and still be close.
OF_A_ROW = 5

#: What is faster by less is noise, which shall not decide what runs.
MARGIN = 0.02

WARM_LAUNCHES = 2

ROUNDS = 11

#: For so many cycles the GPU is kept waiting in each round, so that the host has enqueued the round before it starts;
#: otherwise short kernels would be timed together with the host's work between them.
HEAD_START = 1_000_000

_PIECE = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UndecidedError(Exception):
    """This launch cannot tell right plans from wrong ones; the message says why."""


class Outcome(NamedTuple):
    """How a plan fared: the time of a launch, or the reason why it dropped out."""

    microseconds: float | None
    reason: str = ""


def output_tensors(key: PlanKey, pointers: Sequence[int], device: torch.device) -> list[Tensor]:
    """The outputs of a launch as tensors, which own nothing.

    Raises:
        UndecidedError: An output lies where an input does, so that a second launch would read what the first wrote.
    """
    places = dict(zip((*key.inputs, *key.outputs), pointers, strict=True))
    inputs = [operand for operand in key.inputs if operand.role is Role.TENSOR]
    for output in key.outputs:
        for other in inputs:
            if _share_memory((output, places[output]), (other, places[other])):
                raise UndecidedError(f"{output.name} lies in the same memory as {other.name}")
    return [tensor_at(places[output], output.layout, device) for output in key.outputs]


def tensor_at(address: int, layout: TensorLayout, device: torch.device) -> Tensor:
    """The memory at an address as a tensor, which does not own it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, _extent(layout))
    return torch.empty(0, dtype=layout.dtype, device=device).set_(storage, 0, layout.shape, layout.stride)


def compare(
    launches: Sequence[Launch | str],
    outputs: list[Tensor],
    *,
    repeatable: bool,
    measure: Measure | None = None,
) -> list[Outcome]:
    """Runs plans, and times those that are right.

    Args:
        launches: Of cuDNN's first choice, which is taken to be right, and of the others; in place of one that cannot be
            built, the reason.
        outputs: What each of them writes; what was in them is in them afterwards.
        repeatable: Whether one drops out that does not give the same bits twice.
        measure: What times launches, if not `device_times`.

    Raises:
        UndecidedError: The first one's results hold nothing to compare with.
    """
    before = [_copy(output) for output in outputs]
    try:
        first, *others = launches
        assert not isinstance(first, str)
        expected = _run(first, outputs)
        if not all(map(_tells, expected)):
            raise UndecidedError("the results of its first launch hold nothing but zeros, or no numbers")
        right, reasons = [first], [""]
        for other in others:
            reasons.append(other if isinstance(other, str) else _fault(other, outputs, expected, repeatable))
            if not isinstance(other, str) and not reasons[-1]:
                right.append(other)
        times = iter((measure or device_times)(right) if len(right) > 1 else [None])
        return [Outcome(None, reason) if reason else Outcome(next(times)) for reason in reasons]
    finally:
        for output, old in zip(outputs, before, strict=True):
            output.copy_(old.view(output.shape))


def fastest(outcomes: Sequence[Outcome]) -> int:
    """The index of the plan to use: the first one unless another takes clearly less time."""
    times = [float("inf") if outcome.microseconds is None else outcome.microseconds for outcome in outcomes]
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < times[0] * (1 - MARGIN) else 0


def device_times(launches: Sequence[Launch]) -> list[float]:
    """Microseconds of device time of each: the median of several rounds, in which they alternate. Waits for the GPU."""
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
        order.append(order.pop(0))  # nobody always runs after the same other
    torch.cuda.current_stream().synchronize()
    return [statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs) for pairs in spans]


def difference(found: Tensor, expected: Tensor) -> float:
    """By how much two results differ, in parts of their dtype's tolerance; infinite or NaN if one lacks numbers.

    It is the norm of the difference over that of what is expected, or `OF_A_ROW` times less the same of the worst row,
    to whose norm a typical one's is added: a row that is nearly zero need not be right in all its digits.

    Args:
        found: A result, one row for each index of all dimensions but the last.
        expected: The result of a plan that is right, likewise.
    """
    if found.dtype not in TOLERANCE:
        return 0.0 if torch.equal(found, expected) else float("inf")
    errors, norms = [], []
    for a, b in zip(_pieces(found), _pieces(expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        errors.append(torch.where(same, 0.0, a - b).norm(dim=1))
        norms.append(torch.where(b.isfinite(), b, 0.0).norm(dim=1))
    error, norm = torch.cat(errors), torch.cat(norms)
    typical = norm.square().mean().sqrt()
    worst = (error / (norm + typical)).max()
    return float(torch.maximum(error.norm() / norm.norm(), worst / OF_A_ROW)) / TOLERANCE[found.dtype]


def _fault(launch: Launch, outputs: list[Tensor], expected: list[Tensor], repeatable: bool) -> str:
    """What is wrong with a plan; empty if nothing is."""
    try:
        found = _run(launch, outputs)
        differences = [difference(a, b) for a, b in zip(found, expected, strict=True)]
        if repeatable and not all(map(_same_bits, found, _run(launch, outputs))):
            return "two runs of it do not give the same bits"
    except Exception as error:  # noqa: BLE001 - whatever it is, the plan is not used
        return f"it cannot be launched: {error}"
    if not all(map(math.isfinite, differences)):
        return "it has numbers where the first choice has none, or the other way round"
    if max(differences) > 1:
        return f"its results differ from the first choice's by {max(differences):.3g} times what rounding may do"
    return ""


def _run(launch: Launch, outputs: list[Tensor]) -> list[Tensor]:
    """The results of a launch. What it does not write is NaN."""
    for output in outputs:
        _bits(output).fill_(-1)  # all bits set: NaN in every floating-point format
    launch()
    return [_copy(output) for output in outputs]


def _copy(output: Tensor) -> Tensor:
    """A copy with one row for each index of all dimensions but the last."""
    copy = output.clone(memory_format=torch.contiguous_format)
    return copy.view(-1, output.shape[-1]) if output.dim() else copy.view(1, 1)


def _tells(result: Tensor) -> bool:
    """Whether a wrong result would show in comparison with this one."""
    if result.dtype not in TOLERANCE:
        return True
    return any(bool((piece.isfinite() & (piece != 0)).any()) for piece in _pieces(result))


def _pieces(result: Tensor) -> Iterator[Tensor]:
    """The rows in float64, not all at once."""
    rows = max(1, _PIECE // result.shape[1])
    return (piece.double() for piece in result.split(rows))  # type: ignore[no-untyped-call]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _extent(layout: TensorLayout) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    return (last + 1) * layout.dtype.itemsize


def _share_memory(a: tuple[Operand, int], b: tuple[Operand, int]) -> bool:
    """Whether the address ranges of two operands touch."""
    return a[1] < b[1] + _extent(b[0].layout) and b[1] < a[1] + _extent(a[0].layout)


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
