"""Plans of FlashAttention-4's functions: their operations, their compilation in a helper process, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.attention.flash4.programs import CAUSAL, ENGINE, Kind, Window, program, program_of
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline import function_compiler
from cudnn_sdpa.offline.functions import CompiledFunctions, CompiledOp
from cudnn_sdpa.offline.installation import Installed
from cudnn_sdpa.plans.function_plan import FunctionProgram

#: The compute capability for which functions are called as the tests on a GPU have called them.
TESTED_SM = 90

DTYPES = (torch.float16, torch.bfloat16)

#: The head dims of q and v with which the tests passed on a GPU. With others, gradients were wrong (seen with 4.0.0b36:
#: of packed sequences with 8 and 8, of dense ones with 48 and 80), or do not compile (64 and 32).
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))

_PROGRAM = """
import os
from cudnn_sdpa.attention.flash4.compiler import ENVIRONMENT, main
os.environ.update(ENVIRONMENT)
main()
"""


def kind_of(key: PlanKey) -> Kind:
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    return Kind.of(layouts, key.option_values["window"])  # type: ignore[arg-type]


def names_of(kind: Kind) -> tuple[str, ...]:
    """The functions of a kind."""
    if not kind.is_backward:
        return ("forward",)
    return ("before", "main", "grad_q", *(("grad_k", "grad_v") if kind.group > 1 else ()))


_SOURCES = (
    Path(__file__).with_name("compiler.py"),
    Path(__file__).with_name("programs.py"),
    Path(function_compiler.__file__),
)


class Functions(CompiledFunctions[Kind]):
    """FlashAttention-4's compiled functions of this process, by kind."""

    sources = _SOURCES
    library, engine, helper, variables = "FlashAttention-4", ENGINE, _PROGRAM, "FLASH_ATTENTION_"

    def installed(self) -> Installed:
        return installed()

    def kind_of(self, key: PlanKey) -> Kind:
        return kind_of(key)

    def names_of(self, kind: Kind) -> tuple[str, ...]:
        return names_of(kind)


functions = Functions()


class Flash4Op(CompiledOp):
    """An operation that FlashAttention-4's functions compute."""

    provider = "fa4"
    functions = functions


@Flash4Op
def flash4_forward(key: PlanKey) -> FunctionProgram:
    """The forward pass of attention: dense, packed, or packed on pages."""
    return program_of(key)


@Flash4Op
def flash4_backward(key: PlanKey) -> FunctionProgram:
    """The backward pass of attention, dense or packed."""
    return program_of(key)


def reasons_against(layouts: Mapping[str, TensorLayout], window: Window, target: Target) -> list[str]:
    """Why FlashAttention-4 cannot serve a call with these operands: (B, H, S, D), (T, H, D), or (pages, H, S, D)."""
    if missing := installed().missing:
        return [missing]
    reasons = []
    if target.sm != TESTED_SM:
        reasons.append(f"it was tested on compute capability 9.0 alone, and the GPU has {target.sm / 10:.1f}")
    q, v = layouts["q"], layouts["v"]
    dims, is_packed = (q.shape[-1], v.shape[-1]), len(q.shape) == 3
    if q.dtype not in DTYPES:
        reasons.append(f"its dtypes are float16 and bfloat16, and q has {str(q.dtype).removeprefix('torch.')}")
    if dims not in DIMS:
        *most, last = (str(dim) if dim == dim_v else f"{dim} with {dim_v}" for dim, dim_v in DIMS)
        served = f"{', '.join(most)}, and {last}"
        reasons.append(f"it is right with head dims of {served}; q and v have {dims[0]} and {dims[1]}")
    grid = q.shape[1:2] if is_packed else q.shape[:2]
    if max(grid) > known_issues.MAX_GRID and (is_packed or ("grad_q" not in layouts and window != CAUSAL)):
        reasons.append(f"its grids have at most {known_issues.MAX_GRID:,} batch entries or heads")
    if any(bound is not None and bound < 0 for bound in window):
        reasons.append(f"its masks end at the last query and the last key, and this one is the window {window} there")
    for name, layout in layouts.items():
        sizes = zip(layout.shape[:-1], layout.stride[:-1], strict=True)
        if any(size > 1 and not stride for size, stride in sizes):
            reasons.append(f"{name} is expanded: it would be copied")
    if "grad_q" in layouts and dims[0] != dims[1] and q.shape[1] != layouts["k"].shape[1]:
        reasons.append("its gradients of grouped heads need one head dim of q and v")
    reasons = reasons or program(layouts, window).reasons_against
    if not reasons and (failure := functions.failure(Kind.of(layouts, window))):
        reasons.append(failure)
    return reasons
