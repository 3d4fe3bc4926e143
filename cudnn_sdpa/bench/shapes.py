"""`bench shapes`: what shapes without a plan cost under each policy, and what buckets cost afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rich.progress import track
from torch import Tensor

from cudnn_sdpa.attention.dense import launch
from cudnn_sdpa.attention.dense.buckets import BucketCall
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.bench.programs.many_lengths import COUNT, DIM, HEADS_KV, HEADS_Q, LONGEST
from cudnn_sdpa.bench.tools import cases
from cudnn_sdpa.bench.tools.processes import run_module
from cudnn_sdpa.bench.tools.timing import device_times
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.default_store import OFF
from cudnn_sdpa.plans.shape_policy import BUCKETED, EXACT, TIERED, shape_policy

LABEL = f"{COUNT} lengths from 1 to {LONGEST}, {HEADS_Q} and {HEADS_KV} heads of {DIM}, causal"

#: Lengths of prefills, and of the cache of decode steps, whose buckets are compared with plans of their own.
PREFILLS = (77, 128, 300, 512, 1000, 2048, 4096, 8192)
CACHES = (300, 1000, 4096)


def passes(repeats: int) -> list[dict[str, Any]]:
    """Calls of many lengths from cold, and of as many others after them, in processes of their own."""
    names = (EXACT, BUCKETED, TIERED, "pytorch")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in track(range(repeats), "many lengths", transient=True):
        for name, results in found.items():
            results.append(run_module("cudnn_sdpa.bench.programs.many_lengths", "pass", name, store=OFF))
    rows = []
    for name, results in found.items():
        row: dict[str, Any] = {"policy": "PyTorch's cuDNN backend" if name == "pytorch" else name}
        for which, title in (("cold", f"first {COUNT}"), ("other lengths", f"{COUNT} others")):
            each = [result[which] for result in results]
            row[f"{title}, s"] = statistics.median(x["seconds"] for x in each)
            row[f"{title}: longest wait, ms"] = statistics.median(x["longest_wait_ms"] for x in each)
            row[f"{title}: builds"] = "–" if name == "pytorch" else str(each[0]["builds"])
        rows.append(row)
    return rows


def takeover(repeats: int) -> list[dict[str, Any]]:
    """What calls wait for while their own plans are built in the background, and their cost afterwards."""
    rows = []
    for number in track(range(repeats), "taking over", transient=True):
        found = run_module("cudnn_sdpa.bench.programs.many_lengths", "takeover", store=OFF)
        rows.append(
            {
                "process": f"{number + 1}",
                "plans built in the background": found["plans"],
                "in, s": found["seconds"],
                "longest wait before, ms": found["longest_wait_before_ms"],
                "longest wait meanwhile, ms": found["longest_wait_meanwhile_ms"],
                "exact, µs a call": found["exact_us"],
                "tiered, µs a call": found["tiered_us"],
                "tiered / exact": found["tiered_us"] / found["exact_us"],
            }
        )
    return rows


def buckets(repeats: int) -> list[dict[str, Any]]:
    """Device time of a call with its bucket's plan beside its own plan, by length and memory order."""
    del repeats
    calls = [(length, length) for length in PREFILLS] + [(1, length) for length in CACHES]
    return [_bucket_row(*rows) for rows in track(calls, "buckets", transient=True)]


def _bucket_row(rows_q: int, rows_kv: int) -> dict[str, Any]:
    row: dict[str, Any] = {"queries × keys": f"{rows_q} × {rows_kv}"}
    for order, title in (("bshd", "heads together"), ("bhsd", "heads apart")):
        q, k, v = (
            _tensor(order, heads, rows) for heads, rows in ((HEADS_Q, rows_q), (HEADS_KV, rows_kv), (HEADS_KV, rows_kv))
        )
        causal = rows_q == rows_kv
        plan_cache.clear()
        runs: dict[str, Callable[[], Tensor]] = {}
        outs = {}
        for policy in (BUCKETED, EXACT):
            with shape_policy(policy):
                outs[policy] = sdpa(q, k, v, is_causal=causal)
                (call,) = [c for c in launch.calls._calls.values() if isinstance(c, BucketCall) == (policy == BUCKETED)]
                runs[policy] = _launcher(call, q, k, v)
        cases.check_agreement(["out"], [outs[BUCKETED]], [outs[EXACT]], "that of its own plan")
        times = device_times(runs)
        row |= {
            f"{title}: own plan, µs": times[EXACT],
            "bucket, µs" if order == "bshd" else "bucket, µs ": times[BUCKETED],
            "ratio" if order == "bshd" else "ratio ": times[BUCKETED] / times[EXACT],
        }
    return row


def _launcher(call: Any, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def launch() -> Tensor:
        out: Tensor = call.run(q, k, v, None, None)
        return out

    return launch


def _tensor(order: str, heads: int, rows: int) -> Tensor:
    if order == "bshd":
        return cases.normal(1, rows, heads, DIM).transpose(1, 2)
    return cases.normal(1, heads, rows, DIM)
