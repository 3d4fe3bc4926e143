"""Launches of plans of functions with TVM FFI's C interface, natively and in Python, to functions compiled here."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

import pytest
import torch
from function_plans import function, interface
from native_way import native_way
from real_plans import Device, real_plans
from torch import Tensor

from cudnn_sdpa import ExecutionError, plan_cache
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.graph import target as targets
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans.function_plan import (
    FunctionCall,
    FunctionPlan,
    FunctionProgram,
    Interface,
    Library,
    NumberArgument,
    TensorArgument,
)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

#: Writes what it gets into its first argument: two numbers, one within a tuple, the rank, sizes, strides and first
#: value of the second tensor, the stream, and the sum of a tensor in the workspace, which it then overwrites.
FUNCTION = r"""
int __tvm_ffi_func(void* self, const Any* given, int32_t count, Any* result) {
  if (count != 7 || given[0].kind != 7 || given[1].kind != 3 || given[2].kind != 1 || given[3].kind != 71) return -1;
  if (given[4].kind != 7 || given[5].kind != 0 || given[6].kind != 7) return -1;
  const Array* tuple = given[3].pointer;
  const Tensor *out = given[0].pointer, *in = given[4].pointer, *scratch = given[6].pointer;
  if (out->type != 2 || out->device != 0 || in->code != 4 || in->bits != 16 || in->lanes != 1) return -1;
  if (tuple->size != 2 || tuple->data[0].kind != 0 || tuple->data[1].kind != 3) return -1;
  float *to = out->data, *sum = scratch->data;
  *to++ = FACTOR * given[1].real;
  *to++ = given[2].number;
  *to++ = tuple->data[1].real;
  *to++ = in->rank;
  for (int i = 0; i < in->rank; ++i) *to++ = in->shape[i];
  for (int i = 0; i < in->rank; ++i) *to++ = in->stride[i];
  *to++ = *(uint16_t*)in->data;
  *to++ = (float)(intptr_t)StreamOfTheseTests();
  *to++ = sum[0] + sum[1];
  sum[0] = sum[1] = 9;
  return 0;
}
"""

RESULTS = 11

#: Where the tensor in the workspace begins, and its bytes.
ZEROED = (512, 8)


@pytest.fixture(scope="module")
def made() -> tuple[Interface, dict[str, Library]]:
    """An interface, and two functions, whose results differ by a factor."""
    factors = {"one": 1, "ten": 10}
    return interface(), {name: function(name, FUNCTION, f"-DFACTOR={factor}") for name, factor in factors.items()}


@pytest.fixture(params=["python", "native"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with native_way(on=request.param == "native"):
        yield request.param


@pytest.fixture
def device() -> Iterator[Device]:
    with real_plans() as found:
        yield found


class Calls:
    """Calls that are one launch of a plan of functions, with their results."""

    def __init__(self, made: tuple[Interface, dict[str, Library]], program: FunctionProgram) -> None:
        self.calls, self.bound = NativeCalls(numbers=2), list[BoundPlan]()
        x, out = (TensorLayout.contiguous((n,), d) for n, d in ((6, torch.bfloat16), (RESULTS, torch.float32)))
        inputs = (Operand("x", x), Operand("scale", HOST_SCALAR, Role.SCALAR))
        outputs = (Operand("out", out), Operand("more", out))
        key = PlanKey("tests:function", "", inputs, outputs, (), targets.live_target(0), device=0)
        self.plan = plan_cache.get(key, lambda key: FunctionPlan(key, program, made[1], made[0]))

    def __call__(self, x: Tensor, scale: float) -> list[list[float]]:
        if self.calls.find is not None and (known := self.calls.find(x, scale)) is not MISSED:
            return [result.tolist() for result in known]
        layouts = [((RESULTS,), (1,), torch.float32)] * 2
        bound = BoundPlan(self.plan, ["x"], layouts, {"scale": scale})
        found = bound([x], numbers=(scale,))
        self.calls.register((x, scale), {}, RepeatableCall(bound, [x], [0, 1], single_output=False))
        return [result.tolist() for result in found]


def program_of(*functions: str, offset: int = 0) -> FunctionProgram:
    x = TensorArgument("x", (2, 3), (3, 1), torch.bfloat16, offset)
    scratch = TensorArgument("", (2,), (1,), torch.float32, ZEROED[0])
    outs = [TensorArgument(name, (RESULTS,), (1,), torch.float32) for name in ("out", "more")]
    calls = [
        FunctionCall(function, (out, NumberArgument("scale"), -7, (None, 2.5), x, None, scratch))
        for function, out in zip(functions, outs, strict=False)
    ]
    return FunctionProgram("tests", calls, workspace=sum(ZEROED), zeroed=ZEROED)


X = torch.tensor([5, 9, 3, 4, 5, 6], dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(("offset", "first"), [(0, 5), (2, 9)])
def test_a_function_gets_its_arguments(made, way, device, launches_in_python, offset, first):
    call = Calls(made, program_of("one", offset=offset))
    for number, scale in enumerate((0.75, -2.25, 4.5)):
        with device.stream(number):
            launches_in_python.clear()
            out, _ = call(X, scale)
        assert out == [scale, -7, 2.5, 2, 2, 3, 3, 1, first, number, 0]
    assert bool(launches_in_python) is (way == "python")


def test_functions_are_called_in_order_each_with_its_own(made, way, device):  # noqa: ARG001
    """The system's loader must not take one library for the other, though both came from memory."""
    call = Calls(made, program_of("one", "ten"))
    for scale in (0.75, -2.0):
        out, more = call(X, scale)
        assert (out[0], more[0]) == (scale, 10 * scale)
        assert (out[-1], more[-1]) == (0, 18)  # zeroed before the first alone


def test_the_stream_is_set_for_a_launch_alone(made, way, device):  # noqa: ARG001
    call, before = Calls(made, program_of("one")), ctypes.c_void_p()
    with device.stream(7):
        for _ in range(3):
            call(X, 1.0)
    made[0].set_stream(2, 0, None, ctypes.byref(before))
    assert before.value is None


def test_a_refused_launch_says_why(made, way, device):  # noqa: ARG001
    call = Calls(made, FunctionProgram("tests", [FunctionCall("one", (NumberArgument("scale"),))]))
    for _ in range(3):
        with pytest.raises(ExecutionError, match="TypeError: no such tensor"):
            call(X, 1.0)
