"""Plans of compiled functions with the C interface of TVM FFI, in which CuTe's kernels are exported.

A launch calls a few functions in host code, each of which launches kernels on the current stream. What a call needs
besides addresses is one block of 64-bit words, made once: descriptions of tensors (`DLTensor`), tuples of them, and
arguments (`TVMFFIAny`). A launch copies the block and writes its addresses into the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.private_memory import relaxed_capture
from cudnn_sdpa.plans.plan import allocate, current_raw_stream
from cudnn_sdpa.plans.program_plan import ProgramPlan

# Of `tvm/ffi/c_api.h`: the kinds of a `TVMFFIAny`, and words of structures.
_NONE, _INT, _FLOAT, _TENSOR, _ARRAY = 0, 1, 3, 7, 71
_TENSOR_WORDS, _ANY_WORDS = 6, 2
_OBJECT_WORDS, _SEQUENCE_WORDS = 3, 4

#: Of `dlpack.h`: the code of CUDA's devices, and of kinds of numbers.
_CUDA = 2
_KINDS = {torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int32: (0, 32)}

#: The operand of plans for any sizes: a host array that has the shapes and strides of tensors, which each launch reads.
SIZES = "sizes"


#: The largest number of elements that a tensor of a compiled function extends over.
MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class TensorArgument:
    """A tensor that a function reads or writes.

    Attributes:
        operand: The name of the operand in whose memory it lies; empty for the workspace.
        offset: Where it begins there, in bytes.
        sizes: Where its shape, and behind that its strides, begin in the operand `SIZES`; None if they are these.
    """

    operand: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    sizes: int | None = None

    @property
    def extent(self) -> int:
        """The number of elements from its first to its last, with those between that are not its own."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class NumberArgument:
    """A float32 in host memory that each launch reads: the name of its operand."""

    operand: str


#: None, a tensor, a number of the launch's or a fixed one, or a tuple of arguments.
Argument: TypeAlias = "TensorArgument | NumberArgument | int | float | tuple[Argument, ...] | None"


@dataclass(frozen=True)
class FunctionCall:
    """A function, by its name among those of the plan, and its arguments."""

    function: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class FunctionProgram:
    """The functions that a launch calls, one after another.

    Attributes:
        zeroed: The first byte and the number of bytes of the workspace that are 0 before the first call.
        knobs: What `explain` shows of it.
    """

    engine: str
    calls: Sequence[FunctionCall]
    workspace: int = 0
    zeroed: tuple[int, int] = (0, 0)
    knobs: Mapping[str, int] = field(default_factory=dict)

    @property
    def reasons_against(self) -> list[str]:
        """The tensors beyond what functions were tested with: their addresses may be computed in 32 bits."""
        tensors = [x for call in self.calls for x in call.arguments if isinstance(x, TensorArgument)]
        large = {x.operand or "its workspace" for x in tensors if x.extent > MAX_ELEMENTS}
        return [f"it is untested beyond {MAX_ELEMENTS:,} elements of {name}" for name in sorted(large)]


class Interface:
    """TVM FFI's library and the runtime of CuTe's DSL, loaded without Python's packages of these names."""

    def __init__(self, tvm_ffi: str, runtime: str) -> None:
        self._tvm_ffi = ctypes.CDLL(tvm_ffi, mode=ctypes.RTLD_GLOBAL)  # functions find their symbols
        self._runtime = ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        self.set_stream = self._tvm_ffi.TVMFFIEnvSetStream
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        self.set_stream.argtypes = [integer, integer, pointer, pointer]
        self.address_of_set_stream = ctypes.cast(self.set_stream, pointer).value
        self._tvm_ffi.TVMFFIErrorMoveFromRaised.argtypes = [pointer]
        self._tvm_ffi.TVMFFIErrorMoveFromRaised.restype = None
        self._tvm_ffi.TVMFFIObjectDecRef.argtypes = [pointer]

    def raised(self) -> str:
        """The message of the error that a function has raised on this thread."""
        error = ctypes.c_void_p()
        self._tvm_ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
        if error.value is None:
            return "no reason is given"
        words = (ctypes.c_uint64 * 4).from_address(error.value + 8 * _OBJECT_WORDS)
        kind, message = (ctypes.string_at(words[i], words[i + 1]).decode(errors="replace") for i in (0, 2))
        self._tvm_ffi.TVMFFIObjectDecRef(error)
        return f"{kind}: {message}"


class Library:
    """A shared library with one function, loaded from memory. It is never unloaded: CUDA graphs have its kernels.

    Its file stays open: the system's loader takes a path that it knows for the library that it has loaded from there,
    and the path is the file's number.

    Attributes:
        is_launched: Whether the function was called: its first call loads kernels.
    """

    def __init__(self, contents: bytes) -> None:
        self._file = os.memfd_create("cudnn_sdpa function")
        with os.fdopen(self._file, "wb", closefd=False) as memory:
            memory.write(contents)
        self._library = ctypes.CDLL(f"/proc/self/fd/{self._file}")
        self.is_launched = False
        self.function = self._library["__tvm_ffi_func"]
        pointer = ctypes.c_void_p
        self.function.argtypes = [pointer, pointer, ctypes.c_int32, pointer]

    @functools.cached_property
    def address(self) -> int:
        found = ctypes.cast(self.function, ctypes.c_void_p).value
        assert found is not None
        return found


class Block:
    """The words of a launch, and where it writes what.

    Attributes:
        words: All words, with zeros where a launch writes.
        pointers: For each address in an operand's memory its word, the operand's place, and an offset.
        scratch: For each tensor in the workspace the word of its address, and an offset.
        links: For each word that is the address of another word both of them.
        numbers: For each number of the launch's its word, and the operand's place.
        calls: For each call the word of its first argument, and the number of its arguments.
    """

    def __init__(self, program: FunctionProgram, operands: Sequence[Operand], device: int) -> None:
        self.words = array("Q")
        self.pointers: list[tuple[int, int, int]] = []
        self.scratch: list[tuple[int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.numbers: list[tuple[int, int]] = []
        self._places = {operand.name: place for place, operand in enumerate(operands)}
        self._device = device
        self.sizes: list[array[int]] = []  # shapes and strides, whose addresses are among the words
        self.calls = [(self._arguments(call.arguments), len(call.arguments)) for call in program.calls]

    def _arguments(self, arguments: Sequence[Argument]) -> int:
        """Adds arguments side by side, behind all that they point to; returns the word of the first."""
        pointed_to = [self._pointed_to(x) for x in arguments]
        first = len(self.words)
        for argument, target in zip(arguments, pointed_to, strict=True):
            word = len(self.words) + 1
            if target is not None:
                self.links.append((word, target))
                self.words.extend([_ARRAY if isinstance(argument, tuple) else _TENSOR, 0])
            elif isinstance(argument, NumberArgument):
                self.numbers.append((word, self._places[argument.operand]))
                self.words.extend([_FLOAT, 0])
            elif isinstance(argument, float):
                self.words.extend([_FLOAT, *struct.unpack("<Q", struct.pack("<d", argument))])
            elif isinstance(argument, int):
                self.words.extend([_INT, argument & (2**64 - 1)])
            else:
                self.words.extend([_NONE, 0])
        return first

    def _pointed_to(self, argument: Argument) -> int | None:
        if isinstance(argument, TensorArgument):
            return self._tensor(argument)
        if isinstance(argument, tuple):
            return self._tuple(argument)
        return None

    def _tensor(self, tensor: TensorArgument) -> int:
        word, (kind, bits), rank, shape = len(self.words), _KINDS[tensor.dtype], len(tensor.shape), 0
        if tensor.sizes is None:
            self.sizes.append(array("q", (*tensor.shape, *tensor.stride)))
            shape = self.sizes[-1].buffer_info()[0]
        else:
            begins = enumerate((8 * tensor.sizes, 8 * (tensor.sizes + rank)), word + 3)
            self.pointers += [(each, self._places[SIZES], offset) for each, offset in begins]
        described = kind << 32 | bits << 40 | 1 << 48
        self.words.extend([0, self._device << 32 | _CUDA, rank | described, shape, shape + 8 * rank, 0])
        if tensor.operand:
            self.pointers.append((word, self._places[tensor.operand], tensor.offset))
        else:
            self.scratch.append((word, tensor.offset))
        return word

    def _tuple(self, items: Sequence[Argument]) -> int:
        """An array that its user only reads: nobody frees it, as its count of references stays above 0."""
        elements = self._arguments(items)
        word = len(self.words)
        self.links.append((word + _OBJECT_WORDS, elements))
        self.words.extend([1 << 32 | 1, _ARRAY, 0, 0, len(items), len(items), 0])
        return word


class FunctionPlan(ProgramPlan):
    """A plan of functions.

    CUDA graphs need no such plan: nothing unloads its functions, and graphs have copies of their kernels' arguments.
    """

    can_be_recorded = True

    def __init__(
        self, key: PlanKey, program: FunctionProgram, libraries: Mapping[str, Library], interface: Interface
    ) -> None:
        super().__init__(key, program)
        operands = (*key.inputs, *key.outputs)
        self.block, self.count = Block(program, operands, self.device), len(operands)
        self.zeroed, self.interface = program.zeroed, interface
        self.libraries = [libraries[call.function] for call in program.calls]

    def launch(self, pointers: Sequence[int]) -> None:
        block, scratch = self.block, None
        words = block.words[:]  # local to this call: many threads launch a plan at once
        base = words.buffer_info()[0]
        for word, place, offset in block.pointers:
            words[word] = pointers[place] + offset
        for word, target in block.links:
            words[word] = base + 8 * target
        for word, place in block.numbers:
            number = ctypes.c_float.from_address(pointers[place]).value
            words[word] = struct.unpack("<Q", struct.pack("<d", number))[0]
        if self.workspace:
            scratch = allocate((self.workspace,), (1,), torch.uint8)
            for word, offset in block.scratch:
                words[word] = scratch.data_ptr() + offset
            first, count = self.zeroed
            if count:
                scratch[first : first + count].zero_()
        stream, before = current_raw_stream(self.device), ctypes.c_void_p()
        self.interface.set_stream(_CUDA, self.device, stream, ctypes.byref(before))
        try:
            for library, (first, count) in zip(self.libraries, block.calls, strict=True):
                result = (ctypes.c_uint64 * _ANY_WORDS)()
                with contextlib.nullcontext() if library.is_launched else relaxed_capture():
                    failed = library.function(None, base + 8 * first, count, result)
                if failed:
                    self.refuse_launch()
                library.is_launched = True
        finally:
            self.interface.set_stream(_CUDA, self.device, before, None)
        del scratch  # not before: its memory must not go to other work of this launch

    def why_not_recorded(self) -> str:
        if self.zeroed[1]:
            return "its functions add to memory that is cleared before, in any order"
        if any(operand.role is Role.HOST for operand in self.key.inputs):
            return "each launch reads the sizes of its tensors"
        return ""

    def execution(self, native: Any, handle: int, stream: int) -> tuple[Any, int]:
        return native.executor_of_functions(self.native_form() | {"device": self.device}), stream

    def native_form(self) -> dict[str, object]:
        block = self.block
        return {
            "functions": [(library.address, *call) for library, call in zip(self.libraries, block.calls, strict=True)],
            "set_stream": self.interface.address_of_set_stream,
            "words": list(block.words),
            "written": block.pointers,
            "in_workspace": block.scratch,
            "links": block.links,
            "host_numbers": block.numbers,
            "zeroed": self.zeroed,
            "refuse": self.refuse_launch,
            "workspace": ([self.workspace], [1], torch.uint8),
        }

    def refuse_launch(self) -> NoReturn:
        raise ExecutionError(f"{self.key.name} could not be launched: {self.interface.raised()}. {self.key}")
