"""What `bench shapes` runs in a process of its own: calls of many lengths; it prints one line of JSON.

    python -m cudnn_sdpa.bench.programs.many_lengths pass exact     # or bucketed, tiered, pytorch
    python -m cudnn_sdpa.bench.programs.many_lengths takeover

Python's garbage collector is off: its full run takes 80 ms with PyTorch imported.
Calls are a causal prefill of one sequence, 32 query and 8 key heads of 128, a token's heads together in memory.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.bench.programs.first_call import start_cuda, start_library
from cudnn_sdpa.bench.tools import cases, peers
from cudnn_sdpa.offline.background import background
from cudnn_sdpa.plans.cache import no_plan_builds, plan_cache
from cudnn_sdpa.plans.shape_policy import EXACT, TIERED, shape_policy

HEADS_Q, HEADS_KV, DIM = 32, 8, 128
LONGEST = 8192
COUNT = 200

#: Lengths that come back again and again while their own plans are built.
RETURNING = 12

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def lengths(count: int, seed: int) -> list[int]:
    """Distinct lengths, the same ones in every run."""
    return random.Random(seed).sample(range(1, LONGEST + 1), count)


class Inputs:
    """Queries, keys and values of any length, out of memory that is there already."""

    def __init__(self) -> None:
        self._whole = [cases.normal(1, LONGEST, heads, DIM) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]

    def __call__(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views (1, H, length, D)."""
        q, k, v = (whole[:, :length].transpose(1, 2) for whole in self._whole)
        return q, k, v


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call that is measured."""
    return sdpa(q, k, v, is_causal=True)


def one_pass(attend: Attend, inputs: Inputs, of: Iterable[int]) -> dict[str, Any]:
    """Calls of some lengths, one after the other: how long all take, and the longest wait for one to return."""
    builds, longest = plan_cache.info().builds, 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for length in of:
        q, k, v = inputs(length)
        called = time.perf_counter()
        attend(q, k, v)
        longest = max(longest, time.perf_counter() - called)
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    return {"seconds": total, "longest_wait_ms": longest * 1e3, "builds": plan_cache.info().builds - builds}


def _prepare_process() -> None:
    """All that is there before a first call."""
    start_cuda()
    start_library()
    gc.collect()
    gc.disable()


def passes(policy: str) -> dict[str, Any]:
    """A pass from cold, then one of as many other lengths."""
    _prepare_process()
    inputs = Inputs()
    first, second = (lengths(2 * COUNT, seed=1)[part::2] for part in (0, 1))
    if policy == "pytorch":
        with peers.only("pytorch cudnn"):
            return _passes(_pytorch, inputs, first, second)
    with shape_policy(policy):
        return _passes(ours, inputs, first, second)


def _pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return peers.pytorch(q, k, v, is_causal=True)()


def _passes(attend: Attend, inputs: Inputs, first: list[int], second: list[int]) -> dict[str, Any]:
    result = {"cold": one_pass(attend, inputs, first), "other lengths": one_pass(attend, inputs, second)}
    for length in [*first[:5], *second[:5]]:
        q, k, v = inputs(length)
        with peers.only("pytorch flash"):
            expected = _pytorch(q, k, v)
        cases.check_agreement(["out"], [attend(q, k, v)], [expected], f"PyTorch's at length {length}")
    return result


def takeover() -> dict[str, Any]:
    """What calls wait for while plans of their own are built in the background, and what they cost afterwards."""
    _prepare_process()
    inputs = Inputs()
    with shape_policy(TIERED):
        one_pass(ours, inputs, lengths(COUNT, seed=2))  # the buckets are there now
        returning = lengths(RETURNING, seed=3)
        with no_plan_builds():  # nor does anybody ask for plans in the background
            quiet = one_pass(ours, inputs, returning * 20)
        before = plan_cache.info().loads
        start, busy = time.perf_counter(), [one_pass(ours, inputs, returning)]
        while plan_cache.info().loads - before < RETURNING and time.perf_counter() - start < 240:
            busy.append(one_pass(ours, inputs, returning * 20))
        taken, seconds = plan_cache.info().loads - before, time.perf_counter() - start
        if taken != RETURNING or not background.wait(1.0):
            raise RuntimeError(f"{taken} of {RETURNING} plans took over within {seconds:.0f} s")
    return {
        "longest_wait_before_ms": quiet["longest_wait_ms"],
        "longest_wait_meanwhile_ms": max(each["longest_wait_ms"] for each in busy),
        "plans": taken,
        "seconds": seconds,
        **_steady(inputs, returning),
    }


def _steady(inputs: Inputs, of: list[int]) -> dict[str, Any]:
    """Microseconds of a call under both policies, in turn, when every length has its own plan."""
    times: dict[str, list[float]] = {EXACT: [], TIERED: []}
    for _ in range(9):
        for policy, found in times.items():
            with shape_policy(policy):
                one_pass(ours, inputs, of)  # calls are recognized again
                found.append(one_pass(ours, inputs, of * 20)["seconds"] / (20 * len(of)) * 1e6)
    return {f"{policy}_us": statistics.median(found) for policy, found in times.items()}


RUNS: dict[str, Callable[..., dict[str, Any]]] = {"pass": passes, "takeover": takeover}


if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](*sys.argv[2:])))
