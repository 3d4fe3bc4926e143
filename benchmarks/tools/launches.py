"""The launches of a call without the call: what CUDA's driver takes of its CPU time, and cuDNN where it launches."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.tools.timing import Call
from benchmarks.tools.ways import in_python
from cudnn_sdpa.engine.recorded.recorder import Recorder
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.nvrtc import LoadedKernel
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import ProgramPlan


class Launches(NamedTuple):
    """The launches of one call, on its operands, outputs and addresses; each is None if the call has none.

    Attributes:
        plans: Those of plans; recorded ones are made by a function of the native module, called from Python.
        not_launched: That function's calls without a launch, which has their operands checked.
        own_kernels: Those of this library's kernels.
    """

    plans: Call | None
    not_launched: Call | None
    own_kernels: Call | None


def launches_of(call: Callable[[], object]) -> Launches:
    """Runs a warm call in Python and notes its launches. What the call returns must keep alive all that they write."""
    with in_python():
        call()
        with _noted() as (plans, not_launched, kernels):
            results = call()
    alive = results, plans, kernels

    def repeated(noted: list[Call]) -> Call | None:
        def run(_alive: object = alive) -> None:
            for launch in noted:
                launch()

        return run if noted else None

    return Launches(repeated(plans), repeated(not_launched), repeated(kernels))


@contextmanager
def _noted() -> Iterator[tuple[list[Call], list[Call], list[Call]]]:
    """The launches that are made meanwhile; see `Launches`."""
    plans: list[Call] = []
    not_launched: list[Call] = []
    kernels: list[Call] = []
    executes = {plan: plan._execute for plan in plan_cache.plans() if not isinstance(plan, ProgramPlan)}
    launch_kernel = LoadedKernel.launch

    def note_kernel(kernel: LoadedKernel, blocks: int, threads: int, fields: array[int], stream: int) -> None:
        kernels.append(partial(launch_kernel, kernel, blocks, threads, fields[:], stream))
        kernels[-1]()

    for plan in executes:
        plan._execute = _noting(plan, plans, not_launched)
    LoadedKernel.launch = note_kernel  # type: ignore[method-assign, assignment]
    try:
        yield plans, not_launched, kernels
    finally:
        LoadedKernel.launch = launch_kernel  # type: ignore[method-assign]
        for plan, execute in executes.items():
            plan._execute = execute


def _noting(plan: Plan, noted: list[Call], not_launched: list[Call]) -> Callable[[int, int, int, int, int], None]:
    """Executes a plan, and notes how it is launched, with numbers and a workspace that stay."""
    execute = plan._execute
    operands = (*plan.key.inputs, *plan.key.outputs)

    def note(address: int, count: int, workspace: int, handle: int, index: int) -> None:
        words = array("Q", (ctypes.c_uint64 * count).from_address(address))
        numbers = array("f", bytes(4 * count))
        for place, operand in enumerate(operands):
            if operand.role is Role.SCALAR:
                numbers[place] = ctypes.c_float.from_address(words[place]).value
                words[place] = numbers.buffer_info()[0] + 4 * place
        own = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=torch.device("cuda", plan.device))
        alive = words, numbers, own

        def run(_alive: object = alive) -> None:
            # In the order of `backend.Execute`.
            execute(words.buffer_info()[0], count, own.data_ptr(), handle, index)

        del workspace
        native = _recorded(plan)
        if native is None:
            noted.append(run)
        else:
            zeros = _Zeros(native.zeros if native.takes_zeros else 0, own.device)
            noted.append(lambda: native.launch(words, own.data_ptr(), 0, zeros.take()) and None)
            not_launched.append(lambda: native.serves(words) and None)
        run()

    return note


def _recorded(plan: Plan) -> Any:
    """A plan's recorded launches; None if cuDNN launches it."""
    recorder = plan.recorder
    return recorder.native if isinstance(recorder, Recorder) and recorder.native.is_serving else None


class _Zeros:
    """Memory in which each launch counts in another place, cleared when all of it has been taken."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._at = size, 0
        self._memory = torch.zeros(1024 * size, dtype=torch.uint8, device=device)
        self._end = len(self._memory)

    def take(self) -> int:
        """An address; 0 if none is needed."""
        if self._at == self._end:
            self._memory.zero_()
            self._at = 0
        self._at += self._size
        return self._memory.data_ptr() + self._at - self._size if self._size else 0
