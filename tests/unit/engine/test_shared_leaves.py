"""Threads that share the leaves which they differentiate, as a model's weights, do not deadlock.

A leaf has a mutex that PyTorch takes where a call becomes part of an autograd graph. Its operators have released the
GIL then, and may acquire it while they hold the mutex: so whoever holds the GIL must not wait for the mutex.
"""

from __future__ import annotations

from pathlib import Path

import forked_python
import pytest
from native_way import native_way

TESTS = Path(__file__).parents[2]

START = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)  # threads take turns in the middle of an operator, too
import torch
"""

SHARE = """
def share(call, threads=2, seconds=2):
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

    work = [calls, operators_of_pytorch] * threads
    started = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in started:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in started:
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

CALLS_BY_OPERATORS = """
import cudnn_sdpa

x = torch.randn(4, 16, dtype=torch.bfloat16)
leaves = {name: torch.randn(1, 2, 4, 16, dtype=torch.bfloat16, requires_grad=True) for name in "qkv"}
weight = leaves["weight"] = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)

def attend_and_normalize():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cudnn_sdpa.sdpa(leaves["q"], leaves["k"], leaves["v"])
        cudnn_sdpa.rms_norm(x, weight)
    with Passes():
        cudnn_sdpa.rms_norm(x, weight)

class Passes(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

attend_and_normalize()
share(attend_and_normalize, threads=1)
print("ended")
"""

CALLS_IN_PYTHON = """
from cudnn_sdpa.engine.dispatch_state import Function

class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x.detach()

leaves = {"x": torch.randn(8, requires_grad=True)}
share(lambda: Double.apply(leaves["x"]), threads=1)
print("ended")
"""


@pytest.mark.slow
def test_known_calls_do_not_wait_for_a_leaf_with_the_gil(monkeypatch):
    with native_way():  # or skipped
        monkeypatch.setenv("PYTHONPATH", str(TESTS))
    assert_ends(KNOWN_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("program", [CALLS_IN_PYTHON, CALLS_BY_OPERATORS], ids=["function", "operators"])
def test_calls_in_python_do_not_wait_for_a_leaf_with_the_gil(program):
    assert_ends(program)


def assert_ends(program: str) -> None:
    found = forked_python.run(["-c", START + SHARE + program], timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["ended"]
