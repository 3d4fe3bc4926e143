"""All candidates that cuDNN proposes for a graph: each compiles, is stored, and is loaded as itself."""

from __future__ import annotations

import json

import pytest

from cudnn_sdpa.offline import driver

pytestmark = pytest.mark.usefixtures("can_plan")

#: Runs in a separate process, where cuDNN plans for a GPU that is not in the machine.
SCRIPT = """
import json, re, sys, torch
import cudnn_sdpa
from cudnn_sdpa.fused.activation_graphs import silu_mul_rows
from cudnn_sdpa.attention.dense.explain import describe_sdpa
from cudnn_sdpa.fused.conv_graphs import channels_last, convolution
from cudnn_sdpa.fused.norm_graphs import rms_norm_rows
from cudnn_sdpa.offline.worker import preload
from cudnn_sdpa.graph import backend, heuristics
from cudnn_sdpa.graph.target import Target, load_properties

preload()
properties = load_properties("h200")
target = Target.from_properties(properties)
name, *about = json.loads(sys.argv[1])

def bare(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

def descriptions():
    if name == "silu_mul":
        return [silu_mul_rows.describe(bare(4096, 32, 32), bare(4096, 32, 32))]
    if name == "rms_norm":
        rows, weight = bare(512, 1024), bare(1024)
        return [rms_norm_rows.describe(rows, weight, 1e-6, trains=False, activation=None)]
    if name == "conv2d":
        sizes = {which: (1, 1) for which in ("stride", "padding", "dilation")}
        x, weight = channels_last(bare(2, 64, 32, 32)), channels_last(bare(64, 64, 3, 3))
        return [convolution.describe(x, weight, bare(64), **sizes, groups=1, activation="silu")]
    dim, options = about
    q, k, v = (bare(2, 8, 256, dim).requires_grad_() for _ in range(3))
    forward = describe_sdpa(q, k, v, **options)
    return [forward, forward.backward]

def recorded(data):
    # The engine and its settings in cuDNN's own words, which are JSON within the file.
    found = re.search(rb'"engine":{"engineId":(\\d+),.*?"knobChoices":({.*?})', data)
    return int(found[1]), json.loads(found[2])

def configuration(built):
    return built.engine, built.knobs

def describe(built):
    data = built.serialize()
    loaded = backend.cudnn().pygraph(device_property=backend.cudnn().create_device_properties(json.dumps(properties)))
    loaded.deserialize(list(data))
    return {
        "built": configuration(built),
        "kept": recorded(data),
        "loaded": recorded(bytes(loaded.serialize())),
        "workspaces": (built.workspace, int(loaded.get_workspace_size())),
    }

answers = []
for description in descriptions():
    with cudnn_sdpa.providers("cudnn"):  # whose candidates are asked for
        key, operation = description.key(target, None), description.operation
    first = operation.compile(key, backend.GraphBuilder(properties=properties))
    asked = heuristics.ProposalsBuilder(properties=properties)
    operation.compile(key, asked)
    others = heuristics.build_others(operation, key, configuration(first), len(asked.proposals), properties=properties)
    fewer = heuristics.build_others(operation, key, configuration(first), 1, properties=properties)
    assert [configuration(each) for each in fewer] == [configuration(each) for each in others][:1]
    built = [configuration(each) for each in (first, *others)]
    assert [each for each in asked.proposals if each in built] == built
    answers.append([describe(each) for each in (first, *others)])
print(json.dumps(answers))
"""

CASES = {
    "causal": ("attention", 64, {"is_causal": True}),
    "deterministic": ("attention", 64, {"deterministic": True}),
    "head dim 128": ("attention", 128, {}),
    "silu_mul": ("silu_mul",),
    "rms_norm": ("rms_norm",),
    "conv2d": ("conv2d",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_stored_and_loaded_as_itself(run_python, name):
    environment = {name: driver.helper_environment().get(name) for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")}
    result = run_python(SCRIPT, json.dumps(CASES[name]), **environment)
    for plans in json.loads(result.stdout.splitlines()[-1]):
        assert len(plans) > 1
        assert len({json.dumps(plan["built"], sort_keys=True) for plan in plans}) == len(plans)
        for plan in plans:
            engine, settings = plan["built"]
            assert plan["workspaces"][0] == plan["workspaces"][1]
            for number, choices in (plan["kept"], plan["loaded"]):
                assert f"eng{number}" == engine
                assert {knob: choices[f"CUDNN_KNOB_TYPE_{knob}"] for knob in settings} == settings
