"""Plans of `sdpa_paged_varlen`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.kernel_plan import KernelOp, KernelProgram

FOLDER = Path(__file__).parent


@functools.partial(KernelOp, folder=FOLDER)
def paged_varlen_forward(key: PlanKey) -> KernelProgram:
    """Attention of packed new tokens on pages."""
    raise NotImplementedError(key)


def keys(call: PagedVarlenArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    del call, target, device
    yield from ()
