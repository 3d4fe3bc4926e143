"""Launches of plans of own kernels, natively and in Python: what the driver is given, and what it refuses.

The plan is that of `scaled_sums`, whose sizes and strides are in an array of the host.
"""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_driver import FakeDriver, fake_driver
from fake_gpu import poisoned
from native_way import native_way
from real_plans import Device, real_plans
from scaled_sums import LEAST, ROWS, WORDS, ScaledSums
from torch import Tensor

from cudnn_sdpa import ExecutionError, plan_cache
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.kernel_plan import KernelProgram


@pytest.fixture
def folder() -> Path | None:
    """The user's folder of modules, in which the real one is."""
    return None


@pytest.fixture(params=["python", "native"], autouse=True)
def way(request: pytest.FixtureRequest, folder: Path | None) -> Iterator[str]:  # noqa: ARG001
    with native_way(on=request.param == "native"):
        yield request.param


@pytest.fixture
def device() -> Iterator[Device]:
    with real_plans() as found:
        yield found


@pytest.fixture
def driver(device: Device) -> Iterator[FakeDriver]:  # noqa: ARG001 - which the driver is part of
    with fake_driver(WORDS) as found:
        yield found


@pytest.fixture
def sums(tmp_path: Path, driver: FakeDriver) -> ScaledSums:  # noqa: ARG001
    return ScaledSums(tmp_path)


@pytest.mark.parametrize("stream", [0, 11])
def test_the_driver_is_given_the_grids_and_the_fields_of_a_call(stream, way, sums, driver, device, launches_in_python):
    x, weights = torch.randn(37, 8)[::2], torch.randn(8)
    with device.stream(stream):
        sums.warm_up(x, weights)
        driver.launches.clear()
        launches_in_python.clear()
        out = sums(x, weights, -0.7)
    sums.assert_right(out, x, weights, -0.7)
    assert bool(launches_in_python) is (way == "python")
    first, second = driver.launches
    assert (first.name, first.blocks, first.threads, first.shared) == ("sum_rows", 7, 32, 64)
    assert (second.name, second.blocks, second.threads, second.shared) == ("scale_sums", 2, 64, 0)
    assert first.stream == second.stream == stream
    assert first.fields == second.fields
    unused, scratch = (first.fields[sums.places[name]] for name in ("unused", "sums"))
    assert scratch == unused + 512
    scale = array("i", array("f", [-0.7]).tobytes())[0] & 0xFFFFFFFF
    expected = [x.data_ptr(), weights.data_ptr(), out.data_ptr(), unused, scratch, scale, 19, 8, 16, LEAST]
    assert first.fields == expected


@pytest.mark.parametrize("sm", [89, 90, 120])
def test_launches_overlap_what_is_ahead_where_kernels_wait_for_it(sm, way, sums, driver):
    driver.sm = sm
    sums.warm_up(torch.randn(3, 4))
    driver.launches.clear()
    sums.assert_right(sums(x := torch.randn(3, 4)), x)
    assert [launch.overlaps for launch in driver.launches] == [way == "native" and sm >= 90, False]


@pytest.mark.parametrize("captured", [11, 12])
def test_launches_into_a_cuda_graph_wait(captured, way, sums, driver, device):
    """Other readers of the graph may not expect the edges that others make."""
    sums.warm_up(torch.randn(3, 4))
    driver.captured.add(captured)
    driver.launches.clear()
    with device.stream(11):
        sums.assert_right(sums(x := torch.randn(3, 4)), x)
    assert [launch.overlaps for launch in driver.launches] == [way == "native" and captured != 11, False]


def test_one_plan_serves_all_sizes(sums, driver):
    for rows, columns, apart in [(1, 1, 1), (130, 3, 3), (19, 40, 77), (1, 1, 5)]:
        x = torch.randn(rows, apart)[:, :columns]
        for weights in (None, torch.randn(columns)):
            sums.warm_up(x, weights)
    assert plan_cache.info().builds == 1
    assert {launch.fields[-1] for launch in driver.launches} == {LEAST}


def test_an_operand_that_a_call_lacks_has_no_address(sums, driver):
    sums.warm_up(torch.randn(3, 4))
    sums.warm_up(torch.randn(3, 4), torch.randn(4))
    assert [launch.fields[sums.places["weights"]] != 0 for launch in driver.launches] == [False] * 4 + [True] * 4


def test_arrays_are_read_at_each_launch_and_kept(way, sums):
    x = torch.randn(6, 8)
    sizes = array("q", (6, 8, 8))
    bound = sums.bind(x, None, 0.5, sizes)
    sums.bound[x.shape, x.stride(), True] = bound
    sums.warm_up(x)
    sizes[1] = 3
    sums.assert_right(sums(x), x[:, :3])
    if way == "native":
        gone = weakref.ref(bound)
        del bound, sizes
        sums.bound.clear()
        gc.collect()
        assert gone() is None
        others = [array("q", (99, 99, 99)) for _ in range(1000)]
        sums.assert_right(sums(x), x[:, :3])
        del others


def test_arrays_are_checked_when_a_plan_is_bound(sums):
    x = torch.randn(6, 8)
    for wrong in (array("q", (6, 8)), array("q", (6, 8, 8, 1)), array("i", (6, 8, 8)), array("i", (6, 0) * 3)):
        with pytest.raises(ValueError, match=f"sizes: host array of 3.*not {len(wrong)} of"):
            sums.bind(x, None, 0.5, wrong)
    with pytest.raises(KeyError, match="sizes"):
        BoundPlan(sums.bind(x, None, 0.5).plan, ["x"], [((6,), (1,), torch.float32)], {"scale": 0.5})


def test_an_operand_beyond_the_fields_is_refused(sums, monkeypatch):
    program = sums.operation.program(sums.key())
    for place in (WORDS - 2, WORDS):
        slots = {**program.slots, "sizes": place}
        monkeypatch.setattr(
            sums.operation,
            "program",
            lambda _, slots=slots: KernelProgram(program.calls, program.fields, slots, program.scratch),
        )
        with pytest.raises(ValueError, match="10 fields, and an operand beyond them"):
            sums.operation.plan(sums.key())


# What the driver refuses.


@pytest.mark.parametrize("kernel", ["sum_rows", "scale_sums"])
def test_a_refused_launch_is_an_error(kernel, way, sums, driver):
    x = torch.randn(5, 6)
    sums.warm_up(x)
    asked = 2 if way == "native" else 1  # once again by Python
    driver.statuses[:] = [0] * (kernel == "scale_sums") + [2] * asked
    with pytest.raises(ExecutionError, match=f"CUDA could not launch {kernel}: CUDA_ERROR_2"):
        sums(x)
    assert not driver.statuses
    sums.check(x)


def test_a_thread_without_a_context_gets_one(way, sums, driver):
    x = torch.randn(5, 6)
    sums.warm_up(x)
    driver.statuses[:] = [201, 201] if way == "native" else [201]
    sums.check(x)
    assert driver.made_current == 1


# Memory, threads, captures.


def test_scratch_memory_is_one_allocation_until_the_last_launch(way, tmp_path, launches_in_python):
    made: list[tuple[weakref.ref[Tensor], int, int]] = []

    def allocate(*layout):
        tensor = poisoned(*layout)
        made.append((weakref.ref(tensor), tensor.data_ptr(), tensor.numel()))
        return tensor

    with real_plans(allocate=allocate), fake_driver(WORDS) as driver:
        sums, x = ScaledSums(tmp_path), torch.randn(ROWS, 6)
        sums.warm_up(x)
        made.clear()
        driver.launches.clear()
        launches_in_python.clear()
        alive = []
        run = driver._kernels[2].launch
        driver._kernels[2].launch = lambda *given: (alive.append(made[1][0]() is not None), run(*given))
        sums.check(x)
        assert bool(launches_in_python) is (way == "python")
    (_, out, _), (scratch, address, size) = made
    assert size == 128 + ROWS
    assert driver.launches[0].fields[2:5] == [out, address, address + 512]
    assert alive == [True]
    assert scratch() is None


def test_threads_call_at_once(sums, driver):
    given = [(torch.randn(rows, 6), torch.randn(6), 0.1 * rows) for rows in range(1, 5)]
    for x, weights, _ in given:
        sums.warm_up(x, weights)
    ready = threading.Barrier(4)

    def work(x: Tensor, weights: Tensor, scale: float) -> None:
        ready.wait()
        for number in range(20):
            sums.check(x, weights, scale + number)

    driver.launches.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, *zip(*given, strict=True)))
    assert len(driver.launches) == 2 * 4 * 20


def test_a_capture_needs_no_plan_to_be_kept(sums, device, monkeypatch):
    """Nothing unloads kernels, and a graph has copies of their arguments."""
    captured: list[plans.Plan] = []
    monkeypatch.setattr(plans, "captured_plans", captured)
    x = torch.randn(5, 6)
    sums.warm_up(x)
    with device.stream(11):
        device.capturing = True
        sums.check(x)
    assert not captured


@pytest.mark.parametrize("words", [512, 513])
def test_a_plan_of_many_fields(words, way, tmp_path, device):  # noqa: ARG001 - the driver's
    with fake_driver(WORDS):
        sums, x = ScaledSums(tmp_path, words=words), torch.randn(5, 6)
        sums.warm_up(x)
        sums.warm_up(x)
        assert (len(sums.calls) > 0) is (way == "native" and words == 512)


def test_an_evicted_plan_is_built_again(sums):
    x = torch.randn(5, 6)
    sums.warm_up(x)
    plan_cache.clear()
    assert not len(sums.calls)
    sums.bound.clear()
    sums.warm_up(x)
    assert plan_cache.info().builds >= 1
