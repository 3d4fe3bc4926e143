"""Recording of plans of functions, such as FlashAttention-4's: one function that launches three kernels."""

from __future__ import annotations

import ctypes
import shutil
from array import array
from collections.abc import Iterator

import pytest
import torch
from function_plans import function, interface
from real_plans import Device, real_plans
from stand_in_gpu import Kernel, launched, library, own_kernel, stand_in_driver, wait
from torch import Tensor

from cudnn_sdpa import plan_cache
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.engine.recorded.recorder import Recorder
from cudnn_sdpa.graph import target as targets
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans.function_plan import (
    SIZES,
    FunctionCall,
    FunctionPlan,
    FunctionProgram,
    NumberArgument,
    TensorArgument,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

WORDS = 64

#: Bytes between a tensor of packed sequences and where FlashAttention-4 has its tensor map begin.
AHEAD = 1 << 41

#: Arguments: a, b, out, the workspace, the scale, a counter of calls, `cuLaunchKernelEx`, and its three functions.
FUNCTION = r"""
typedef struct { unsigned grid[3], block[3], shared; void* stream; void* attributes; unsigned count; } Config;
typedef int (*Launch)(const Config*, void*, void**, void**);
int __tvm_ffi_func(void* self, const Any* given, int32_t count, Any* result) {
  if (count != 10) return -1;
  void* memory[4];
  for (int i = 0; i < 4; ++i) memory[i] = ((Tensor*)given[i].pointer)->data;
  float values[2] = {given[4].real, 0};
  ++*(int64_t*)given[5].number;
  const Launch launch = (Launch)given[6].number;
  const Config config = {{3, 1, 1}, {128, 1, 1}, 0, StreamOfTheseTests(), 0, 0};
  char description[128];  // the rest stays as the stack was, but for an address far ahead of the result's
  const uint64_t ahead = (uint64_t)memory[2] - AHEAD;
  memcpy(description + 20, &memory[2], 8);
  memcpy(description + 40, &ahead, 8);
  static char launches;
  ++launches;
  FAULT;
  void* start[] = {&memory[3]};
  void* products[] = {&memory[3], &memory[0], &memory[1], &values[0], &values[1]};
  void* finish[] = {description, &memory[3]};
  int failed = launch(&config, (void*)given[7].number, start, 0);
  if (!failed) failed = launch(&config, (void*)given[8].number, products, 0);
  return failed ? failed : launch(&config, (void*)given[9].number, finish, 0);
}
"""


class Calls:
    """Calls that are one launch of a plan of that function.

    Attributes:
        called: How often the function was called, captures included.
    """

    def __init__(self, *, zeroed: tuple[int, int] = (0, 0), has_sizes: bool = False, fault: str = "") -> None:
        layout, self._called = TensorLayout.contiguous((WORDS,), torch.float32), array("q", [0])
        of_driver = ctypes.cast(library().cuLaunchKernelEx, ctypes.c_void_p).value
        self._kernels = [
            Kernel(name, own_kernel(name), sizes)
            for name, sizes in {"start": [8], "products": [8, 8, 8, 4, 4], "finish": [128, 8]}.items()
        ]
        scratch = TensorArgument("", (4 + WORDS,), (1,), torch.float32)
        tensors = [TensorArgument(name, (WORDS,), (1,), torch.float32) for name in ("a", "b", "out")]
        fixed = (self._called.buffer_info()[0], of_driver, *(kernel.handle for kernel in self._kernels))
        call = FunctionCall("function", (*tensors, scratch, NumberArgument("scale"), *fixed))
        program = FunctionProgram("functions", [call], workspace=4 * (4 + WORDS), zeroed=zeroed)
        sizes = Operand(SIZES, TensorLayout.contiguous((2,), torch.int64), Role.HOST)
        scale = Operand("scale", HOST_SCALAR, Role.SCALAR)
        inputs = (Operand("a", layout), Operand("b", layout), scale, *([sizes] if has_sizes else []))
        key = PlanKey("tests:recorded", "", inputs, (Operand("out", layout),), (), targets.live_target(0), device=0)
        made = {"function": function("recorded", FUNCTION, f"-DAHEAD={AHEAD}ull", f"-DFAULT={fault}")}
        self.plan = plan_cache.get(key, lambda key: FunctionPlan(key, program, made, interface()))
        self.calls, self._arrays = NativeCalls(numbers=3), {SIZES: array("q", [0, 0])} if has_sizes else {}

    @property
    def called(self) -> int:
        return self._called[0]

    def __call__(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        known = self.calls.find(a, b, scale)
        if known is not MISSED:
            wait()
            return known
        bound = BoundPlan(
            self.plan, ["a", "b"], [((WORDS,), (1,), torch.float32)], {"scale": scale}, arrays=self._arrays
        )
        (out,) = bound([a, b], numbers=(scale,))
        self.calls.register((a, b, scale), {}, RepeatableCall(bound, [a, b], [0], single_output=True))
        return out

    def check(self, scale: float) -> None:
        a, b = torch.randn(WORDS), torch.randn(WORDS)
        expected = (a.double() - 2 * b.double()) * scale + 1
        torch.testing.assert_close(self(a, b, scale).double(), expected, atol=1e-5, rtol=1e-5)

    def settle(self) -> str:
        for _ in range(12):
            self.check(0.75)
        assert isinstance(self.plan.recorder, Recorder)
        return str(self.plan.recorder)


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in_driver(), real_plans() as found:
        yield found


def test_functions_are_called_no_more_once_their_launches_are_recorded(device):
    call = Calls()
    assert call.settle() == "as recorded (kernels: 3, memsets: 0)"
    before = call.called
    for stream in (0, 7, 0, 8):
        with device.stream(stream):
            call.check(0.75)
    assert call.called == before
    call.check(-1.5)  # what a host scalar was is part of the recording
    assert call.called == before + 1


def test_what_a_function_leaves_unwritten_is_zero(device):  # noqa: ARG001
    """An argument is a structure that its host code fills in part, with an address before that of the tensor."""
    call = Calls()
    assert call.settle().startswith("as recorded")
    a, b = torch.randn(WORDS), torch.randn(WORDS)
    launched()
    out = call(a, b, 0.75)
    words = {20: out.data_ptr(), 40: out.data_ptr() - AHEAD}
    description = bytearray(128)
    for place, word in words.items():
        description[place : place + 8] = word.to_bytes(8, "little")
    assert description.hex() in launched()[-1]


@pytest.mark.parametrize(
    "fault",
    [
        "description[60] = (description[60] & ~1) | 1",  # a bit among others that are unwritten
        "description[60] = launches",
        "description[60] = launches % 2 ? 0 : 255",
        "description[60] = launches / 2 % 2 ? 0 : 255",
    ],
    ids=["one bit", "a counter", "each other launch", "each other pair"],
)
def test_what_is_written_is_not_taken_for_unwritten(device, fault):  # noqa: ARG001
    call = Calls(fault=fault)
    assert "moves with no operand" in call.settle()
    before = call.called
    call.check(0.75)
    assert call.called == before + 1


def test_addresses_ahead_of_all_memory_are_left_to_the_function(device):  # noqa: ARG001
    """They would be below zero, which its host code masks."""
    call = Calls()
    call.settle()
    native, scale = call.plan.recorder.native, array("f", [0.75])
    a, b, out = (torch.empty(WORDS).data_ptr() for _ in range(3))
    assert native.serves([a, b, scale.buffer_info()[0], out])
    assert not native.serves([a, b, scale.buffer_info()[0], 0x302000000])


@pytest.mark.parametrize("mode", [loader.OFF, loader.VERIFY])
def test_modes(mode):
    with stand_in_driver(mode), real_plans():
        call = Calls()
        for _ in range(12):
            call.check(0.75)
        before = call.called
        call.check(0.75)
        if mode == loader.OFF:
            assert (call.plan.recorder, call.called) == (None, before + 1)
        else:  # the call, and two launches that the recorded one is compared with
            assert str(call.plan.recorder).endswith("each compared with functions's")
            assert call.called == before + 3


def test_functions_are_called_again_after_an_error_of_the_recorded_launch(device, monkeypatch):  # noqa: ARG001
    call, launch = Calls(), FunctionPlan.launch
    call.settle()

    def repairs(self, pointers):
        library().fail_with(0)
        launch(self, pointers)

    before = call.called
    library().fail_with(1)
    monkeypatch.setattr(FunctionPlan, "launch", repairs)
    for number in (1, 2):
        call.check(0.75)
        assert call.called == before + number
    assert str(call.plan.recorder) == "by functions, because CUDA reports error 1 for its recorded launch"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"zeroed": (0, 8)}, "its functions add to memory that is cleared before, in any order"),
        ({"has_sizes": True}, "each launch reads the sizes of its tensors"),
    ],
    ids=["zeroed", "sizes"],
)
def test_plans_that_are_not_recorded(device, options, why):  # noqa: ARG001
    call = Calls(**options)
    assert call.settle() == f"by functions, because {why}"
    before = call.called
    call.check(0.75)
    assert call.called == before + 1
