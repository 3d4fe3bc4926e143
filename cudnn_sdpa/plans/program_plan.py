"""Plans of kernels that are not cuDNN's: what their operations and their launches have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.backend import BuiltGraph, GraphBuilder
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.store import PlanStore


class Program(Protocol):
    """The kernels of a plan, as `explain` shows them."""

    @property
    def engine(self) -> str: ...

    @property
    def knobs(self) -> Mapping[str, int]: ...

    @property
    def workspace(self) -> int: ...


class ProgramOp(GraphDefinition):
    """An operation whose plans are programs of kernels that are not cuDNN's.

    `program` makes the program of a key, and depends on nothing else.
    """

    def __init__(self, program: Callable[[PlanKey], Program]) -> None:
        self.__doc__ = program.__doc__
        self.program = program
        self.channels_last = False
        self.name = f"{program.__module__}:{program.__qualname__}"

    def compile(self, key: PlanKey, g: GraphBuilder) -> BuiltGraph:
        raise AssertionError("cuDNN compiles no kernels of others")

    def plan(self, key: PlanKey) -> Plan:
        """The plan of a key, compiled if need be; known bugs of its kernels are refused."""
        known_issues.check(key)
        start = time.perf_counter()
        plan = self.made(key)
        plan.build_seconds = time.perf_counter() - start
        return plan

    def made(self, key: PlanKey) -> Plan:
        raise NotImplementedError

    def is_compiled(self, key: PlanKey) -> bool:
        """Whether a plan takes no compilation, and so less than a millisecond."""
        return False

    def compile_into(self, store: PlanStore, key: PlanKey) -> bool:
        """Compiles what a key needs into a store, without its GPU; returns whether any of it was missing there."""
        raise NotImplementedError

    def ready(
        self, key: PlanKey, *, of_cudnn: Callable[[Target, int | None], PlanKey], has_plan: Callable[[PlanKey], bool]
    ) -> PlanKey:
        """This key; or that of cuDNN's plan, while what this one needs is still compiled: see `dense.specs.ready`."""
        return key

    def is_in(self, store: PlanStore, key: PlanKey) -> bool:
        raise NotImplementedError


class ProgramPlan(Plan):
    """A plan of a program. It has no slots, so that it can be watched as it is freed."""

    can_be_recorded = False

    def __init__(self, key: PlanKey, program: Program) -> None:
        if key.device is None:
            raise ValueError("launching a plan needs a device")
        self.key, self.device = key, key.device
        self.engine, self.knobs, self.workspace = program.engine, dict(program.knobs), program.workspace
        self.constants = {}
        self.build_seconds = 0.0
        self._start_counting()
        self.loaded = self.captured = self.held = self.tuned = False
        self.recorder = None

    @property
    def launched_by(self) -> str:
        return self.engine

    def native_form(self) -> dict[str, object]:
        """The program as the native module launches it; empty if Python does."""
        return {}
