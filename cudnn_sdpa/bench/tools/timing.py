"""How time is taken.

Host time is that of enqueueing alone: no synchronization within, several rounds, the best one. Device time comes from
events around single calls, the candidates interleaved, because the chip's clock moves; the median. Before each round
the GPU waits until the host has enqueued all of it: or else the time of short kernels would be that of the host. What
moves more than it computes is timed "cold": before each call the GPU reads something else, larger than its cache. Or
else who comes after a like one finds its data there, and who comes after a large copy has to wait for it to be written.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
Pair = tuple[torch.cuda.Event, torch.cuda.Event]

_CYCLES_PER_SECOND = 2e9  #: of a GPU's clock, at most about

_CACHED = 256 << 20  #: bytes, more than any GPU caches


def host_times(calls: Mapping[str, Call], *, per_round: int = 1000, rounds: int = 15) -> dict[str, float]:
    """Microseconds of host time for one call of each; rounds of the candidates alternate."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        _repeat(call, 50)
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            _repeat(call, per_round)
            best[name] = min(best[name], (time.perf_counter() - start) / per_round)
    torch.cuda.synchronize()
    empty = min(_time_of_loop(per_round) for _ in range(rounds))
    return {name: (seconds - empty) * 1e6 for name, seconds in best.items()}


def device_times(calls: Mapping[str, Call], *, repeats: int = 40, cold: bool = False) -> dict[str, float]:
    """Microseconds of device time for one call of each: the median of `repeats`, interleaved.

    `cold` has every call find nothing in the GPU's cache.
    """
    clear = _reader() if cold else _nothing
    for call in calls.values():
        _repeat(call, 3)
    torch.cuda.synchronize()
    events: dict[str, list[Pair]] = {name: [] for name in calls}
    order, chance = list(calls.items()), random.Random(0)
    began = time.perf_counter()
    _enqueue(order, events, clear)
    ahead = int(2 * (time.perf_counter() - began) * _CYCLES_PER_SECOND)
    for _ in range(repeats):
        chance.shuffle(order)  # nobody always runs after the same other
        torch.cuda._sleep(ahead)  # type: ignore[no-untyped-call]
        _enqueue(order, events, clear)
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs[1:])
        for name, pairs in events.items()
    }


def _enqueue(order: list[tuple[str, Call]], events: dict[str, list[Pair]], clear: Call) -> None:
    """One round of calls between events."""
    for name, call in order:
        start, end = _event(), _event()
        clear()
        start.record()
        call()
        end.record()
        events[name].append((start, end))


def _reader() -> Call:
    """Has the GPU read, not write, as much as it can cache."""
    much = torch.zeros(_CACHED // 4, device="cuda")
    return much.sum


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _repeat(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def _time_of_loop(count: int) -> float:
    start = time.perf_counter()
    _repeat(_nothing, count)
    return (time.perf_counter() - start) / count


def _nothing() -> None:
    return None
