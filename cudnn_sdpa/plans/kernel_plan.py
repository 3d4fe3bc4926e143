"""Plans of the library's own kernels: a key decides which kernels run, in how many blocks, and what they are given.

Everything else that holds of plans holds of these: they are cached, recorded, explained, and calls are bound to them.
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

#: What `explain` shows as the engine of such plans.
ENGINE = "own kernels"


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its grid."""

    kernel: Kernel
    blocks: int
    threads: int


@dataclass(frozen=True)
class KernelProgram:
    """What a launch of a plan runs: kernels one after the other, all with the same argument.

    Attributes:
        calls: The kernels.
        fields: The argument, a structure of 64-bit values, without addresses and numbers.
        places: Where the address of each operand, output and scratch tensor goes, or the bits of a number.
        scratch: Shapes of float32 tensors that only this launch uses, by name.
        knobs: What was chosen, for `explain`.
    """

    calls: Sequence[KernelCall]
    fields: Sequence[int]
    places: Mapping[str, int]
    scratch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    knobs: Mapping[str, int] = field(default_factory=dict)

    @property
    def workspace(self) -> int:
        """Bytes of all scratch tensors."""
        return sum(4 * math.prod(shape) for shape in self.scratch.values())


class KernelOp(GraphDefinition):
    """An operation that the library's own kernels compute.

    Args:
        program: Gives what a key's plan launches; must depend on nothing else.
        folder: Where the sources are, whose change makes other plans.
    """

    def __init__(self, program: Callable[[PlanKey], KernelProgram], folder: Path) -> None:
        self.__doc__ = program.__doc__
        self.program = program
        self.channels_last = False
        self.name = f"{program.__module__}:{program.__qualname__}"
        self._folder = folder

    @functools.cached_property
    def digest(self) -> str:
        """A digest that changes with the sources and the package's version."""
        digest = hashlib.sha256(__version__.encode())
        for source in sorted(self._folder.iterdir()):
            if source.suffix in (".cu", ".cuh", ".py"):
                digest.update(source.read_bytes())
        return digest.hexdigest()

    def compile(self, key: PlanKey, g: GraphBuilder) -> BuiltGraph:
        """There is no graph."""
        raise AssertionError("cuDNN compiles no kernels of the library's own")

    def plan(self, key: PlanKey) -> Plan:
        """The plan of `key` on its GPU; its kernels are compiled, or read from the plan store."""
        start = time.perf_counter()
        plan = KernelPlan(key, self.program(key))
        plan.build_seconds = time.perf_counter() - start
        return plan

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        """Compiles the kernels of a plan for the GPU of its key, which need not be present, into a store.

        Returns whether any was compiled.
        """
        compiled = [call.kernel.compile_into(store, key.target.sm) for call in self.program(key).calls]
        return any(compiled)

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        """Whether a store has the kernels of a plan."""
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
        self._slots = [(program.places[x.name], slot, x.role is Role.SCALAR) for slot, x in enumerate(operands)]
        self._scratch = [(program.places[name], shape) for name, shape in program.scratch.items()]

    def launch(self, pointers: Sequence[int]) -> None:
        """See `Plan.launch`."""
        fields, scratch = self._fields[:], []  # of this call alone: many threads call at once
        for place, slot, is_number in self._slots:
            address = int(pointers[slot])
            fields[place] = ctypes.c_uint32.from_address(address).value if is_number else address
        for place, shape in self._scratch:
            scratch.append(allocate((math.prod(shape),), (1,), torch.float32))
            fields[place] = scratch[-1].data_ptr()
        stream = current_raw_stream(self.device)
        for kernel, blocks, threads in self._kernels:
            kernel.launch(blocks, threads, fields, stream)
