"""Convolutions whose bias and activation are a kernel of their own, where `autotune` finds that faster."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from support import poison

from cudnn_sdpa import autotune, conv1d, conv2d, conv3d, no_plan_builds, plan_cache, use_plan_store
from cudnn_sdpa.conv_graphs import ACTIVATIONS, channels_last, finished
from cudnn_sdpa.runtime import trials

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 2e-3}

#: Shapes of x and of the filters, and sizes: parts of tiles, channels that no vector divides, many numbers.
CASES = {
    "3x3": ((2, 32, 20, 24), (64, 32, 3, 3), {"padding": 1}),
    "one picture": ((1, 8, 7, 5), (24, 8, 3, 3), {}),
    "odd channels": ((3, 8, 13, 11), (37, 8, 3, 3), {"padding": 1}),
    "large": ((4, 320, 96, 96), (320, 320, 3, 3), {"padding": 1}),
    "wide": ((2, 64, 31, 257), (328, 64, 1, 1), {}),
    "steps": ((3, 16, 33, 29), (24, 16, 3, 5), {"stride": (2, 1), "padding": (1, 4), "dilation": (1, 2)}),
    "groups": ((2, 64, 16, 16), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
}


def second(outcomes):
    """In place of `trials.fastest`: the two kernels, which come behind cuDNN's first choice."""
    assert not outcomes[1].reason
    return 1


@pytest.fixture
def in_two(monkeypatch):
    monkeypatch.setattr(trials, "fastest", second)


def inputs(of_x, of_weight, dtype):
    x = channels_last(torch.randn(of_x, device="cuda", dtype=dtype))
    weight = torch.randn(of_weight, device="cuda") * math.prod(of_weight[1:]) ** -0.5
    return x, channels_last(weight.to(dtype)), torch.randn(of_weight[0], device="cuda", dtype=dtype)


def difference(found, wanted):
    assert found.isfinite().all()
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.usefixtures("in_two")
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name, dtype, activation):
    """As in float64; and the same bits as where the second kernel writes elsewhere, in each of many launches."""
    of_x, of_weight, sizes = CASES[name]
    x, weight, bias = inputs(of_x, of_weight, dtype)
    with autotune() as report:
        out = conv2d(x, weight, bias, **sizes, activation=activation)
    (entry,) = report.entries
    assert "+" in entry.candidates[entry.winner].engine, str(entry)
    elsewhere = finished(conv2d(x, weight, **sizes), bias.view(1, -1, 1, 1), activation=activation)
    for _ in range(10):
        wanted = ACTIVATIONS[activation](F.conv2d(x.double(), weight.double(), bias.double(), **sizes))
        assert difference(out, wanted) < TOLERANCE[dtype]
        assert torch.equal(out, elsewhere)
        poison(tuple(out.shape), dtype=dtype)
        out = conv2d(x, weight, bias, **sizes, activation=activation)
    x, weight, bias = inputs(of_x, of_weight, dtype)
    wanted = ACTIVATIONS[activation](F.conv2d(x.double(), weight.double(), bias.double(), **sizes))
    assert difference(conv2d(x, weight, bias, **sizes, activation=activation), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CASES)
def test_no_plan_of_the_two_is_wrong(name):
    of_x, of_weight, sizes = CASES[name]
    x, weight, bias = inputs(of_x, of_weight, torch.bfloat16)
    with autotune(candidates=48) as report:
        conv2d(x, weight, bias, **sizes, activation="silu")
    (entry,) = report.entries
    found = [each for each in entry.candidates if "+" in each.engine]
    assert found
    assert [each.reason for each in found] == [""] * len(found), str(entry)


@pytest.mark.usefixtures("in_two")
def test_other_ranks_and_a_missing_bias():
    x = torch.randn(2, 50, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    weight = (torch.randn(64, 3, 32, device="cuda") * 0.1).bfloat16().transpose(1, 2)
    volume = channels_last(torch.randn(1, 16, 6, 10, 12, device="cuda", dtype=torch.bfloat16))
    filters = channels_last((torch.randn(32, 16, 3, 3, 3, device="cuda") * 0.05).bfloat16())
    for _ in range(2):
        with autotune():
            line = conv1d(x, weight, padding=1, activation="gelu")
            solid = conv3d(volume, filters, padding=1, activation="relu")
        assert difference(line, F.gelu(F.conv1d(x.double(), weight.double(), padding=1))) < 1e-2
        assert difference(solid, F.relu(F.conv3d(volume.double(), filters.double(), padding=1))) < 1e-2
    assert all("+" in plan.engine for plan in plan_cache.plans())


@pytest.mark.usefixtures("in_two")
def test_the_two_are_loaded_captured_and_launched_by_threads(tmp_path):
    x, weight, bias = inputs((4, 64, 24, 24), (96, 64, 3, 3), torch.bfloat16)

    def call():
        return conv2d(x, weight, bias, padding=1, activation="silu")

    def wanted():
        return F.silu(F.conv2d(x.double(), weight.double(), bias.double(), padding=1))

    with use_plan_store(tmp_path / "plans") as store:
        with autotune():
            call()
        (plan,) = plan_cache.plans()
        found = plan.engine, plan.knobs, plan.workspace
        plan_cache.clear()
        with no_plan_builds():
            assert difference(call(), wanted()) < 1e-2
        (plan,) = plan_cache.plans()
        assert (plan.engine, plan.knobs, plan.workspace) == found
        assert (plan.loaded, plan.tuned, store.info().rejected) == (True, True, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        for tensor in (x, weight, bias):
            tensor.normal_().mul_(0.1)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert difference(out, wanted()) < 1e-2
    exact, errors = wanted(), []
    torch.cuda.synchronize()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [call() for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            errors.append(max(difference(each, exact) for each in outs))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert max(errors) < 1e-2
