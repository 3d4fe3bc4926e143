"""What cuDNN's heuristics propose for a graph, and what they do not: the first engine alone, or plans of all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.backend import BuiltGraph, Configuration, GraphBuilder
from cudnn_sdpa.runtime.graph_op import GraphOp
from cudnn_sdpa.runtime.key import PlanKey


class Other(NamedTuple):
    """A configuration beside the first choice: its compiled graph, or the reason why it cannot be built."""

    configuration: Configuration
    built: BuiltGraph | str
    proposed: bool = True


class HeuristicsBuilder(GraphBuilder):
    """Asks which engine cuDNN proposes and compiles nothing, unless it must be deterministic: 2 ms in place of 500."""

    def _finish(self, index: int) -> BuiltGraph:
        if self._deterministic:
            self._graph.build_plans()
        return BuiltGraph(graph=self._graph, engine=self._configuration(index)[0], knobs={}, workspace=0)


class GuessesBuilder(HeuristicsBuilder):
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

    def unproposed(self) -> list[Configuration]:
        """The engines that are proposed, in turn, with settings that are in no proposal; after the graph is built.

        None for attention, whose results depend on data in ways that one launch does not show.
        """
        if self.has_attention:
            return []
        best: dict[str, dict[str, int]] = {}
        for engine, knobs in self.proposals:
            best.setdefault(engine, knobs)
        in_turn = chain.from_iterable(zip_longest(*(self._neighbors(*each) for each in best.items())))
        return [each for each in in_turn if each is not None and each not in self.proposals]

    def _neighbors(self, engine: str, knobs: dict[str, int]) -> Iterator[Configuration]:
        """What differs from an engine's best proposal in one setting; first the settings that have few values."""
        try:
            known = self._graph.get_knobs_for_engine(int(engine.removeprefix("eng")))
        except Exception:  # noqa: BLE001 - of some engines cuDNN does not say what can be set
            return
        values = {str(knob.type.name): range(knob.min_value, knob.max_value + 1, max(1, knob.stride)) for knob in known}
        for name in sorted(values, key=lambda name: len(values[name])):
            for value in values[name]:
                if value != knobs.get(name):
                    yield engine, {**knobs, name: value}


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


class UnproposedBuilder(GraphBuilder):
    """Builds the plan of a configuration whether or not cuDNN proposes it."""

    def __init__(self, configuration: Configuration, **where: Any) -> None:
        super().__init__(**where)
        self._engine, self._knobs = configuration

    def _propose(self) -> None:
        knobs = {getattr(self.types.knob_type, name): value for name, value in self._knobs.items()}
        self._graph.create_execution_plan(int(self._engine.removeprefix("eng")), knobs)


def build_others(
    operation: GraphOp, key: PlanKey, first: Configuration, most: int, *, unproposed: bool = False, **where: Any
) -> list[Other]:
    """What there is beside `first`: compiled, or with the reason why cuDNN does not compile what it proposes.

    In this order: the operation in steps, if it knows any; what cuDNN proposes behind `first`, in its order; other
    plans of the steps.

    Args:
        operation: The operation.
        key: The key of its plan.
        first: The proposal that is built already. What cuDNN ranks before it could not be built.
        most: How many to build.
        unproposed: Whether to build what cuDNN does not propose, too, where it proposes fewer.
        **where: The handle or the properties that a `GraphBuilder` takes.
    """
    asked = ProposalsBuilder(**where)
    operation.compile(key, asked)
    proposals = list(asked.proposals)
    others = proposals[proposals.index(first) + 1 :] if first in proposals else proposals
    proposed = (Other(each, _build(operation, key, ConfigurationBuilder(each, **where))) for each in others)
    beyond = _unproposed(operation, key, asked, where) if unproposed else iter(())
    return list(islice(chain(proposed, beyond), most))


def _unproposed(operation: GraphOp, key: PlanKey, asked: ProposalsBuilder, where: dict[str, Any]) -> Iterator[Other]:
    for other in asked.unproposed():
        plan = _build(operation, key, UnproposedBuilder(other, **where))
        if not isinstance(plan, str):  # most settings do not go together, which is no news
            yield Other(other, plan, proposed=False)


def _build(operation: GraphOp, key: PlanKey, builder: GraphBuilder) -> BuiltGraph | str:
    try:
        return operation.compile(key, builder)
    except UnsupportedError as error:
        return "; ".join(error.reasons)
