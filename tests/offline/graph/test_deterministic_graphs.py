"""Under determinism, graphs get engines that cuDNN does not mark as nondeterministic, or none."""

from __future__ import annotations

import json

import pytest

from cudnn_sdpa.offline import driver

pytestmark = pytest.mark.usefixtures("can_plan")

#: Runs in a separate process, where cuDNN plans for a GPU that is not in the machine.
SCRIPT = """
import json, sys, torch
from dataclasses import replace
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.fused.conv_graphs import channels_last, conv_wgrad, conv_dgrad
from cudnn_sdpa.offline.worker import preload
from cudnn_sdpa.graph import backend, heuristics
from cudnn_sdpa.graph.target import Target, load_properties

preload()
gpu, which = sys.argv[1:]
properties = load_properties(gpu)
image, filters, loss = (
    channels_last(torch.empty(shape, device="meta")) for shape in ((8, 3, 32, 32), (32, 3, 3, 3), (8, 32, 32, 32))
)
function, operand, shape = {
    "grad_x": (conv_dgrad, filters, image.shape[1:]), "grad_weight": (conv_wgrad, image, filters.shape)
}[which]
sizes = {name: (value, value) for name, value in (("stride", 1), ("padding", 1), ("dilation", 1))}
key = function.describe(loss, operand, shape=tuple(shape), **sizes).key(Target.from_properties(properties), None)
exactly = replace(key, deterministic=True)


class Noted(heuristics.ConfigurationBuilder):
    # Takes nothing but what has the note.
    def build(self, what):
        self._deterministic = True
        self._graph.deselect_numeric_notes = self._graph.select_numeric_notes
        return super().build(what)


def has_note(configuration):
    try:
        function.compile(key, Noted(configuration, properties=properties))
    except UnsupportedError as error:
        assert any("nondeterministic" in reason for reason in error.reasons), error
        return False
    return True


usual, one = (function.compile(each, backend.GraphBuilder(properties=properties)) for each in (key, exactly))
first = (one.engine, one.knobs)
asked = heuristics.ProposalsBuilder(properties=properties)
function.compile(key, asked)
others = heuristics.build_others(function, exactly, first, 99, properties=properties)
print(json.dumps({
    "noted": [configuration for configuration in asked.proposals if has_note(configuration)],
    "usual": [usual.engine, usual.knobs],
    "one": first,
    "guessed": function.compile(exactly, heuristics.HeuristicsBuilder(properties=properties)).engine,
    "others": [(other.engine, other.knobs) for other in others],
}))
"""


@pytest.fixture
def ask(run_python):
    environment = {name: driver.helper_environment().get(name) for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")}
    return lambda code, *arguments: run_python(code, *arguments, **environment).stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("which", ["grad_x", "grad_weight"])
def test_gradients_of_convolutions(ask, gpu, which):
    found = json.loads(ask(SCRIPT, gpu, which))
    assert found["noted"]  # otherwise the test proves nothing
    assert found["one"] not in found["noted"]
    assert found["guessed"] == found["one"][0]
    assert found["others"]
    assert not [configuration for configuration in found["others"] if configuration in found["noted"]]
    if which == "grad_x":
        assert found["usual"] in found["noted"]


REFUSED = """
import torch
from dataclasses import replace
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.fused.norm_graphs import rms_norm_gradients
from cudnn_sdpa.offline.worker import preload
from cudnn_sdpa.graph import backend, heuristics
from cudnn_sdpa.graph.target import Target, load_properties

preload()
graph = backend.cudnn().pygraph
graph.deselect_numeric_notes = graph.select_numeric_notes  # as if all engines had the note
properties = load_properties("h200")
x, weight, scale = (torch.empty(*size, 1, 1, n, device="meta") for size, n in (((64,), 256), ((1,), 256), ((64,), 1)))
key = rms_norm_gradients.describe(x, x, weight, scale).key(Target.from_properties(properties), None)
answers = []
for builder in (backend.GraphBuilder, heuristics.HeuristicsBuilder):
    assert rms_norm_gradients.compile(key, builder(properties=properties)).engine.startswith("eng")
    try:
        rms_norm_gradients.compile(replace(key, deterministic=True), builder(properties=properties))
    except UnsupportedError as error:
        answers.append("; ".join(error.reasons).replace("\\n", " "))
print(answers)
"""


@pytest.mark.slow
def test_a_graph_without_such_an_engine_is_refused(ask):
    answers = ask(REFUSED)
    assert answers.count("it as nondeterministic, and deterministic kernels were requested") == 2
