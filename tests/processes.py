"""Processes of one gloo group, for tests of what several GPUs do together.

`Ranks` starts them once and gives them functions, so that many tests share one start. The fixtures `ranks` (two) and
`four_ranks` hand it to tests:

    def sums(number):  # at the top of a test's file: each process imports it
        tensor = torch.full((2,), number * dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.tolist()

    def test_sums(ranks):
        assert ranks(sums, 3) == [[3, 3], [3, 3]]
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

#: Seconds that a collective waits for the other ranks, and that a call of all ranks may take.
COLLECTIVE, CALL = 30, 150

#: What is imported once, before the processes are forked: all that the first case of a file would import in each.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "cudnn_sdpa",
    "pytest",
)


class RankError(AssertionError):
    """A rank raised, ended, or took too long."""


class Ranks:
    """Processes of one group: a call runs a function in each, and returns the results in the order of their ranks.

    Every rank draws the same random numbers. If one fails, the processes are ended, and the next call starts others.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """The results of `function(*arguments)` in each rank.

        Raises:
            RankError: A rank raised: with the tracebacks of all that did.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send((list(sys.path), request))
        found, errors = self._answers()
        if errors:
            self.end()
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        return [found[rank] for rank in range(self.count)]

    def _answers(self) -> tuple[dict[int, Any], dict[int, str]]:
        """What the ranks returned and raised. After an error the others may be waiting for that rank: not for long."""
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + CALL
        while len(found) + len(errors) < self.count:
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in (*found, *errors)}
            ready: list[Any] = multiprocessing.connection.wait(list(missing), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                return found, errors | dict.fromkeys(missing.values(), "no answer")
            for pipe in ready:
                rank = missing[pipe]
                try:
                    succeeded, answer = pipe.recv()
                except EOFError:
                    succeeded, answer = False, f"the process ended with {self._exit_code(rank)}"
                if succeeded:
                    found[rank] = answer
                else:
                    errors[rank] = answer
                    end = min(end, time.monotonic() + 3)
        return found, errors

    def _exit_code(self, rank: int) -> object:
        self._processes[rank].join(5)
        return self._processes[rank].exitcode

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        if hasattr(os, "fork"):
            context.set_forkserver_preload(list(PRELOADED))
        store = os.path.join(tempfile.mkdtemp(), "store")  # noqa: PTH118
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.count, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def check_for_a_cudnn_that_has_sinks(patch: pytest.MonkeyPatch) -> None:
    """With an older cuDNN installed, as for `make test-min`, CPU tensors are checked for the version of the benchmarks.

    Older versions refuse sinks, and gradients with softcap, which the reference supports for every version.
    """
    from cudnn_sdpa.engine import cpu_target

    version = max(cpu_target.installed_cudnn(), cpu_target.ASSUMED_CUDNN)
    patch.setattr(cpu_target, "installed_cudnn", lambda: version)
    cpu_target.target_of.cache_clear()  # what was imported may have asked for it


def _serve(pipe: Connection, rank: int, count: int, store: str) -> None:
    """What one process does: runs each function that it is sent."""
    import torch
    import torch.distributed as dist

    check_for_a_cudnn_that_has_sinks(pytest.MonkeyPatch())
    os.environ["CUDNN_SDPA_PLAN_DIR"] = os.environ["CUDNN_SDPA_NATIVE"] = "off"
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    while True:
        try:
            path, request = pipe.recv()
        except EOFError:
            return
        try:
            sys.path[:] = path
            function, arguments = pickle.loads(request)
            torch.manual_seed(7)
            answer = pickle.dumps((True, function(*arguments)))
            dist.barrier()
        except BaseException:  # noqa: BLE001 - also pytest's outcomes
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
