"""Plans of the library's own kernels: a key determines the kernels, their grids and their arguments.

Such plans are cached, recorded, explained and bound to calls like those of cuDNN.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.graph.backend import BuiltGraph, GraphBuilder
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.plans.device_memory import relaxed_capture
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.plan import Plan, allocate, current_raw_stream
from cudnn_sdpa.plans.store import PlanStore

#: The engine's name in `explain`.
ENGINE = "own kernels"


@dataclass(frozen=True)
class KernelCall:
    kernel: Kernel
    blocks: int
    threads: int


@dataclass(frozen=True)
class KernelProgram:
    """Kernels that a launch runs one after another, all with the same argument.

    The argument is a structure of 64-bit values: `fields`, with the address of each operand, output and scratch tensor,
    or a scalar's bits, at its index in `slots`. Scratch tensors are float32; `explain` shows the knobs.
    """

    calls: Sequence[KernelCall]
    fields: Sequence[int]
    slots: Mapping[str, int]
    scratch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    knobs: Mapping[str, int] = field(default_factory=dict)

    @property
    def workspace(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.scratch.values())


class KernelOp(GraphDefinition):
    """An operation that the library's own kernels compute.

    `program` makes the program of a key, and depends on nothing else. The sources in `folder` are part of the digest.
    """

    def __init__(self, program: Callable[[PlanKey], KernelProgram], folder: Path) -> None:
        self.__doc__ = program.__doc__
        self.program = program
        self.channels_last = False
        self.name = f"{program.__module__}:{program.__qualname__}"
        self._folder = folder

    @functools.cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(__version__.encode())
        for source in sorted(self._folder.iterdir()):
            if source.suffix in (".cu", ".cuh", ".py"):
                digest.update(source.read_bytes())
        return digest.hexdigest()

    def compile(self, key: PlanKey, g: GraphBuilder) -> BuiltGraph:
        raise AssertionError("cuDNN compiles no kernels of the library's own")

    def plan(self, key: PlanKey) -> Plan:
        start = time.perf_counter()
        plan = KernelPlan(key, self.program(key))
        plan.build_seconds = time.perf_counter() - start
        return plan

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        """Compiles the kernels of a key into a store, without its GPU; returns whether any was missing there."""
        compiled = [call.kernel.compile_into(store, key.target.sm) for call in self.program(key).calls]
        return any(compiled)

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        return all(store.has(call.kernel.identity(key.target.sm)) for call in self.program(key).calls)


class KernelPlan(Plan):
    """A plan of own kernels. It has no slots, so that it can be watched as it is freed."""

    def __init__(self, key: PlanKey, program: KernelProgram) -> None:
        if key.device is None:
            raise ValueError("launching a plan needs a device")
        self.key, self.device = key, key.device
        self.engine, self.knobs, self.workspace = ENGINE, dict(program.knobs), program.workspace
        self.constants = {}
        self.build_seconds, self.last_used, self.added_at = 0.0, 0, 0
        self.loaded = self.captured = self.held = self.tuned = False
        with torch.cuda.device(key.device), relaxed_capture():
            self._kernels = [(call.kernel.on(key.device), call.blocks, call.threads) for call in program.calls]
        self._fields = array("q", program.fields)
        operands = (*key.inputs, *key.outputs)
        self._slots = [(program.slots[x.name], slot, x.role is Role.SCALAR) for slot, x in enumerate(operands)]
        self._scratch = [(program.slots[name], shape) for name, shape in program.scratch.items()]

    def launch(self, pointers: Sequence[int]) -> None:
        fields, scratch = self._fields[:], []  # local to this call: many threads launch a plan at once
        for index, slot, is_number in self._slots:
            address = int(pointers[slot])
            fields[index] = ctypes.c_uint32.from_address(address).value if is_number else address
        for index, shape in self._scratch:
            scratch.append(allocate((math.prod(shape),), (1,), torch.float32))
            fields[index] = scratch[-1].data_ptr()
        stream = current_raw_stream(self.device)
        for kernel, blocks, threads in self._kernels:
            kernel.launch(blocks, threads, fields, stream)
