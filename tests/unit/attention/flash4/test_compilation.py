"""FlashAttention-4 itself compiles, without a GPU, what `programs.py` calls, and accepts those arguments."""

from __future__ import annotations

import sys
from array import array

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_sdpa.attention.flash4 import compiler
from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.attention.flash4.plans import Functions, names_of
from cudnn_sdpa.attention.flash4.programs import CAUSAL, Kind, operands_of_any_size, program, sizes_of
from cudnn_sdpa.errors import ExecutionError, LibraryError
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans import function_plan
from cudnn_sdpa.plans.default_store import open_store
from cudnn_sdpa.plans.function_plan import FunctionCall, FunctionPlan, FunctionProgram, TensorArgument

pytestmark = pytest.mark.skipif(bool(installed().missing), reason=f"FlashAttention-4: {installed().missing}")

PLAIN = Kind(
    is_backward=False,
    dtype="bfloat16",
    dim=128,
    dim_v=128,
    group=4,
    is_causal=True,
    has_left=False,
    has_right=False,
    has_lse=True,
    has_sinks=False,
    is_capped=False,
    few_queries=False,
    few_keys=False,
    is_packed=False,
)
WINDOW = PLAIN._replace(dim=64, dim_v=64, group=1, is_causal=False, has_left=True, has_right=True, has_lse=False)
KINDS = {
    "forward": PLAIN,
    "window, sinks, soft cap": WINDOW._replace(has_sinks=True, is_capped=True),
    "backward": PLAIN._replace(is_backward=True),
    "few, capped": PLAIN._replace(is_backward=True, dim=256, dim_v=256, group=1, is_capped=True, few_queries=True),
    "full, 80 queries a tile": PLAIN._replace(is_backward=True, is_causal=False, group=1),
    "packed": PLAIN._replace(is_packed=True),
    "packed, backward": PLAIN._replace(is_packed=True, is_backward=True),
    "on pages": PLAIN._replace(is_packed=True, is_on_pages=True, has_lse=False),
    "on pages, window, sinks, soft cap": WINDOW._replace(
        is_packed=True, is_on_pages=True, has_sinks=True, is_capped=True
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_functions_take_the_arguments_of_launches(name, tmp_path, monkeypatch):
    """They are compared with those of its own Python as they are compiled; then the C interface checks their types."""
    monkeypatch.setattr(function_plan, "current_raw_stream", lambda _: 0)
    monkeypatch.setattr(function_plan, "allocate", lambda shape, _, dtype: torch.empty(shape, dtype=dtype))
    kind, functions, folder = KINDS[name], Functions(), tmp_path / "plans"
    folder.mkdir(mode=0o700)
    store = open_store(folder, "folder")
    assert functions.compile_into(store, kind)
    assert not functions.compile_into(store, kind)
    monkeypatch.setattr("cudnn_sdpa.plans.default_store.active", lambda: store)
    libraries = functions.of(kind)
    assert tuple(libraries) == names_of(kind)
    with FakeTensorMode():
        layouts = {name: TensorLayout.of(x) for name, x in compiler.example(kind).items()}
    given = [Operand(name, x, Role.SCALAR if name == "softcap" else Role.TENSOR) for name, x in layouts.items()]
    given.append(Operand("scale", HOST_SCALAR, Role.SCALAR))
    window = compiler.window_of(kind)
    sizes = sizes_of(layouts, window) if kind.is_on_pages else array("q")
    if kind.is_on_pages:  # which has a plan for all sizes
        given = operands_of_any_size(given, window)
        layouts = {operand.name: operand.layout for operand in given}
        assert Kind.of(layouts, window) == kind
    target = Target.from_properties(load_properties("h100"))
    key = PlanKey("tests:flash4", "", tuple(given), (), (), target, device=0)
    numbers = array("f", [0.5])
    on_the_host = {Role.SCALAR: numbers.buffer_info()[0], Role.HOST: sizes.buffer_info()[0]}
    addresses = [on_the_host.get(x.role, 1 << 33) for x in given]
    whole = program(layouts, window)
    for call in whole.calls:
        plan = FunctionPlan(key, FunctionProgram("", [call], whole.workspace), libraries, functions.interface())
        if torch.cuda.is_available():
            break  # which would be given wild addresses
        with pytest.raises(ExecutionError, match=r"Cuda Runtime Error|CUDA"):
            plan.launch(addresses)
        tensors = [x for x in call.arguments if isinstance(x, TensorArgument)]
        wrong = FunctionCall(call.function, (None, *call.arguments[1:]))
        assert tensors[0] == call.arguments[0]
        plan = FunctionPlan(key, FunctionProgram("", [wrong], whole.workspace), libraries, functions.interface())
        with pytest.raises(ExecutionError, match="Mismatched type on argument #0"):
            plan.launch(addresses)


def test_other_arguments_of_another_version_are_noticed(monkeypatch):
    monkeypatch.setattr("cudnn_sdpa.offline.interpreter.command", lambda text, *_: _with_other_window(text))
    with pytest.raises(LibraryError, match=r"argument 11 of function 0 is None instead of 3"):
        Functions()._compiled(PLAIN)


def _with_other_window(text: str) -> list[str]:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from cudnn_sdpa.attention.flash4 import compiler
real = compiler.program
compiler.program = lambda layouts, window: real(layouts, (3, 4))
{text}"""
    return [sys.executable, "-c", program]


def test_a_causal_mask_has_kernels_of_its_own():
    assert compiler.window_of(PLAIN) == CAUSAL
    assert compiler.window_of(WINDOW) == (7, 5)
