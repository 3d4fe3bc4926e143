"""What cuDNN's heuristics propose for a graph: the first engine alone, or plans of all."""

from __future__ import annotations

from typing import Any, NamedTuple

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.backend import BuiltGraph, Configuration, GraphBuilder
from cudnn_sdpa.graph.definition import GraphOp
from cudnn_sdpa.graph.key import PlanKey


class Other(NamedTuple):
    """A configuration beside the first choice: its compiled graph, or the reason why it cannot be built."""

    configuration: Configuration
    built: BuiltGraph | str


class HeuristicsBuilder(GraphBuilder):
    """Asks which engine cuDNN proposes and compiles nothing, unless it must be deterministic: 2 ms in place of 500."""

    def _finish(self, index: int) -> BuiltGraph:
        if self._deterministic:
            self._graph.build_plans()
        return BuiltGraph(graph=self._graph, engine=self._configuration(index)[0], knobs={}, workspace=0)


class ModeABuilder(HeuristicsBuilder):
    """The same, without the engines that cuDNN has in reserve, which can be many times slower."""

    def _propose(self) -> None:
        self._graph.create_execution_plans([self.types.heur_mode.A])


class ProposalsBuilder(GraphBuilder):
    """Compiles nothing, and learns what cuDNN proposes.

    Attributes:
        proposals: Engines with their settings, best first; known when the graph is built.
    """

    proposals: tuple[Configuration, ...] = ()

    def _finish(self, index: int) -> BuiltGraph:
        rest = range(index, self._graph.get_execution_plan_count())
        found = [self._configuration(each) for each in rest if self._takes(each)]
        self.proposals = tuple(each for number, each in enumerate(found) if each not in found[:number])
        return BuiltGraph(graph=self._graph, engine=self.proposals[0][0], knobs={}, workspace=0)


class ConfigurationBuilder(GraphBuilder):
    """Builds the plan of one proposal and of no other.

    A graph of its own for each: what is serialized is then that plan, and its kernels can be let go with it.
    """

    def __init__(
        self, configuration: Configuration, *, handle: Any = None, properties: dict[str, Any] | None = None
    ) -> None:
        super().__init__(handle=handle, properties=properties)
        self._wanted = configuration

    def _takes(self, index: int) -> bool:
        return super()._takes(index) and self._configuration(index) == self._wanted


def build_others(operation: GraphOp, key: PlanKey, first: Configuration, most: int, **where: Any) -> list[Other]:
    """What cuDNN proposes behind `first`, in its order: compiled, or with the reason why cuDNN does not compile it.

    Args:
        operation: The operation.
        key: The key of its plan.
        first: The proposal that is built already. What cuDNN ranks before it could not be built.
        most: How many to build.
        **where: The handle or the properties that a `GraphBuilder` takes.
    """
    asked = ProposalsBuilder(**where)
    operation.compile(key, asked)
    proposals = list(asked.proposals)
    others = proposals[proposals.index(first) + 1 :] if first in proposals else proposals
    return [Other(each, _build(operation, key, ConfigurationBuilder(each, **where))) for each in others[:most]]


def _build(operation: GraphOp, key: PlanKey, builder: GraphBuilder) -> BuiltGraph | str:
    try:
        return operation.compile(key, builder)
    except UnsupportedError as error:
        return "; ".join(error.reasons)
