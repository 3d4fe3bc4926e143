"""Recording of one plan: its words of addresses, its proof, its launches, and everything that disqualifies it.

The plan is two kernels and a memset, which a stand-in for CUDA's driver captures and runs over host memory: see
`stand_in_gpu`. Its results are right only if the memset is there, kernels run in order, and each address is in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import struct
import threading
import weakref
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import soak
import torch
from fake_gpu import TARGET
from real_plans import Device, _Handle, real_plans
from stand_in_gpu import CAPTURING, CLUSTERS, OVERLAPS, Kernel, launched, library, own_kernel, stand_in_driver, wait

from cudnn_sdpa import ExecutionError, OptionError
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import captures, proof, recorder
from cudnn_sdpa.engine.recorded.recorder import Recorder
from cudnn_sdpa.graph import handles, known_issues
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.plan import Plan

WORDS = 64
APART = 512  #: where a counter is that lies apart from all other data in the workspace
SCALE = 0.75
SIZES = [4 * WORDS]  #: bytes of its result
LAYOUT = TensorLayout.contiguous((1, WORDS), torch.float32)
SCALAR = TensorLayout.contiguous((1, 1), torch.float32)


@GraphDefinition
def combine(g, a, b, scale):
    """A key is all that it is needed for."""
    return g.mul(g.add(a, b), scale)


KEY = combine.key(
    [Operand("a", LAYOUT), Operand("b", LAYOUT), Operand("scale", SCALAR, Role.SCALAR)],
    [Operand("out", LAYOUT)],
    {},
    TARGET,
    0,
)


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


class Garbage:
    """It is freed once garbage is collected.

    Attributes:
        freed: For each, whether that was while plans were captured.
    """

    freed: list[bool] = []  # noqa: RUF012 - of all

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.freed.append(library().is_captured(CAPTURING))


class Engine:
    """A built graph, with the faults that are named.

    Attributes:
        calls: How often it was executed, captures included.
    """

    engine, knobs, workspace = "eng0", {}, APART + 64

    def __init__(self, *faults: str, extra: list[str] | None = None) -> None:
        self.faults, self.calls = set(faults), 0
        self.products = Kernel("products", own_kernel("products"), [8, 8, 8, 4, 4])
        self.other = Kernel("products_of_aligned", own_kernel("products"), [8, 8, 8, 4, 4])
        self.noted = Kernel("products_noted", own_kernel("products"), [8, 8, 8, 4, 4, 8])
        self.halves = Kernel("products_of_halves", own_kernel("products"), [8, 8, 8, 4, 4, 16])
        self.products_apart = Kernel("products_apart", own_kernel("products_apart"), [8, 8, 8, 4, 4, 8])
        self.finish_apart = Kernel("finish_apart", own_kernel("finish_apart"), [128, 8, 8])
        self.products_beside = Kernel("products_beside", own_kernel("products_beside"), [8, 8, 8, 4, 4, 8])
        self.finish_elsewhere = Kernel("finish_elsewhere", own_kernel("finish_elsewhere"), [128, 8, 8])
        self.start = Kernel("start", own_kernel("start"), [8])
        self.finish = Kernel("finish", own_kernel("finish"), [128, 8])
        self.foreign = torch.zeros(64)
        library().own_memory(self.foreign.data_ptr(), 256)
        if self.faults & {"early", "false edge"}:
            library().let_next_begin(self.products.handle)
        if "hidden arguments" in self.faults:
            library().hide_sizes(self.finish.handle)

    def executor(self, _):
        return self.execute

    def execute(self, address, count, workspace, handle, index):
        assert (count, index) == (4, -1)
        for _ in range(20 * ("garbage" in self.faults)):
            Garbage()
        library().make_context_current()
        self.host_scalar = ctypes.c_uint64.from_address(address + 16).value
        a, b, scale, out = (ctypes.c_uint64 * 4).from_address(address)
        self.launch(_Handle.all[handle].stream, a, b, ctypes.c_float.from_address(scale).value, out, workspace)

    def kernel_of_products(self, a, b, out, workspace):
        """It, and what more arguments it gets."""
        noted = {
            "a counter": self.calls,
            "half an address": a & 0xFFFF0000,
            "upper half": out >> 32,
            "upper half of the workspace": workspace >> 32,
            "a high bit": out >> 46 & 1,
            "host memory": self.host_scalar,
            "foreign memory": self.foreign.data_ptr() + 64,
        }
        if found := self.faults & set(noted):
            return self.noted, [word(noted[found.pop()])]
        if "swapped halves" in self.faults:
            return self.halves, [struct.pack("<4I", a >> 32, a % 2**32, b >> 32, b % 2**32)]
        if "halves of the workspace" in self.faults:
            upper, lower = workspace >> 32, workspace % 2**32
            return self.halves, [struct.pack("<4I", upper, lower, upper, 0)]
        is_aligned = {"by alignment": not (a | b | out) % 256, "by alignment to 32": not a % 32}
        return self.other if any(is_aligned[fault] for fault in self.faults & set(is_aligned)) else self.products, []

    def kernels(self, a, b, out, workspace):
        """Both kernels, and arguments of theirs."""
        if "apart" not in self.faults:
            products, more = self.kernel_of_products(a, b, out, workspace)
            return products, self.finish, more, []
        counter = [word(workspace + APART)]
        products = self.products_beside if "beside" in self.faults else self.products_apart
        return (
            products,
            self.finish_elsewhere if "also elsewhere" in self.faults else self.finish_apart,
            counter,
            counter,
        )

    def launch(self, stream, a, b, scale, out, workspace):
        self.calls += 1
        is_captured, faults = library().is_captured(stream), self.faults
        cleared = workspace + APART * ("apart" in faults)
        if "refuses in captures" in faults and is_captured:
            raise RuntimeError("cuDNN: CUDNN_STATUS_EXECUTION_FAILED")
        if is_captured and "swapped in captures" in faults:
            a, b = b, a
        if "kernels alone" in faults:
            self.start.launch(stream, word(workspace), attributes={OVERLAPS: 1})
        elif not (is_captured and "no memset in captures" in faults):
            assert not library().cuMemsetD32Async(cleared, 0, 2, stream)
        if "host work" in faults and is_captured:
            library().enqueue_host_work(stream)
        if "endless" in faults and is_captured:
            for _ in range(70):
                self.start.launch(stream, word(workspace))
        if "side by side" in faults and is_captured:
            library().fork_stream(stream)
        products, finish, more, counter = self.kernels(a, b, out, workspace)
        if "another kernel" in faults and is_captured and not self.calls % 3:
            products = self.other
        first = {OVERLAPS: 1} if "behind a memset" in faults else {}
        waits = bool(faults & {"no overlap", "early"}) or ("false edge" in faults and not is_captured)
        second = {} if waits else {OVERLAPS: 1}
        values = array("f", [scale, 0.0]).tobytes()
        products.launch(
            stream,
            *(word(workspace), word(a), word(b), values[:4], values[4:], *more),
            blocks=5,
            attributes={**first, CLUSTERS: 2} if "clusters" in faults else first,
            packed="packed" in faults,
        )
        # Unaligned, as in a structure, among bytes that are the same in each launch.
        more = word(self.foreign.data_ptr() + 64) if "foreign memory, unaligned" in faults else bytes(8)
        description = bytes(range(20)) + word(out) + more + bytes(92)
        finish.launch(stream, description, word(workspace), *counter, blocks=9, attributes=second)
        if not is_captured and "random" in faults:
            ctypes.c_float.from_address(out).value += random.random()


class Call:
    """A plan on this engine, and launches of it."""

    def __init__(self, module, device: Device, *faults: str, engine: Engine | None = None) -> None:
        self.engine, self.device = engine or Engine(*faults), device
        self.plan = Plan(KEY, self.engine, {})
        self.plan.held = True
        self.recorder = Recorder(module, "combine")
        self.plan.recorder = self.recorder
        self.arenas: list[torch.Tensor] = []

    def operands(self, alignment: int = 16, *, zeros: bool = False) -> list[torch.Tensor]:
        """Two inputs and a result, anywhere."""
        found = []
        for _ in range(3):
            arena = torch.zeros(1 << 14, dtype=torch.uint8)
            begin = -arena.data_ptr() % 256 + alignment * random.randrange((8 << 10) // alignment)
            found.append(arena[begin : begin + 4 * WORDS].view(torch.float32))
        for x in found[:2]:
            x.copy_(torch.zeros(WORDS) if zeros else torch.randn(WORDS))
        found[2].fill_(torch.nan)
        return found

    def pointers(self, operands: list[torch.Tensor], scale: float = SCALE) -> array[int]:
        self.scale = array("f", [scale])  # alive during the launch
        a, b, out = (x.data_ptr() for x in operands)
        return array("Q", [a, b, self.scale.buffer_info()[0], out])

    def by_plan(self, operands: list[torch.Tensor], scale: float = SCALE) -> torch.Tensor:
        self.plan.launch(self.pointers(operands, scale))
        return operands[2].clone()

    def watched(self, operands: list[torch.Tensor] | None = None, scale: float = SCALE) -> torch.Tensor:
        operands = self.operands() if operands is None else operands
        self.recorder.watch(self.plan, self.pointers(operands, scale), SIZES)
        wait()
        assert_right(operands, scale)
        return operands[2]

    def recorded(self, operands: list[torch.Tensor], stream: int = 0, zeros: int = 0) -> torch.Tensor:
        pointers = self.pointers(operands).tolist()
        assert self.recorder.native.serves(pointers)
        workspace = torch.full((self.plan.workspace,), 0xEE, dtype=torch.uint8)
        assert not self.recorder.native.launch(pointers, workspace.data_ptr(), stream, zeros)
        return operands[2].clone()

    def settle(self, most: int = 16) -> str:
        for _ in range(most):
            if not self.recorder.native.is_watched:
                break
            self.watched()
        return str(self.recorder)


def assert_right(operands: list[torch.Tensor], scale: float = SCALE) -> None:
    a, b, out = (x.double() for x in operands)
    torch.testing.assert_close(out, (a - 2 * b) * scale + 1, atol=1e-5, rtol=1e-5)


@pytest.fixture
def module() -> Iterator[object]:
    with stand_in_driver() as found:
        yield found


@pytest.fixture
def device(module) -> Iterator[Device]:  # noqa: ARG001 - before it
    with real_plans() as found:
        yield found


def without_addresses(lines: list[str], of: dict[int, str]) -> list[str]:
    for address, name in of.items():
        lines = [line.replace(word(address).hex(), name) for line in lines]
    return lines


ALIKE = [(), ("packed",), ("clusters",), ("no overlap",), ("early",), ("kernels alone",)]


@pytest.mark.parametrize("kinds", ALIKE, ids=lambda kinds: " ".join(kinds) or "plain")
def test_a_recorded_launch_asks_the_driver_for_what_execute_asks_for(module, device, kinds):
    """Kernels, memsets, shapes, attributes and every byte of arguments, at fresh addresses, on any stream."""
    call = Call(module, device, *kinds)
    kernels, memsets = (3, 0) if "kernels alone" in kinds else (2, 1)
    assert call.settle() == f"as recorded (kernels: {kernels}, memsets: {memsets})"
    executed = call.engine.calls
    for stream in (0, 11, 0, 12):
        operands, again = call.operands(), call.operands()
        for one, other in zip(operands[:2], again[:2], strict=True):
            other.copy_(one)
        launched()
        with device.stream(stream):
            expected = call.by_plan(operands)
        names = {x.data_ptr(): f"<{i}>" for i, x in enumerate(operands)}
        by_plan = without_addresses(launched(), names)
        torch.testing.assert_close(call.recorded(again, stream), expected, atol=0, rtol=0)
        assert_right(again)
        names = {x.data_ptr(): f"<{i}>" for i, x in enumerate(again)}
        recorded = without_addresses(launched(), names)
        assert len(recorded) == 3
        workspaces = [lines[-1].split()[-1] for lines in (by_plan, recorded)]
        for lines, workspace in zip((by_plan, recorded), workspaces, strict=True):
            lines[:] = [line.replace(workspace, "<workspace>") for line in lines]
        assert recorded == by_plan
        overlapping = {"no overlap": 0, "early": 0, "kernels alone": 2}.get("".join(kinds), 1)
        assert sum(f"@{OVERLAPS}=" in line for line in recorded) == overlapping
        assert all(f"<{i}>" in " ".join(recorded) for i in range(3))
    assert call.engine.calls == executed + 4


def test_zeros_take_the_place_of_a_counter_that_a_memset_clears(module, device):
    """Launches count there alone, and clear nothing."""
    call = Call(module, device, "apart")
    assert call.settle() == "as recorded (kernels: 2, memsets: 1, none on the default stream)"
    native = call.recorder.native
    assert native.takes_zeros
    assert native.counters == [[APART, 8, 0]]
    for zeros in torch.zeros(3, native.zeros, dtype=torch.uint8):
        launched()
        operands = call.operands()
        call.recorded(operands, zeros=zeros.data_ptr())
        assert_right(operands)
        assert not [line for line in launched() if line.startswith("memset")]
        assert zeros[:4].view(torch.int32).item() == 1
        assert not zeros[4:].any()


@pytest.mark.parametrize("kinds", [(), ("kernels alone",), ("apart", "also elsewhere"), ("apart", "beside")])
def test_zeros_are_for_counters_alone(module, device, kinds):
    """Kernels use other data from there on, or clear it, or count in the workspace, too, or use what is behind."""
    call = Call(module, device, *kinds)
    assert call.settle().startswith("as recorded")
    assert not call.recorder.native.takes_zeros
    assert bool(call.recorder.native.counters) == ("apart" in kinds)


def test_a_kernel_behind_a_memset_does_not_overlap(module, device):
    """Only kernels have programmatic edges: its attribute is not seen, and changes nothing."""
    call = Call(module, device, "behind a memset")
    call.settle()
    launched()
    call.recorded(call.operands())
    assert [f"@{OVERLAPS}=" in line for line in launched()] == [False, False, True]


DISQUALIFIED = {
    "refuses in captures": "cuDNN: CUDNN_STATUS_EXECUTION_FAILED",
    "swapped in captures": "its recorded launch had other results",
    "no memset in captures": "its recorded launch had other results",
    "false edge": "its recorded launch had other results",
    "host work": "it enqueues more than kernels and memsets: a node of type 3",
    "endless": "it launches too much: 146 nodes",
    "side by side": "it launches side by side",
    "a counter": "byte 0 of argument 5 moves with no operand: products_noted",
    "half an address": "byte 2 of argument 5 moves with no operand: products_noted",
    "host memory": "byte 0 of argument 5 moves with no operand: products_noted",
    "upper half": "a number may be half of an address: products_noted",
    "swapped halves": "byte 0 of argument 5 moves with no operand: products_of_halves",
    "a high bit": "byte 0 of argument 5 moves with no operand: products_noted",
    "upper half of the workspace": "a number may be half of an address: products_noted",
    "halves of the workspace": "a number may be half of an address: products_of_halves",
    "foreign memory": "it uses memory that is no operand's: products_noted",
    "foreign memory, unaligned": "it uses memory that is no operand's: finish",
    "hidden arguments": "a kernel's arguments: CUDA reports error 400",
    "another kernel": "what it launches depends on its operands' addresses",
    "random": "its results differ in bits from launch to launch",
}


@pytest.mark.sample(len(DISQUALIFIED))
@pytest.mark.parametrize("fault", DISQUALIFIED)
def test_what_disqualifies_a_plan(module, device, fault):
    call = Call(module, device, fault)
    if fault == "random":
        for _ in range(6):
            call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
            wait()
    else:
        call.settle()
    assert str(call.recorder) == f"by cuDNN, because {DISQUALIFIED[fault]}"
    assert not call.recorder.native.is_serving
    assert not call.recorder.native.is_watched
    assert not library().is_captured(4000)


def test_an_engine_that_chooses_by_alignment_is_recorded_for_its_best(module, device):
    call = Call(module, device, "by alignment")
    for _ in range(6):
        call.watched(call.operands(256))
    assert str(call.recorder).startswith("as recorded")
    launched()
    call.recorded(call.operands(256))
    assert "products_of_aligned" in " ".join(launched())
    a, b, out = call.operands(256)
    for moved in ([a[4:], b, out], [a, b[8:], out], [a, b, out[4:]]):
        assert not call.recorder.native.serves(call.pointers(moved).tolist())


def test_a_kernel_for_any_coarser_alignment_serves_no_other(module, device):
    """Chance must not hide it: of addresses that are multiples of 16, half are multiples of 32."""
    for _ in range(12):
        call = Call(module, device, "by alignment to 32")
        call.settle()
        a, b, out = call.operands(256)
        assert not call.recorder.native.serves(call.pointers([a[4:], b, out]).tolist())
        assert "products_of_aligned" in call.recorder.native.names


def test_addresses_that_never_have_the_alignment_end_the_proof(module, device, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_TRIES", 3)
    call = Call(module, device, "by alignment")
    for _ in range(6):
        operands = call.operands(256)
        call.watched([operands[0].as_strided((WORDS,), (1,)), *shifted(operands[1:])])
    assert "no call has the alignment" in str(call.recorder)


def shifted(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same, 16 bytes on."""
    found = []
    for x in operands:
        made = torch.empty(WORDS + 128)
        begin = (-made.data_ptr() % 256 + 16) // 4
        found.append(made[begin : begin + WORDS].copy_(x))
    return found


def test_host_scalars_are_part_of_what_is_recorded(module, device):
    call = Call(module, device)
    call.settle()
    operands = call.operands()
    assert call.recorder.native.serves(call.pointers(operands, SCALE).tolist())
    for other in (0.5, -SCALE, 0.7500001, float("nan")):
        assert not call.recorder.native.serves(call.pointers(operands, other).tolist())
    pointers = call.pointers(operands)
    pointers[0] = 0
    assert not call.recorder.native.serves(pointers.tolist())


def test_results_of_zeros_prove_nothing(module, device, monkeypatch):
    """Swapped operands go unnoticed where both are zeros."""
    monkeypatch.setattr(recorder, "MAX_TRIES", 4)
    for fault, nonzero in (("swapped in captures", True), ("", True), ("", False)):
        call = Call(module, device, fault)
        zeros = torch.full((WORDS,), -1.0)  # plus 1 is 0
        for _ in range(6):
            operands = call.operands(zeros=True)
            operands[0].copy_(zeros / SCALE)
            call.watched(operands)
            assert not call.recorder.native.is_serving
        if nonzero:
            call.recorder._tries = 0
            call.settle()
            assert call.recorder.native.is_serving is (fault == "")
        else:
            operands = call.operands(zeros=True)
            operands[0].copy_(zeros / SCALE)
            for _ in range(6):
                call.watched(operands)
            assert "all zeros" in str(call.recorder)


def test_nothing_is_recorded_while_the_calls_stream_is_captured(module, device, monkeypatch):
    monkeypatch.setattr(plans, "captured_plans", [])
    call = Call(module, device)
    with device.stream(11):
        device.capturing = True
        for _ in range(3):
            call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
            wait()
        assert call.engine.calls == 3
        device.capturing = False
        captured = plans.captured_plans[:]
    call.settle()
    assert captured == plans.captured_plans == [call.plan]


def test_a_plan_that_is_evicted_before_its_turn_is_not_recorded(module, device):
    call, go = Call(module, device), threading.Event()
    recorder._Background.submit(go.wait)
    call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
    call.plan.held = False
    go.set()
    wait()
    assert str(call.recorder) == "by cuDNN, because it is evicted"
    assert call.engine.calls == 1


def test_a_plan_that_is_evicted_meanwhile_is_freed_where_others_may_capture(module, device, monkeypatch):
    """CUDA unloads its kernels, which a capture in PyTorch's default mode forbids all other threads."""
    active, freed, go = [], [], threading.Event()

    @contextlib.contextmanager
    def relaxed():
        active.append(1)
        yield
        active.pop()

    monkeypatch.setattr(recorder, "relaxed_capture", relaxed)
    for is_held in (False, True):
        call = Call(module, device)
        go.clear()
        recorder._Background.submit(go.wait)
        call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
        call.plan.held = is_held
        weakref.finalize(call.engine, lambda: freed.append((threading.current_thread(), bool(active))))
        del call
        gc.collect()
        go.set()
        wait()
        (thread, was_relaxed) = freed.pop()
        assert thread is not threading.main_thread()
        assert was_relaxed


def test_a_thread_that_cannot_be_started_leaves_the_plan_to_cudnn(module, device, monkeypatch):
    """And its calls to C++: Python looks at none of them any more, and what waited for the thread is not done later."""

    def start(_):
        raise RuntimeError("can't start new thread")

    for before in (1, 3):  # recordings, then verdicts
        call = Call(module, device)
        for _ in range(before - 1):
            call.watched()
        with monkeypatch.context() as patch:
            patch.setattr(recorder._Background, "pool", ThreadPoolExecutor(1))
            patch.setattr(threading.Thread, "start", start)
            for _ in range(3):
                call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
        why = "nothing can be recorded in the background: can't start new thread"
        assert str(call.recorder) == f"by cuDNN, because {why}"
        assert not call.recorder.native.is_watched
        engine = weakref.ref(call.engine)
        del call
        gc.collect()
        assert engine() is None


def test_no_garbage_is_collected_while_a_stream_is_captured(module, device, monkeypatch):
    """A graph that is destroyed then, or a plan, would end the capture with an error."""
    monkeypatch.setattr(Garbage, "freed", [])
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        call = Call(module, device, "garbage")
        assert call.settle().startswith("as recorded")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(Garbage.freed) == 20 * call.engine.calls
    assert not any(Garbage.freed)
    assert gc.isenabled()


def test_nothing_is_allocated_on_a_full_gpu(module, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 40))
    monkeypatch.setattr(captures, "allocate", None)
    call = Call(module, device)
    call.watched()
    needed = captures.SPREAD + 4 * (4 * WORDS + call.plan.workspace)
    why = f"the GPU has {1 << 20} bytes of free memory; recording it takes {needed}"
    assert str(call.recorder) == f"by cuDNN, because {why}"


def test_the_interpreter_does_not_end_later_for_what_is_to_be_recorded(run_python):
    code = """
import time
from cudnn_sdpa.engine.recorded import recorder
for _ in range(100):
    recorder._Background.submit(lambda: (print("recorded", flush=True), time.sleep(0.2)))
"""
    assert 1 <= run_python(code, fresh=True).stdout.count("recorded") < 4


def test_a_stream_that_others_may_use_is_not_captured(monkeypatch):
    monkeypatch.setattr(handles, "_loaders", {})
    monkeypatch.setattr(handles, "_streams", {})
    monkeypatch.setattr(handles, "_shared", set())
    monkeypatch.setattr(handles.backend, "new_stream", lambda: None)
    monkeypatch.setattr(handles.backend, "create_handle", lambda: SimpleNamespace(backend_handle=5))
    monkeypatch.setattr(handles.backend, "set_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=88))
    with handles.loading_handle(0):
        pass
    with (
        pytest.raises(ExecutionError, match="no stream can be made that nobody else uses"),
        handles.capturing_handle(0),
    ):
        pass


def test_a_verdict_is_awaited_by_calls_that_cudnn_launches(module, device, monkeypatch):
    known = []
    monkeypatch.setattr(proof.Verdict, "is_known", lambda _: bool(known))
    call = Call(module, device)
    for _ in range(6):
        call.watched()
    assert str(call.recorder) == "by cuDNN, because it is not recorded yet"
    assert call.engine.calls == 6 + len(captures.ORDER) + 2
    known.append(True)
    call.watched()
    assert call.recorder.native.is_serving


def test_kernels_that_seldom_add_in_another_order_raise_no_alarm(module, device, monkeypatch, caplog):
    """A recorded launch that differs in all comparisons is wrong; after one that differs at times it is not known."""
    for differs, level in (([1, 1, 1], "WARNING"), ([1, 0], "INFO"), ([1, 1, 0], "INFO")):
        call, left = Call(module, device), differs[:]
        monkeypatch.setattr(proof.Verdict, "read", lambda _, left=left: [False, bool(left.pop(0)), True, False])
        caplog.clear()
        with caplog.at_level("INFO", "cudnn_sdpa"):
            call.settle()
        assert not left
        assert not call.recorder.native.is_serving
        assert (
            str(call.recorder)
            == f"by cuDNN, because its recorded launch had other results{' at times' * (0 in differs)}"
        )
        assert [record.levelname for record in caplog.records if "had other" in record.message] == [level]


@pytest.mark.usefixtures("device")
def test_every_result_must_tell_something():
    """An LSE does, and results beside it are zeros where values are."""
    native = SimpleNamespace(launch=lambda *_: 0, zeros=0)
    for second in (0, 1):

        def launch(pointers, second=second):
            for address, value in zip(pointers[len(KEY.inputs) :], (1, second), strict=True):
                ctypes.memset(address, value, 20)

        native.launch = lambda pointers, *_, launch=launch: launch(pointers)
        plan = SimpleNamespace(key=KEY, launch=launch, workspace=0, device=0)
        found = proof.compare(native, plan, [0] * 4, [20, 20])
        assert found.tolist() == [False, False, bool(second), False]


def test_a_recording_keeps_no_plan(module, device, monkeypatch):
    monkeypatch.setattr(plans, "captured_plans", [])
    call = Call(module, device)
    call.settle()
    engine = weakref.ref(call.engine)
    assert not plans.captured_plans
    del call
    gc.collect()
    assert engine() is None


@pytest.mark.slow
def test_memory_is_flat_while_plans_are_recorded_and_freed(module, device):
    """Python's objects, the native module's, and the driver's graphs."""
    engine, made = Engine(), []

    def step() -> None:
        call = Call(module, device, engine=engine)
        assert call.settle().startswith("as recorded")
        call.recorded(call.operands())
        made.append([weakref.ref(x) for x in (call.plan.recorder, call.recorder.native)])
        launched()

    assert not soak.growth(step, 600, "cpu")["grows"]
    assert not [reference for each in made for reference in each if reference() is not None]
    assert library().open_graphs() == 0


@pytest.mark.parametrize("held", [True, False])
def test_plans_that_are_not_tried(module, device, held, monkeypatch):
    call = Call(module, device)
    if held:
        monkeypatch.setattr(recorder, "MAX_BYTES", 100)
    call.plan.held = held
    call.watched()
    assert call.engine.calls == 1
    size = 4 * WORDS + call.plan.workspace
    why = (
        f"its results and its workspace have {size} bytes; more than 100 are not recorded" if held else "it is evicted"
    )
    assert str(call.recorder) == f"by cuDNN, because {why}"


@pytest.mark.parametrize(
    ("where", "why"),
    [("in_capture", "it cannot be captured in a CUDA graph"), ("when_recorded", "a known issue forbids it")],
)
def test_a_known_issue_forbids_it(module, device, where, why, monkeypatch):
    row = known_issues.KnownIssue("it hangs", "a report", "avoided", lambda key: key.name == "combine", **{where: True})
    monkeypatch.setattr(known_issues, "FUSED_ISSUES", (row,))
    assert not known_issues.reasons_against(KEY)
    assert bool(known_issues.not_in_capture(KEY)) == (where == "in_capture")
    call = Call(module, device)
    call.watched()
    assert str(call.recorder) == f"by cuDNN, because {why}: {row}"


def test_a_call_on_its_way_to_the_proof_waits_for_nothing(module, device, monkeypatch):
    """The verdict may be drawn in the background while C++ sends a call to Python."""
    call = Call(module, device)
    call.settle()
    assert call.recorder.native.is_serving
    monkeypatch.setattr(proof, "compare", None)
    executed = call.engine.calls
    call.recorder.watch(call.plan, call.pointers(call.operands()), SIZES)
    assert call.engine.calls == executed + 1


def test_memory_that_cannot_be_allocated_leaves_the_plan_to_cudnn(module, device):
    for works in (0, 1, 2, 5):
        call, made = Call(module, device), []
        allocate = plans.allocate

        def fails(*layout, made=made, works=works, allocate=allocate):
            made.append(layout)
            if len(made) > works:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return allocate(*layout)

        call.watched()  # records
        with pytest.MonkeyPatch.context() as patch:
            for of in (captures, proof):
                patch.setattr(of, "allocate", fails)
            if not works:
                call.recorder._step = Recorder._begin
                call.watched()
            else:
                call.watched()
        wait()
        assert ("CUDA out of memory" in str(call.recorder)) is (works < 5), (works, str(call.recorder))
        call.watched()


def test_verifying_compares_every_call(device):
    """A wrong launch that its proof has not seen, in a call whose operands show it."""
    for fault in ("", "swapped in captures", "no memset in captures", "false edge"):
        with stand_in_driver(loader.VERIFY) as module, pytest.MonkeyPatch.context() as patch:
            call = Call(module, device, fault)
            patch.setattr(proof.Verdict, "read", lambda _: [False, False, True, False])
            for _ in range(3):
                call.watched()
            memsets = int("no memset" not in fault)
            assert str(call.recorder) == f"as recorded (kernels: 2, memsets: {memsets}), each compared with cuDNN's"
            executed = call.engine.calls
            if not fault:
                call.watched()
                assert call.engine.calls == executed + 3
                continue
            with pytest.raises(ExecutionError, match=r"the recorded launch of combine has other results than cuDNN's"):
                call.watched()
            call.engine.faults.add("random")  # not comparable
            operands = call.operands()
            call.recorder.watch(call.plan, call.pointers(operands), SIZES)


def test_a_function_that_was_unloaded_is_an_error(module, device):
    call = Call(module, device)
    call.settle()
    library().unload(call.engine.finish.handle)
    pointers = call.pointers(call.operands()).tolist()
    workspace = torch.zeros(call.plan.workspace, dtype=torch.uint8)
    assert call.recorder.native.launch(pointers, workspace.data_ptr(), 0) == 400
    call = Call(module, device)
    call.watched()
    library().unload(call.engine.finish.handle)
    with pytest.raises(ExecutionError, match="error 400"):
        call.watched()


def test_a_driver_that_lacks_functions(module, device, monkeypatch):
    for driver, why in ((None, "there is no NVIDIA driver"), (ctypes.CDLL(None), "the NVIDIA driver has no cuCtxGet")):
        recorder._connect.cache_clear()
        monkeypatch.setattr(recorder, "_driver", lambda driver=driver: driver)
        call = Call(module, device)
        call.watched()
        assert str(call.recorder).startswith(f"by cuDNN, because {why}")


def test_comparisons_allocate_although_another_thread_captures(device, monkeypatch):
    active, seen = [], []

    @contextlib.contextmanager
    def relaxed():
        active.append(1)
        yield
        active.pop()

    def compare(*arguments, of=proof.compare):
        seen.append(bool(active))
        return of(*arguments)

    monkeypatch.setattr(recorder, "relaxed_capture", relaxed)
    monkeypatch.setattr(proof, "compare", compare)
    with stand_in_driver(loader.VERIFY) as module:
        call = Call(module, device)
        for _ in range(4):  # recorded, proved, known, verified
            call.watched()
    assert seen == [True, True]


def test_pinned_memory_is_freed_before_the_stream_may_be_captured(monkeypatch):
    """PyTorch records an event on the streams that have used it, and asks for that event later."""
    made, freed, taken, empty = [], [], [], torch.empty

    @contextlib.contextmanager
    def capturing_handle(_):
        yield 7001, 4000
        freed.extend(memory() is None for memory in made)

    def pinned(*arguments, pin_memory, **options):
        assert pin_memory
        found = empty(*arguments, **options)
        made.append(weakref.ref(found))
        return found

    class Mark:
        def synchronize(self):
            pass

    monkeypatch.setattr(handles, "capturing_handle", capturing_handle)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream: stream)
    monkeypatch.setattr(proof, "_mark", Mark)
    monkeypatch.setattr(proof, "take_memory", lambda _, size: taken.append(size) or empty(256, dtype=torch.uint8))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: taken.append(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: 11)
    assert proof.Verdict(torch.tensor([True, False, True]), 0).read() == [True, False, True]
    assert freed == [True]
    assert taken == [3, 11]


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv(loader.RECORDED_VARIABLE, "yes")
    with pytest.raises(OptionError, match=r"^CUDNN_SDPA_RECORDED: got 'yes'; expected one of off, on, verify"):
        loader.start()


def test_a_launch_of_other_operands_is_refused(module, device):
    call = Call(module, device)
    call.settle()
    with pytest.raises(ValueError, match="other operands"):
        call.recorder.native.launch([1, 2, 3], 0, 0)
