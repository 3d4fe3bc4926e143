"""Many calls in one process: memory stays flat, and threads get right results while plans are evicted.

    python tests/soak.py --calls 1000000 --seconds 180 --json soak.json

runs the examples of the contract suite on a GPU. ``--device cpu`` runs them on the fake GPU of the tests, one after the
other. Calls take the native way, or with ``--python`` Python's.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contract.operations import OPERATIONS, Example
from fake_gpu import FakePlan, gpu_on_the_cpu
from native_way import native_way
from torch import Tensor

import cudnn_sdpa
from benchmarks.tools.ways import recorders
from cudnn_sdpa import UnsupportedError, plan_cache
from cudnn_sdpa.engine.recorded import recorder
from cudnn_sdpa.graph import backend

#: Rounds between readings of memory. Whatever is kept for each call grows in all of them.
ROUNDS = 5
#: Growth that is none: allocators and the interpreter take memory at times, but not in each round.
MAX_GROWTH = 512 << 10
#: Largest relative error, where an example names none.
PRECISION = 3e-2

#: Seconds after which a call that has not ended is a fault.
PATIENCE = 60.0
#: Seconds after which the process ends if nothing in it goes on.
LAST_RESORT = 120.0
#: Faults after which threads end.
MAX_FAULTS = 20
#: Calls before the first reading.
WARM_UP = 500
#: Kinds of calls that threads make at the same time, so that each comes back before its plan is evicted, and for how
#: many seconds.
AT_ONCE, TURN = 10, 2.0

Step = Callable[[], object]


@contextlib.contextmanager
def on(device: str, example: Example) -> Iterator[None]:
    """Calls of an example run on a device."""
    if device == "cuda":
        yield
        return
    with gpu_on_the_cpu(example.compute), cudnn_sdpa.cpu_checks(None):
        yield


def tensors_of(example: Example, device: str, *, grad: bool) -> dict[str, Tensor]:
    """New tensors of an example, on a device."""
    moved = {name: x.detach().to(device) for name, x in example.tensors().items()}
    return {name: x.requires_grad_() if grad and name in example.differentiable else x for name, x in moved.items()}


def steps_of(example: Example, device: str) -> dict[str, Step]:
    """The calls of an example: inference, and training where it has gradients."""
    tensors = tensors_of(example, device, grad=False)
    steps: dict[str, Step] = {"inference": lambda: example(tensors)}
    if example.differentiable:
        leaves = tensors_of(example, device, grad=True)
        steps["training"] = lambda: example.gradients(leaves)
    return steps


# Memory.


def readings(device: str) -> tuple[int, int]:
    """Bytes of the process in the host's memory, and of PyTorch's allocator in the GPU's."""
    FakePlan.launched.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), torch.cuda.memory_allocated() if device == "cuda" else 0


def growth(step: Step, calls: int, device: str) -> dict[str, Any]:
    """Readings of memory between rounds of equal calls, and the least growth of a round."""
    for _ in range(min(calls, WARM_UP)):
        step()
    found = [readings(device)]
    for _ in range(ROUNDS):
        for _ in range(max(calls // ROUNDS, 1)):
            step()
        found.append(readings(device))
    host, gpu = ([after - before for before, after in itertools.pairwise(of)] for of in zip(*found, strict=True))
    return {"calls": calls, "host": host, "gpu": gpu, "grows": min(host) > MAX_GROWTH or min(gpu) > 0}


def memory(names: list[str], calls: int, device: str) -> dict[str, dict[str, Any]]:
    """The growth of every example: `calls` of the first one's inference, as many of all others together."""
    jobs = [
        (name, kind) for name in names for kind in ("inference", *["training"] * bool(OPERATIONS[name].differentiable))
    ]
    each, found = max(calls // max(len(jobs) - 1, 1), ROUNDS), {}
    for number, (name, kind) in enumerate(jobs):
        with on(device, OPERATIONS[name]):
            try:
                found[f"{name}, {kind}"] = growth(
                    steps_of(OPERATIONS[name], device)[kind], each if number else calls, device
                )
            except UnsupportedError as error:
                found[f"{name}, {kind}"] = {"calls": 0, "declined": list(error.reasons), "grows": False}
    return found


# Threads.


@dataclass
class Call:
    """A call with its results in float64, and how far off they may be."""

    name: str
    run: Callable[[], list[Tensor]]
    exact: list[Tensor]
    precision: float

    def is_right(self) -> bool:
        """Whether it gives these results, on the current stream, which the comparison waits for."""
        found = self.run()
        return all(
            float((x.detach().double() - y).norm()) <= self.precision * max(float(y.norm()), 1e-3)
            for x, y in zip(found, self.exact, strict=True)
        )


def calls_of(name: str, device: str) -> Iterator[Call]:
    """Calls of an example that a GPU has plans for, with results computed beforehand, on the CPU."""
    example = OPERATIONS[name]
    for kind, step in (("inference", None), *[("training", True)] * bool(example.differentiable)):
        leaves = tensors_of(example, device, grad=bool(step))
        exact = {n: x.detach().cpu().double() if x.is_floating_point() else x.cpu() for n, x in leaves.items()}
        wanted = [exact[n].requires_grad_() for n in example.differentiable] if step else []
        with torch.enable_grad():
            out = example.exact(**exact, **example.options)
        results = torch.autograd.grad(out, wanted, torch.ones_like(out)) if step else [out.detach()]
        right = [x.to(device) for x in results]

        def run(leaves: dict[str, Tensor] = leaves, *, trains: bool = bool(step)) -> list[Tensor]:
            if not trains:
                return [example(leaves)]
            found = example.gradients(leaves)
            return [found[name] for name in example.differentiable]

        try:
            run()
        except UnsupportedError:
            continue
        yield Call(f"{name}, {kind}", run, right, max(example.precision or 0.0, PRECISION))


@dataclass
class Soak:
    device: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    under_way: dict[int, tuple[str, float]] = field(default_factory=dict)
    recorded: Counter[str] = field(default_factory=Counter)

    def note(self, fault: str) -> None:
        """Keeps a fault, and prints it at once: what follows may never end."""
        print(fault, file=sys.stderr, flush=True)
        self.faults.append(fault)

    def work(self, calls: list[Call], seed: int) -> None:
        """Makes random calls, each on one of the thread's two streams."""
        r, is_gpu = random.Random(seed), self.device == "cuda"
        streams = [torch.cuda.Stream() for _ in range(2)] if is_gpu else []
        while not self.over.is_set() and len(self.faults) < MAX_FAULTS:
            turn = int(time.monotonic() / TURN) * AT_ONCE
            call = calls[(turn + r.randrange(AT_ONCE)) % len(calls)]
            self.under_way[seed] = call.name, time.monotonic()
            try:
                with torch.cuda.stream(r.choice([*streams, None])) if is_gpu else contextlib.nullcontext():
                    is_right = call.is_right()
            except Exception as error:  # noqa: BLE001 - each is a fault
                self.note(f"{call.name}: {type(error).__name__}: {error}")
                continue
            self.counts[call.name] += 1
            if not is_right:
                self.note(f"{call.name}: wrong")
        self.under_way.pop(seed, None)

    def has_stalled(self) -> bool:
        """Whether a call does not end: a fault, with what all threads are doing."""
        now = time.monotonic()
        for name, since in list(self.under_way.values()):
            if now - since > PATIENCE:
                self.note(f"{name}: has not ended after {PATIENCE} s; under way: {sorted(self.under_way.values())}")
                faulthandler.dump_traceback()
                return True
        return False

    def evict(self, seed: int) -> None:
        """Makes the plan cache smaller and larger, and empties it."""
        r, size = random.Random(seed), plan_cache.info().capacity
        while not self.over.wait(0.02 if self.device == "cpu" else 0.4):
            self.under_way[seed] = "eviction", time.monotonic()
            self.recorded.update(each.name for each in recorders() if not each.why_not)
            plan_cache.resize(r.choice([1, 2, 4, 8, 64]))
            if r.random() < 0.2:
                plan_cache.clear()
            if r.random() < 0.2:
                gc.collect()
            FakePlan.launched.clear()
            self.under_way.pop(seed)
        plan_cache.resize(size)

    def run(self, calls: list[Call], threads: int, seconds: float) -> None:
        every = [threading.Thread(target=self.work, args=(calls, seed), daemon=True) for seed in range(threads)]
        every.append(threading.Thread(target=self.evict, args=(threads,), daemon=True))
        self.over.clear()
        for thread in every:
            thread.start()
        end, has_stalled = time.monotonic() + seconds, False
        while not has_stalled and any(thread.is_alive() for thread in every):
            # Not even this loop runs if a call stalls with the GIL: then this ends the process.
            faulthandler.dump_traceback_later(LAST_RESORT, exit=True)
            if time.monotonic() > end or len(self.faults) >= MAX_FAULTS:
                self.over.set()
            time.sleep(0.1)
            has_stalled = self.has_stalled()
        faulthandler.cancel_dump_traceback_later()
        self.over.set()


def soak(names: list[str], threads: int, seconds: float, device: str) -> dict[str, Any]:
    """Threads on streams of their own while plans are evicted: all examples together, or one by one on the CPU."""
    found, builds = Soak(device), plan_cache.info().builds
    if device == "cuda":
        torch.cuda.synchronize()
        start = time.monotonic()
        calls = [call for name in names for call in calls_of(name, device)]
        torch.cuda.synchronize()
        print(f"{len(calls)} kinds of calls prepared in {time.monotonic() - start:.0f} s", flush=True)
        found.run(calls, threads, seconds)
    else:
        for name in names:
            with on(device, OPERATIONS[name]):
                found.run(list(calls_of(name, device)), threads, seconds / len(names))
    info = plan_cache.info()
    return {
        "threads": threads,
        "seconds": seconds,
        "calls": dict(sorted(found.counts.items())),
        "builds": info.builds - builds,
        "recorded plans at evictions": dict(sorted(found.recorded.items())),
        "faults": found.faults,
    }


def versions(device: str) -> dict[str, str]:
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {
        "cudnn_sdpa": cudnn_sdpa.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cudnn": backend.version_string(backend.cudnn_version()),
        **gpu,
    }


def main(arguments: list[str]) -> int:
    """Runs both parts, prints what they found, and returns whether there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of the first example, and of all others; 0: none")
    parser.add_argument("--seconds", type=float, default=120.0, help="for which threads call; 0: none")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", action="store_true", help="without the native module")
    parser.add_argument(
        "--only", action="append", choices=list(OPERATIONS), help="an example; may be given several times"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    names, report = given.only or list(OPERATIONS), {"versions": versions(given.device), "native": not given.python}
    recorder.MIN_CALLS = 0  # plans are recorded at once
    with native_way(on=not given.python), cudnn_sdpa.use_plan_store("off"):
        if given.calls:
            report["memory"] = memory(names, given.calls, given.device)
        if given.json:
            given.json.write_text(json.dumps(report, indent=2) + "\n")  # of the first part, should the second be ended
        if given.seconds:
            # A GPU draws other numbers for dropout than the exact results of the example have.
            compared = [name for name in names if not OPERATIONS[name].options.get("dropout_p")]
            with tempfile.TemporaryDirectory() as folder, cudnn_sdpa.use_plan_store(folder):  # evicted plans come back
                report["threads"] = soak(compared, given.threads, given.seconds, given.device)
    grown = [name for name, of in report.get("memory", {}).items() if of["grows"]]
    faults = [*(f"{name}: memory grows" for name in grown), *report.get("threads", {}).get("faults", [])]
    report["faults"] = faults
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    total = sum(of["calls"] for of in report.get("memory", {}).values())
    print(f"memory: {total} calls, {len(grown)} examples grow")
    print(f"threads: {sum(report.get('threads', {}).get('calls', {}).values())} calls")
    print("\n".join(faults) or "no fault")
    return int(bool(faults))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    if threading.active_count() > 1:  # one has stalled, and would keep the interpreter
        os._exit(code)
    sys.exit(code)
