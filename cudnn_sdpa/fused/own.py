"""Graph functions that kernels of this library serve: the choice between these and cuDNN, and the keys of their plans.

The table of measurements has rows for functions and passes on a GPU, with times of one of the calls of each. Without a
row cuDNN serves a call, and own kernels those for which it has no engine.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused.encoding import Value
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.preferences import rows_of
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, OWN

FOLDER = Path(__file__).parent

#: The macros DTYPE and WDTYPE of the kernels.
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

#: The first compute capability with conversions to FP8.
_SM_OF_FP8 = 89

_WORDS = {OWN: "own kernels", CUDNN: "cuDNN's engines"}

#: Why own kernels serve what nothing else does.
LACKED = f"{_WORDS[OWN]}: cuDNN has no engine for it, or for some rows like these"

_NUMBER = TensorLayout.contiguous((1,), torch.float32)


class Preference(NamedTuple):
    """A row of the table; times in microseconds, of the call `of` of `benchmarks fused`.

    `rows` and `lengths` are the least and the most that it is for.
    """

    sm: int
    function: str
    is_backward: bool
    kernel: str
    own_us: float
    cudnn_us: float
    of: str
    rows: tuple[int, int] = (1, sys.maxsize)
    lengths: tuple[int, int] = (1, sys.maxsize)

    def __str__(self) -> str:
        times = {OWN: self.own_us, CUDNN: self.cudnn_us}
        (other,) = times.keys() - {self.kernel}
        of_other = f"{_WORDS[other]}, {times[other]} µs ({self.of}; preferences.json)"
        return f"{_WORDS[self.kernel]}: measured {times[self.kernel]} µs; {of_other}"


@functools.cache
def preferences() -> list[Preference]:
    """The rows, of which the first that fits a call counts."""
    return [Preference(**row) for part in ("few_rows", "norms", "gates") for row in rows_of(part)]


def preference(function: str, target: Target, shape: Sequence[int], *, is_backward: bool) -> Preference | None:
    *outer, length = 1, *shape  # a scalar is a row of one
    count = math.prod(outer)
    for row in preferences():
        is_like = row.sm == target.sm and row.function == function and row.is_backward == is_backward
        if is_like and row.rows[0] <= count <= row.rows[1] and row.lengths[0] <= length <= row.lengths[1]:
            return row
    return None


def may_serve() -> bool:
    """Whether a provider is in force that has own kernels."""
    return not {DEFAULT, FASTEST, OWN}.isdisjoint(providers.Setting.names or providers.active())


def choice(
    function: str, target: Target, shape: Sequence[int], *, is_backward: bool, has_engine: bool
) -> tuple[str, str]:
    """Who serves a call, and why.

    Args:
        function: "norm" or "gate".
        target: The GPU.
        shape: That of a result, (..., n) or ().
        is_backward: Whether these are gradients.
        has_engine: Whether cuDNN surely has an engine for the call.
    """
    row = preference(function, target, shape, is_backward=is_backward)
    for name in providers.Setting.names or providers.active():
        if name == OWN or (name == CUDNN and has_engine):
            return name, f"{_WORDS[name]}, by providers({name!r})"
        if name in (DEFAULT, FASTEST):
            if row is not None and (row.kernel == OWN or has_engine):
                return row.kernel, str(row)
            return (CUDNN, f"{_WORDS[CUDNN]}: nothing was measured on this GPU") if has_engine else (OWN, LACKED)
    return (OWN, LACKED) if may_serve() else (CUDNN, "")


def unless_known_wrong(key: PlanKey, why: str, *, has_engine: bool) -> tuple[PlanKey | None, str]:
    """The key of a plan by own kernels, and why; the key is None where these have a known issue and cuDNN serves."""
    if has_engine and (reasons := known_issues.reasons_against(key)):
        return None, f"{_WORDS[CUDNN]}: {_WORDS[OWN]} do not serve it, as {'; '.join(reasons)}"
    return key, why


def refuse_without_fp8(function: str, target: Target, instead: str) -> None:
    if target.sm < _SM_OF_FP8:
        reasons = [f"GPUs before compute capability 8.9 have no FP8, and this one has {target.sm / 10}"]
        raise UnsupportedError(function, reasons, instead)


def key_of(
    operation: KernelOp,
    named: Mapping[str, Value],
    results: Sequence[Tensor],
    options: Mapping[str, object],
    *,
    target: Target,
    device: int | None,
    layout: Callable[[Tensor], TensorLayout] | None = None,
) -> PlanKey:
    """The key of a plan, given its operands by name and its results, which are rows if no layout is given.

    Numbers are data.
    """
    layout = _as_rows if layout is None else layout
    inputs = [
        Operand(name, layout(x)) if isinstance(x, Tensor) else Operand(name, _NUMBER, Role.SCALAR)
        for name, x in named.items()
        if x is not None
    ]
    outputs = [Operand(f"output{index}", layout(x)) for index, x in enumerate(results)]
    return operation.key(inputs, outputs, options, target, device=device)


def _as_rows(x: Tensor) -> TensorLayout:
    """The layout of a tensor (..., n) as (rows, n), whose rows are at one stride from each other."""
    return TensorLayout.of(x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1))
