"""Plans of the attention kernel of cuDNN's frontend: its operation, its compilation in a helper process, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from cudnn_sdpa.attention.frontend.installed import installed
from cudnn_sdpa.attention.frontend.programs import ENGINE, FORWARD, ROWS, Kind, program, program_of, strides_of
from cudnn_sdpa.attention.mask import Band
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import function_compiler
from cudnn_sdpa.offline.functions import CompiledFunctions, CompiledOp
from cudnn_sdpa.offline.installation import Installed
from cudnn_sdpa.plans.function_plan import FunctionProgram

#: The compute capability of the kernel. The frontend's kernels for later ones were run on no GPU by these tests.
TESTED_SM = 90

DTYPES = (torch.float16, torch.bfloat16)

#: Head dims are multiples of this, above `ABOVE_DIM` and up to `MAX_DIM`: as the frontend admits them to its kernel,
#: which computes all of them as 512.
UNIT, ABOVE_DIM, MAX_DIM = 8, 256, 512

_PROGRAM = """
import os
from cudnn_sdpa.attention.frontend.compiler import ENVIRONMENT, main
os.environ.update(ENVIRONMENT)
main()
"""


def kind_of(key: PlanKey) -> Kind:
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    return Kind.of(layouts, key.option_values["band"])  # type: ignore[arg-type]


_SOURCES = (
    Path(__file__).with_name("compiler.py"),
    Path(__file__).with_name("programs.py"),
    Path(function_compiler.__file__),
)


class Functions(CompiledFunctions[Kind]):
    """The frontend's compiled functions of this process, by kind."""

    sources = _SOURCES
    library, engine, helper, variables = "cuDNN's frontend", ENGINE, _PROGRAM, "CUDNN_FRONTEND_"
    limit = 64  # each shape is a kind

    def installed(self) -> Installed:
        return installed()

    def kind_of(self, key: PlanKey) -> Kind:
        return kind_of(key)

    def names_of(self, kind: Kind) -> tuple[str, ...]:
        return (FORWARD,)


functions = Functions()


class FrontendOp(CompiledOp):
    """An operation that a kernel of the frontend's computes."""

    provider = "frontend"
    functions = functions


@FrontendOp
def frontend_forward(key: PlanKey) -> FunctionProgram:
    """The forward pass of dense attention."""
    return program_of(key)


def reasons_against(layouts: Mapping[str, TensorLayout], band: Band | None, target: Target) -> list[str]:
    """Why the frontend cannot serve a call with these operands, each (B, H, S, D)."""
    if missing := installed().missing:
        return [missing]
    reasons = []
    if target.sm != TESTED_SM:
        tested = "its kernels were tested on compute capability 9.0 alone"
        reasons.append(f"{tested}, and the GPU has {target.sm / 10:.1f}")
    q, v = layouts["q"], layouts["v"]
    sq, skv, dims = q.shape[2], v.shape[2], (q.shape[3], v.shape[3])
    if q.dtype not in DTYPES:
        reasons.append(f"its dtypes are float16 and bfloat16, and q has {str(q.dtype).removeprefix('torch.')}")
    if any(dim % UNIT or not ABOVE_DIM < dim <= MAX_DIM for dim in dims):
        served = f"its head dims are multiples of {UNIT} above {ABOVE_DIM} and up to {MAX_DIM}"
        reasons.append(f"{served}, and not {dims[0]} and {dims[1]}")
    if sq == 1:
        reasons.append("it is not used for single queries: each number of keys would be compiled anew, in seconds")
    if max(q.shape[:2]) > known_issues.MAX_GRID:
        reasons.append(f"its grids have at most {known_issues.MAX_GRID:,} batch entries or heads")
    left, right, _ = band or (None, None, False)
    if any(bound is not None and bound < 0 for bound in (left, right)):
        reasons.append(f"the bounds of its masks are not negative, and this one has ({left}, {right})")
    if left is not None and sq > skv:
        reasons.append(f"its windows have no more queries than keys, and not {sq} and {skv}")
    kept = f"are expanded, or have strides that are no multiples of {UNIT}"
    if unreadable := [name for name in ROWS if not _is_readable(layouts[name])]:
        reasons.append(f"it takes no tensors that {kept}, as {' and '.join(unreadable)}")
    reasons = reasons or program(layouts, band).reasons_against
    if not reasons and (failure := functions.failure(Kind.of(layouts, band))):
        reasons.append(failure)
    return reasons


def _is_readable(layout: TensorLayout) -> bool:
    """Whether no two elements share memory, as the frontend makes sure, and all rows begin at multiples of 16 bytes."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(layout.stride, layout.shape, strict=True)):
        if size > 1:
            if stride < span:
                return False
            span = stride * size
    return layout.stride[3] == 1 and not any(stride % UNIT for stride in strides_of(layout)[:3])
