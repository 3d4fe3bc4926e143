"""A plan of several graphs that run one after the other, each on what the one before has written.

Where an operation has operations in it that cuDNN's fastest engine does not take, two kernels can be faster than one.
cuDNN compiles graphs, so each step is one; together they are launched, stored and loaded like a single graph's plan.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from array import array
from collections.abc import Sequence
from typing import Any

from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.backend import BuiltGraph, Launch

#: Between the engines of a plan in steps, in its name.
THEN = "+"


class GraphsInTurn(BuiltGraph):
    """Graphs with compiled plans that are launched one after the other; `graph` has them, with their places."""

    @classmethod
    def of(cls, graphs: Sequence[BuiltGraph], steps: Sequence[Sequence[int]]) -> GraphsInTurn:
        """Graphs, and for each the places of its operands."""
        knobs = dict(graphs[0].knobs)
        for number, graph in enumerate(graphs[1:], start=2):
            knobs |= {f"{number}.{name}": value for name, value in graph.knobs.items()}
        engines = THEN.join(graph.engine for graph in graphs)
        pairs = [(graph, tuple(places)) for graph, places in zip(graphs, steps, strict=True)]
        return cls(pairs, engines, knobs, max(graph.workspace for graph in graphs))

    def serialize(self) -> bytes:
        """A line of JSON that says what follows, and the compiled plans in cuDNN's own format."""
        parts = [graph.serialize() for graph, _ in self.graph]
        contents = [{"size": len(part), "places": places} for part, (_, places) in zip(parts, self.graph, strict=True)]
        return b"".join([json.dumps(contents).encode(), b"\n", *parts])

    def launcher(self, uids: list[int]) -> Launch:
        """What launches all of them; each has its operands' UIDs in order."""
        del uids
        steps = [(graph.launcher(list(range(1, 1 + len(places)))), places) for graph, places in self.graph]

        def launch(operands: int, count: int, workspace: int, handle: int, index: int) -> None:
            pointers = (ctypes.c_uint64 * count).from_address(operands)
            for run, places in steps:
                own = array("Q", [pointers[place] for place in places])
                run(own.buffer_info()[0], len(own), workspace, handle, index)

        return launch


def load_graph(handle: Any, data: bytes, engine: str, knobs: dict[str, int]) -> BuiltGraph:
    """A graph, or graphs in turn, with the plan that `serialize` gave: nothing is planned or compiled.

    Raises:
        Exception: Whatever is wrong with the bytes, or cuDNN says of them.
    """
    if THEN not in engine:
        return backend.load_graph(handle, data, engine, knobs)
    line, _, rest = data.partition(b"\n")
    contents = json.loads(line)
    sizes, steps = [part["size"] for part in contents], [part["places"] for part in contents]
    numbers = [*sizes, *itertools.chain.from_iterable(steps)]
    if any(type(each) is not int or each < 0 for each in numbers) or sum(sizes) != len(rest):
        raise ValueError("its parts are not what its first line says")
    ends = itertools.accumulate(sizes, initial=0)
    parts = [rest[begin:end] for begin, end in itertools.pairwise(ends)]
    graphs = [backend.load_graph(handle, *each, {}) for each in zip(parts, engine.split(THEN), strict=True)]
    found = GraphsInTurn.of(graphs, steps)
    found.knobs = knobs
    return found
