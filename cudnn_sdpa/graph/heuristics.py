"""Queries cuDNN's heuristics for a graph: the first engine, or a plan of each candidate."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.backend import (
    BuiltGraph,
    DeviceOptions,
    EngineConfiguration,
    GraphBuilder,
)
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import PlanKey

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeuristicsBuilder(GraphBuilder):
    """Returns the proposed engine without compiling it, unless it must be deterministic: 2 ms instead of 500."""

    def _finish(self, index: int) -> BuiltGraph:
        if self._deterministic:
            self._graph.build_plans()
        return BuiltGraph(graph=self._graph, engine=self._configuration(index)[0], knobs={}, workspace=0)


class ModeABuilder(HeuristicsBuilder):
    """A `HeuristicsBuilder` without cuDNN's fallback engines, which can be many times slower."""

    def _propose(self) -> None:
        self._graph.create_execution_plans([self.types.heur_mode.A])


class ProposalsBuilder(GraphBuilder):
    """Lists cuDNN's proposals, best first, without compiling."""

    proposals: tuple[EngineConfiguration, ...] = ()

    def _finish(self, index: int) -> BuiltGraph:
        rest = range(index, self._graph.get_execution_plan_count())
        listed = [self._configuration(each) for each in rest if self._select(each)]
        self.proposals = tuple(each for number, each in enumerate(listed) if each not in listed[:number])
        return BuiltGraph(graph=self._graph, engine=self.proposals[0][0], knobs={}, workspace=0)


class ConfigurationBuilder(GraphBuilder):
    """Builds the plan of one proposal only.

    Each proposal gets its own graph, so that serialization yields that plan and its kernels can be freed with it.
    """

    def __init__(self, configuration: EngineConfiguration, **device_options: Unpack[DeviceOptions]) -> None:
        super().__init__(**device_options)
        self._only = configuration

    def _select(self, index: int) -> bool:
        return super()._select(index) and self._configuration(index) == self._only


def build_others(
    operation: GraphDefinition,
    key: PlanKey,
    first: EngineConfiguration,
    max_count: int,
    **device_options: Unpack[DeviceOptions],
) -> list[BuiltGraph]:
    """cuDNN's proposals after `first`, compiled, in order, without those that cannot be compiled.

    Proposals ranked before `first`, which is already built, could not be built.
    """
    builder = ProposalsBuilder(**device_options)
    operation.compile(key, builder)
    proposals = list(builder.proposals)
    others = proposals[proposals.index(first) + 1 :] if first in proposals else proposals
    built = []
    for configuration in others[:max_count]:
        with contextlib.suppress(UnsupportedError):
            built.append(operation.compile(key, ConfigurationBuilder(configuration, **device_options)))
    return built
