"""Faults in what is recorded, put into the captures of a plan of kernels for this (`faults.cu`), on the real driver.

Each is found by the recording's own proof, and by `verify` where the proof has missed it. A programmatic edge that
cuDNN's launch lacks gives wrong results if the first kernel lets others begin before it has written, as `products` does
for sure; where no kernel does so, such an edge changes no bits. A programmatic edge that is lost changes none either:
the GPU's time shows it.

A stale function handle, "function", is here that of another kernel of the same signature. A real driver promises
nothing of one that was unloaded: the stand-in driver alone has that, in `tests/unit/engine/recorded/test_recording.py`.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from pathlib import Path

import pytest
import torch
from fake_driver import OVERLAPS, Attribute, Config
from native_way import is_off
from stand_in_gpu import wait
from torch import Tensor

from benchmarks.tools.ways import wait_for_native_calls
from cudnn_sdpa import ExecutionError
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import proof
from cudnn_sdpa.engine.recorded.recorder import NOT_YET, Recorder
from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.plan import Plan, current_raw_stream

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="launches do not overlap"
)

SOURCE = Path(__file__).with_name("faults.cu")
PRODUCTS, OTHER_PRODUCTS, FINISH, FINISH_EARLY = (
    Kernel(SOURCE, name) for name in ("products", "other_products", "finish", "finish_early")
)
WORDS = 64
SIZES = [4 * WORDS]  #: bytes of the result
CLOCKS = 400_000  #: some 0.2 ms, in which the host launches the next kernel
LAYOUT = TensorLayout.contiguous((1, WORDS), torch.float32)


@GraphDefinition
def combine(g, a, b):
    """A key is all that it is needed for."""
    return g.sub(a, b)


@functools.cache
def driver() -> ctypes.PyDLL:
    """CUDA's driver, whose functions keep the GIL, as cuDNN's launches do."""
    return ctypes.PyDLL("libcuda.so.1")


def launch(kernel: Kernel, stream: int, fields: array[int], *, overlaps: bool) -> None:
    attribute = Attribute(OVERLAPS, 0, (1,))
    config = Config((1, 1, 1), (WORDS, 1, 1), 0, stream, ctypes.pointer(attribute), int(overlaps))
    _, _, function, _, _ = kernel.on(0).native
    arguments = (ctypes.c_void_p * 1)(fields.buffer_info()[0])
    assert not driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), arguments, None)


class Engine:
    """A memset and two kernels, which compute a - 2 b + 1; in captures with a fault."""

    engine, knobs, workspace = "eng0", {}, 1024

    def __init__(self, fault: str, *, overlaps: bool) -> None:
        self.fault, self.overlaps = fault, overlaps
        self.finish = FINISH_EARLY if overlaps else FINISH
        for kernel in (PRODUCTS, OTHER_PRODUCTS, self.finish):
            kernel.on(0)  # nothing is loaded in a capture
        with handles.capturing_handle(0) as (self.capturing, self.stream):
            pass

    def executor(self, _):
        return self.execute

    def execute(self, address, count, workspace, handle, _):
        is_captured = handle == self.capturing
        stream = self.stream if is_captured else current_raw_stream(0)
        fault = self.fault if is_captured else ""
        a, b, out = (ctypes.c_uint64 * count).from_address(address)
        if fault == "operands":
            a, b = b, a
        if fault != "memset":
            to, one, raw = ctypes.c_uint64(workspace), ctypes.c_size_t(1), ctypes.c_void_p(stream)
            assert not driver().cuMemsetD32Async(to, 0, one, raw)
        fields = array("Q", (workspace, a, b, out, CLOCKS))
        launch(OTHER_PRODUCTS if fault == "function" else PRODUCTS, stream, fields, overlaps=False)
        overlaps = self.overlaps ^ (fault in ("false edge", "lost edge"))
        launch(self.finish, stream, fields, overlaps=overlaps)


class Call:
    """A plan on this engine, and launches of it."""

    def __init__(self, fault: str = "", *, overlaps: bool = False) -> None:
        module = loader.module()
        assert module is not None
        operands = [Operand(name, LAYOUT) for name in ("a", "b", "out")]
        key = combine.key(operands[:2], operands[2:], {}, live_target(0), 0)
        self.plan = Plan(key, Engine(fault, overlaps=overlaps), {})
        self.plan.held = True
        self.recorder = Recorder(module, "combine")
        self.plan.recorder = self.recorder

    def draw(self) -> tuple[array[int], Tensor, Tensor]:
        """Addresses of operands, the result, and what it is to be."""
        a, b, out = torch.randn(3, WORDS, device="cuda")
        self.operands = a, b, out  # alive during launches
        return array("Q", [x.data_ptr() for x in self.operands]), out.fill_(torch.nan), a - 2 * b + 1

    def run(self) -> None:
        pointers, out, expected = self.draw()
        self.recorder.watch(self.plan, pointers, SIZES)
        wait()  # before the GPU is waited for, which a capture may forbid
        torch.testing.assert_close(out, expected)

    def settle(self) -> str:
        for _ in range(40):
            if self.recorder.why_not != NOT_YET:
                break
            self.run()
        return str(self.recorder)

    def run_recorded(self, workspace: Tensor) -> Tensor:
        pointers, out, expected = self.draw()
        assert self.recorder.native.serves(pointers.tolist())
        assert not self.recorder.native.launch(pointers.tolist(), workspace.data_ptr(), current_raw_stream(0))
        torch.testing.assert_close(out, expected)
        return out


@pytest.fixture(autouse=True)
def memory_is_kept(monkeypatch):
    """A kernel that is overtaken writes to its workspace when others may have got that memory."""
    if is_off():
        pytest.skip("only native calls are launched as recorded")
    assert wait_for_native_calls()
    kept, allocate = [], proof.allocate

    def keep(*layout):
        kept.append(allocate(*layout))
        return kept[-1]

    monkeypatch.setattr(proof, "allocate", keep)
    yield
    torch.cuda.synchronize()


FAULTS = ("operands", "function", "memset", "false edge")


@pytest.mark.parametrize("overlaps", [False, True])
def test_without_a_fault_the_recorded_launch_serves(overlaps):
    call = Call(overlaps=overlaps)
    assert call.settle() == "as recorded (kernels: 2, memsets: 1)"
    workspace = torch.full((1024,), 0xEE, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        call.run_recorded(workspace)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_finds_it(fault):
    call = Call(fault)
    assert call.settle() == "by cuDNN, because its recorded launch had other results"
    assert not call.recorder.native.is_serving
    call.run()


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_verify_finds_what_the_proof_has_missed(fault, monkeypatch):
    monkeypatch.setenv(loader.RECORDED_VARIABLE, loader.VERIFY)
    monkeypatch.setattr(proof.Verdict, "read", lambda _: [False, False, True, False])
    call = Call(fault)
    memsets = int(fault != "memset")
    assert call.settle() == f"as recorded (kernels: 2, memsets: {memsets}), each compared with cuDNN's"
    for _ in range(3):
        if not fault:
            call.run()
            continue
        pointers, out, expected = call.draw()
        with pytest.raises(ExecutionError, match=r"the recorded launch of combine has other results than cuDNN's"):
            call.recorder.watch(call.plan, pointers, SIZES)
        torch.testing.assert_close(out, expected)  # of cuDNN's launch, ahead of the comparison


@pytest.mark.whole_gpu
@pytest.mark.parametrize("fault", ["", "lost edge"])
def test_the_gpus_time_shows_a_lost_edge(fault):
    """Both kernels do nothing for the same time, at once where the second may begin early."""
    call = Call(fault, overlaps=True)
    assert call.settle() == "as recorded (kernels: 2, memsets: 1)"
    workspace = torch.empty(1024, dtype=torch.uint8, device="cuda")
    pointers, _, _ = call.draw()
    words, stream = pointers.tolist(), current_raw_stream(0)

    def milliseconds(run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        begin.record()
        for _ in range(20):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    by_plan = milliseconds(lambda: call.plan.launch(pointers))
    recorded = milliseconds(lambda: call.recorder.native.launch(words, workspace.data_ptr(), stream))
    ratio = recorded / by_plan
    assert ratio > 1.5 if fault else ratio < 1.25, (recorded, by_plan)
