"""Result shapes declared by a user that differ from the graph's are refused when the plan is built."""

from __future__ import annotations

import json

import pytest

from cudnn_sdpa.offline import driver

pytestmark = pytest.mark.usefixtures("can_plan")

GRAPHS = """
import torch
from cudnn_sdpa import graph_op

def sized(*given, shape):
    empty = torch.empty(shape, dtype=given[0].dtype, device="meta")
    return empty.contiguous(memory_format=torch.channels_last) if empty.dim() == 4 else empty

@graph_op(outputs=sized)
def relu(g, a, *, shape):
    return g.relu(input=a)

@graph_op(outputs=sized)
def chain(g, a, b, *, shape):
    return g.mul(a=g.add(a=a, b=b), b=a)

@graph_op(outputs=sized)
def product(g, a, b, *, shape):
    return g.relu(input=g.matmul(A=a, B=b))

@graph_op(outputs=sized)
def conv(g, a, b, *, shape):
    return g.relu(input=g.conv_fprop(image=a, weight=b, padding=[1, 1], stride=[1, 1], dilation=[1, 1]))

@graph_op(outputs=sized)
def of_image(g, a, b, *, shape):
    return g.conv_dgrad(loss=a, filter=b, padding=[1, 1], stride=[2, 2], dilation=[1, 1])

@graph_op(outputs=sized)
def of_filters(g, a, b, *, shape):
    return g.conv_wgrad(image=b, loss=a, padding=[1, 1], stride=[1, 1], dilation=[1, 1])

@graph_op(outputs=lambda a, *, shapes: tuple(torch.empty(shape, dtype=a.dtype, device="meta") for shape in shapes))
def two(g, a, *, shapes):
    y = g.relu(input=a)
    return y, g.mul(a=y, b=y)
"""

#: The graph, the shapes of its operands, correct result shapes, then wrong ones.
CASES = {
    "pointwise": ("relu", [(2, 8, 64)], [(2, 8, 64)], [(2, 8, 32), (2, 64, 8), (4, 8, 64), (2, 8, 128), (2, 1, 64)]),
    "broadcast": ("chain", [(1, 8, 64), (1, 1, 64)], [(1, 8, 64)], [(1, 1, 64), (2, 8, 64), (1, 8, 1)]),
    "matmul": ("product", [(2, 8, 64), (2, 64, 16)], [(2, 8, 16)], [(2, 16, 8), (2, 8, 64)]),
    "convolution": ("conv", [(2, 8, 16, 16), (16, 8, 3, 3)], [(2, 16, 16, 16)], [(2, 16, 14, 14), (2, 8, 16, 16)]),
    "gradient by x": ("of_image", [(2, 16, 8, 8), (16, 8, 3, 3)], [(2, 8, 16, 16), (2, 8, 15, 15)], []),
    "gradient by weight": ("of_filters", [(2, 16, 8, 8), (2, 8, 8, 8)], [(16, 8, 3, 3)], []),
    "two results": ("two", [(1, 8, 64)], [((1, 8, 64),) * 2], [((1, 8, 64), (1, 8, 32))]),
}

SCRIPT = """
import json, sys, torch
import made_graphs
from cudnn_sdpa import ShapeError
from cudnn_sdpa.offline.worker import preload
from cudnn_sdpa.graph.heuristics import HeuristicsBuilder
from cudnn_sdpa.graph.target import Target, load_properties

preload()
properties = load_properties("h200")
name, shapes, results = json.loads(sys.argv[1])
function = getattr(made_graphs, name)
tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
tensors = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors]

def as_tuples(value):
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value

for result in results:
    option = {"shapes" if name == "two" else "shape": as_tuples(result)}
    key = function.describe(*tensors, **option).key(Target.from_properties(properties), None)
    try:
        print(function.compile(key, HeuristicsBuilder(properties=properties)).engine)
    except ShapeError as error:
        print(error)
"""


@pytest.fixture
def answers(run_python, tmp_path):
    (tmp_path / "made_graphs.py").write_text(GRAPHS)
    environment = {name: driver.helper_environment().get(name) for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")}
    return lambda *asked: run_python(SCRIPT, json.dumps(asked), **environment).stdout.splitlines()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_only_the_graphs_own_result_shapes_are_accepted(answers, name):
    graph, shapes, right, wrong = CASES[name]
    found = answers(graph, shapes, [*right, *wrong])
    assert len(found) == len(right) + len(wrong)
    for answer in found[: len(right)]:
        assert answer.startswith("eng")
    for answer, shape in zip(found[len(right) :], wrong, strict=True):
        last, given = (shape, right[0]) if graph != "two" else (shape[1], right[0][1])
        assert answer.startswith(f"result {int(graph == 'two')} of {graph}: got shape {last}; expected shape {given}")
        assert "outputs=" in answer
