"""cuDNN plans for each GPU that the package describes."""

from __future__ import annotations

import base64
import itertools
import re

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target, bundled_targets, load_properties
from cudnn_sdpa.offline.planner import plan_offline
from cudnn_sdpa.planning.support import descriptions

pytestmark = pytest.mark.usefixtures("can_plan")

NAMES = list(bundled_targets())
DIRECTIONS = ("forward", "backward")


def key_of(direction, target, head_dim=128):
    """The key of a plain causal call in bfloat16, or that of its gradients."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "sq": 1024, "skv": 1024}
    found = descriptions("sdpa", direction, torch.bfloat16, **sizes, options={"is_causal": True})[-1]
    key = found.key(target, None)
    known_issues.check(key)
    return key


@pytest.fixture(scope="module")
def made(can_plan):  # noqa: ARG001 - skips first
    """Plans by GPU and direction, each made once."""
    plans = {}

    def plan(name, direction):
        if (name, direction) not in plans:
            properties = load_properties(name)
            try:
                key = key_of(direction, Target.from_properties(properties))
            except UnsupportedError as refused:
                pytest.skip(str(refused))
            plans[name, direction] = plan_offline(key, properties)
        return plans[name, direction]

    return plan


def kernels(plan):
    """The machine code in a plan. The rest contains addresses and differs between builds."""
    return tuple(base64.b64decode(text) for text in re.findall(rb'"cubin":"([^"]+)"', plan.data))


def compute_capability(kernel):
    """The compute capability in the flags of the ELF header; their position depends on the format's version."""
    assert kernel.startswith(b"\x7fELF")
    flags, version = kernel[48:52], kernel[8]
    return flags[1] if version >= 8 else flags[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_call_compiles_for_the_gpu(made, name, direction):
    properties, plan = load_properties(name), made(name, direction)
    assert re.fullmatch(r"eng\d+", plan.engine)
    assert plan.knobs
    assert plan.workspace >= 0
    assert {compute_capability(kernel) for kernel in kernels(plan)} == {Target.from_properties(properties).sm}
    for key in ("multiProcessorCount", "maxSharedMemoryPerBlockOptin", "l2CacheSize"):
        assert f'"{key}":{properties[key]}'.encode() in plan.data


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpus_of_different_compute_capability_get_different_kernels(made, direction):
    capabilities = {name: load_properties(name)["deviceVer"] for name in NAMES}
    code = {name: kernels(made(name, direction)) for name in NAMES}
    for one, other in itertools.combinations(
        NAMES, 2
    ):  # the plan of a plain call does not depend on the number of multiprocessors
        assert (code[one] == code[other]) == (capabilities[one] == capabilities[other]), (one, other)
