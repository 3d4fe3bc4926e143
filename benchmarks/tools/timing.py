"""CPU times, device times and peak memory of calls.

CPU time is the time to enqueue, without synchronization: the best of several rounds. Device time is the median of
event pairs around single calls; the candidates are interleaved, because the GPU's clock changes with its load. Before
each round the GPU sleeps until the host has enqueued the whole round: otherwise a short kernel would wait for the host.
Memory-bound calls are timed "cold": before each call the GPU reads a buffer larger than its cache. Otherwise a call
would find data of the call before it in the cache, or wait until that call's writes reach memory.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
Pair = tuple[torch.cuda.Event, torch.cuda.Event]

_CYCLES_PER_SECOND = 2e9  #: about the highest clock of a GPU

_CACHE_BYTES = 256 << 20  #: more than the cache of any GPU


def host_times(calls: Mapping[str, Call], *, per_round: int = 200, rounds: int = 75) -> dict[str, float]:
    """Microseconds of CPU time of one call of each candidate; their rounds alternate, in another order each time.

    Rounds are short and many: a processor's clock changes, and other work shares it.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        _repeat(call, 50)
    order, chance = list(calls.items()), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)  # no candidate always follows the same other one
        for name, call in order:
            torch.cuda.synchronize()
            start = time.perf_counter()
            _repeat(call, per_round)
            best[name] = min(best[name], (time.perf_counter() - start) / per_round)
    torch.cuda.synchronize()
    empty = min(_time_of_loop(per_round) for _ in range(rounds))
    return {name: (seconds - empty) * 1e6 for name, seconds in best.items()}


def device_times(calls: Mapping[str, Call], *, repeats: int = 40, cold: bool = False) -> dict[str, float]:
    """Microseconds of device time of one call of each candidate: the median of `repeats` interleaved calls.

    With `cold`, every call starts with none of its data in the GPU's cache.
    """
    clear = _reader() if cold else _nothing
    for call in calls.values():
        _repeat(call, 3)
    torch.cuda.synchronize()
    events: dict[str, list[Pair]] = {name: [] for name in calls}
    order, chance = list(calls.items()), random.Random(0)
    start = time.perf_counter()
    _enqueue(order, events, clear)
    cycles = int(2 * (time.perf_counter() - start) * _CYCLES_PER_SECOND)
    for _ in range(repeats):
        chance.shuffle(order)  # no candidate always follows the same other one
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        _enqueue(order, events, clear)
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs[1:])
        for name, pairs in events.items()
    }


def _enqueue(order: list[tuple[str, Call]], events: dict[str, list[Pair]], clear: Call) -> None:
    """Enqueues one round: each call between two events."""
    for name, call in order:
        start, end = _event(), _event()
        clear()
        start.record()
        call()
        end.record()
        events[name].append((start, end))


def peak_memory(step: Call) -> int:
    """Bytes of PyTorch's allocator at the peak of a step, minus those before."""
    step()  # allocates plans, handles, and memory that libraries keep
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _reader() -> Call:
    """A call that reads, without writing, more than the GPU can cache."""
    buffer = torch.zeros(_CACHE_BYTES // 4, device="cuda")
    return buffer.sum


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
