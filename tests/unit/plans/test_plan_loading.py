"""A stored plan that cannot be loaded: it is kept for others unless the plan itself is invalid."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa import ExecutionError, OutOfPagesError
from cudnn_sdpa.graph import backend, handles
from cudnn_sdpa.plans import cache, nvrtc
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.store import StoredPlan
from tests.unit.plans.test_plan_store import key, plan

#: Errors that do not concern the plan: of the GPU, its memory or the process.
IN_TROUBLE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    MemoryError(),
    RuntimeError("CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER: an illegal memory access was encountered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cudnnBackendFinalize failed: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuModuleLoadData: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE"),
]

#: Errors that concern the plan, or might.
REFUSED = [
    ValueError("it wants 5 bytes"),
    KeyError("size"),
    RuntimeError("[json.exception.parse_error.110] parse error: unexpected end of input"),
    RuntimeError("CUDNN_STATUS_BAD_PARAM"),
    RuntimeError("CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"),
    RuntimeError("cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"),
    RuntimeError("CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("nothing that anybody knows"),
]


LOADING_HANDLE, BUILD_HANDLE, CREATE_HANDLE = handles.loading_handle, handles.build_handle, backend.create_handle


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with a valid plan, and a fake GPU."""
    monkeypatch.setattr(handles, "loading_handle", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(handles, "build_handle", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with cudnn_sdpa.use_plan_store(tmp_path / "plans") as store:
        store.save(key(), plan(key()))
        yield store


def fail_with(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(backend, "load_graph", fail)


@pytest.mark.parametrize("trouble", IN_TROUBLE, ids=str)
def test_gpu_errors_raise_and_keep_the_stored_plan(store, monkeypatch, caplog, trouble):
    fail_with(monkeypatch, trouble)
    expected = ExecutionError if type(trouble) is RuntimeError else type(trouble)
    for _ in range(2):
        with pytest.raises(expected):
            cache.load_plan(key())
    assert caplog.text == ""
    assert (store.info().plans, store.info().rejected) == (1, 0)
    assert store.load(key()) == plan(key())


class Runtime:
    """A fake CUDA runtime, which remembers its last error."""

    def __init__(self):
        self.last = 0

    def cudaPeekAtLastError(self):  # noqa: N802 - the runtime's own names
        return self.last

    def cudaGetLastError(self):  # noqa: N802
        last, self.last = self.last, 0
        return last


@pytest.mark.parametrize("before", [0, 700])
@pytest.mark.parametrize("trouble", [*IN_TROUBLE[:3], *REFUSED[:3]], ids=str)
def test_pytorch_does_not_report_the_frontends_errors_after_its_own_kernels(store, monkeypatch, trouble, before):
    """Before, the frontend's failure to make a stream on a full GPU was the error of the next `fill_`."""
    runtime = Runtime()
    runtime.last = before
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: runtime)

    def load(*_):
        runtime.last = runtime.last or 2
        raise trouble

    monkeypatch.setattr(backend, "load_graph", load)
    with contextlib.suppress(ExecutionError, MemoryError, torch.OutOfMemoryError):
        cache.load_plan(key())
    assert runtime.last == before
    assert store.info().plans == 1


class Streams:
    """A fake CUDA runtime with streams, some of which are captured."""

    def __init__(self, capturing=(), error=0):
        self.capturing, self.error, self.dropped = set(capturing), error, []

    def cudaStreamCreateWithFlags(self, stream, flags):  # noqa: N802
        stream._obj.value = 0 if self.error else 77
        return self.error or flags - 1

    def cudaPeekAtLastError(self):  # noqa: N802
        return 0

    def cudaGetLastError(self):  # noqa: N802
        return 0

    def cudaStreamIsCapturing(self, stream, status):  # noqa: N802
        status._obj.value = int(stream.value in self.capturing)
        return 0

    def cudaStreamEndCapture(self, stream, graph):  # noqa: N802
        self.capturing.remove(stream.value)
        graph._obj.value = 5
        return 0

    def cudaGraphDestroy(self, graph):  # noqa: N802
        self.dropped.append(graph.value)
        return 0


def test_plans_are_loaded_on_a_stream_of_their_own_whose_capture_ends(monkeypatch):
    """The frontend captures the stream, and does not end that where it finds no memory."""
    runtime, bound = Streams(), []
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(backend, "create_handle", lambda: "handle")
    monkeypatch.setattr(backend, "set_stream", lambda *to: bound.append(to))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(handles, "_loaders", {})
    monkeypatch.setattr(handles, "_streams", {})
    for _ in range(2):
        with contextlib.suppress(MemoryError), handles.loading_handle(3) as handle:
            assert handle == "handle"
            runtime.capturing.add(77)
            raise MemoryError
        assert not runtime.capturing
    assert runtime.dropped == [5, 5]
    assert bound == [("handle", 77)]


@pytest.fixture
def handles_of_a_gpu(store, monkeypatch):
    """A thread without a handle, and the streams that handles are bound to from then on."""
    assert store
    bound = []
    monkeypatch.setattr(handles, "loading_handle", LOADING_HANDLE)
    monkeypatch.setattr(handles, "build_handle", BUILD_HANDLE)
    monkeypatch.setattr(handles, "_loaders", {})
    monkeypatch.setattr(handles, "_streams", {})
    monkeypatch.setattr(handles.thread, "slots", handles._ThreadSlots())
    monkeypatch.setattr(handles, "_created", [])
    monkeypatch.setattr(handles, "_free", {})
    monkeypatch.setattr(backend, "create_handle", lambda: SimpleNamespace(backend_handle=len(bound)))
    monkeypatch.setattr(backend, "set_stream", lambda _, stream: bound.append(stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield bound
    handles.thread.slots.clear()  # or they would return to the pool


def test_a_thread_that_has_loaded_a_plan_has_a_handle_to_launch_it_with(handles_of_a_gpu, monkeypatch):
    """It may capture a CUDA graph next, where none can be created."""
    monkeypatch.setattr(backend, "_cuda_runtime", Streams)
    monkeypatch.setattr(backend, "load_graph", lambda handle, *_: SimpleNamespace(workspace=256, handle=handle))
    monkeypatch.setattr(cache, "Plan", lambda _, built, __: built)
    monkeypatch.setattr(cache, "constants_of", lambda _: {})
    loaded = cache.load_plan(key())
    assert list(handles.thread.slots) == [0]
    assert loaded.handle is not handles.thread.slots[0].handle
    assert handles_of_a_gpu == [77]


def test_without_a_stream_no_plan_is_blamed(store, handles_of_a_gpu, monkeypatch):
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: Streams(error=2))
    for _ in range(2):
        with pytest.raises(ExecutionError, match="error 2"):
            cache.load_plan(key())
    assert not handles_of_a_gpu
    assert (store.info().plans, store.info().rejected) == (1, 0)


def test_without_memory_for_a_handle_no_plan_is_blamed(store, handles_of_a_gpu, monkeypatch):
    """The stream of the first attempt serves the next one."""
    monkeypatch.setattr(handles, "thread", type(handles.thread)())  # as in a thread that has launched nothing yet
    runtime, made = Streams(), []
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(backend, "new_stream", lambda: made.append(77) or 77)
    new_handle = backend.create_handle
    assert handles.thread.slots[0].handle.backend_handle == 0  # of launches; only the one for loading is missing

    def no_handle():
        raise RuntimeError("cudnnHandle Create failed cudaStreamCreateWithFlags(…) != cudaSuccess")

    monkeypatch.setattr(backend, "cudnn", lambda: SimpleNamespace(create_handle=no_handle))
    monkeypatch.setattr(backend, "create_handle", CREATE_HANDLE)
    for _ in range(2):
        with pytest.raises(ExecutionError, match="memory of the GPU: cudnnHandle Create failed"):
            cache.load_plan(key())
    assert (store.info().plans, store.info().rejected) == (1, 0)
    monkeypatch.setattr(backend, "create_handle", new_handle)
    with handles.loading_handle(0):
        assert (made, handles_of_a_gpu) == ([77], [77])


def test_one_thread_at_a_time_loads_plans_on_that_stream(handles_of_a_gpu, monkeypatch):
    """Or the graph that the frontend captures for one plan would contain the other's launch."""
    monkeypatch.setattr(backend, "_cuda_runtime", Streams)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    got = []

    def load():
        with handles.loading_handle(0) as handle:
            got.append(handle)

    other = threading.Thread(target=load)
    with handles.loading_handle(0) as handle:
        other.start()
        other.join(0.3)
        assert not got
    other.join(60)
    assert got == [handle]
    assert handles_of_a_gpu == [77]


def test_without_cudas_runtime_a_stream_of_pytorch_serves(handles_of_a_gpu, monkeypatch):
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=99))
    with contextlib.suppress(MemoryError), handles.loading_handle(0):
        raise MemoryError
    assert handles_of_a_gpu == [99]


def test_a_launch_that_fails_leaves_no_error_behind(monkeypatch):
    runtime = Runtime()
    runtime.last = 2
    monkeypatch.setattr(backend, "_cuda_runtime", lambda: runtime)
    assert isinstance(backend.execution_error(RuntimeError("out of memory"), "a plan"), ExecutionError)
    assert runtime.last == 0


@pytest.mark.parametrize("refusal", REFUSED, ids=str)
def test_a_plan_rejected_by_cudnn_stays_until_it_is_replaced(store, monkeypatch, caplog, refusal):
    fail_with(monkeypatch, refusal)
    with caplog.at_level(logging.WARNING):
        assert cache.load_plan(key()) is None
    assert caplog.text.count("it will be built again") == 1
    # If the rebuild failed, the plan would be lost for all.
    assert (store.info().plans, store.info().rejected) == (1, 1)
    store.save(key(), plan(key(), seed=1))
    assert store.load(key()) == plan(key(), seed=1)


def test_library_errors_are_handled_the_same(store, monkeypatch):
    fail_with(monkeypatch, OutOfPagesError(1, 0))
    assert cache.load_plan(key()) is None
    assert store.info().plans == 1


class Driver:
    """A fake CUDA driver whose module loading returns a status."""

    def __init__(self, *statuses):
        self.statuses = list(statuses)

    def cuModuleLoadData(self, module, cubin):  # noqa: N802 - the driver's own names
        return self.statuses.pop(0)

    def cuModuleGetFunction(self, function, module, name):  # noqa: N802
        function._obj.value = 1234
        return 0

    def cuGetErrorName(self, status, name):  # noqa: N802
        return 0

    cuLaunchKernel = cuLaunchKernelEx = cuStreamIsCapturing = None  # noqa: N815


class Identity(NamedTuple):
    """What a store takes in place of a key."""

    identity: Callable[[], object]


@pytest.mark.parametrize(("status", "refused"), [(200, True), (209, True), (2, False), (700, False), (214, False)])
def test_a_stored_kernel_is_removed_only_if_its_code_is_invalid(tmp_path, monkeypatch, status, refused):
    source = tmp_path / "kernel.cu"
    source.write_text("nothing")
    driver = Driver(status, 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernel = Kernel(source, "a_kernel")
    monkeypatch.setattr(Kernel, "compile", lambda *_: b"new code")
    with cudnn_sdpa.use_plan_store(tmp_path / "plans") as store:
        saved = []
        monkeypatch.setattr(store, "save", lambda of, made: saved.append((of, made)))
        of = Identity(kernel_identity(kernel))
        type(store).save(store, of, StoredPlan(of.identity(), "nvrtc", {}, 0, 0.0, b"old code"))
        if refused:
            assert kernel._load(0).name == "a_kernel"
            assert [made.data for _, made in saved] == [b"new code"]
            assert store.info().plans == 0
        else:
            with pytest.raises(ExecutionError):
                kernel._load(0)
            assert (store.info().plans, store.info().rejected, saved) == (1, 0, [])


def kernel_identity(kernel):
    digest = nvrtc.hashlib.sha256(kernel.path.read_bytes()).hexdigest()
    return nvrtc._Identity(kernel.name, digest, 90).identity


@pytest.mark.parametrize("needed", [0, 255, 257, 1 << 20])
def test_a_plan_that_needs_other_workspace_than_was_stored_is_refused(store, monkeypatch, caplog, needed):
    """A launch would give it less than it writes to."""
    monkeypatch.setattr(backend, "load_graph", lambda *_: SimpleNamespace(workspace=needed))
    assert cache.load_plan(key()) is None
    assert f"it needs {needed} bytes of workspace, not 256" in caplog.text
    assert store.info().rejected == 1


def test_all_that_a_kernel_is_compiled_from_is_in_its_identity(tmp_path, monkeypatch):
    """Its source, macros, headers and GPU: with less, it would get another one's code from the store."""
    monkeypatch.setattr(nvrtc, "HEADERS", tmp_path / "headers")
    header, source = tmp_path / "headers" / "common.cuh", tmp_path / "a.cu"
    header.parent.mkdir()
    header.write_text("#define A 1")
    source.write_text("int x;")

    def identities():
        macros = ({}, {"DIM": 64}, {"DIM": 128}, {"DIM": 64, "CAUSAL": 1}, {"DIM": 1, "CAUSAL": 64}, {"DIMS": 64})
        made = [Kernel(source, "a", defines).identity(90) for defines in macros]
        return [*made, Kernel(source, "a", {"DIM": 64}).identity(100), Kernel(source, "b", {"DIM": 64}).identity(90)]

    first = identities()
    assert len({str(one.identity()) for one in first}) == len(first)
    assert Kernel(source, "a", {"CAUSAL": 1, "DIM": 64}).identity(90) == Kernel(
        source, "a", {"DIM": 64, "CAUSAL": 1}
    ).identity(90)
    source.write_text("int y;")
    assert not set(identities()) & set(first)
    source.write_text("int x;")
    header.write_text("#define A 2")
    assert [one in first for one in identities()] == [True] + [False] * (len(first) - 1)


@pytest.mark.parametrize(("of", "name"), [(nvrtc, "__version__"), (torch.version, "cuda")], ids=["package", "CUDA"])
def test_a_kernel_of_another_version_is_compiled_again(tmp_path, monkeypatch, of, name):
    """Its compiler, or the flags for it, may be others."""
    source = tmp_path / "a.cu"
    source.write_text("int x;")
    monkeypatch.setattr(Kernel, "compile", lambda *_: b"code")
    with cudnn_sdpa.use_plan_store(tmp_path / "plans") as store:
        assert Kernel(source, "a").compile_into(store, 90)
        assert not Kernel(source, "a").compile_into(store, 90)
        monkeypatch.setattr(of, name, "0.0")
        assert Kernel(source, "a").compile_into(store, 90)
