"""How many of the package's files a call opens: those that a reader opens to follow it.

A plan of the fake GPU is built elsewhere: files that only cuDNN's planning needs are not counted.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from contract.operations import OPERATIONS
from fake_gpu import FakePlan, gpu_on_the_cpu
from native_way import native_way

import cudnn_sdpa

PACKAGE = f"{Path(cudnn_sdpa.__file__).parent}/"


def opened(run):
    """The files of the package whose functions are called, in the order of the calls."""
    found = []

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            found.append(path.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def moves(files):
    """How often a function of another file is called than before."""
    return sum(one != other for one, other in itertools.pairwise(files))


def counts(name, *, trains=False):
    """Files and moves of a call whose plan is missing, and of the fourth one like it; with gradients if it trains."""
    example = OPERATIONS[name]
    run = example.gradients if trains else example
    with (
        pytest.MonkeyPatch.context() as patch,
        native_way(on=False),
        gpu_on_the_cpu(example.compute),
        cudnn_sdpa.cpu_checks(None),
        torch.set_grad_enabled(trains),
    ):
        patch.setattr(FakePlan, "launch", lambda *_: None)
        run(example.tensors(grad=trains))  # settings are read from the environment, digests are made
        cudnn_sdpa.plan_cache.clear()
        tensors = example.tensors(grad=trains)
        cold = opened(lambda: run(tensors))
        for _ in range(2):
            run(tensors)
        warm = opened(lambda: run(tensors))
    return (len(set(cold)), moves(cold)), (len(set(warm)), moves(warm))


#: Files and moves of a cold call, and of a warm one in Python. A change that adds to them needs a reason.
BOUNDS = {
    "sdpa": ((19, 83), (8, 7)),  # of them two for the number of a use, which C++ counts without Python
    "sdpa, sinks": ((19, 74), (8, 7)),  # and one to see whether own kernels are named: then it may copy operands
    "sdpa_varlen": ((20, 100), (10, 9)),
    "sdpa_paged": ((22, 149), (9, 8)),
    "rms_norm": ((26, 130), (7, 8)),  # own kernels, whose threads and argument are found in files of theirs
}

#: The same of calls with their gradients.
BOUNDS_WITH_GRADIENTS = {"sdpa": ((21, 157), (10, 31)), "rms_norm": ((26, 290), (9, 30))}


def assert_within(bounds, found):
    for most, counted in zip(bounds, found, strict=True):
        assert all(one <= other for one, other in zip(counted, most, strict=True)), f"{counted}; at most {most}"


@pytest.mark.parametrize("name", BOUNDS)
def test_files_and_moves_of_a_call(name):
    assert_within(BOUNDS[name], counts(name))


@pytest.mark.parametrize("name", BOUNDS_WITH_GRADIENTS)
def test_files_and_moves_of_a_call_and_its_gradient(name):
    assert_within(BOUNDS_WITH_GRADIENTS[name], counts(name, trains=True))


def test_an_empty_plan_store_adds_few_files(tmp_path):
    """Which looks for the plan, and for that of a bucket."""
    with cudnn_sdpa.use_plan_store(tmp_path):
        cold, _ = counts("sdpa")
    assert cold[0] <= BOUNDS["sdpa"][0][0] + 2
    assert cold[1] <= 99


def test_a_plan_store_adds_nothing_for_own_kernels(tmp_path):
    """It has their code, and no plans of them."""
    without, _ = counts("rope_")
    with cudnn_sdpa.use_plan_store(tmp_path):
        cold, _ = counts("rope_")
    assert cold == without
