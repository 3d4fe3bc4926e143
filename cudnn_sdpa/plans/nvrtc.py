"""The library's own CUDA kernels, for operations that cuDNN lacks, compiled with NVRTC for the current GPU.

NVRTC is present wherever cuDNN is, since cuDNN compiles its own kernels with it. Compiled kernels are kept in the plan
store.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import ExecutionError, LibraryError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.store import PlanStore, StoredPlan

#: CUDA_ERROR_INVALID_CONTEXT: this thread has not called the CUDA runtime yet.
_NO_CONTEXT = 201

#: CUDA's errors for bytes that are not a kernel for this GPU: INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX,
#: UNSUPPORTED_PTX_VERSION, INVALID_SOURCE, SHARED_OBJECT_SYMBOL_NOT_FOUND, NOT_FOUND.
_NOT_A_KERNEL = frozenset({200, 209, 218, 222, 300, 302, 500})


class _NotAKernelError(ExecutionError):
    pass


@dataclass(frozen=True)
class _Identity:
    name: str
    digest: str
    sm: int

    def identity(self) -> dict[str, object]:
        version = {"package": __version__, "cuda": torch.version.cuda}
        return {"kernel": self.name, "source": self.digest, "sm": self.sm, **version}


class LoadedKernel:
    __slots__ = ("_device", "_function", "_launch", "_shared", "name", "native")

    def __init__(self, name: str, function: int, device: int, shared: int = 0, *, overlaps: bool = False) -> None:
        self.name = name
        self._shared = shared
        self._function = function
        self._device = device
        self._launch = _driver().cuLaunchKernel
        #: For native code: addresses of `cuLaunchKernelEx`, of `cuStreamIsCapturing`, and of the kernel, bytes of
        #: shared memory of a block, and whether the kernel waits itself for what is ahead of it in the stream.
        functions = _driver().cuLaunchKernelEx, _driver().cuStreamIsCapturing
        self.native = (*map(_address, functions), function, shared, overlaps)

    def launch(self, blocks: int, threads: int, fields: array[int], stream: int) -> None:
        parameters = array("Q", (fields.buffer_info()[0],))
        # The order of `cuLaunchKernel`, since ctypes knows no names: function, grid, block, dynamic shared memory,
        # stream, parameters, extra.
        call = (self._function, blocks, 1, 1, threads, 1, 1, self._shared, stream, parameters.buffer_info()[0], None)
        status = self._launch(*call)
        if status == _NO_CONTEXT:
            _make_context_current(self._device)
            status = self._launch(*call)
        if status:
            raise ExecutionError(f"CUDA could not launch {self.name}: {_error_name(status)}")


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8

#: Dynamic shared memory, in bytes, beyond which a kernel needs `cuFuncSetAttribute`.
_SHARED_UNASKED = 48 << 10


#: The first compute capability with instructions that only GPUs of the same have.
FIRST_SPECIFIC = 90

#: The first compute capability on which a launch may begin before what is ahead of it in the stream has ended.
_FIRST_TO_OVERLAP = 90

#: Headers that any kernel may include, such as primitives.cuh.
HEADERS = Path(__file__).parents[1] / "kernels"


class Kernel:
    """CUDA source of one kernel, declared `extern "C"`, whose argument is a structure of 64-bit values.

    The file may include the headers (.cuh) of its folder, and those of `HEADERS`; `defines` are macros. A block uses
    `shared` bytes of dynamic shared memory. `architecture_specific` kernels have instructions that no later GPU has,
    such as Hopper's WGMMA.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        defines: Mapping[str, int] | None = None,
        shared: int = 0,
        *,
        architecture_specific: bool = False,
    ) -> None:
        self.path = path
        self.name = name
        self.defines = dict(defines or {})
        self.shared = shared
        self.architecture_specific = architecture_specific
        self._loaded: dict[int, LoadedKernel] = {}
        self._lock = threading.RLock()  # a signal handler may call within

    def on(self, device: int) -> LoadedKernel:
        """The kernel on a GPU; the first call compiles it, or reads it from the plan store, and loads it."""
        kernel = self._loaded.get(device)
        if kernel is None:
            with self._lock, torch.cuda.device(device), relaxed_capture():
                kernel = self._loaded.get(device)
                if kernel is None:
                    _make_context_current(device)
                    kernel = self._loaded[device] = self._load(device)
        return kernel

    def is_compiled(self, device: int, sm: int) -> bool:
        """Whether it is loaded on a GPU, or stored for it."""
        store = default_store.active()
        return device in self._loaded or (store is not None and store.load(self.identity(sm)) is not None)

    def identity(self, sm: int) -> _Identity:
        source = self.path.read_bytes()
        digest = hashlib.sha256(source)
        if self._may_include(source):
            for header in sorted({*self.path.parent.glob("*.cuh"), *HEADERS.glob("*.cuh")}):
                digest.update(header.read_bytes())
            digest.update(repr(sorted(self.defines.items())).encode())
        if self.architecture_specific:
            digest.update(b"architecture-specific")
        return _Identity(self.name, digest.hexdigest(), sm)

    def overlaps(self, sm: int) -> bool:
        """Whether its launch need not wait for what is ahead in the stream: it begins with `wait_for_previous()`."""
        source = re.sub(r"//[^\n]*|/\*.*?\*/", " ", self.path.read_text(), flags=re.DOTALL)
        first = re.findall(rf"__global__[^{{;]*\b{self.name}\s*\([^{{;]*{{\s*([^;]*;)?", source)
        return sm >= _FIRST_TO_OVERLAP and set(first) == {"wait_for_previous();"}

    def _may_include(self, source: bytes) -> bool:
        return bool(self.defines) or b"#include" in source

    def _load(self, device: int) -> LoadedKernel:
        major, minor = torch.cuda.get_device_capability(device)
        key = self.identity(10 * major + minor)
        store = default_store.active()
        stored = None if store is None else store.load(key)
        if store is not None and stored is not None:
            try:
                return self._in_memory(stored.data, device, key.sm)
            except _NotAKernelError as error:  # any other failure is the GPU's, not the file's
                store.reject(key, str(error))
        compiled = self._stored_form(key)
        if store is not None:
            store.save(key, compiled)
        return self._in_memory(compiled.data, device, key.sm)

    def compile_into(self, store: PlanStore, sm: int) -> bool:
        """Compiles the kernel for a compute capability into a store; needs no GPU. Returns whether it was missing."""
        key = self.identity(sm)
        if store.load(key) is not None:
            return False
        store.save(key, self._stored_form(key))
        return True

    def _stored_form(self, key: _Identity) -> StoredPlan:
        start = time.perf_counter()
        cubin = self.compile(key.sm)
        seconds = time.perf_counter() - start
        return StoredPlan(key.identity(), engine="nvrtc", knobs={}, workspace=0, build_seconds=seconds, data=cubin)

    def _in_memory(self, cubin: bytes, device: int, sm: int) -> LoadedKernel:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = _driver().cuModuleLoadData(ctypes.byref(module), cubin)
        status = status or _driver().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode())
        if status in _NOT_A_KERNEL:
            raise _NotAKernelError(f"CUDA could not load {self.name}: {_error_name(status)}")
        if not status and self.shared > _SHARED_UNASKED:
            status = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, self.shared)
        _check(status, self.name)
        assert function.value is not None
        return LoadedKernel(self.name, function.value, device, self.shared, overlaps=self.overlaps(sm))

    def compile(self, sm: int) -> bytes:
        return self.compile_verbosely(sm)[0]

    def compile_verbosely(self, sm: int, *more: str) -> tuple[bytes, str]:
        nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
        source, file = self.path.read_bytes(), self.path.name.encode()
        is_specific = self.architecture_specific and sm >= FIRST_SPECIFIC
        flags = [f"--gpu-architecture=sm_{sm}{'a' * is_specific}", *more]
        if self._may_include(source):
            flags += ["--std=c++17", *(f"--include-path={folder}" for folder in (self.path.parent, HEADERS))]
            flags += [f"--define-macro={name}={value}" for name, value in self.defines.items()]
        options = (ctypes.c_char_p * len(flags))(*map(os.fsencode, flags))
        status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, file, 0, None, None)
        try:
            status = status or nvrtc.nvrtcCompileProgram(program, len(flags), options)
            status = status or nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
            cubin = ctypes.create_string_buffer(size.value)
            status = status or nvrtc.nvrtcGetCUBIN(program, cubin)
            if status:
                raise LibraryError(
                    f"NVRTC cannot compile {self.path.name} for SM{sm}: {nvrtc.nvrtcGetErrorString(status).decode()}. "
                    f"{_log_of(program)}It is {nvrtc._name}; a newer one may know this GPU."
                )
            return cubin.raw, _log_of(program)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log_of(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if _nvrtc().nvrtcGetProgramLogSize(program, ctypes.byref(size)) or size.value <= 1:
        return ""
    log = ctypes.create_string_buffer(size.value)
    _nvrtc().nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace").strip() + "\n"


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for name in _nvrtc_candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise LibraryError(
        "libnvrtc cannot be found; PyTorch's CUDA wheels include it: pip install nvidia-cuda-nvrtc (CUDA 13) or "
        "nvidia-cuda-nvrtc-cu12 (CUDA 12)"
    )


def _nvrtc_candidates() -> Iterator[str]:
    loaded = backend.loaded_libraries().get("libnvrtc")
    if loaded is not None:
        yield loaded
    majors = [torch.version.cuda.partition(".")[0]] if torch.version.cuda else ["13", "12"]
    yield from (f"libnvrtc.so.{major}" for major in majors)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for major in majors:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")))


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    size, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuLaunchKernel.argtypes = [pointer, *(size,) * 7, pointer, pointer, pointer]
    return driver


def _make_context_current(device: int) -> None:
    context, ordinal = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(ordinal), device), "a kernel")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal), "a kernel")
    _check(_driver().cuCtxSetCurrent(context), "a kernel")


def _check(status: int, name: str) -> None:
    if status:
        raise ExecutionError(f"CUDA could not load {name}: {_error_name(status)}")


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


class Struct:
    """The argument of a kernel, a struct of 64-bit values, with the fields that its source declares.

    Fields within an array or another struct are named by their path, such as "of.1.table".
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    @functools.cached_property
    def _owners(self) -> dict[str, str | None]:
        """The fields in their order, and the struct that each number is in, as a path; None for pointers."""
        return dict(_fields(self._path.read_text(), self._name))

    @property
    def names(self) -> list[str]:
        """The fields in their order."""
        return list(self._owners)

    def indices(self, *names: str) -> list[int]:
        order = self.names
        return [order.index(name) for name in names]

    def filled(self, **values: object) -> array[int]:
        """The struct with these values. A pointer that is not given is null; a number must be given.

        Raises:
            ValueError: There is no such field, or a number is missing in a struct that `values` are of.
        """
        given: dict[str, int] = dict(_flat("", values))
        structs = {within for within in self._owners.values() if not within or any(x.startswith(within) for x in given)}
        numbers = {name for name, within in self._owners.items() if within is not None and within in structs}
        if wrong := (numbers - given.keys()) | (given.keys() - self._owners.keys()):
            raise ValueError(f"missing or unknown fields of struct {self._name}: {sorted(wrong)}")
        return array("q", [given.get(name, 0) for name in self._owners])


_FIELD = re.compile(r"^\s+(?:const )?(\w+)(\*)? (\w+)(?:\[(\d+)\])?;", re.MULTILINE)


def _fields(source: str, struct: str, within: str = "") -> Iterator[tuple[str, str | None]]:
    body = source.partition(f"struct {struct} {{\n")[2].partition("\n};")[0]
    found = _FIELD.findall(body)
    if len(found) != len(body.splitlines()):
        raise ValueError(f"struct {struct}: a line that is no field")
    for kind, pointer, name, count in found:
        for path in [f"{within}{name}.{i}" for i in range(int(count))] if count else [f"{within}{name}"]:
            if pointer or kind == "number":
                yield path, None if pointer else within
            else:
                yield from _fields(source, kind, f"{path}.")


def _flat(within: str, values: Any) -> Iterator[tuple[str, int]]:
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(value, (Mapping, list, tuple)):
            yield from _flat(f"{within}{key}.", value)
        else:
            yield f"{within}{key}", value
