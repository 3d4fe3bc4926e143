"""cuDNN's frontend itself makes the kernels that are served, without a GPU, and they take the arguments of launches."""

from __future__ import annotations

import itertools
import sys
from array import array

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_sdpa.attention.frontend import compiler
from cudnn_sdpa.attention.frontend.installed import COMMAND, installed
from cudnn_sdpa.attention.frontend.plans import Functions
from cudnn_sdpa.attention.frontend.programs import Kind, program
from cudnn_sdpa.errors import ExecutionError, LibraryError
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans import function_plan
from cudnn_sdpa.plans.default_store import open_store
from cudnn_sdpa.plans.function_plan import FunctionCall, FunctionPlan, FunctionProgram

needs_frontend = pytest.mark.skipif(bool(installed().missing), reason=f"cuDNN's frontend: {installed().missing}")

PLAIN = Kind(
    dtype="bfloat16",
    batch=2,
    heads=8,
    heads_kv=2,
    sq=256,
    skv=320,
    dim=512,
    dim_v=512,
    left=None,
    right=0,
    bottom_right=True,
    has_lse=True,
    has_sinks=False,
    order_q="hsb",
    order_k="hsb",
    order_v="shb",
    order_out="hsb",
)
KINDS = {
    "causal": PLAIN,
    "window, sinks, packed heads": PLAIN._replace(
        dtype="float16", sq=70, dim_v=264, left=30, right=4, has_lse=False, has_sinks=True, order_q="shb"
    ),
}


def layouts_of(kind: Kind) -> dict[str, TensorLayout]:
    with FakeTensorMode():
        return {name: TensorLayout.of(x) for name, x in compiler.example(kind).items()}


def band_of(kind: Kind):
    return None if (kind.left, kind.right) == (None, None) else (kind.left, kind.right, kind.bottom_right)


@needs_frontend
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_functions_take_the_arguments_of_launches(name, tmp_path, monkeypatch):
    """The C interface checks types, shapes and strides; then the kernel cannot be loaded without a GPU."""
    monkeypatch.setattr(function_plan, "current_raw_stream", lambda _: 0)
    kind, functions, folder = KINDS[name], Functions(), tmp_path / "plans"
    folder.mkdir(mode=0o700)
    store = open_store(folder, "folder")
    assert functions.compile_into(store, kind)
    assert not functions.compile_into(store, kind)
    monkeypatch.setattr("cudnn_sdpa.plans.default_store.active", lambda: store)
    libraries = functions.of(kind)
    layouts = layouts_of(kind)
    given = [Operand(each, layout) for each, layout in layouts.items()]
    given.append(Operand("scale", HOST_SCALAR, Role.SCALAR))
    target = Target.from_properties(load_properties("h100"))
    key = PlanKey("tests:frontend", "", tuple(given), (), (), target, device=0)
    numbers = array("f", [0.5])
    addresses = [numbers.buffer_info()[0] if x.role is Role.SCALAR else 1 << 33 for x in given]
    (call,) = program(layouts, band_of(kind)).calls
    if torch.cuda.is_available():
        return  # which would be given wild addresses

    def launch(*arguments):
        changed = FunctionProgram("", [FunctionCall(call.function, arguments)])
        FunctionPlan(key, changed, libraries, functions.interface()).launch(addresses)

    with pytest.raises(ExecutionError, match=r"Cuda Runtime Error|CUDA"):
        launch(*call.arguments)
    q, *others = call.arguments
    shorter = function_plan.TensorArgument("q", (*q.shape[:2], q.shape[2] - 1, q.shape[3]), q.stride, q.dtype)
    with pytest.raises(ExecutionError, match="argument #0"):
        launch(None, *others)
    with pytest.raises(ExecutionError, match=r"[Ss]hape|argument #0"):
        launch(shorter, *others)


@needs_frontend
@pytest.mark.slow
def test_another_kernel_of_another_version_is_noticed(monkeypatch):
    """Its maps of tensors may have their dimensions in another order than the kind says."""
    text = """
import sys
sys.path[:] = {path!r}
from cudnn_sdpa.attention.frontend import compiler
compiler.ROWS = ("v", "k", "q", "out")
{text}"""
    monkeypatch.setattr(
        "cudnn_sdpa.offline.interpreter.command",
        lambda program, *_: [sys.executable, "-c", text.format(path=sys.path, text=program)],
    )
    with pytest.raises(LibraryError, match=r"reads the dimensions of v in the order \(3, 1, 2, 0\) instead of"):
        Functions()._compiled(PLAIN)


@needs_frontend
@pytest.mark.slow
def test_the_frontend_admits_the_masks_that_are_served(run_python):
    """Its adapter checks them, and makes the kernel's parameters of them."""
    run_python(
        f"""
import itertools
from torch._subclasses.fake_tensor import FakeTensorMode
from cudnn.sdpa.fwd import api_dsl
from cudnn_sdpa.attention.frontend import compiler
from cudnn_sdpa.attention.frontend.programs import Kind

plain = Kind(*{tuple(PLAIN)!r})
bounds = itertools.product((None, 0, 33), (None, 0, 5), (False, True), (200, 256, 320))
for left, right, bottom_right, skv in bounds:
    # As `normalize_mask` makes bands, and `reasons_against` admits them.
    if (bottom_right and (skv <= 256 or left is right is None)) or (left is not None and skv < 256):
        continue
    kind = plain._replace(left=left, right=right, bottom_right=bottom_right, skv=skv)
    with compiler._as_on_hopper(), FakeTensorMode():
        adapter = api_dsl.SdpaFwdDslSm90(**compiler._samples(kind), **compiler.options_of(kind))
        adapter.check_support()
    made = adapter.params
    assert (made.window_left, 0 if made.causal else made.window_right) == (left, right), (kind, made)
    ends_right = made.causal if made.bottom_right is None else made.bottom_right
    assert (left is right is None) or skv == 256 or ends_right is bottom_right, (kind, made)
    assert (made.pack_gqa, made.qh_per_kh, made.scale_mode) == (kind.packs_heads, 4, 1)
""",
        fresh=True,
        **compiler.ENVIRONMENT,
    )


@pytest.mark.parametrize("sizes", [*itertools.product((1, 2), (1, 3), (2, 70))])
def test_an_example_is_of_its_kind(sizes):
    batch, heads, length = sizes
    for order in map("".join, itertools.permutations("bhs")):
        with FakeTensorMode():
            strides, distance, shape = {}, 512, dict(zip("bhs", sizes, strict=True))
            for letter in order:
                strides[letter] = distance
                distance *= shape[letter]
            x = torch.empty_strided((*sizes, 512), (*(strides[letter] for letter in "bhs"), 1), dtype=torch.float16)
        kind = Kind.of(dict.fromkeys(("q", "k", "v", "out"), TensorLayout.of(x)), (3, None, False))
        assert Kind.of(layouts_of(kind), (3, None, False)) == kind, (batch, heads, length, order)


def test_the_documentation_has_the_command(repository):
    assert f"```bash\n{COMMAND}\n```" in (repository / "docs" / "providers.md").read_text()
