"""Plans of the library's own kernels: a key determines the kernels, their grids and their arguments.

Such plans are cached, recorded, explained and bound to calls like those of cuDNN.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans.nvrtc import HEADERS, Kernel
from cudnn_sdpa.plans.plan import Plan, allocate, current_raw_stream, side_by_side
from cudnn_sdpa.plans.program_plan import ProgramOp, ProgramPlan
from cudnn_sdpa.plans.store import PlanStore

#: The engine's name in `explain`.
ENGINE = "own kernels"


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its grid."""

    kernel: Kernel
    blocks: int
    threads: int


@dataclass(frozen=True)
class KernelProgram:
    """Kernels that a launch runs one after another, all with the same argument.

    The argument is a structure of 64-bit values: `fields`, with the address of each operand, output and scratch tensor,
    a scalar's bits, or the values of a host array, beginning at its index in `slots`. Scratch tensors are float32;
    `explain` shows the knobs.
    """

    calls: Sequence[KernelCall]
    fields: Sequence[int]
    slots: Mapping[str, int]
    scratch: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    knobs: Mapping[str, int] = field(default_factory=dict)

    engine: ClassVar[str] = ENGINE

    @property
    def workspace(self) -> int:
        return self._side_by_side[1]

    @property
    def scratch_places(self) -> list[tuple[int, int]]:
        """The field of each scratch tensor's address, and where the tensor begins in the workspace."""
        return [(self.slots[name], offset) for name, offset in zip(self.scratch, self._side_by_side[0], strict=True)]

    @property
    def _side_by_side(self) -> tuple[list[int], int]:
        return side_by_side(4 * math.prod(shape) for shape in self.scratch.values())


class KernelOp(ProgramOp):
    """An operation that own kernels compute. Its digest covers the sources in `folder`, and all headers."""

    provider = "own"
    program: Callable[[PlanKey], KernelProgram]

    def __init__(self, program: Callable[[PlanKey], KernelProgram], folder: Path) -> None:
        super().__init__(program)
        self._folder = folder

    @functools.cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(__version__.encode())
        for source in sorted({*self._folder.iterdir(), *HEADERS.iterdir()}):
            if source.suffix == ".cuh" or (source.parent == self._folder and source.suffix in (".cu", ".py")):
                digest.update(source.read_bytes())
        return digest.hexdigest()

    def made(self, key: PlanKey) -> Plan:
        return KernelPlan(key, self.program(key))

    def is_compiled(self, key: PlanKey) -> bool:
        device = key.device
        return device is not None and all(
            call.kernel.is_compiled(device, key.target.sm) for call in self.program(key).calls
        )

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        compiled = [call.kernel.compile_into(store, key.target.sm) for call in self.program(key).calls]
        return any(compiled)

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        return all(store.has(call.kernel.identity(key.target.sm)) for call in self.program(key).calls)


class KernelPlan(ProgramPlan):
    """A plan of own kernels. It has no slots, so that it can be watched as it is freed.

    CUDA graphs need no such plan: nothing unloads its kernels, and graphs have copies of their arguments.

    Attributes:
        kernels: The kernels, each with its blocks and its threads.
        fields: Their argument, as far as it is the same in all launches.
        places: For each pointer of a launch the index of its field, and the number of bytes that are copied to there
            from host memory; 0 if the field is the address itself.
        scratch_places: The index of the field of each scratch tensor, and where the tensor begins in the workspace.
    """

    def __init__(self, key: PlanKey, program: KernelProgram) -> None:
        super().__init__(key, program)
        with torch.cuda.device(self.device), relaxed_capture():
            self.kernels = [(x.kernel.on(self.device), x.blocks, x.threads) for x in program.calls]
        self.fields = array("q", program.fields)
        self.places = [(program.slots[x.name], _bytes_in_host_memory(x)) for x in (*key.inputs, *key.outputs)]
        self.scratch_places = program.scratch_places
        if any(index + max(1, size // 8) > len(self.fields) for index, size in self.places):
            raise ValueError(f"{key.name}: {len(self.fields)} fields, and an operand beyond them")

    def launch(self, pointers: Sequence[int]) -> None:
        fields = self.fields[:]  # local to this call: many threads launch a plan at once
        for (index, size), pointer in zip(self.places, pointers, strict=True):
            fields[index] = 0 if size else pointer
            if size:
                ctypes.memmove(fields.buffer_info()[0] + 8 * index, pointer, size)
        if self.workspace:
            scratch = allocate((self.workspace // 4,), (1,), torch.float32)
            for index, offset in self.scratch_places:
                fields[index] = scratch.data_ptr() + offset
        stream = current_raw_stream(self.device)
        for kernel, blocks, threads in self.kernels:
            kernel.launch(blocks, threads, fields, stream)


def _bytes_in_host_memory(operand: Operand) -> int:
    """How many bytes of host memory a launch reads of an operand."""
    layout, is_there = operand.layout, operand.role in (Role.SCALAR, Role.HOST)
    return math.prod(layout.shape) * layout.dtype.itemsize if is_there else 0
