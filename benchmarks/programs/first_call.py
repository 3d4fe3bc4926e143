"""The processes of `benchmarks coldstart`: each measures once and prints one line of JSON.

    python -m benchmarks.programs.first_call sdpa
    python -m benchmarks.programs.first_call pytorch
    python -m benchmarks.programs.first_call record plans.json
    python -m benchmarks.programs.first_call warmup plans.json
    python -m benchmarks.programs.first_call fa4

The environment variable CUDNN_SDPA_PLAN_DIR sets their plan store.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.tools import cases, peers
from benchmarks.tools.cases import Shape, check_agreement
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.graph import handles, target
from cudnn_sdpa.offline.warmup import warmup
from cudnn_sdpa.planning.record import record_plans
from cudnn_sdpa.plans.cache import no_plan_builds, plan_cache
from cudnn_sdpa.plans.providers import FLASH4, providers
from cudnn_sdpa.plans.shape_policy import EXACT, shape_policy

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: The first call, and one of another shape.
SHAPES = (
    Shape(batch=2, heads_q=8, heads_kv=8, length=512, dim=128, causal=True),
    Shape(batch=2, heads_q=8, heads_kv=8, length=640, dim=128, causal=True),
)

#: Calls of kinds that FlashAttention-4's kernels are compiled for: shapes, and options. The first loads what all need.
KINDS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "the first of a process: D=128, causal": (Shape(1, 32, 8, 512, 128, causal=True), {"is_causal": True}),
    "D=128, window": (Shape(1, 32, 8, 512, 128, causal=True), {"is_causal": True, "window_size": (100, 0)}),
    "D=64, full": (Shape(1, 8, 8, 512, 64, causal=False), {}),
    "D=256, causal": (Shape(1, 16, 8, 512, 256, causal=True), {"is_causal": True}),
}

#: Lengths of the calls of a manifest, one plan each.
LENGTHS = range(100, 300)


def start_cuda() -> None:
    """Creates the CUDA context and launches a kernel of PyTorch."""
    torch.randn(8, device=cases.DEVICE)
    torch.cuda.synchronize()


def start_library() -> None:
    """Loads cuDNN, creates this thread's handle and the one that loads plans, and detects the plans' target."""
    device = torch.cuda.current_device()
    handles.build_handle(device)
    with handles.loading_handle(device):
        pass
    target.live_target(device)


def first_calls_of_sdpa() -> dict[str, list[dict[str, float]]]:
    """The first two calls of `sdpa`, of two shapes."""
    start_cuda()
    start_library()
    return {"calls": _timed_calls(partial(sdpa, is_causal=True))}


def first_calls_of_pytorch() -> dict[str, list[dict[str, float]]]:
    """The same of PyTorch's cuDNN backend."""
    start_cuda()
    plane = torch.randn(2, 4, 8, 8, device=cases.DEVICE)
    ones = plane.new_ones(4)
    torch.ops.aten.cudnn_batch_norm(plane, ones, ones, None, None, True, 0.1, 1e-5)  # creates PyTorch's handle
    with peers.only("pytorch cudnn"):
        return {"calls": _timed_calls(lambda q, k, v: peers.pytorch(q, k, v, is_causal=True)())}


def first_calls_of_flash4() -> dict[str, dict[str, float]]:
    """Milliseconds of the first call of a kind of FlashAttention-4's kernels, and of a new shape of it."""
    start_cuda()
    start_library()
    found = {}
    with torch.no_grad(), providers(FLASH4):
        for kind, (shape, options) in KINDS.items():
            times = []
            for length in (shape.length, shape.length + 64):
                qkv = shape._replace(length=length).tensors()
                torch.cuda.synchronize()
                start = time.perf_counter()
                sdpa(*qkv, **options)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            found[kind] = dict(zip(("first", "another"), times, strict=True))
    return found


def record(path: str) -> dict[str, float]:
    """Builds and stores a plan for each of `LENGTHS`, and writes their manifest."""
    with record_plans() as manifest, shape_policy(EXACT):
        for length in LENGTHS:
            sdpa(*_inputs(length))
    if len(manifest) != len(LENGTHS):
        raise RuntimeError(f"{len(manifest)} plans were recorded in calls of {len(LENGTHS)} lengths")
    manifest.save(path)
    return {"plans": len(manifest)}


def warm_up(path: str) -> dict[str, float]:
    """Loads the plans of a manifest, and checks that a call needs no build."""
    start_cuda()
    start_library()
    report = warmup(path)
    if report.failed:
        raise RuntimeError(f"plans are missing: {report.failed}")
    q, k, v = _inputs(LENGTHS[-1])
    with no_plan_builds():
        out = sdpa(q, k, v)
    _check(out, q, k, v, is_causal=False)
    return {"seconds": report.seconds, "loaded": report.loaded, "built": report.built, "held": report.held}


def _inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return Shape(batch=1, heads_q=2, heads_kv=2, length=length, dim=64, causal=False).tensors()


def _timed_calls(attend: Attend) -> list[dict[str, float]]:
    """For a call of each shape: milliseconds until it returns and until the GPU has finished; builds and loads."""
    inputs = [shape.tensors() for shape in SHAPES]
    torch.cuda.synchronize()
    calls, outs = [], []
    for qkv in inputs:
        before = plan_cache.info()
        start = time.perf_counter()
        outs.append(attend(*qkv))
        returned = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        after = plan_cache.info()
        calls.append(
            {
                "returned_ms": (returned - start) * 1e3,
                "done_ms": (done - start) * 1e3,
                "builds": after.builds - before.builds,
                "loads": after.loads - before.loads,
            }
        )
    for out, qkv in zip(outs, inputs, strict=True):
        _check(out, *qkv, is_causal=True)
    return calls


def _check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> None:
    """Stops if the result is wrong."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = peers.pytorch(q, k, v, is_causal=is_causal)()
    check_agreement(["out"], [out], [expected], "PyTorch's")


RUNS: dict[str, Callable[..., object]] = {
    "sdpa": first_calls_of_sdpa,
    "pytorch": first_calls_of_pytorch,
    "fa4": first_calls_of_flash4,
    "record": record,
    "warmup": warm_up,
}


if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](*sys.argv[2:])))
