"""Runs many random calls in processes. A call that hangs or kills its process is reported, and the others continue."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import platform
import time
from collections import Counter
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import generators
import torch

import cudnn_sdpa
from cudnn_sdpa.graph import backend

#: Seconds after which a worker says where it is.
LONG = 60

#: CUDA errors are sticky: everything that runs in the process afterwards fails, too.
STICKY = ("CUDA error", "AcceleratorError", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS", "misaligned address")


def work(connection: Connection, device: str) -> None:
    """A worker process: runs the calls it receives, one after the other, until it receives None."""
    torch.set_num_threads(1)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        started = time.monotonic()
        faulthandler.dump_traceback_later(LONG)
        outcome = generators.attempt(*task, device)
        faulthandler.cancel_dump_traceback_later()
        is_dead = outcome.kind == "crashed" and any(text in problem for problem in outcome.problems for text in STICKY)
        connection.send((asdict(outcome), time.monotonic() - started, is_dead))
        if is_dead:
            os._exit(1)


class Worker:
    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.task: tuple[str, int] | None = None
        self.is_ready = False
        self.since = time.monotonic()

    def end(self) -> None:
        """Stops it, even if it is busy."""
        self.process.kill()
        self.process.join(10)
        self.connection.close()


class Report:
    def __init__(self, device: str) -> None:
        self.device = device
        self.counts: dict[str, Counter[str]] = {}
        self.faults: list[dict[str, Any]] = []
        self.declines: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.slowest: list[tuple[float, str]] = []

    def add(self, task: tuple[str, int], outcome: dict[str, Any], seconds: float) -> None:
        name, kind = task[0], outcome["kind"]
        self.counts.setdefault(name, Counter())[kind] += 1
        line = generators.line(*task, self.device)
        for reason in {reason.splitlines()[0][:160] for reason in outcome["reasons"] if reason}:
            self.declines[f"{name}: {reason}"] += 1
            self.examples.setdefault(f"{name}: {reason}", line)
        self.served.update(outcome.get("served", ()))
        self.launched.update(f"{name}: {by[:160]}" for by in outcome.get("launched", ()))
        if kind in ("wrong", "crashed"):
            self.faults.append({"line": line, "kind": kind, "problems": outcome["problems"][:4]})
            print(f"{kind.upper()}  {line}\n    " + "\n    ".join(outcome["problems"][:4]), flush=True)
        self.slowest = sorted([*self.slowest, (round(seconds, 2), line)], reverse=True)[:8]

    def total(self, kind: str) -> int:
        """Number of calls with this kind of outcome."""
        return sum(counts[kind] for counts in self.counts.values())

    def as_dict(self, seconds: float) -> dict[str, Any]:
        versions = {
            "cudnn_sdpa": cudnn_sdpa.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "nvidia-cudnn-frontend": backend.frontend_version(),
            "cudnn": backend.version_string(backend.cudnn_version()),
        }
        if self.device == "cuda":
            versions["gpu"] = torch.cuda.get_device_name()
        kinds = ("right", "declined", "wrong", "crashed")
        return {
            "versions": versions,
            "seconds": round(seconds, 1),
            "totals": {kind: self.total(kind) for kind in kinds},
            "operations": {name: dict(counts) for name, counts in sorted(self.counts.items())},
            "faults": self.faults,
            "declines": {
                reason: {"count": count, "example": self.examples[reason]}
                for reason, count in self.declines.most_common()
            },
            "served": dict(self.served.most_common()),
            "launched": dict(self.launched.most_common()),
            "slowest": self.slowest,
        }


def in_processes(tasks: list[tuple[str, int]], report: Report, given: Any) -> None:
    """Distributes calls over processes, until all have run or time is up."""
    started, todo = time.monotonic(), list(reversed(tasks))
    workers = [Worker(given.device) for _ in range(given.workers)]
    try:
        while (todo or any(w.task for w in workers)) and not _is_over(started, given.seconds):
            wait([w.connection for w in workers] + [w.process.sentinel for w in workers], timeout=1.0)
            for place, worker in enumerate(workers):
                if not _serve(worker, todo, report, given):
                    worker.end()
                    workers[place] = Worker(given.device)
    finally:
        for worker in workers:
            worker.end()


def _serve(worker: Worker, todo: list[tuple[str, int]], report: Report, given: Any) -> bool:
    """Takes a worker's result and sends it the next call; False if it is dead."""
    now = time.monotonic()
    try:
        if worker.connection.poll():
            message = worker.connection.recv()
            if message == "ready":
                worker.is_ready = True
            else:
                outcome, seconds, is_dead = message
                assert worker.task is not None
                report.add(worker.task, outcome, seconds)
                worker.task = None
                if is_dead:
                    return False
    except (EOFError, ConnectionError, OSError):
        pass
    if not worker.process.is_alive() and not (worker.task and worker.connection.poll()):
        if worker.task is not None:
            text = f"the process ended with {worker.process.exitcode}"
            report.add(worker.task, {"kind": "crashed", "problems": [text], "reasons": []}, now - worker.since)
            worker.task = None
        return False
    if worker.task is not None and now - worker.since > given.timeout:
        text = f"no answer within {given.timeout:.0f} s"
        report.add(worker.task, {"kind": "crashed", "problems": [text], "reasons": []}, now - worker.since)
        worker.task = None
        return False
    if worker.is_ready and worker.task is None and todo:
        worker.task, worker.since = todo.pop(), now
        worker.connection.send(worker.task)
    return True


def _is_over(started: float, seconds: float) -> bool:
    return bool(seconds) and time.monotonic() - started > seconds


def main(names: list[str], given: Any) -> int:
    """Runs `count` calls, spread evenly over operations, and reports."""
    started = time.monotonic()
    each = -(-given.count // len(names))
    tasks = [(name, given.seed + i) for i in range(each) for name in names][: given.count]
    report = Report(given.device)
    if given.workers:
        in_processes(tasks, report, given)
    else:
        for task in tasks:
            if _is_over(started, given.seconds):
                break
            before = time.monotonic()
            report.add(task, asdict(generators.attempt(*task, given.device)), time.monotonic() - before)
    found = report.as_dict(time.monotonic() - started)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")
    for name, counts in found["operations"].items():
        print(f"{name:30} " + "  ".join(f"{kind} {n}" for kind, n in sorted(counts.items())))
    for reason, of in found["declines"].items():
        print(f"{of['count']:5} declined: {reason}   ({of['example']})")
    for what in ("served", "launched"):
        for by, count in found[what].items():
            print(f"{count:5} {what}: {by}")
    for seconds, line in found["slowest"]:
        print(f"{seconds:6.1f} s  {line}")
    print(f"{found['totals']} in {found['seconds']} s")
    return int(bool(report.faults))
