"""Threads that share the leaves which they differentiate, as a model's weights, do not deadlock.

A leaf has a mutex that PyTorch takes where a call becomes part of an autograd graph. Its operators have released the
GIL then, and may acquire it while they hold the mutex: so whoever holds the GIL must not wait for the mutex.
"""

from __future__ import annotations

from pathlib import Path

import forked_python
import pytest
from native_way import native_way

TESTS = Path(__file__).parents[3]

PROGRAM = """
import faulthandler, os, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
import torch
from contract.operations import OPERATIONS
from fake_gpu import gpu_on_the_cpu
from native_way import native_way

import cudnn_sdpa

example = OPERATIONS["rms_norm"]
leaves = {name: x.detach().requires_grad_() for name, x in example.tensors().items()}
with native_way(), gpu_on_the_cpu(example.compute), cudnn_sdpa.cpu_checks(None):
    for _ in range(6):
        example.gradients(leaves)
    calls, over = [0, 0], threading.Event()

    def known_calls():
        while not over.is_set():
            example(leaves)
            calls[0] += 1

    def operators_of_pytorch():
        while not over.is_set():
            for leaf in leaves.values():
                leaf.unsqueeze(0)
            calls[1] += 1

    def hold_the_gil():
        while not over.is_set():
            sum(range(1000))

    work = [known_calls, operators_of_pytorch, hold_the_gil, known_calls, operators_of_pytorch]
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    time.sleep(3)
    over.set()
    for thread in threads:
        thread.join()
assert min(calls) > 0
print("ended")
"""


@pytest.fixture
def folder() -> Path | None:
    """The user's folder of modules, in which the real one is."""
    return None


def test_known_calls_do_not_wait_for_a_leaf_with_the_gil(monkeypatch):
    with native_way():  # or skipped
        monkeypatch.setenv("PYTHONPATH", str(TESTS))
    found = forked_python.run(["-c", PROGRAM], timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["ended"]
