"""Plans are loaded from the store while other threads work: on the default stream, and on a stream that they share.

The frontend captures a launch of each plan that it loads. Before the capture had a stream of its own, either work made
the load fail, and what a thread launched during a capture of its stream would not have run.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa
from cudnn_sdpa import plan_cache
from cudnn_sdpa.graph import backend, handles

pytestmark = pytest.mark.usefixtures("default_providers")

ROUNDS = 40


def problem():
    return [make("bshd", 2, heads, 64, 64, torch.bfloat16, "cuda") for heads in (4, 2, 2)]


def counters():
    """Tensors of two dtypes, so that PyTorch adds to one after the other, and does not hold the GIL meanwhile."""
    return [torch.zeros(8, device="cuda", dtype=dtype) for _ in range(500) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize("shares", [False, True], ids=["default stream", "shared stream"])
def test_other_threads_launch_while_plans_are_loaded(tmp_path, shares):
    stream = torch.cuda.Stream() if shares else torch.cuda.default_stream()
    q, k, v = problem()
    expected, counts = exact(q, k, v)[0], counters()
    torch.cuda.synchronize()
    over, failures, rounds = threading.Event(), [], 0

    def work():
        nonlocal rounds
        try:
            with torch.cuda.stream(stream):
                while not over.is_set():
                    torch._foreach_add_(counts, 1)
                    rounds += 1
                    stream.synchronize()
        except Exception as failure:  # noqa: BLE001 - raised again below
            failures.append(failure)

    with cudnn_sdpa.use_plan_store(tmp_path / "plans"), torch.cuda.stream(stream):
        cudnn_sdpa.sdpa(q, k, v)
        thread = threading.Thread(target=work)
        thread.start()
        worst = 0.0
        try:
            for _ in range(ROUNDS):
                plan_cache.clear()
                out = cudnn_sdpa.sdpa(q, k, v)
                assert plan_cache.info().loads == 1
                worst = max(worst, error(out, expected))
        finally:
            over.set()
            thread.join()
    torch.cuda.synchronize()
    assert not failures, failures[0]
    assert rounds > 0
    assert {float(x.max()) for x in counts} | {float(x.min()) for x in counts} == {float(rounds)}
    assert worst < TOLERANCE[torch.bfloat16]


def is_capturing(stream):
    status = ctypes.c_int()
    assert backend._cuda_runtime().cudaStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) == 0
    return bool(status.value)


def test_a_load_that_fails_leaves_no_capture_open(tmp_path):
    q, k, v = problem()
    with cudnn_sdpa.use_plan_store(tmp_path / "plans"):
        out = cudnn_sdpa.sdpa(q, k, v)
        with contextlib.suppress(MemoryError), handles.loading_handle(0):
            stream = handles._loaders[0].stream
            runtime = backend._cuda_runtime()
            assert runtime.cudaStreamBeginCapture(ctypes.c_void_p(stream), 2) == 0
            assert is_capturing(stream)
            raise MemoryError
        assert not is_capturing(stream)
        plan_cache.clear()
        assert torch.equal(cudnn_sdpa.sdpa(q, k, v), out)
        assert plan_cache.info().loads == 1
    torch.cuda.synchronize()
