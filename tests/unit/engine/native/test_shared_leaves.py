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

START = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)  # threads take turns in the middle of an operator, too
import torch
"""

SHARE = """
def share(call, seconds=3):
    over, counts = threading.Event(), [0, 0]

    def calls():
        while not over.is_set():
            call()
            counts[0] += 1

    def operators_of_pytorch():
        while not over.is_set():
            for leaf in leaves.values():
                leaf.unsqueeze(0)
            counts[1] += 1

    work = [calls, operators_of_pytorch, calls, operators_of_pytorch, operators_of_pytorch]
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    assert min(counts) > 0
"""

KNOWN_CALLS = """
from contract.operations import OPERATIONS
from fake_gpu import gpu_on_the_cpu
from native_way import native_way

import cudnn_sdpa

example = OPERATIONS["rms_norm"]
leaves = {name: x.detach().requires_grad_() for name, x in example.tensors().items()}
with native_way(), gpu_on_the_cpu(example.compute), cudnn_sdpa.cpu_checks(None):
    for _ in range(6):
        example.gradients(leaves)
    share(lambda: example(leaves))
print("ended")
"""

CALLS_IN_PYTHON = """
from cudnn_sdpa.engine.call import Function

class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x.detach()

leaves = {"x": torch.randn(8, requires_grad=True)}
share(lambda: Double.apply(leaves["x"]))
print("ended")
"""


@pytest.fixture
def folder() -> Path | None:
    """The user's folder of modules, in which the real one is."""
    return None


def test_known_calls_do_not_wait_for_a_leaf_with_the_gil(monkeypatch):
    with native_way():  # or skipped
        monkeypatch.setenv("PYTHONPATH", str(TESTS))
    assert_ends(KNOWN_CALLS)


def test_calls_in_python_do_not_wait_for_a_leaf_with_the_gil():
    assert_ends(CALLS_IN_PYTHON)


def assert_ends(program: str) -> None:
    found = forked_python.run(["-c", START + SHARE + program], timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["ended"]
