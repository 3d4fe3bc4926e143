"""Plans of several graphs that are launched one after the other."""

from __future__ import annotations

import ctypes
import json
from array import array

import pytest
import torch
import torch.nn.functional as F
from stand_in_engines import TARGET

from cudnn_sdpa.conv_graphs import ACTIVATIONS, channels_last, convolution, finished
from cudnn_sdpa.runtime import backend, steps
from cudnn_sdpa.runtime.backend import BuiltGraph
from cudnn_sdpa.runtime.steps import GraphsInTurn
from cudnn_sdpa.runtime.tuning import AutotuneCandidate


class Graph(BuiltGraph):
    """One whose launches are noted."""

    def serialize(self):
        return self.graph

    def launcher(self, uids):
        def launch(operands, count, *rest):
            assert count == len(uids)
            launched.append((self.engine, list((ctypes.c_uint64 * count).from_address(operands)), uids, *rest))

        return launch


launched = []


@pytest.fixture
def in_turn():
    launched.clear()
    first = Graph(b"one\nplan", "eng62", {"TILE": 4, "SPLIT": 1}, 512)
    second = Graph(b"{another}", "eng1", {"TILE": 7}, 0)
    return GraphsInTurn.of([first, second], [(0, 1, 3), (3, 2, 3)])


def test_each_gets_its_own_operands(in_turn):
    launch = in_turn.launcher([1, 2, 3, 4])
    operands = array("Q", [100, 200, 300, 400])
    launch(operands.buffer_info()[0], 4, 99, 7, -1)
    assert launched == [
        ("eng62", [100, 200, 400], [1, 2, 3], 99, 7, -1),
        ("eng1", [400, 300, 400], [1, 2, 3], 99, 7, -1),
    ]


def test_its_name_says_all_engines_and_settings(in_turn):
    assert (in_turn.engine, in_turn.workspace) == ("eng62+eng1", 512)
    assert in_turn.knobs == {"TILE": 4, "SPLIT": 1, "2.TILE": 7}
    assert str(AutotuneCandidate(in_turn.engine, in_turn.knobs)) == "eng62+eng1 TILE=4 SPLIT=1 2.TILE=7"


def test_it_is_loaded_as_it_was_kept(in_turn, monkeypatch):
    workspaces = iter([512, 0])
    monkeypatch.setattr(
        backend, "load_graph", lambda _, data, engine, knobs: Graph(data, engine, knobs, next(workspaces))
    )
    loaded = steps.load_graph("handle", in_turn.serialize(), in_turn.engine, in_turn.knobs)
    assert (loaded.engine, loaded.knobs, loaded.workspace) == (in_turn.engine, in_turn.knobs, 512)
    assert [(graph.graph, graph.engine, places) for graph, places in loaded.graph] == [
        (b"one\nplan", "eng62", (0, 1, 3)),
        (b"{another}", "eng1", (3, 2, 3)),
    ]


def test_a_single_graph_is_loaded_as_before(monkeypatch):
    monkeypatch.setattr(backend, "load_graph", lambda *given: given)
    assert steps.load_graph("handle", b"data", "eng4", {"TILE": 1}) == ("handle", b"data", "eng4", {"TILE": 1})


DAMAGES = [
    *(lambda data: data[3:], lambda data: b"[]\n" + data, lambda _: b"", lambda _: b"eng", lambda data: data[:-1]),
    *(lambda data: data + b"x", lambda data: data.replace(b"8", b"-8"), lambda data: data.replace(b"0, 1", b'"a", 1')),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_whole_is_not_loaded(in_turn, monkeypatch, damage):
    monkeypatch.setattr(backend, "load_graph", lambda _, data, engine, knobs: Graph(data, engine, knobs, 0))
    with pytest.raises(ValueError, match=r"."):
        steps.load_graph("handle", damage(in_turn.serialize()), in_turn.engine, in_turn.knobs)


CASES = {
    "all": (2, True, "silu"),
    "without a bias": (2, False, "gelu"),
    "without an activation": (2, True, None),
    "in three dimensions": (3, True, "relu"),
    "nothing to do": (2, False, None),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_in_two_steps(name, deterministic):
    """What the two compute together is what the one does; their keys go with its key."""
    rank, with_bias, activation = CASES[name]
    x, weight = torch.randn(2, 6, *(9,) * rank), torch.randn(8, 3, *(3,) * rank)
    x, weight = channels_last(x), channels_last(weight)
    bias = torch.randn(1, 8, *(1,) * rank) if with_bias else None
    sizes = {"stride": (2,) * rank, "padding": (1,) * rank, "dilation": (1,) * rank}
    description = convolution.describe(
        *(None if t is None else t.to("meta") for t in (x, weight, bias)), **sizes, activation=activation
    )
    key = description.key(TARGET, 0)
    key = convolution.key(key.inputs, key.outputs, key.option_values, TARGET, 0, deterministic=deterministic)
    found = convolution.steps(key)
    if not with_bias and activation is None:
        assert found == ()
        return
    given = [part for part in (x, weight, bias) if part is not None]
    memory = [*given, torch.full(key.outputs[0].layout.shape, float("nan"))]
    for step in found:
        assert (step.key.deterministic, step.key.target, step.key.device) == (deterministic, TARGET, 0)
        operands = (*step.key.inputs, *step.key.outputs)
        assert [each.layout for each in operands] == [
            (*key.inputs, *key.outputs)[place].layout for place in step.places
        ]
        *inputs, output = (memory[place] for place in step.places)
        memory[step.places[-1]] = step.operation.reference(*inputs, **step.key.option_values)
        assert output.shape == memory[step.places[-1]].shape
    assert [step.operation for step in found] == [convolution, finished]
    convolve = F.conv2d if rank == 2 else F.conv3d
    flat = None if bias is None else bias.flatten()
    expected = ACTIVATIONS[activation](convolve(x, weight, flat, *sizes.values(), groups=2))
    torch.testing.assert_close(memory[-1], expected, atol=1e-5, rtol=1e-5)


def test_in_float16_a_convolution_is_left_in_one():
    """What is between two might be infinite, and SiLU of that no number."""
    x, weight, bias = (
        torch.empty(s, dtype=torch.float16, device="meta") for s in ((2, 8, 9, 9), (8, 8, 3, 3), (1, 8, 1, 1))
    )
    sizes = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    described = convolution.describe(channels_last(x), channels_last(weight), bias, **sizes, activation="silu")
    assert convolution.steps(described.key(TARGET, 0)) == ()


def test_the_contents_are_told_in_one_line(in_turn):
    line, _, rest = in_turn.serialize().partition(b"\n")
    assert json.loads(line) == [{"size": 8, "places": [0, 1, 3]}, {"size": 9, "places": [3, 2, 3]}]
    assert rest == b"one\nplan{another}"
