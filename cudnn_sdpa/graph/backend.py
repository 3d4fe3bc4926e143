"""The only module that imports cuDNN's frontend: loading, versions, enums, building and launching.

Nothing is loaded until the first call that needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypedDict

from cudnn_sdpa.errors import ExecutionError, LibraryError, UnsupportedError
from cudnn_sdpa.graph.diagnostics import SourceLocation, reason_of, recording

#: Oldest tested versions.
MIN_FRONTEND = (1, 28)
MIN_CUDNN = 91000

# The frontend has no type information.

#: The frontend's `pygraph`.
PyGraph: TypeAlias = Any

#: The frontend's `Handle`, which owns a `cudnnHandle_t`.
Handle: TypeAlias = Any

#: A GPU in the format of cuDNN's device-properties JSON.
DeviceProperties: TypeAlias = dict[str, Any]

#: An engine and its settings.
EngineConfiguration = tuple[str, dict[str, int]]

#: Executes a built plan: (address of the pointer array, its length, workspace pointer, handle, plan index).
Execute = Callable[[int, int, int, int, int], None]

_INSTALL = "install it with: pip install 'cudnn-sdpa[cu13]' (PyTorch for CUDA 13) or 'cudnn-sdpa[cu12]' (CUDA 12)"


class Symbol(Protocol):
    def get_dim(self) -> list[int]: ...

    def set_output(self, is_output: bool, /) -> Symbol: ...

    def set_dim(self, shape: list[int], /) -> Symbol: ...

    def set_stride(self, stride: list[int], /) -> Symbol: ...

    def set_data_type(self, data_type: object, /) -> Symbol: ...

    def set_uid(self, uid: int, /) -> Symbol: ...

    def set_ragged_offset(self, offsets: Symbol, /) -> Symbol: ...


#: The results of a builder function.
Results: TypeAlias = Symbol | Sequence[Symbol]


class Operations(Protocol):
    """cuDNN's pointwise operations as methods: the argument of a `score_mod`."""

    def __getattr__(self, name: str) -> Callable[..., Symbol]: ...


@functools.cache
def cudnn() -> ModuleType:
    """The `cudnn` module, after checking its version and that libcudnn loads."""
    try:
        module: ModuleType = importlib.import_module("cudnn")
    except Exception as error:
        raise LibraryError(f"nvidia-cudnn-frontend cannot be imported ({error}); {_INSTALL}") from error
    installed = tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2])
    if installed < MIN_FRONTEND:
        oldest = ".".join(map(str, MIN_FRONTEND))
        raise LibraryError(
            f"nvidia-cudnn-frontend {module.__version__} at {module.__file__} is too old: {oldest} or newer is needed; "
            "pip install --upgrade nvidia-cudnn-frontend"
        )
    try:
        version = int(module.backend_version())
    except Exception as error:
        raise LibraryError(f"libcudnn.so.9 cannot be loaded ({error}); {_INSTALL}") from error
    if version < MIN_CUDNN:
        where = loaded_libraries().get("libcudnn", "an unknown location")
        raise LibraryError(
            f"cuDNN {version_string(version)} at {where} is too old: {version_string(MIN_CUDNN)} or newer is needed. "
            "A folder on LD_LIBRARY_PATH comes before the pip package; " + _INSTALL
        )
    # The frontend logs a warning here when it declines a graph; our errors carry the same text.
    logging.getLogger("cudnn").addHandler(logging.NullHandler())
    _keep_out_python_engines()
    return module


#: An attribute of this library's graphs.
_BACKEND_ONLY = "_backend_only"


def _keep_out_python_engines() -> None:
    """Keeps the frontend's Python engines, whose import takes 0.3 s, out of this library's graphs, which skip them."""
    try:
        manifest: Any = importlib.import_module("cudnn.engines.manifest")
        family_for = manifest.family_for
    except (ImportError, AttributeError):  # a frontend without such engines, or with others
        return
    manifest.family_for = lambda graph: (
        None if hasattr(graph, "__dict__") and _BACKEND_ONLY in vars(graph) else family_for(graph)
    )


def version_string(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def cudnn_version() -> int:
    """cuDNN's version as a number: 91900 for 9.19.0."""
    return int(cudnn().backend_version())


def frontend_version() -> str:
    return str(cudnn().__version__)


def mapped_files() -> list[str]:
    """Paths of the files that this process has mapped, in the order of their addresses; none but on Linux."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    # Names of files are bytes, in any encoding.
    return [os.fsdecode(line[line.find(b"/") :]) for line in maps.splitlines() if b"/" in line]


def loaded_libraries() -> dict[str, str]:
    """The file of each loaded NVIDIA library: {"libcudnn": "/…/libcudnn.so.9", …}."""
    pattern = re.compile(r"/(libcudnn|libcudnn_graph|libcuda|libnvrtc|libcublasLt|libcudart)\.so[.\d]*$")
    libraries: dict[str, str] = {}
    for path in mapped_files():
        match = pattern.search(path)
        if match:
            libraries.setdefault(match[1], path)
    return dict(sorted(libraries.items()))


def device_properties(device: int) -> DeviceProperties:
    serialized = cudnn().create_device_properties(device).serialize()
    return dict(json.loads(bytes(serialized) if isinstance(serialized, list) else serialized))


def create_handle() -> Handle:
    """A new handle, bound to the current CUDA device; cuDNN makes none on a GPU without free memory."""
    try:
        with no_error_left():
            return cudnn().create_handle()
    except RuntimeError as error:
        raise ExecutionError(f"cuDNN could not create a handle, which takes some memory of the GPU: {error}") from error


def raw_handle(handle: Handle) -> int:
    return int(handle.backend_handle)


def set_stream(handle: Handle, stream: int) -> None:
    cudnn().set_stream(handle, stream)


class DeviceOptions(TypedDict, total=False):
    """The GPU that a `GraphBuilder` plans for: its handle, or the properties of an absent one."""

    handle: Handle | None
    properties: DeviceProperties | None


class GraphBuilder:
    """cuDNN's graph, with every operation as a method: the argument `g` of builder functions."""

    # The operations with several results; `__getattr__` finds them like all others.
    sdpa: Callable[..., Sequence[Symbol]]
    sdpa_backward: Callable[..., Sequence[Symbol]]
    sdpa_fp8: Callable[..., Sequence[Symbol]]
    sdpa_fp8_backward: Callable[..., Sequence[Symbol]]
    rmsnorm: Callable[..., Sequence[Symbol]]
    rmsnorm_backward: Callable[..., Sequence[Symbol]]
    layernorm: Callable[..., Sequence[Symbol]]
    layernorm_backward: Callable[..., Sequence[Symbol]]

    def __init__(self, *, handle: Handle | None = None, properties: DeviceProperties | None = None) -> None:
        self.types = cudnn()
        self.device_options: DeviceOptions = {"handle": handle, "properties": properties}
        options: dict[str, object] = {"handle": handle}
        if properties is not None:
            options = {
                "device_property": self.types.create_device_properties(json.dumps(properties)),
                "sm_version": properties["deviceVer"] // 10,
                "sm_count": properties["multiProcessorCount"],
            }
        float32 = self.types.data_type.FLOAT
        self._graph: PyGraph = self.types.pygraph(intermediate_data_type=float32, compute_data_type=float32, **options)
        with contextlib.suppress(AttributeError):  # a graph in C++ has no engines in Python
            setattr(self._graph, _BACKEND_ONLY, True)
        self._is_allowed: Callable[[str, dict[str, int]], bool] = lambda *_: True
        self._skipped_any = self._deterministic = False
        self.locations: list[SourceLocation] = []

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        operation: Callable[..., Symbol] = recording(name, getattr(self._graph, name), self.locations)
        return operation

    def only_repeatable(self, *, single_query: bool) -> None:
        """Skips forward kernels that may differ in the last bit from run to run."""
        self._is_allowed = functools.partial(is_repeatable, single_query=single_query)

    def only_deterministic(self, sm: int, version: int) -> None:
        """Skips plans that cuDNN marks as nondeterministic, or should, on a GPU of this compute capability."""
        self._deterministic = True

        def is_allowed(engine: str, _: dict[str, int]) -> bool:
            return not self._has("conv_fprop") or is_repeatable_convolution(engine, sm, version)

        self._is_allowed = is_allowed

    def declare(
        self,
        name: str,
        *,
        uid: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: str,
        host_scalar: bool = False,
        ragged: Symbol | None = None,
    ) -> Symbol:
        """Adds an operand: with `host_scalar` a pass-by-value scalar, with `ragged` one with offsets of entries."""
        symbol: Symbol = self._graph.tensor(
            name=name,
            uid=uid,
            dim=list(shape),
            stride=list(stride),
            data_type=getattr(self.types.data_type, dtype),
            is_pass_by_value=host_scalar,
            ragged_offset=ragged,
        )
        return symbol

    def declare_output(
        self,
        symbol: Symbol,
        *,
        uid: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: str,
        ragged: Symbol | None = None,
    ) -> None:
        symbol.set_output(True).set_dim(list(shape)).set_stride(list(stride))
        symbol.set_data_type(getattr(self.types.data_type, dtype)).set_uid(uid)
        if ragged is not None:
            symbol.set_ragged_offset(ragged)

    def build(self, name: str) -> BuiltGraph:
        """Plans and compiles the graph with the best of cuDNN's own engines that supports it.

        The frontend also ranks its own Python engines in the same list; those are skipped.
        """
        # Reasons are kept as text: an exception would keep the graph alive past interpreter shutdown.
        graph, failures = self._graph, list[str]()
        try:
            graph.validate()
            graph.build_operation_graph()
            self._propose()
            if self._deterministic:  # takes effect at build: the frontend exposes no notes
                graph.deselect_numeric_notes([self.types.numerical_note.NONDETERMINISTIC])
        except Exception as error:  # noqa: BLE001 - whatever the frontend raises, it is the reason
            raise _unsupported(name, [reason_of(error)]) from None
        for index in range(graph.get_execution_plan_count()):
            if not self._select(index):
                continue
            try:
                graph.check_support()
                return self._finish(index)
            except Exception as error:  # noqa: BLE001 - whatever one engine raises, another may work
                failures.append(reason_of(error))
        if self._skipped_any:
            failures.append("its other kernels may differ from run to run, and deterministic ones were requested")
        raise _unsupported(name, failures)

    @property
    def has_attention(self) -> bool:
        return self._has("sdpa")

    def _has(self, operation: str) -> bool:
        return any(location.operation.startswith(operation) for location in self.locations)

    def _propose(self) -> None:
        modes = self.types.heur_mode
        self._graph.create_execution_plans([modes.A] if self.has_attention else [modes.A, modes.FALLBACK])

    def _select(self, index: int) -> bool:
        self._graph.select_plan(index)
        if self._graph.selected_engine is not None:  # one of the frontend's Python engines
            return False
        is_allowed = self._is_allowed(*self._configuration(index))
        self._skipped_any |= not is_allowed
        return is_allowed

    def _configuration(self, index: int) -> EngineConfiguration:
        engine, knobs = self._graph.get_engine_and_knobs_at_index(index)
        return f"eng{engine}", {str(getattr(knob, "name", knob)): int(value) for knob, value in knobs.items()}

    def _finish(self, index: int) -> BuiltGraph:
        self._graph.build_plans()
        engine, knobs = self._configuration(index)
        return BuiltGraph(self._graph, engine, knobs, int(self._graph.get_workspace_size()))


@dataclass
class BuiltGraph:
    """A graph with a compiled plan; `workspace` is the number of bytes that each launch needs."""

    graph: PyGraph
    engine: str
    knobs: dict[str, int]
    workspace: int

    def serialize(self) -> bytes:
        return bytes(self.graph.serialize())

    def executor(self, uids: list[int]) -> Execute:
        """The fastest callable of this frontend that executes the plan. UIDs are ascending."""
        raw = _raw_executor(self.graph, uids)
        return raw if raw is not None else _public_executor(self.graph, uids)


def load_graph(handle: Handle, data: bytes, engine: str, knobs: dict[str, int]) -> BuiltGraph:
    """A graph with a plan serialized by `BuiltGraph.serialize`; any exception means that this cuDNN cannot load it."""
    graph: PyGraph = cudnn().pygraph(handle=handle)
    try:
        graph.deserialize(data)
    except TypeError:  # frontends before 1.29 take a list of integers
        graph.deserialize(list(data))
    return BuiltGraph(graph, engine, knobs, int(graph.get_workspace_size()))


def _raw_executor(graph: PyGraph, uids: list[int]) -> Execute | None:
    """The frontend's private execute call with an array of raw pointers, if it has one: 6 µs faster than `execute`."""
    lowered = getattr(graph, "_lowered_graph", None)
    required = ("_execute_with_raw_ptrs", "_prepare_variant_pack_template", "_get_variant_pack_uids_sorted")
    if lowered is None or not all(hasattr(lowered, name) for name in required):
        return None
    lowered._prepare_variant_pack_template()
    if list(lowered._get_variant_pack_uids_sorted()) != uids:
        return None
    execute: Execute = lowered._execute_with_raw_ptrs
    return execute


def _public_executor(graph: PyGraph, uids: list[int]) -> Execute:
    handle_type = cudnn().Handle

    def execute(array: int, count: int, workspace: int, handle: int, index: int) -> None:
        del index  # the public method runs the selected plan
        pointers = (ctypes.c_uint64 * count).from_address(array)
        graph.execute(dict(zip(uids, pointers, strict=True)), workspace, handle=handle_type(handle))

    return execute


@functools.cache
def _cuda_runtime() -> ctypes.CDLL | None:
    """CUDA's runtime if PyTorch has loaded it; the frontend uses the same one."""
    import torch

    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


#: `cudaStreamNonBlocking`: the default stream does not wait for it, nor it for the default stream.
_NON_BLOCKING = 1


def new_stream() -> int | None:
    """A stream of the current device that PyTorch does not use; never destroyed.

    None if CUDA's runtime is not found, as in a PyTorch that is linked to it statically.
    """
    stream = ctypes.c_void_p()
    if (runtime := _cuda_runtime()) is None:
        return None
    if error := runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING):
        runtime.cudaGetLastError()
        raise ExecutionError(f"a stream cannot be made: CUDA reports error {error}")
    return stream.value


def end_capture(stream: int) -> None:
    runtime = _cuda_runtime()
    status, graph = ctypes.c_int(), ctypes.c_void_p()
    if runtime is None or runtime.cudaStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)):
        return
    if status.value:
        runtime.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            runtime.cudaGraphDestroy(graph)


@contextlib.contextmanager
def no_error_left() -> Iterator[None]:
    """While active, the frontend leaves CUDA's last error as it was.

    If a call of CUDA's runtime fails, as for lack of memory, the frontend raises, but the runtime keeps the error, and
    PyTorch would report it after its next kernel, which has done nothing wrong.
    """
    runtime = _cuda_runtime()
    was_there = runtime is None or runtime.cudaPeekAtLastError() != 0
    try:
        yield
    finally:
        if runtime is not None and not was_there:
            runtime.cudaGetLastError()


def execution_error(error: Exception, plan: str) -> ExecutionError:
    if (runtime := _cuda_runtime()) is not None:
        runtime.cudaGetLastError()  # PyTorch checks it after each of its own kernels
    return ExecutionError(f"cuDNN {version_string(cudnn_version())} could not launch {plan}: {error}")


def _unsupported(name: str, reasons: list[str]) -> UnsupportedError:
    reasons = list(dict.fromkeys(reasons)) or ["cuDNN's heuristics proposed no engine"]
    return UnsupportedError(f"{name} with cuDNN {version_string(cudnn_version())}", reasons)


#: KERNEL_CFG of single-query kernels, for versions without the STREAM_K knob, which shows a split of the keys.
_SINGLE_QUERIES = 35

#: Engines of data-center Blackwell.
_BLACKWELL = ("eng3", "eng10")


def has_only_repeatable(sm: int, queries: int) -> bool:
    """Single-query kernels split the keys of a query among warps and blocks, and add the partial sums in any order.

    On 9.19 with an H200, 40 runs of 32 queries on 4,096 keys gave two results that differ in the last bit of one
    element. For more queries only data-center Blackwell has kernels that split the keys.
    """
    return queries != 1 and sm // 10 != 10


def is_repeatable_convolution(engine: str, sm: int, version: int) -> bool:
    """Engine 5 of 9.23 is marked as deterministic, and is not on SM 8.6 (pytorch#188288, pytorch#188318).

    Seen with 9.23.1, fixed in 9.24 (pytorch#189483).
    """
    return not (engine == "eng5" and sm == 86 and 92300 <= version < 92400)


def is_repeatable(engine: str, knobs: dict[str, int], *, single_query: bool) -> bool:
    """Single-query kernels of data-center Blackwell split the keys whatever knobs say; their sums are not tested."""
    if single_query and engine in _BLACKWELL:
        return False
    return not knobs["STREAM_K"] if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") != _SINGLE_QUERIES
