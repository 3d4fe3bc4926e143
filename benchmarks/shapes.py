"""`benchmarks shapes`: the cost of new shapes under each shape policy, and of a bucket's plan in later calls."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from rich.progress import track
from torch import Tensor

from benchmarks.programs.many_lengths import COUNT, DIM, HEADS_KV, HEADS_Q, MAX_LENGTH
from benchmarks.tools import cases
from benchmarks.tools.output import Row
from benchmarks.tools.processes import run_module
from benchmarks.tools.timing import device_times
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.forward import BucketRun
from cudnn_sdpa.attention.dense.sdpa import SDPA, sdpa
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.default_store import OFF
from cudnn_sdpa.plans.shape_policy import BUCKETED, EXACT, TIERED, shape_policy

LABEL = f"{COUNT} lengths from 1 to {MAX_LENGTH}, {HEADS_Q} and {HEADS_KV} heads of {DIM}, causal"

#: Lengths of prefills and of the KV cache of decode steps, in the comparison of buckets with exact plans.
PREFILLS = (77, 128, 300, 512, 1000, 2048, 4096, 8192)
CACHES = (300, 1000, 4096)


def passes(repeats: int) -> list[Row]:
    """A cold pass over many lengths, then one over as many other lengths; each policy in its own process."""
    names = (EXACT, BUCKETED, TIERED, "pytorch")
    results_by_policy: dict[str, list[JsonObject]] = {name: [] for name in names}
    for _ in track(range(repeats), "many lengths", transient=True):
        for name, results in results_by_policy.items():
            results.append(run_module("benchmarks.programs.many_lengths", "pass", name, store=OFF))
    rows = []
    for name, results in results_by_policy.items():
        row: Row = {"policy": "PyTorch's cuDNN backend" if name == "pytorch" else name}
        for which, title in (("cold", f"first {COUNT}"), ("other lengths", f"{COUNT} others")):
            measured = [result[which] for result in results]
            row[f"{title}, s"] = statistics.median(x["seconds"] for x in measured)
            row[f"{title}: longest wait, ms"] = statistics.median(x["longest_wait_ms"] for x in measured)
            row[f"{title}: builds"] = "–" if name == "pytorch" else str(measured[0]["builds"])
        rows.append(row)
    return rows


def takeover(repeats: int) -> list[Row]:
    """The longest wait of calls while exact plans are built in the background, and the cost of later calls."""
    rows = []
    for number in track(range(repeats), "taking over", transient=True):
        measured = run_module("benchmarks.programs.many_lengths", "takeover", store=OFF)
        rows.append(
            {
                "process": f"{number + 1}",
                "plans built in the background": measured["plans"],
                "in, s": measured["seconds"],
                "longest wait before, ms": measured["longest_wait_before_ms"],
                "longest wait meanwhile, ms": measured["longest_wait_meanwhile_ms"],
                "exact, µs a call": measured["exact_us"],
                "tiered, µs a call": measured["tiered_us"],
                "tiered / exact": measured["tiered_us"] / measured["exact_us"],
            }
        )
    return rows


def buckets(repeats: int) -> list[Row]:
    """Device time of a call with its bucket's plan and with its exact plan, by length and memory order."""
    del repeats
    calls = [(length, length) for length in PREFILLS] + [(1, length) for length in CACHES]
    return [_bucket_row(length_q, length_kv) for length_q, length_kv in track(calls, "buckets", transient=True)]


def _bucket_row(length_q: int, length_kv: int) -> Row:
    row: Row = {"queries × keys": f"{length_q} × {length_kv}"}
    for order, title in (("bshd", "heads together"), ("bhsd", "heads apart")):
        q, k, v = (
            _tensor(order, heads, length)
            for heads, length in ((HEADS_Q, length_q), (HEADS_KV, length_kv), (HEADS_KV, length_kv))
        )
        causal = length_q == length_kv
        plan_cache.clear()
        runs: dict[str, Callable[[], object]] = {}
        outs = {}
        for policy in (BUCKETED, EXACT):
            with shape_policy(policy):
                outs[policy] = sdpa(q, k, v, is_causal=causal)
                (run,) = [x.run for x in SDPA.table.each() if isinstance(x.run, BucketRun) == (policy == BUCKETED)]
                runs[policy] = functools.partial(run, SdpaCall(q, k, v))
        cases.check_agreement(["out"], [outs[BUCKETED]], [outs[EXACT]], "that of its own plan")
        times = device_times(runs)
        row |= {
            f"{title}: own plan, µs": times[EXACT],
            "bucket, µs" if order == "bshd" else "bucket, µs ": times[BUCKETED],
            "ratio" if order == "bshd" else "ratio ": times[BUCKETED] / times[EXACT],
        }
    return row


def _tensor(order: str, heads: int, length: int) -> Tensor:
    if order == "bshd":
        return cases.normal(1, length, heads, DIM).transpose(1, 2)
    return cases.normal(1, heads, length, DIM)
