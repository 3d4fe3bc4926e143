"""Public calls whose plans are launched as recorded, by a stand-in for CUDA's driver, in all that a launch meets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from contract.operations import OPERATIONS, Example
from fake_gpu import poisoned
from stand_in_gpu import Kernel, KernelOfPlan, in_new_thread, launched, library, recorded_plans, recorders, settle, wait

from benchmarks.tools import ways
from cudnn_sdpa import ExecutionError, explain, plan_cache, providers, rms_norm, sdpa
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import captures, proof, recorder
from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.handles import SCRATCH_BYTES, thread
from cudnn_sdpa.plans import plan as plans

#: Examples that launch a plan of cuDNN's where no kernel of the library's own is preferred.
OF_OWN_KERNELS = (
    *("kernels", "a kernel", "append", "rope", "rms_norm_fp8", "layer_norm_fp8", "sdpa_paged_varlen"),
    "sdpa_paged, FP8",
    *("gelu_mul", "relu_squared"),  # their gradients
)
WITH_PLANS = [name for name in OPERATIONS if not name.startswith(OF_OWN_KERNELS)]

#: Examples that are always launched by Python, as they are more than one launch, or by kernels of the library's own.
BY_PYTHON = (
    *("sdpa, dropout", "sdpa, dropout, lengths", "sdpa_backward", "sdpa_backward, mask, some"),
    *("sdpa_varlen, self-attention", "sdpa_varlen_backward", "sdpa_paged, a chunk", "sdpa_paged, sinks, window"),
    *("sdpa_fp8, pages", "sdpa_fp8_backward, lengths"),
)


def assert_right(call: Example, tensors: dict[str, torch.Tensor] | None = None) -> None:
    tensors = call.tensors() if tensors is None else tensors
    call.assert_out(call(tensors), tensors)


def run(call: Example) -> None:
    """A call and its gradients, with new tensors."""
    assert_right(call)
    if call.differentiable:
        tensors = call.tensors(grad=True)
        call.assert_gradients(call.gradients(tensors), tensors)


def settled(name: str) -> Example:
    call = OPERATIONS[name]
    settle(lambda: run(call))
    return call


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", WITH_PLANS)
@pytest.mark.parametrize("stream", [0, 11])
def test_calls_and_gradients(name, stream, launches_in_python):
    """Right at fresh addresses, on the stream of the recording and on others, and no longer executed by cuDNN."""
    call = OPERATIONS[name]
    with providers("cudnn"), recorded_plans(call.compute) as device, device.stream(stream):
        settle(lambda: run(call))
        assert bool(recorders()) is (name not in BY_PYTHON)
        assert {str(each) for each in recorders()} <= {"as recorded (kernels: 1, memsets: 0)"}
        for other in (stream, 12, 0, stream):
            with device.stream(other):
                executed = KernelOfPlan.executed
                launches_in_python.clear()
                for _ in range(2):
                    run(call)
                assert KernelOfPlan.executed == executed + len(launches_in_python)


@pytest.mark.parametrize(("workspace", "stream"), [(0, 0), (64, 0), (SCRATCH_BYTES + 1, 0), (0, 11), (64, 11)])
def test_workspaces(workspace, stream):
    """The thread's scratch memory on the default stream if it is small, otherwise new memory, which is freed."""
    allocated = []

    def notes(shape, stride, dtype):
        made = poisoned(shape, stride, dtype)
        if dtype is torch.uint8:
            allocated.append((made.data_ptr(), weakref.ref(made)))
        return made

    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute, workspace=workspace, allocate=notes) as device, device.stream(stream):
        settled("sdpa")
        for _ in range(2):
            allocated.clear()
            launched()
            assert_right(call)
        (line,) = launched()
        is_own = 0 < workspace <= SCRATCH_BYTES and not stream
        assert len(allocated) == (workspace > 0 and not is_own)
        expected = [address for address, _ in allocated] or [thread.slots[0].scratch * is_own]
        assert line.split()[-2] == expected[0].to_bytes(8, "little").hex()
        assert not any(memory() is not None for _, memory in allocated)


@pytest.mark.parametrize("mode", [loader.ON, loader.VERIFY])
def test_plans_that_are_rarely_launched_are_not_recorded(mode, monkeypatch):
    """C++ counts, so the launches of many shapes are no slower; `verify` looks at all."""
    call, before = OPERATIONS["sdpa"], 7 * (mode == loader.ON)
    with recorded_plans(call.compute, mode=mode), torch.no_grad():
        monkeypatch.setattr(recorder, "MIN_CALLS", 7)
        tensors, watched, watch = call.tensors(), [], recorder.Recorder.watch
        monkeypatch.setattr(recorder.Recorder, "watch", lambda *of, **more: watched.append(1) or watch(*of, **more))
        while not recorders():
            call(tensors)
        registered = KernelOfPlan.executed
        for _ in range(before):
            assert_right(call, tensors)
        assert not watched
        assert KernelOfPlan.executed == registered + before
        for _ in range(6):
            call(tensors)
            wait()
        assert watched
        assert recorders()[0].native.is_serving


def test_threads_without_a_context():
    with recorded_plans(OPERATIONS["sdpa"].compute) as device:
        call = settled("sdpa")
        executed = KernelOfPlan.executed

        def work(stream: int) -> bool:
            library().lose_context()
            with device.stream(stream):
                for _ in range(6):
                    assert_right(call)
            return True

        assert in_new_thread(lambda: work(11))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert all(pool.map(work, (0, 11, 12)))
        assert KernelOfPlan.executed == executed


def test_a_thread_with_another_context_is_served_by_cudnn():
    with recorded_plans(OPERATIONS["sdpa"].compute):
        call = settled("sdpa")
        executed = KernelOfPlan.executed

        def work() -> bool:
            library().change_context()
            assert_right(call)
            return True

        assert in_new_thread(work)
        assert KernelOfPlan.executed == executed + 1


def test_threads_that_make_the_first_calls_together():
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute) as device:

        def work(stream: int) -> bool:
            library().make_context_current()
            with device.stream(stream):
                for _ in range(25):
                    run(call)
            return True

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, (0, 0, 11, 12)))
        settle(lambda: run(call))
        assert all(each.native.is_serving for each in recorders())


def test_a_captured_launch_is_in_the_graph_and_its_plan_is_kept(monkeypatch):
    monkeypatch.setattr(plans, "captured_plans", [])
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute) as device:
        settled("sdpa")
        assert not plans.captured_plans
        executed = KernelOfPlan.executed
        with device.stream(11):
            device.capturing = True
            with library_capture(11) as count:
                for _ in range(2):
                    call(call.tensors())
            assert count() == 2
            device.capturing = False
        assert len(plans.captured_plans) == 1
        assert KernelOfPlan.executed == executed
        plans.captured_plans.clear()


@contextlib.contextmanager
def library_capture(stream: int) -> Iterator[Callable[[], int]]:
    """Captures a stream of the driver's; gives the number of the graph's nodes."""
    driver, graph, count = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert not driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 2)
    yield lambda: count.value
    assert not driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    assert not driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    assert not driver.cuGraphDestroy(graph)


def test_other_host_scalars_are_executed():
    """A scale is in the arguments as a number: launches with another one are cuDNN's."""
    call = OPERATIONS["rms_norm"]
    with providers("cudnn"), recorded_plans(call.compute), torch.no_grad():
        x, weight = (torch.randn(shape).to(torch.bfloat16) for shape in ((4, 64), (64,)))

        def assert_norm(eps):
            exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
            torch.testing.assert_close(rms_norm(x, weight, eps=eps).double(), exact, atol=3e-2, rtol=3e-2)

        settle(lambda: assert_norm(1e-2))
        for eps, more in ((1e-2, 0), (0.5, 1), (1e-2, 0), (3.0, 1)):
            executed = KernelOfPlan.executed
            assert_norm(eps)
            assert KernelOfPlan.executed == executed + more


@pytest.mark.parametrize("workspace", [0, 64])
def test_cudnn_launches_a_plan_whose_recorded_launch_fails(workspace, monkeypatch):
    """As where another plan has lowered the shared memory that a function of both may have; `execute` raises it."""
    with recorded_plans(OPERATIONS["sdpa"].compute, workspace=workspace) as device:
        call = settled("sdpa")
        execute = Kernel.launch

        def repairs(self, *arguments, **options):
            library().fail_with(0)
            execute(self, *arguments, **options)

        library().fail_with(1)
        with monkeypatch.context() as patch, device.stream(11):
            patch.setattr(Kernel, "launch", repairs)
            assert_right(call)
        executed = KernelOfPlan.executed
        assert_right(call)
        assert KernelOfPlan.executed == executed + 1
        said = "by cuDNN, because CUDA reports error 1 for its recorded launch"
        assert said in {str(each) for each in recorders()}


@pytest.mark.parametrize("workspace", [64, SCRATCH_BYTES + 64])
def test_one_memset_clears_the_counters_of_many_launches(workspace, monkeypatch):
    """On the default stream alone, whatever streams are in use between; elsewhere each launch clears its own."""
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute, workspace=workspace) as device, torch.no_grad():
        assert_right(call)  # this thread has all of its memory
        plan_cache.clear()
        monkeypatch.setattr(KernelOfPlan, "counts", True)
        monkeypatch.setattr(handles, "ZEROS_BYTES", 1024)
        settle(lambda: assert_right(call))
        found = recorders()[-1]
        assert found.native.takes_zeros is (workspace < SCRATCH_BYTES)  # the space of this counter is all that follows
        launched()
        for number in range(11):
            assert_right(call)
            if number % 5 == 2:
                with device.stream(11):
                    assert_right(call)
        memsets = [line for line in launched() if line.startswith("memset")]
        assert len(memsets) == 11 // 4 + 1 + 2 if found.native.takes_zeros else 13


def test_a_threads_memory_is_of_pytorchs_small_pool():
    """More than 1 MiB at once is of a segment of 20 MiB, which could never be given back."""
    sizes = []
    with recorded_plans(), pytest.MonkeyPatch.context() as patch:
        allocate = handles._memory
        patch.setattr(handles, "_memory", lambda size: (sizes.append(size), allocate(size))[1])
        slot = handles._create(0)
        slot.bind(0)
    assert slot.scratch
    assert sizes == [1 << 20]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_calls_of_its_parents_threads(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    execute = Kernel.launch

    def blocks(self, *arguments, **options):
        begun.set()
        assert may_end.wait(30)
        execute(self, *arguments, **options)

    def work():
        library().make_context_current()
        assert_right(OPERATIONS["sdpa"])
        return True

    with recorded_plans(OPERATIONS["sdpa"].compute, mode=loader.VERIFY), monkeypatch.context() as patch:
        for _ in range(12):  # C++ launches it then, and nothing is recorded any more
            assert_right(OPERATIONS["sdpa"])
            wait()
        patch.setattr(Kernel, "launch", blocks)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            is_asking = begun.wait(30) and loader.module().asking() == 1
            child = os.fork()
            if not child:
                since = time.monotonic()
                recorder._Background.end()
                os._exit(time.monotonic() - since > recorder.PATIENCE / 2)
            may_end.set()
            assert done.result()
        assert is_asking
        assert os.waitpid(child, 0)[1] == 0
        assert not loader.module().asking()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_success_of_another_thread_hides_no_error(monkeypatch):
    """One thread's launch fails while the other's, which found the plan serving, is still to come."""
    call, is_armed, may_fail, may_end = OPERATIONS["sdpa"], [False], threading.Event(), threading.Event()
    this, execute, failed = threading.current_thread(), Kernel.launch, threading.Event()

    def allocates(shape, stride, dtype):  # of the workspace: after the plan was found to serve
        made = poisoned(shape, stride, dtype)
        if is_armed[0] and dtype is torch.uint8 and threading.current_thread() is this:
            is_armed[0] = False
            library().fail_with(1)
            may_fail.set()
            assert failed.wait(20)
        return made

    def launch(self, *arguments, **options):
        if threading.current_thread() is not this and may_fail.is_set():
            library().fail_with(0)
            failed.set()
            assert may_end.wait(20)
        execute(self, *arguments, **options)

    with recorded_plans(call.compute, workspace=SCRATCH_BYTES + 1, allocate=allocates), torch.no_grad():
        tensors = call.tensors()
        settle(lambda: call(tensors))
        (found,) = recorders()
        monkeypatch.setattr(Kernel, "launch", launch)

        def fails():
            library().make_context_current()
            assert may_fail.wait(20)
            with torch.no_grad():
                call(tensors)

        other = threading.Thread(target=fails)
        other.start()
        is_armed[0] = True
        call(tensors)
        may_end.set()
        other.join()
        assert failed.is_set()
        call(tensors)
        wait()
        assert str(found) == "by cuDNN, because CUDA reports error 1 for its recorded launch"
        assert not found.native.is_watched


def test_a_forked_child_records_although_its_parent_did_meanwhile(monkeypatch):
    """What the parent's thread had begun never ends there; plans that the child builds are recorded by its own."""
    begun, may_end = threading.Event(), threading.Event()
    record = captures.record

    def blocks(*given):
        begun.set()
        assert may_end.wait(30)
        record(*given)

    with recorded_plans(OPERATIONS["sdpa"].compute):
        with monkeypatch.context() as patch:
            patch.setattr(captures, "record", blocks)
            while not begun.is_set():
                assert_right(OPERATIONS["sdpa"])
            child = os.fork()
        if not child:
            status = 1
            torch.set_num_threads(1)  # those of OpenMP are the parent's, and the child would wait for them
            with contextlib.suppress(BaseException):
                assert_right(OPERATIONS["sdpa"])
                plan_cache.clear()
                settled("sdpa")
                status = int(not all(each.native.is_serving for each in recorders()))
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()
        settled("sdpa")
        assert all(each.native.is_serving for each in recorders())


def test_who_shares_a_slot_never_counts_where_the_other_has(monkeypatch):
    """As a call in a finalizer of a thread that ends, whose slot the next thread has by then."""
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute, workspace=64), torch.no_grad():
        monkeypatch.setattr(KernelOfPlan, "counts", True)
        settle(lambda: assert_right(call))
        assert recorders()[-1].native.takes_zeros
        shared = dict(thread.slots)
        turn = threading.Barrier(2, timeout=30)

        def work(first: int) -> bool:
            library().make_context_current()
            thread.slots.update(shared)
            for number in range(8):
                if number % 2 == first:
                    assert_right(call)
                turn.wait()
            thread.slots.clear()  # no other test's
            return True

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert all(pool.map(work, range(2)))


def test_an_error_of_the_driver_is_raised_as_of_a_refused_launch():
    with recorded_plans(OPERATIONS["sdpa"].compute):
        call = settled("sdpa")
        library().fail_with(719)
        for _ in range(2):
            with pytest.raises(ExecutionError, match=r"could not launch .*the driver reports error 719"):
                call(call.tensors())
        library().fail_with(0)
        assert_right(call)


@pytest.mark.parametrize("is_long", [False, True])
def test_results_that_are_compared_have_room_for_all_rows_of_packed_tensors(is_long):
    """Sequences may begin behind the memory of a batch of the maximum length, as those of a slice of the offsets."""
    call, sizes = OPERATIONS["sdpa_varlen"], []
    tensors = call.tensors()
    if is_long:
        tensors["q"] = torch.randn(3000, 4, 16).to(torch.bfloat16)
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            tensors[name] = tensors[name][:2].clone()
    with providers("cudnn"), recorded_plans(call.compute, workspace=0), torch.no_grad():
        allocate = proof.allocate

        def notes(shape, stride, dtype):
            sizes.append(shape[0] * dtype.itemsize)
            return allocate(shape, stride, dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proof, "allocate", notes)
            settle(lambda: call(tensors))
        (plan,) = plan_cache.plans()
        assert str(plan.recorder).startswith("as recorded")
    rows = tensors["q"].shape[0]
    assert max(sizes) == rows * 4 * 24 * 2
    assert is_long is (plan.key.outputs[0].layout.shape[0] * plan.key.outputs[0].layout.shape[2] < rows)


def test_an_evicted_plan_is_freed_and_recorded_again():
    with recorded_plans(OPERATIONS["sdpa"].compute):
        call = settled("sdpa")
        graphs = [weakref.ref(plan.built) for plan in plan_cache.plans()]
        plan_cache.clear()
        gc.collect()
        assert not any(graph() is not None for graph in graphs)
        settled("sdpa")
        executed = KernelOfPlan.executed
        run(call)
        assert KernelOfPlan.executed == executed


@pytest.mark.parametrize("mode", [loader.ON, loader.VERIFY])
def test_plans_are_evicted_while_they_are_recorded_and_proved(mode):
    """By another thread, at any moment."""
    call, over, freed = OPERATIONS["sdpa"], threading.Event(), []

    def evict() -> None:
        while not over.wait(0.002):
            freed.extend(weakref.ref(plan.built) for plan in plan_cache.plans())
            plan_cache.clear()

    def work(stream: int) -> bool:
        library().make_context_current()
        with device.stream(stream):
            for _ in range(60):
                run(call)
        return True

    with recorded_plans(call.compute, mode=mode) as device, concurrent.futures.ThreadPoolExecutor(4) as pool:
        evicting = pool.submit(evict)
        try:
            assert all(pool.map(work, (0, 11, 12)))
        finally:
            over.set()
        evicting.result()
        wait()
        assert len(freed) > 10
        plan_cache.clear()
        gc.collect()
        assert not [graph for graph in freed if graph() is not None]
        for _ in range(30):
            run(call)
            wait()
        assert recorders()
        assert all(each.native.is_serving for each in recorders())


@pytest.mark.parametrize("name", ["sdpa", "silu_mul"])
def test_verified_calls_are_launched_both_ways(name):
    call = OPERATIONS[name]
    with providers("cudnn"), recorded_plans(call.compute, mode=loader.VERIFY):
        for _ in range(12):
            run(call)
            wait()
        assert all("each compared with cuDNN's" in str(each) for each in recorders())
        executed = KernelOfPlan.executed
        assert_right(call)
        assert KernelOfPlan.executed == executed + 3  # the call's, and two that are compared


def test_benchmarks_measure_both_ways():
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute):
        assert ways.until_recorded(lambda: run(call)) == ["as recorded (kernels: 1, memsets: 0)"] * 3
        assert ways.until_recorded(lambda: run(call)) == []
        executed = KernelOfPlan.executed
        with ways.by_provider():
            assert_right(call)
        assert KernelOfPlan.executed == executed + 1
        assert_right(call)
        assert KernelOfPlan.executed == executed + 1


def test_explain_says_who_launches_a_plan(monkeypatch):
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute):
        tensors = call.tensors()
        assert explain(sdpa, **tensors).launched == "by cuDNN, because C++ has not launched it yet"
        settled("sdpa")
        found = explain(sdpa, **call.tensors(grad=True))
        assert found.launched == found.backward.launched == "as recorded (kernels: 1, memsets: 0)"
        assert "  launched   as recorded (kernels: 1, memsets: 0)\n" in str(found)
        with monkeypatch.context() as patch:
            patch.setattr(loader.Native, "module", None)
            patch.setattr(loader.Native, "status", "Python: there is no C++ compiler")
            plan_cache.clear()
            found = explain(sdpa, **tensors)
            assert found.launched == "by cuDNN, because calls go through Python: there is no C++ compiler"
        monkeypatch.setenv(loader.RECORDED_VARIABLE, "off")
        found = explain(sdpa, **tensors)
        assert found.launched == "by cuDNN, because CUDNN_SDPA_RECORDED is off"


@pytest.mark.parametrize("mode", [loader.OFF, loader.ON])
def test_a_thread_without_a_handle_is_refused_in_a_capture_before_its_plan_is_kept(mode, monkeypatch):
    """With and without recorded launches: what such a thread captures may need cuDNN at any time."""
    monkeypatch.setattr(plans, "captured_plans", [])
    call = OPERATIONS["sdpa"]
    with recorded_plans(call.compute, mode=mode) as device:
        settled("sdpa")

        def work() -> str:
            library().make_context_current()
            with device.stream(11):
                device.capturing = True
                try:
                    call(call.tensors())
                except ExecutionError as error:
                    return str(error)
                finally:
                    device.capturing = False
            return ""

        monkeypatch.setattr(handles, "_free", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        assert "cannot be created while a CUDA graph is being captured" in str(in_new_thread(work))
        assert not plans.captured_plans


def test_nothing_is_imported_where_recording_is_off(run_python):
    code = """
import sys
from contract.operations import OPERATIONS
from native_way import native_way
from real_plans import real_plans
call = OPERATIONS["sdpa"]
with native_way(), real_plans(call.compute):
    call.warm_up()
assert not [name for name in sys.modules if "engine.recorded" in name]
"""
    path = os.pathsep.join(sys.path)
    run_python(code, fresh=True, PYTHONPATH=path, CUDNN_SDPA_RECORDED="off")
