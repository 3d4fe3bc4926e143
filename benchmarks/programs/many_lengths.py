"""The processes of `benchmarks shapes`: calls of many lengths; each prints one line of JSON.

    python -m benchmarks.programs.many_lengths pass exact     # or bucketed, tiered, pytorch
    python -m benchmarks.programs.many_lengths takeover

Python's garbage collector is off, because a full collection takes 80 ms with PyTorch imported.
The calls are causal prefills of one sequence with 32 query heads and 8 key heads of 128, in the layout (B, S, H, D).
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from benchmarks.programs.first_call import start_cuda, start_library
from benchmarks.tools import cases, peers
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.offline.background import background
from cudnn_sdpa.plans.cache import no_plan_builds, plan_cache
from cudnn_sdpa.plans.shape_policy import EXACT, TIERED, Policy, shape_policy

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
MAX_LENGTH = 8192
COUNT = 200

#: Number of lengths of each pass whose results are checked.
CHECKED = 5

#: Number of lengths that recur while their exact plans are built.
RETURNING = 12

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def lengths(count: int, seed: int) -> list[int]:
    """Distinct lengths, the same in every run."""
    return random.Random(seed).sample(range(1, MAX_LENGTH + 1), count)


class Inputs:
    """Queries, keys and values of any length, as views of memory allocated once."""

    def __init__(self) -> None:
        self._buffers = [cases.normal(1, MAX_LENGTH, heads, DIM) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]

    def __call__(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views (1, H, length, D)."""
        q, k, v = (buffer[:, :length].transpose(1, 2) for buffer in self._buffers)
        return q, k, v


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The measured call."""
    return sdpa(q, k, v, is_causal=True)


def one_pass(attend: Attend, inputs: Inputs, seqlens: Iterable[int]) -> dict[str, float]:
    """Calls of some lengths: their total time, that of the first call, and the longest wait for a call to return."""
    builds = plan_cache.info().builds
    waits: list[float] = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    for length in seqlens:
        q, k, v = inputs(length)
        call_start = time.perf_counter()
        attend(q, k, v)
        waits.append(time.perf_counter() - call_start)
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    return {
        "seconds": total,
        "first_ms": waits[0] * 1e3,
        "longest_wait_ms": max(waits) * 1e3,
        "builds": plan_cache.info().builds - builds,
    }


def _prepare_process() -> None:
    start_cuda()
    start_library()
    gc.collect()
    gc.disable()


def passes(policy: Policy | Literal["pytorch"]) -> dict[str, dict[str, float]]:
    """A cold pass, then one over as many other lengths."""
    _prepare_process()
    inputs = Inputs()
    drawn = lengths(2 * COUNT, seed=1)
    first, second = drawn[::2], drawn[1::2]
    if policy == "pytorch":
        with peers.only("pytorch cudnn"):
            return _passes(_pytorch, inputs, first, second)
    with shape_policy(policy):
        return _passes(ours, inputs, first, second)


def _pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return peers.pytorch(q, k, v, is_causal=True)()


def _passes(attend: Attend, inputs: Inputs, first: list[int], second: list[int]) -> dict[str, dict[str, float]]:
    result = {"cold": one_pass(attend, inputs, first), "other lengths": one_pass(attend, inputs, second)}
    for length in [*first[:CHECKED], *second[:CHECKED]]:
        q, k, v = inputs(length)
        with peers.only("pytorch flash"):
            expected = _pytorch(q, k, v)
        cases.check_agreement(["out"], [attend(q, k, v)], [expected], f"PyTorch's at length {length}")
    return result


def takeover() -> dict[str, float]:
    """The longest wait of calls while their exact plans are built in the background, and the cost of later calls."""
    _prepare_process()
    inputs = Inputs()
    with shape_policy(TIERED):
        one_pass(ours, inputs, lengths(COUNT, seed=2))  # builds the buckets' plans
        returning = lengths(RETURNING, seed=3)
        with no_plan_builds():  # in the background neither
            quiet = one_pass(ours, inputs, returning * 20)
        before = plan_cache.info().loads
        start, busy = time.perf_counter(), [one_pass(ours, inputs, returning)]
        while plan_cache.info().loads - before < RETURNING and time.perf_counter() - start < 240:
            busy.append(one_pass(ours, inputs, returning * 20))
        loaded, seconds = plan_cache.info().loads - before, time.perf_counter() - start
        if loaded != RETURNING or not background.wait(1.0):
            raise RuntimeError(f"{loaded} of {RETURNING} exact plans were ready within {seconds:.0f} s")
    return {
        "longest_wait_before_ms": quiet["longest_wait_ms"],
        "longest_wait_meanwhile_ms": max(measured["longest_wait_ms"] for measured in busy),
        "plans": loaded,
        "seconds": seconds,
        **_steady(inputs, returning),
    }


def _steady(inputs: Inputs, seqlens: list[int]) -> dict[str, float]:
    """Microseconds of a call under each policy, in turn, when every length has its exact plan."""
    times: dict[Policy, list[float]] = {EXACT: [], TIERED: []}
    for _ in range(9):
        for policy, measured in times.items():
            with shape_policy(policy):
                one_pass(ours, inputs, seqlens)  # binds the calls under this policy
                measured.append(one_pass(ours, inputs, seqlens * 20)["seconds"] / (20 * len(seqlens)) * 1e6)
    return {f"{policy}_us": statistics.median(measured) for policy, measured in times.items()}


RUNS: dict[str, Callable[..., object]] = {"pass": passes, "takeover": takeover}


if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](*sys.argv[2:])))
