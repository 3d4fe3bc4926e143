"""Launches of real plans, natively and in Python: pointers, workspaces, streams, slots, captures, refusals, evictions.

Only cuDNN's launch has a stand-in; see `real_plans`. Values show which pointer is whose; addresses and streams are
compared with what a launch may use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contract.operations import OPERATIONS, Example
from fake_driver import CAPTURING, LAUNCH_EX, Launch
from fake_gpu import CpuKernel, everywhere, poisoned
from native_way import native_way
from real_plans import Device, real_plans

from cudnn_sdpa import ExecutionError, graph_op, plan_cache, providers, sdpa
from cudnn_sdpa.engine.native import calls
from cudnn_sdpa.graph import backend, handles, known_issues
from cudnn_sdpa.graph.handles import FILLED_BYTES, SCRATCH_BYTES, thread
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import next_use

#: Examples that launch a plan of cuDNN's; the others are kernels of the library's own.
OF_OWN_KERNELS = (
    *("kernels", "a kernel", "append", "sdpa_paged_varlen", "sdpa_paged, FP8", "rope", "rms_norm_fp8"),
    "layer_norm_fp8",
)
WITH_PLANS = [name for name in OPERATIONS if not name.startswith(OF_OWN_KERNELS)]

#: Examples with kernels of the library's own before the plan.
WITH_KERNELS = (
    "sdpa, lengths",
    "sdpa, one query, lengths",
    "sdpa_varlen",
    "sdpa_varlen, softcap",
    "sdpa_paged",
)

#: Examples whose plan gets operands that were quantized before.
QUANTIZED = ("fp8_attention",)

#: Examples whose gradients cuDNN has no graph of.
WITH_OWN_GRADIENTS = ("gelu_mul", "relu_squared")

#: Examples that add, join or convert results.
RESULTS_TOGETHER = (
    "sdpa_fp8_backward",
    "sdpa_fp8_backward, lengths",
    "rms_norm, zero-centered, residual",
    "rms_norm, residual, several kernels",
    "layer_norm, zero-centered, residual, SiLU",
    "a user's graph_op",
    "a user's graph_op, booleans",
)


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
    with real_plans(OPERATIONS["sdpa"].compute) as found:
        yield found


def assert_right(call: Example, tensors: dict[str, torch.Tensor]) -> None:
    call.assert_out(call(tensors), tensors)


def range_of(address: int, size: int) -> range:
    return range(address, address + size)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", WITH_PLANS)
@pytest.mark.parametrize("stream", [0, 11])
def test_pointers_are_those_of_the_operands_and_results(name, stream, way, launches_in_python):
    call = OPERATIONS[name]
    named = ("cudnn", "own") if name.startswith(WITH_OWN_GRADIENTS) else ("cudnn",)
    with providers(*named), real_plans(call.compute) as device, device.stream(stream):
        call.warm_up()
        launches_in_python.clear()
        tensors = call.tensors()
        found = call(tensors)
        call.assert_out(found, tensors)
        last = device.last
        assert last.stream == stream
        assert last.handle == thread.slots[0].raw
        names = [operand.name for operand in (*last.key.inputs, *last.key.outputs)]
        assert list(last.pointers) == list(range(1, len(names) + 1))
        if way == "native" and not launches_in_python and name not in QUANTIZED:
            pointers = dict(zip(names, last.pointers.values(), strict=True))
            shared = {x.data_ptr() for x in tensors.values()} & set(pointers.values())
            assert shared, "no tensor is read in place"
            if name not in RESULTS_TOGETHER:
                assert found.data_ptr() in pointers.values()
        if call.differentiable:
            tensors = call.tensors(grad=True)
            call.assert_gradients(call.gradients(tensors), tensors)
            assert device.last.stream == stream


# Kernels of the library's own before a plan, and several GPUs.


@pytest.mark.parametrize("status", [0, 201])
@pytest.mark.parametrize("name", ["sdpa, lengths", "sdpa_paged"])
def test_kernels_before_a_plan_are_launched_on_its_stream(name, status, way, monkeypatch):
    """By the driver, or by Python, which knows what to do if the driver refuses."""
    call, kernels, launched, run = OPERATIONS[name], {}, [], CpuKernel.launch

    def by_python(kernel, blocks, threads, fields, on):
        launched.append(("python", kernel.name, blocks, threads, on))
        run(kernel, blocks, threads, fields)

    def by_driver(config, function, arguments, _):
        launch = Launch.of_ex(kernels[function].name, config.contents, arguments, words=64)
        launched.append(("driver", launch.name, launch.blocks, launch.threads, launch.stream))
        if not status:
            run(kernels[function], launch.blocks, launch.threads, array("q", launch.fields))
        return status

    def native(kernel):
        kernels[id(kernel)] = kernel
        return *(ctypes.cast(x, ctypes.c_void_p).value for x in (driver, is_capturing)), id(kernel), 0, True

    driver, is_capturing = LAUNCH_EX(by_driver), CAPTURING(lambda *_: 0)
    monkeypatch.setattr(CpuKernel, "launch", by_python)
    monkeypatch.setattr(CpuKernel, "native", property(native), raising=False)
    with real_plans(call.compute) as device, device.stream(11):
        call.warm_up()
        first = {launch[1:] for launch in launched}
        launched.clear()
        assert_right(call, call.tensors())
        assert {launch[1:] for launch in launched} <= first
    assert {on for *_, on in launched} == {11}
    by = {"python"} if way == "python" else {"driver", "python"} if status else {"driver"}
    assert {who for who, *_ in launched} == by


@pytest.mark.parametrize("name", ["sdpa, lengths", "rms_norm"])
def test_a_plan_is_launched_on_its_gpu(name):
    """Also where another one is the current device: memory is allocated there, and what is launched goes there."""
    current, seen, call = [0], [], OPERATIONS[name]

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device if isinstance(device, int) else 0
        try:
            yield
        finally:
            current[0] = before

    def allocate(*layout):
        seen.append(current[0])
        return poisoned(*layout)

    with real_plans(call.compute, allocate=allocate) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "device", on)
        everywhere(patch, plans.current_device, lambda: current[0])
        device.during_launch = lambda: seen.append(current[0])
        call.warm_up()
        for current[0] in (0, 1, 0, 1):
            seen.clear()
            assert_right(call, call.tensors())
            assert set(seen) == {0}


@pytest.mark.parametrize("name", ["sdpa", "rms_norm", "sdpa, lengths"])
def test_what_is_current_is_known_without_python(name, way, monkeypatch, launches_in_python):
    """PyTorch's C++ says that it is a device's default stream, and that the device is the current one."""
    call, asked = OPERATIONS[name], []

    def stream_of(device):
        asked.append(device)
        return 0

    with real_plans(call.compute) as device:
        everywhere(monkeypatch, plans.current_raw_stream, stream_of)
        monkeypatch.setattr(calls, "_OF_PYTORCH", (*calls._OF_PYTORCH, stream_of))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        everywhere(monkeypatch, plans.current_device, lambda: 0)
        monkeypatch.setattr(calls, "_OF_PYTORCH", (*calls._OF_PYTORCH, plans.current_device))
        call.warm_up()
        launches_in_python.clear()
        asked.clear()
        assert_right(call, call.tensors())
        assert device.last.stream == 0 if device.launches else name == "rms_norm"
    assert bool(launches_in_python) is bool(asked) is (way == "python")


# Workspaces.


def test_a_small_workspace_on_the_default_stream_is_the_threads_own():
    call = OPERATIONS["sdpa"]
    with real_plans(call.compute, workspace=SCRATCH_BYTES) as device:
        for _ in range(5):
            assert_right(call, call.tensors())
        assert {launch.workspace for launch in device.launches} == {thread.slots[0].scratch}


@pytest.mark.parametrize(("workspace", "stream"), [(SCRATCH_BYTES + 1, 0), (64, 11), (SCRATCH_BYTES + 1, 11)])
def test_any_other_workspace_is_allocated(workspace, stream):
    call, allocated = OPERATIONS["sdpa"], []

    def allocate(shape, stride, dtype):
        made = poisoned(shape, stride, dtype)
        if dtype is torch.uint8:
            allocated.append((made.data_ptr(), made.numel(), weakref.ref(made)))
        return made

    with real_plans(call.compute, workspace=workspace, allocate=allocate) as device, device.stream(stream):
        for _ in range(5):
            assert_right(call, call.tensors())
        assert [launch.workspace for launch in device.launches] == [address for address, *_ in allocated]
        assert {size for _, size, _ in allocated} == {workspace}
        assert not any(reference() is not None for *_, reference in allocated), "a workspace outlives its launch"


def test_a_plan_without_workspace_gets_none():
    call = OPERATIONS["sdpa"]
    with real_plans(call.compute, workspace=0) as device, device.stream(11):
        for _ in range(5):
            assert_right(call, call.tensors())
        assert {launch.workspace for launch in device.launches} == {0}


# Streams and threads.


def test_the_handle_follows_the_current_stream(device):
    call = OPERATIONS["sdpa"]
    for stream in (0, 11, 11, 12, 0, 0, 11, 0):
        with device.stream(stream):
            assert_right(call, call.tensors())
            assert device.last.stream == stream
    assert len({launch.handle for launch in device.launches}) == 1


def test_each_thread_has_its_own_handle_and_memory(device):
    call = OPERATIONS["sdpa, one query, lengths"]
    call.warm_up()
    ready = threading.Barrier(4)

    def work(_: int) -> tuple[int, int, int]:
        ready.wait()
        for _ in range(5):
            assert_right(call, call.tensors())
        slot = thread.slots[0]
        return slot.raw, slot.scratch, slot.filled

    device.launches.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        slots = list(pool.map(work, range(4)))
    assert [len(set(column)) for column in zip(*slots, strict=True)] == [4, 4, 4]
    by_thread = {(launch.thread, launch.handle, launch.workspace) for launch in device.launches}
    assert len(by_thread) == 4
    assert {(raw, scratch) for raw, scratch, _ in slots} == {(raw, scratch) for _, raw, scratch in by_thread}


def test_the_handle_of_a_finished_thread_serves_the_next_one(device):
    call = OPERATIONS["sdpa"]
    call.warm_up()
    numbers = []
    for _ in range(3):
        worker = threading.Thread(target=lambda: assert_right(call, call.tensors()))
        worker.start()
        worker.join()
        numbers.append(device.last.handle)
    assert len(set(numbers)) == 1
    assert numbers[0] != thread.slots[0].raw


# Captures.


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[plans.Plan]:
    """Plans that live as long as the process, as graphs have a launch of them."""
    found: list[plans.Plan] = []
    monkeypatch.setattr(plans, "captured_plans", found)
    return found


def test_a_plan_that_is_captured_is_kept(device, captured):
    call = OPERATIONS["sdpa, one query, lengths"]
    call.warm_up()
    with device.stream(11):
        assert_right(call, call.tensors())
        assert not captured
        device.capturing = True
        for _ in range(3):
            device.launches.clear()
            assert_right(call, call.tensors())
            slot = thread.slots[0]
            taken = (*range_of(slot.scratch, SCRATCH_BYTES)[:: SCRATCH_BYTES - 1], slot.filled)
            assert not {*device.last.pointers.values(), device.last.workspace} & set(taken)
            for address in (*device.last.pointers.values(), device.last.workspace):
                assert address not in range_of(slot.scratch, SCRATCH_BYTES)
                assert address not in range_of(slot.filled, FILLED_BYTES)
    (kept,) = captured
    assert kept.key == device.last.key
    assert kept.captured


def test_a_plan_that_must_not_be_captured_is_refused(device, captured, monkeypatch):
    call = OPERATIONS["sdpa"]
    call.warm_up()
    monkeypatch.setattr(known_issues, "not_in_capture", lambda _: "it hangs")
    device.launches.clear()
    with device.stream(11):
        device.capturing = True
        with pytest.raises(ExecutionError, match="cannot be captured in a CUDA graph: it hangs"):
            call(call.tensors())
        assert not device.launches
        assert not captured
        device.capturing = False
        assert_right(call, call.tensors())


# Refusals and interruptions.


@pytest.mark.parametrize("name", ["sdpa", *WITH_KERNELS])
def test_a_refused_launch_is_told_as_in_python(name):
    call = OPERATIONS[name]
    with real_plans(call.compute) as device:
        call.warm_up()
        device.refuses = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"could not launch .*CUDNN_STATUS_EXECUTION_FAILED") as caught:
                call(call.tensors())
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert not thread.slots[0].taken[0]
        device.refuses = None
        assert_right(call, call.tensors())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_other_errors_of_a_launch_are_raised_as_they_are(device, kind):
    call = OPERATIONS["sdpa, lengths"]
    call.warm_up()
    expected = ExecutionError if issubclass(kind, RuntimeError) else kind
    device.refuses = kind("of the launch")
    with pytest.raises(expected, match="of the launch"):
        call(call.tensors())
    assert not thread.slots[0].taken[0]
    device.refuses = None
    assert_right(call, call.tensors())


# The plan cache.


def test_every_launch_is_a_use(device):
    call = OPERATIONS["sdpa"]
    call.warm_up()
    (plan,) = [plan for plan in plan_cache.plans() if plan.key == device.last.key]
    hits = plan_cache.info().hits
    uses = []
    for _ in range(4):
        call(call.tensors())
        uses.append(plan.last_used)
    assert uses == sorted(set(uses))
    assert plan_cache.info().hits == hits + 4


def test_uses_are_in_one_order_whoever_launches():
    """Python's and native ones in turn: the plan that has been used last is the last to be evicted."""
    names, found = ("sdpa", "sdpa, lengths", "sdpa, one query, lengths"), {}
    with real_plans() as device:
        for name in names:
            OPERATIONS[name].warm_up()
            OPERATIONS[name](OPERATIONS[name].tensors())
            (found[name],) = [plan for plan in plan_cache.plans() if plan.key == device.last.key]
        hits = plan_cache.info().hits
        for _ in range(40):
            name = names[int(torch.randint(3, ()))]
            others = plan_cache.plans()
            others.remove(found[name])
            with plan_cache.watch_uses() as used:
                if torch.rand(()) < 0.5:
                    OPERATIONS[name](OPERATIONS[name].tensors())
                else:
                    found[name].last_used = next_use()
            assert used == [found[name].key]
            assert plan_cache.plans() == [*others, found[name]]
        assert plan_cache.info().hits == hits + 40


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sdpa", "sdpa, lengths"])
def test_a_plan_that_is_evicted_during_its_launch_finishes_it(name):
    call = OPERATIONS[name]
    with real_plans(call.compute) as device:
        call.warm_up()
        graphs = [weakref.ref(plan.built) for plan in plan_cache.plans()]
        device.during_launch = plan_cache.clear
        assert_right(call, call.tensors())
        device.during_launch = lambda: None
        gc.collect()
        assert not any(graph() is not None for graph in graphs), "an evicted plan lives"
        built = plan_cache.info().builds
        assert_right(call, call.tensors())
        assert plan_cache.info().builds == built + 1


# Memory that kernels of the library's own fill.


@contextlib.contextmanager
def filled(name: str) -> Iterator[tuple[Example, Device, Callable[[], list[bool]]]]:
    """A known call of an example, and what tells of the addresses of the last launch if they are in the slot's."""
    call = OPERATIONS[name]
    with real_plans(call.compute) as device:
        call.warm_up()

        def in_slot() -> list[bool]:
            slot = thread.slots[0]
            return [address in range_of(slot.filled, FILLED_BYTES) for address in device.last.pointers.values()]

        yield call, device, in_slot


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_it_is_the_threads_own_on_the_default_stream_alone(name):
    with filled(name) as (call, device, in_slot):
        for stream in (0, 11, 0):
            with device.stream(stream):
                assert_right(call, call.tensors())
            assert any(in_slot()) is (stream == 0)
            assert not thread.slots[0].taken[0]


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_call_in_the_midst_of_another_has_memory_of_its_own(name, way, launches_in_python, monkeypatch):
    """A finalizer or a signal handler may make a call between a kernel's launch and the plan's."""
    with filled(name) as (call, device, in_slot), torch.no_grad():  # as one in between is called, so it is known
        run, inner = CpuKernel.launch, []

        def launch(kernel, *arguments):
            run(kernel, *arguments)
            if not inner:
                inner.append(None)
                assert_right(call, {**call.tensors()})
                assert not any(in_slot())
                assert thread.slots[0].taken[0]

        monkeypatch.setattr(CpuKernel, "launch", launch)
        plan_cache.clear()  # recipes are made again
        for _ in range(4):
            call(call.tensors())
        inner.clear()
        launches_in_python.clear()
        device.launches.clear()
        assert_right(call, call.tensors())
        assert bool(launches_in_python) is (way == "python")
        assert len(device.launches) == 2
        assert any(in_slot())
        assert not thread.slots[0].taken[0]


def test_a_call_in_the_midst_of_another_may_have_another_stream(device):
    """What frees the memory of an allocation may launch on another stream: the handle is bound after that."""
    call, inner = OPERATIONS["sdpa"], OPERATIONS["sdpa, causal, scale"]
    allocate = plans.allocate

    def allocates(*layout):
        made = allocate(*layout)
        if layout[2] is torch.uint8 and device.current_stream() == 11:
            with device.stream(12):
                assert_right(inner, inner.tensors())
        return made

    with pytest.MonkeyPatch.context() as patch:
        everywhere(patch, allocate, allocates)
        plan_cache.clear()
        with device.stream(11):
            for _ in range(4):
                device.launches.clear()
                assert_right(call, call.tensors())
                assert [launch.stream for launch in device.launches] == [12, 11]


def test_a_call_in_the_midst_of_a_binding_may_have_another_stream(device, monkeypatch):
    """As of a signal handler, which Python runs when the function that binds the handle returns."""
    call, inner = OPERATIONS["sdpa"], OPERATIONS["sdpa, causal, scale"]
    for each in (call, inner):
        each.warm_up()
    bind, interruptions = backend.set_stream, []

    def binds(handle, stream):
        bind(handle, stream)
        if stream == 11 and not interruptions:
            interruptions.append(None)
            with device.stream(12):
                assert_right(inner, inner.tensors())

    with device.stream(12):
        assert_right(inner, inner.tensors())
    device.launches.clear()
    with device.stream(11):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "set_stream", binds)
            assert_right(call, call.tensors())
        for _ in range(2):
            assert_right(call, call.tensors())
    assert [launch.stream for launch in device.launches] == [12, 11, 11, 11]


@pytest.mark.parametrize("size", [64, 512])
def test_much_memory_is_allocated(device, size):
    q, k = (torch.randn(1, 2, size, 16).to(torch.bfloat16) for _ in range(2))
    mask = torch.rand(1, 2, size, size) > 0.5
    mask[..., 0] = True
    for _ in range(4):
        found = sdpa(q, k, k, attn_mask=mask)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        filled = range_of(thread.slots[0].filled, FILLED_BYTES)
        is_in_slot = any(address in filled for address in device.last.pointers.values())
        assert is_in_slot is (mask.numel() * 2 <= FILLED_BYTES)


@pytest.mark.parametrize("stream", [0, 11])
def test_threads_that_fill_memory_do_not_meet(device, stream):
    call = OPERATIONS["sdpa, lengths"]
    call.warm_up()

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        with device.stream(stream + seed if stream else 0):
            for _ in range(8):
                tensors = call.tensors()
                tensors["seq_lens_kv"] = torch.randint(1, 14, (2,), generator=generator, dtype=torch.int32)
                assert_right(call, tensors)
        return True

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


# Memory that there is none of.


class Allocator:
    """Allocates, or fails; knows what is alive of it."""

    def __init__(self) -> None:
        self.fails_at, self.made = -1, list[weakref.ref[torch.Tensor]]()

    def __call__(self, *layout):
        if len(self.made) == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made = poisoned(*layout)
        self.made.append(weakref.ref(made))
        return made

    def start(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.made.clear()

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.made)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sdpa", *WITH_KERNELS, "sdpa_fp8", "rms_norm", "silu_mul"])
def test_a_failed_allocation_leaves_nothing_behind(name, way, launches_in_python):
    """Of results, of what kernels fill, and of workspaces, in both passes."""
    call, allocator = OPERATIONS[name], Allocator()
    with real_plans(call.compute, allocate=allocator) as device, device.stream(11):
        call.warm_up()
        launches_in_python.clear()
        for pass_ in ("forward", "backward") if call.differentiable else ("forward",):
            tensors = call.tensors(grad=pass_ == "backward")
            fails_at = 0
            while True:
                allocator.start()
                out = call(tensors)
                allocator.start(fails_at)
                try:
                    if pass_ == "forward":
                        del out
                        found = call(tensors)
                    else:
                        wanted = [x for x in tensors.values() if x.requires_grad]
                        found = torch.autograd.grad(out, wanted, torch.ones_like(out))
                except torch.OutOfMemoryError:
                    pass
                else:
                    break
                out = None
                assert len(allocator.made) == fails_at
                assert not allocator.alive()
                assert not thread.slots[0].taken[0]
                allocator.start()
                if pass_ == "forward":
                    assert_right(call, tensors)
                else:
                    call.assert_gradients(call.gradients(tensors), tensors)
                fails_at += 1
            # The library's own kernels need no workspace.
            assert fails_at >= (1 if name in ("rms_norm", "silu_mul") else 2), "there are a result and a workspace"
            del found
        if way == "native" and not name.startswith("sdpa_varlen"):
            assert not launches_in_python


def test_memory_of_a_slot_that_cannot_be_allocated(monkeypatch):
    """On a new thread, whose slot has none yet."""
    call, memory = OPERATIONS["sdpa, lengths"], handles._memory

    def fails(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def work() -> int:
        slot = thread.slots[0]
        slot.filled = 0  # of a thread that has ended
        with monkeypatch.context() as patch:
            patch.setattr(handles, "_memory", fails)
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    call(call.tensors())
                assert not slot.taken[0]
        assert_right(call, call.tensors())
        return slot.filled

    with real_plans(call.compute):
        assert handles._memory is not memory
        call.warm_up()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result()


# More than the module has room for.


def sum_of(count: int):
    """A graph function of that many operands, and the reference of its gradient."""
    names = ", ".join(f"x{number}" for number in range(count))
    lines = [f"def total(g, {names}):", "    found = x0"]
    lines += [f"    found = g.add(a=found, b=x{number})" for number in range(1, count)]
    namespace: dict[str, Callable[..., object]] = {}
    exec("\n".join([*lines, "    return found"]), namespace)  # noqa: S102 - a builder with names for all operands
    return namespace["total"]


def reference_of_sum(*tensors):
    return sum(tensors[1:], tensors[0])


def test_a_graph_of_70_operands():
    operation = graph_op(reference=reference_of_sum)(sum_of(70))
    with real_plans() as device:
        for _ in range(5):
            tensors = [torch.randn(2, 4, 16) for _ in range(70)]
            torch.testing.assert_close(operation(*tensors), reference_of_sum(*tensors))
            assert len(device.last.pointers) == 71


@pytest.mark.parametrize("count", [60, 63, 64, 65])
def test_a_gradient_of_many_operands(count, way):
    """The launch of the gradient has more than 64, also where that of the function has not."""
    total = graph_op(reference=reference_of_sum)(sum_of(count + 1))

    def backward(grads, operands, results):  # noqa: ARG001
        return total.call(grads[0], *operands)

    operation = graph_op(reference=reference_of_sum, backward=backward)(sum_of(count))
    with real_plans():
        for _ in range(7):
            x, others = torch.randn(2, 16).requires_grad_(), [torch.randn(2, 16) for _ in range(count - 1)]
            out, grad_out = operation(x, *others), torch.randn(2, 16)
            (found,) = torch.autograd.grad(out, x, grad_out)
            with torch.no_grad():
                torch.testing.assert_close(out, reference_of_sum(x, *others))
                torch.testing.assert_close(found, reference_of_sum(grad_out, x, *others))
        assert (len(operation.calls) > 0) is (way == "native" and count < 64)


@pytest.mark.parametrize("fields", [512, 513])
def test_a_kernel_of_many_fields(fields, way, monkeypatch):
    data_of = calls._prologue

    def padded(*arguments):
        kernel = data_of(*arguments)
        return kernel._replace(fields=kernel.fields + [0] * (fields - len(kernel.fields)))

    monkeypatch.setattr(calls, "_prologue", padded)
    call = OPERATIONS["sdpa, lengths"]
    with real_plans(call.compute):
        known = len(sdpa_calls())
        for _ in range(5):
            assert_right(call, call.tensors())
        assert (len(sdpa_calls()) > known) is (way == "native" and fields == 512)


def sdpa_calls() -> calls.NativeCalls:
    from cudnn_sdpa.attention.dense import sdpa as module

    return module._calls
