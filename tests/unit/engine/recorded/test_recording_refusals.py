"""What a recording refuses, and what it launches, one kernel or memset at a time.

Here `execute` is a few lines of a test, with addresses that are the same in each run, and the stand-in driver captures
what it launches. Where that never does what CUDA may do, one of its functions is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_driver import Attribute, Config
from stand_in_gpu import CAPTURING, CLUSTERS, OVERLAPS, Kernel, launched, library, stand_in_driver

WORKSPACE = 1024  #: its bytes
COUNTER = 512  #: where in it a counter is
LAUNCHES = 8
STREAM = 7

#: Launch attributes.
COOPERATIVE, CLUSTER_POLICY, PREFERRED_CLUSTERS, CARVEOUT = 2, 5, 11, 14
ACCESS_POLICY, SYNC_DOMAIN, UPDATABLE = 1, 10, 13

SIZES = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}  #: of what a memset sets, in bytes

ADDRESS_DEPENDENT = "what it launches depends on its operands' addresses"

INVALID_HANDLE = 400  #: an error


class KernelNode(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("shape", ctypes.c_uint * 7),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class MemsetNode(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


@functools.cache
def kernel(name: str, sizes: tuple[int, ...], number: int = 0) -> Kernel:  # noqa: ARG001 - several have one name
    return Kernel(name, _nothing, sizes)


@dataclass
class Launch:
    """A call of `execute`: how many there were before, what it gets, and where it launches."""

    number: int
    a: int
    out: int
    workspace: int
    stream: int = CAPTURING

    def kernel(
        self, *arguments: int | bytes, name="kernel", of=0, grid=(6, 4, 2), block=(32, 2, 3), shared=64, attributes=None
    ) -> None:
        """Launches one with these words, or bytes, as arguments."""
        given = [x if isinstance(x, bytes) else x.to_bytes(8, "little") for x in arguments]
        function = kernel(name, tuple(map(len, given)), of).handle
        noted = [Attribute(id_, 0, value) for id_, value in (attributes or {}).items()]
        config = Config(grid, block, shared, self.stream, (Attribute * 8)(*noted), len(noted))
        buffers = [ctypes.create_string_buffer(x, len(x)) for x in given]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        assert not library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)

    def memset(self, address: int, value: int = 0, width: int = 2, size: int = 4) -> None:
        of_driver = getattr(library(), f"cuMemsetD{8 * size}Async")
        stream = ctypes.c_void_p(self.stream)
        assert not of_driver(ctypes.c_uint64(address), SIZES[size](value), ctypes.c_size_t(width), stream)


Execute = Callable[[Launch], None]


def addresses() -> list[list[int]]:
    """Those of `a`, `out` and the workspace in each launch."""
    draw = random.Random(0)
    return [[draw.randrange(1 << 42, 1 << 46, 256) for _ in range(3)] for _ in range(LAUNCHES)]


def record(module: Any, execute: Execute, sets: list[list[int]] | None = None) -> Any:
    sets, native, numbers = addresses() if sets is None else sets, module.Recorded(), iter(range(LAUNCHES))

    def called(operands: int, count: int, workspace: int, _: int, index: int) -> None:
        assert (count, index) == (2, -1)
        execute(Launch(next(numbers), *(ctypes.c_uint64 * 2).from_address(operands), workspace))

    native.take_context()
    native.record(
        stream=CAPTURING,
        handle=0,
        execute=called,
        sets=sets,
        noise=[1] * LAUNCHES,
        moving=[(0, 16), (1, 16), (2, 256)],
        scalars=[],
        workspace=WORKSPACE,
    )
    assert not list(numbers)
    return native


def refusal(module: Any, execute: Execute, sets: list[list[int]] | None = None) -> str:
    with pytest.raises(RuntimeError) as found:
        record(module, execute, sets)
    assert not library().is_captured(CAPTURING)
    return str(found.value)


def assert_recorded(module: Any, execute: Execute, expected: Execute | None = None) -> list[str]:
    """The recorded launch asks the driver for what `execute` asks for, or else for what is expected."""
    native = record(module, execute)
    memory = torch.zeros(3, WORKSPACE + 256, dtype=torch.uint8)
    a, out, workspace = (x.data_ptr() + -x.data_ptr() % 256 for x in memory)
    launched()
    (expected or execute)(Launch(0, a, out, workspace, STREAM))
    by_execute = launched()
    assert native.serves([a, out])
    assert not native.launch([a, out], workspace, STREAM)
    recorded = launched()
    assert recorded == by_execute
    return recorded


@pytest.fixture
def module() -> Iterator[Any]:
    with stand_in_driver() as found:
        yield found


@pytest.fixture
def replace(module) -> Iterator[Callable[..., None]]:
    """Replaces a function of the driver with so many parameters, which are pointers and numbers."""
    own = {name: ctypes.cast(getattr(library(), name), ctypes.c_void_p).value for name in module.driver_functions()}
    functions, made = dict(own), []

    def replace(name: str, count: int, function: Callable[..., int]) -> None:
        made.append(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(function))
        functions[name] = ctypes.cast(made[-1], ctypes.c_void_p).value
        module.set_driver(functions)

    yield replace
    module.set_driver(own)


def by_driver(name: str, *given: int | None) -> int:
    """What the stand-in driver's own function answers."""
    return getattr(library(), name)(*map(ctypes.c_void_p, given))


# Captures that are not as the ones before predict.

UNPREDICTED = {
    "a bit": lambda x, odd: x.kernel(x.a, bytes(12) + bytes([64 * odd])),
    "a byte ahead of an address": lambda x, odd: x.kernel(x.a, bytes([odd, *range(7)]) + x.out.to_bytes(8, "little")),
    "an address": lambda x, odd: x.kernel(x.a, x.out + 16 * odd),
    "another operand's": lambda x, odd: x.kernel(x.a, x.a if odd else x.out),
    "of a second kernel": lambda x, odd: (x.kernel(x.a), x.kernel(x.out, 5 + odd)),
    "of a memset": lambda x, odd: (x.kernel(x.a), x.memset(x.out + 8 * odd)),
}


@pytest.mark.sample(len(UNPREDICTED))
@pytest.mark.parametrize("difference", UNPREDICTED)
def test_the_last_captures_must_be_as_predicted_to_the_byte(module, difference):
    launch = UNPREDICTED[difference]
    assert_recorded(module, functools.partial(launch, odd=False))
    for odd in ({LAUNCHES - 1}, {LAUNCHES - 2}, {LAUNCHES - 2, LAUNCHES - 1}):
        why = refusal(module, lambda x, odd=odd: launch(x, odd=x.number in odd))
        assert why == f"another capture is not as predicted: {'memset' if 'memset' in difference else 'kernel'}"


def test_addresses_do_not_overlap(module):
    """Half of an address is no part of another one, even if all captures look like that."""
    sets = [[a, out >> 32 << 32 | a >> 32, workspace] for a, out, workspace in addresses()]

    def execute(x: Launch) -> None:
        x.kernel(x.a.to_bytes(8, "little") + (x.out >> 32).to_bytes(4, "little"))

    assert refusal(module, execute, sets) == "byte 8 of argument 0 moves with no operand: kernel"


# What is the same in all captures.

OF_KERNELS = {
    "grid, x": {"grid": (5, 4, 2)},
    "grid, y": {"grid": (6, 5, 2)},
    "grid, z": {"grid": (6, 4, 1)},
    "block, x": {"block": (64, 2, 3)},
    "block, y": {"block": (32, 1, 3)},
    "block, z": {"block": (32, 2, 2)},
    "shared memory": {"shared": 128},
    "overlap": {"attributes": {CLUSTERS: (2, 1, 1)}},
    "clusters": {"attributes": {OVERLAPS: (1,), CLUSTERS: (1, 2, 1)}},
    "an attribute more": {"attributes": {OVERLAPS: (1,), CLUSTERS: (2, 1, 1), COOPERATIVE: (1,)}},
    "function": {"of": 1},
    "name": {"name": "other"},
}


@pytest.mark.sample(len(OF_KERNELS))
@pytest.mark.parametrize("difference", OF_KERNELS)
def test_kernels_are_launched_alike_in_all_captures(module, difference):
    alike = {"attributes": {OVERLAPS: (1,), CLUSTERS: (2, 1, 1)}}

    def execute(x: Launch, odd: int) -> None:
        x.kernel(x.a)
        x.kernel(x.out, **alike | OF_KERNELS[difference] if x.number == odd else alike)

    assert_recorded(module, functools.partial(execute, odd=-1))
    for odd in range(LAUNCHES):
        assert refusal(module, functools.partial(execute, odd=odd)) == ADDRESS_DEPENDENT


@pytest.mark.parametrize("difference", [{"value": 1}, {"width": 3}, {"size": 2}], ids=lambda x: next(iter(x)))
def test_memsets_are_launched_alike_in_all_captures(module, difference):
    def execute(x: Launch, odd: int) -> None:
        x.memset(x.workspace, **difference if x.number == odd else {})
        x.kernel(x.a, x.out, x.workspace)

    assert_recorded(module, functools.partial(execute, odd=-1))
    for odd in range(LAUNCHES):
        assert refusal(module, functools.partial(execute, odd=odd)) == ADDRESS_DEPENDENT


# Attributes of launches.

KEPT = {COOPERATIVE: (1,), CLUSTERS: (2, 1, 3), CLUSTER_POLICY: (2,), PREFERRED_CLUSTERS: (4, 1, 3), CARVEOUT: (50,)}


@pytest.mark.sample(len(KEPT))
@pytest.mark.parametrize("attribute", KEPT)
def test_an_attribute_is_that_of_the_recorded_launch(module, attribute):
    (line,) = assert_recorded(module, lambda x: x.kernel(x.a, x.out, attributes={attribute: KEPT[attribute]}))
    assert line.count("@") == 1
    assert f"@{attribute}={bytes(Attribute(0, 0, KEPT[attribute]).value).hex()} " in line


def test_all_attributes_are_those_of_the_recorded_launch(module):
    def execute(x: Launch) -> None:
        x.kernel(x.a)
        x.kernel(x.out, attributes=KEPT | {OVERLAPS: (1,)})

    first, second = assert_recorded(module, execute)
    assert (first.count("@"), second.count("@")) == (0, 1 + len(KEPT))


@pytest.mark.sample(6)
@pytest.mark.parametrize("attribute", [ACCESS_POLICY, SYNC_DOMAIN, UPDATABLE])
@pytest.mark.parametrize("word", [0, 15])
def test_attributes_that_disqualify_a_plan(module, attribute, word):
    value = tuple(int(place == word) for place in range(16))
    why = refusal(module, lambda x: x.kernel(x.a, x.out, attributes={attribute: value}))
    assert why == f"a kernel has the launch attribute {attribute}"


# Edges between kernels.


def of_edges(replace, edge: tuple[int, int, int]) -> Execute:
    """Two kernels, and all edges of graphs are like this one: the ports, and the type."""

    def edges(graph: int, sources: int, targets: int, data: int, count: int) -> int:
        error = by_driver("cuGraphGetEdges_v2", graph, sources, targets, data, count)
        for number in range(ctypes.c_size_t.from_address(count).value):
            ctypes.memmove(data + 8 * number, bytes(edge), 3)
        return error

    replace("cuGraphGetEdges_v2", 5, edges)
    return two_kernels


def two_kernels(x: Launch, *, overlap: bool = False) -> None:
    for address in (x.a, x.out):
        x.kernel(address, attributes={OVERLAPS: (1,)} if overlap else {})


@pytest.mark.parametrize("overlap", [False, True])
def test_edges_of_which_all_is_known(module, replace, overlap):
    execute = of_edges(replace, (1, 0, 1) if overlap else (0, 0, 0))
    lines = assert_recorded(module, execute, functools.partial(two_kernels, overlap=overlap))
    assert [f"@{OVERLAPS}=" in line for line in lines] == [overlap] * 2


EDGES = {
    "programmatic, of the whole kernel": (0, 0, 1),
    "programmatic, of the launch": (2, 0, 1),
    "programmatic, to a port": (1, 1, 1),
    "full, of a trigger": (1, 0, 0),
    "full, to a port": (0, 1, 0),
    "of an unknown type": (0, 0, 2),
}


@pytest.mark.sample(len(EDGES))
@pytest.mark.parametrize("edge", EDGES)
def test_edges_that_disqualify_a_plan(module, replace, edge):
    assert refusal(module, of_edges(replace, EDGES[edge])) == "a kernel depends on another one's launch"


# Functions of kernels.


def named_by_kernels(replace, function_of: Callable[[int, int], int]) -> Execute:
    """Nodes that have a kernel in place of its function, which a function of the driver finds; none has no name."""
    handle, other = (kernel(name, (8, 8), 0).handle for name in ("kernel", "decoy"))

    def parameters(node: int, found: int) -> int:
        error, params = by_driver("cuGraphKernelNodeGetParams_v2", node, found), KernelNode.from_address(found)
        assert params.function == handle
        params.function, params.kernel = None, other
        return error

    def loaded(found: int, given: int) -> int:
        assert given == other
        return function_of(found, handle)

    replace("cuGraphKernelNodeGetParams_v2", 2, parameters)
    replace("cuKernelGetFunction", 2, loaded)
    replace("cuFuncGetName", 2, lambda *given: by_driver("cuFuncGetName", *given) if given[1] else INVALID_HANDLE)
    replace(
        "cuFuncGetParamInfo", 4, lambda *given: by_driver("cuFuncGetParamInfo", *given) if given[0] else INVALID_HANDLE
    )
    return lambda x: x.kernel(x.a, x.out)


def test_the_function_of_a_kernel_is_launched(module, replace):
    def function_of(found: int, handle: int) -> int:
        ctypes.c_void_p.from_address(found).value = handle
        return 0

    (line,) = assert_recorded(module, named_by_kernels(replace, function_of))
    assert line.startswith("kernel kernel ")


def test_a_kernel_whose_function_is_not_known_disqualifies_a_plan(module, replace):
    assert refusal(module, named_by_kernels(replace, lambda *_: 9)) == "a kernel's function: CUDA reports error 9"


# Memsets, and memory.


@pytest.mark.parametrize(("size", "value"), [(1, 0xA1), (2, 0xB1C2), (4, 0xD1E2F304)])
def test_memsets_set_as_many_bytes_to_the_same_value(module, size, value):
    (line,) = assert_recorded(module, lambda x: x.memset(x.out + 16, value, 5, size))
    assert line.endswith("".join(number.to_bytes(8, "little").hex() for number in (value, size, 5)))


@pytest.mark.parametrize("height", [2, 1000])
def test_a_memset_of_rows_disqualifies_a_plan(module, replace, height):
    def rows(node: int, found: int) -> int:
        error, params = by_driver("cuGraphMemsetNodeGetParams", node, found), MemsetNode.from_address(found)
        assert params.height == 1
        params.height, params.pitch = height, 512
        return error

    assert_recorded(module, lambda x: x.memset(x.out))
    replace("cuGraphMemsetNodeGetParams", 2, rows)
    assert refusal(module, lambda x: x.memset(x.out)) == "it sets rows of memory"


@pytest.mark.parametrize("ahead", [32, 256, 1 << 41])
def test_an_address_ahead_of_the_workspace_disqualifies_a_plan(module, ahead):
    why = "an address is ahead of the workspace"
    assert refusal(module, lambda x: x.kernel(x.out, x.workspace - ahead)) == f"{why}: kernel"
    assert refusal(module, lambda x: (x.kernel(x.out), x.memset(x.workspace - ahead))) == f"{why}: memset"
    native = record(module, lambda x: x.kernel(x.out - ahead, x.workspace))  # ahead of an operand it is not
    assert [native.serves([ahead, out]) for out in (ahead - 16, ahead)] == [False, True]


# Counters.


def counters(module: Any, execute: Execute) -> list[list[int]]:
    native = record(module, execute)
    assert bool(native.zeros) == bool(native.counters)
    return native.counters


@pytest.mark.parametrize(("size", "value"), [(1, 0xFF), (2, 0x0100), (4, 1), (4, 1 << 24)])
def test_what_a_memset_does_not_clear_is_no_counter(module, size, value):
    def execute(x: Launch, value: int) -> None:
        x.memset(x.workspace + COUNTER, value, 2, size)
        x.kernel(x.a, x.out, x.workspace + COUNTER)

    assert counters(module, functools.partial(execute, value=0)) == [[COUNTER, 2 * size, 0]]
    assert counters(module, functools.partial(execute, value=value)) == []


BESIDE = {
    "a kernel ahead of it": lambda x: x.kernel(x.a, x.workspace + COUNTER),
    "a kernel in its middle": lambda x: x.kernel(x.a, x.workspace + COUNTER + 4),
    "a memset of it": lambda x: x.memset(x.workspace + COUNTER, width=1),
    "a memset of its end": lambda x: (
        x.memset(x.workspace + COUNTER + 4, width=1),
        x.kernel(x.workspace + COUNTER + 4),
    ),
}


@pytest.mark.sample(2 * len(BESIDE))
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_used_before_it_is_cleared_is_no_counter(module, beside, is_first):
    """It is not all zeros any more where the next launch begins; nor is what is cleared twice."""

    def execute(x: Launch) -> None:
        if is_first:
            BESIDE[beside](x)
        x.memset(x.workspace + COUNTER)
        x.kernel(x.out, x.workspace + COUNTER)
        if not is_first:
            BESIDE[beside](x)

    is_counter = not is_first and "a kernel" in beside
    assert counters(module, execute) == ([[COUNTER, 8, 0]] if is_counter else [])
