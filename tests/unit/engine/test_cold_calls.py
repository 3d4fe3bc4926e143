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


def counts(name):
    """Files and moves of a call whose plan is missing, and of the fourth one like it."""
    example = OPERATIONS[name]
    with (
        pytest.MonkeyPatch.context() as patch,
        native_way(on=False),
        gpu_on_the_cpu(example.compute),
        cudnn_sdpa.cpu_checks(None),
        torch.no_grad(),
    ):
        patch.setattr(FakePlan, "launch", lambda *_: None)
        example(example.tensors())  # settings are read from the environment, digests are made
        cudnn_sdpa.plan_cache.clear()
        tensors = example.tensors()
        cold = opened(lambda: example(tensors))
        for _ in range(2):
            example(tensors)
        warm = opened(lambda: example(tensors))
    return (len(set(cold)), moves(cold)), (len(set(warm)), moves(warm))


#: Files and moves of a cold call, and of a warm one in Python. A change that adds to them needs a reason.
BOUNDS = {
    "sdpa": ((21, 84), (6, 5)),
    "sdpa, sinks": ((21, 71), (6, 5)),
    "sdpa_varlen": ((22, 92), (8, 7)),
    "sdpa_paged": ((23, 128), (7, 6)),
    "rms_norm": ((18, 94), (4, 5)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_files_and_moves_of_a_call(name):
    for found, most in zip(counts(name), BOUNDS[name], strict=True):
        assert found <= most, f"{found} files and moves; at most {most}"
        assert all(one <= other for one, other in zip(found, most, strict=True)), found


def test_an_empty_plan_store_adds_few_files(tmp_path):
    """Which looks for the plan, and for that of a bucket."""
    with cudnn_sdpa.use_plan_store(tmp_path):
        cold, _ = counts("sdpa")
    assert cold[0] <= BOUNDS["sdpa"][0][0] + 3
    assert cold[1] <= 100
