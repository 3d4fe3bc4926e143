"""Graph functions that kernels of this library serve: whether they may, and the keys of their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa.fused.encoding import Value
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, OWN

FOLDER = Path(__file__).parent

#: The macros DTYPE and WDTYPE of the kernels.
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

_NUMBER = TensorLayout.contiguous((1,), torch.float32)


def may_serve() -> bool:
    """Whether own kernels come before cuDNN's among the providers in force."""
    names = providers.Setting.names or providers.active()
    return next((name != CUDNN for name in names if name in (DEFAULT, OWN, FASTEST, CUDNN)), False)


def as_rows(x: Tensor) -> TensorLayout:
    """The layout of a tensor (..., n) as (rows, n), whose rows are at one stride from each other."""
    return TensorLayout.of(x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1))


def key_of(
    operation: KernelOp,
    named: Mapping[str, Value],
    results: Sequence[Tensor],
    options: Mapping[str, object],
    target: Target,
    device: int | None,
) -> PlanKey:
    """The key of a plan whose operands and results are rows, by their names; numbers are data."""
    inputs = [
        Operand(name, as_rows(x)) if isinstance(x, Tensor) else Operand(name, _NUMBER, Role.SCALAR)
        for name, x in named.items()
        if x is not None
    ]
    outputs = [Operand(f"output{index}", as_rows(x)) for index, x in enumerate(results)]
    return operation.key(inputs, outputs, options, target, device=device)
