"""Stored plans on the GPU: the results of built plans, with nothing built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import dense_calls
import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa
from cudnn_sdpa import no_plan_builds, plan_cache, record_plans, use_plan_store, warmup
from cudnn_sdpa.plans.store import StoredPlan

pytestmark = pytest.mark.usefixtures("default_providers")


@pytest.fixture
def store(default_providers, tmp_path):  # noqa: ARG001
    with use_plan_store(tmp_path / "plans") as store:
        yield store


def inputs(sq=128):
    return [make("bshd", 2, heads, sq, 64, torch.bfloat16) for heads in (4, 2, 2)]


def assert_right(q, k, v):
    assert error(cudnn_sdpa.sdpa(q, k, v), exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", dense_calls.CASES)
def test_loaded_plans_match_built_ones(store, name):
    c = dense_calls.plain(**({"sq": 64} | dense_calls.CASES[name]))
    assert dense_calls.check(c) == []
    built = plan_cache.info()
    saved = store.info()  # kernels of our own are stored beside plans, by the first call of a process that uses one
    assert built.builds > 0
    assert built.builds <= saved.saves == saved.plans <= built.builds + 2
    plan_cache.clear()
    with no_plan_builds():
        assert dense_calls.check(c) == []
    info = plan_cache.info()
    assert (info.builds, info.loads) == (0, built.builds)
    assert store.info().rejected == 0


def test_packed_sequences_with_stored_plans(store):
    ends = torch.tensor([0, 40, 40, 128], dtype=torch.int32, device="cuda")
    leaves = [torch.randn(128, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    grad_out = torch.randn(128, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        out = cudnn_sdpa.sdpa_varlen(*leaves, ends, ends, 88, 88, is_causal=True)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    built = step()
    plan_cache.clear()
    with no_plan_builds():
        loaded = step()
    assert all(error(a.detach(), b.detach().double()) < 1e-3 for a, b in zip(loaded, built, strict=True))
    assert store.info().loads == 2


def test_a_plan_that_cudnn_rejects_is_rebuilt_and_replaced(store, caplog):
    q, k, v = inputs()
    assert_right(q, k, v)
    (plan,) = plan_cache.plans()
    path, key = store.path(plan.key), plan.key
    good = store.load(key)
    del plan
    for data in (b"", b"nonsense" * 100, good.data[: len(good.data) // 2], good.data[:-1]):
        bad = StoredPlan(good.identity, good.engine, good.knobs, good.workspace, good.build_seconds, data)
        path.write_bytes(bad.encode())  # with the right digest
        plan_cache.clear()
        assert_right(q, k, v)
        assert plan_cache.info().builds == 1
        assert store.load(key).data == good.data or len(store.load(key).data) > 10_000
    assert "cuDNN rejects it" in caplog.text


SECOND = """
import sys, torch, cudnn_sdpa
torch.manual_seed(1)
q, k, v = (torch.randn(2, 128, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2))
with cudnn_sdpa.no_plan_builds():
    out = cudnn_sdpa.sdpa(q, k, v)
expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
assert float((out - expected).norm() / expected.norm()) < 6e-3
print(cudnn_sdpa.plan_cache.info().loads)
"""


def test_another_process_loads(store):
    cudnn_sdpa.sdpa(*inputs())
    environment = {**os.environ, "CUDNN_SDPA_PLAN_DIR": str(store.folder)}
    result = subprocess.run(
        [sys.executable, "-c", SECOND], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n"


@pytest.mark.usefixtures("store")
def test_loads_and_builds_in_one_thread_do_not_harm_a_capture_in_another():
    q, k, v = inputs()
    for sq in range(1, 9):
        cudnn_sdpa.sdpa(*inputs(sq))
    plan_cache.clear()
    cudnn_sdpa.sdpa(q, k, v)
    ready, capturing, done, failures = threading.Event(), threading.Event(), threading.Event(), []

    def others():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                prepared = [inputs(sq) for sq in range(1, 11)]
                for tensors in prepared:  # room for results: PyTorch's allocator must not request more in a capture
                    [torch.empty_like(x) for x in tensors for _ in range(4)]
                ready.set()
                capturing.wait()
                for tensors in prepared:  # eight are loaded, two are built
                    cudnn_sdpa.sdpa(*tensors)
        except Exception as error:  # noqa: BLE001
            failures.append(error)
        ready.set()
        done.set()

    thread = threading.Thread(target=others)
    thread.start()
    ready.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        out = cudnn_sdpa.sdpa(q, k, v)
        capturing.set()
        done.wait()
    thread.join()
    assert not failures, failures
    out.fill_(float("nan"))
    graph.replay()
    assert error(out, exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]
    assert plan_cache.info().loads >= 8


def test_a_manifest_is_warmed_up_by_helpers(tmp_path):
    """Without a store: helper processes that see no GPU build plans, and this process runs them."""
    leaves = [x.requires_grad_() for x in inputs(96)]
    with record_plans() as manifest:
        torch.autograd.grad(cudnn_sdpa.sdpa(*leaves, is_causal=True).sum(), leaves)
        cudnn_sdpa.sdpa(*inputs(1))
    assert len(manifest) == 3
    manifest.save(tmp_path / "plans.json")
    plan_cache.clear()
    report = warmup(tmp_path / "plans.json", workers=2)
    assert (report.built, report.loaded, report.held, report.failed) == (3, 0, 0, {})
    with no_plan_builds():
        assert_right(*inputs(1))
        out = cudnn_sdpa.sdpa(*leaves, is_causal=True)
        torch.autograd.grad(out.sum(), leaves)
    expected = exact(*(x.detach() for x in leaves), is_causal=True)[0]
    assert error(out.detach(), expected) < TOLERANCE[torch.bfloat16]
    assert warmup(manifest).held == 3


@pytest.mark.usefixtures("store")
def test_a_manifest_is_warmed_up_from_the_store():
    for sq in range(64, 72):
        cudnn_sdpa.sdpa(*inputs(sq))
    with record_plans() as manifest:
        for sq in range(64, 72):
            cudnn_sdpa.sdpa(*inputs(sq))
    plan_cache.clear()
    report = warmup(manifest)
    assert (report.loaded, report.built) == (8, 0)
    with no_plan_builds():
        assert_right(*inputs(70))


def test_the_device_file_describes_the_gpu():
    from cudnn_sdpa.graph.target import Target, live_target

    command = [sys.executable, "-m", "cudnn_sdpa", "device", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Target.from_properties(json.loads(result.stdout)) == live_target(0)


@pytest.mark.skipif("CUDNN_SDPA_COMPILED_PLANS" not in os.environ, reason="no plans compiled elsewhere were given")
def test_plans_compiled_on_a_machine_without_a_gpu():
    """The folder holds a manifest.json and the plans that the `compile` command built from it."""
    folder = Path(os.environ["CUDNN_SDPA_COMPILED_PLANS"])
    with use_plan_store(folder) as store, no_plan_builds():
        report = warmup(folder / "manifest.json")
        assert report.built == 0
        assert report.loaded == len(cudnn_sdpa.PlanManifest.load(folder / "manifest.json"))
        for sq in (100, 128):
            leaves = [x.requires_grad_() for x in inputs(sq)]
            out = cudnn_sdpa.sdpa(*leaves, is_causal=True)
            grad_out = torch.randn_like(out)
            doubles = [x.detach().double().requires_grad_() for x in leaves]
            expected = exact(*doubles, is_causal=True)[0]
            found = (out, *torch.autograd.grad(out, leaves, grad_out))
            for a, b in zip(found, (expected, *torch.autograd.grad(expected, doubles, grad_out.double())), strict=True):
                assert error(a.detach(), b.detach()) < 2 * TOLERANCE[torch.bfloat16]
        assert store.info().rejected == 0
        assert plan_cache.info().builds == 0


@pytest.mark.whole_gpu
def test_an_out_of_memory_error_keeps_the_stored_plan(run_python, tmp_path):
    """A process with a full GPU does not remove plans of others; with free memory it loads the plan.

    The error is not PyTorch's, too, which would raise it after its next kernel.
    """
    code = """
import sys, torch, cudnn_sdpa
from cudnn_sdpa import plan_cache
q = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
out = torch.empty_like(q)
with cudnn_sdpa.use_plan_store(sys.argv[1]) as store:
    cudnn_sdpa.sdpa(q, q, q, out=out)
    expected = out.clone()
    plan_cache.clear()
    torch.cuda.synchronize()
    taken = []
    for size in (1 << 30, 1 << 26, 1 << 21, 1 << 16):
        try:
            while True:
                taken.append(torch.cuda.caching_allocator_alloc(size))
        except torch.OutOfMemoryError:
            pass
    try:
        cudnn_sdpa.sdpa(q, q, q, out=out)
    except (cudnn_sdpa.ExecutionError, torch.OutOfMemoryError) as error:
        print(type(error).__name__, file=sys.stderr)
    assert store.info().plans == 1, store.info()
    assert store.info().rejected == 0, store.info()
    for address in taken:
        torch.cuda.caching_allocator_delete(address)
    torch.cuda.empty_cache()
    plan_cache.clear()
    out.fill_(float("nan"))
    cudnn_sdpa.sdpa(q, q, q, out=out)
    assert torch.equal(out, expected)
    assert plan_cache.info().loads == 1
print("kept")
"""
    assert run_python(code, str(tmp_path / "plans")).stdout == "kept\n"
