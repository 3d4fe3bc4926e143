"""Captures of a plan at addresses of which no two move alike. Nothing runs meanwhile."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.plans.plan import Plan, allocate

#: Bytes in which operands begin.
SPREAD = 8 << 20

#: All operands of every other launch begin at multiples of the last one, as PyTorch's memory does; those of the others
#: at multiples of the first one, or if what is launched depends on that, of the last one, too.
ALIGNMENTS = (ALIGNMENT, 256)

#: Launches that are captured, two in a row; the last two must be as the others predict.
LAUNCHES = 6


def bytes_of(layout: TensorLayout) -> int:
    """Bytes from the first element to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    return (1 + last) * layout.dtype.itemsize if all(layout.shape) else 0


def scalars_at(plan: Plan, pointers: Sequence[int]) -> list[float]:
    """The values of a launch's host scalars."""
    return [ctypes.c_float.from_address(pointers[place]).value for place in _scalars(plan)]


def record(native: Any, plan: Plan, values: Sequence[float]) -> None:
    """Finds what the plan launches, for these values of its host scalars. Its device is the current one.

    Raises:
        RuntimeError: What it launches is more than kernels and memsets whose arguments are operands' addresses.
    """
    count, scalars, numbers = plan.count, _scalars(plan), array("f", values)
    moving = [place for place in range(count) if place not in scalars] + [count] * (plan.workspace > 0)
    places = dict(zip(scalars, range(len(scalars)), strict=True))
    # Operands may overlap, and inputs may end behind this memory, as nothing is read or written. But CUDA checks that
    # memory which is set exists.
    written = max(plan.workspace, *(bytes_of(x.layout) for x in plan.key.outputs))
    memory = allocate((SPREAD + written,), (1,), torch.uint8)
    first, draw = -(-memory.data_ptr() // 256) * 256, random.Random()  # noqa: S311 - nothing secret

    with handles.capturing_handle(plan.device) as (handle, stream):

        def launch(words: Sequence[int]) -> None:
            pointers = array("Q", words[:count])
            # By position, as the frontend's compiled function takes them: see `backend.Execute`.
            plan._execute(pointers.buffer_info()[0], count, words[count], handle, -1)

        def addresses(alignment: int) -> list[int]:
            found = [first + alignment * draw.randrange(1, SPREAD // alignment - 1) for _ in range(count)]
            for place, number in places.items():
                found[place] = numbers.buffer_info()[0] + numbers.itemsize * number
            return [*found, first + 256 * draw.randrange(1, SPREAD // 256 - 1) if plan.workspace else 0]

        for alignment in ALIGNMENTS:
            try:
                native.record(
                    stream=stream,
                    launch=launch,
                    sets=[addresses(each) for each in (ALIGNMENTS[-1], alignment) * (LAUNCHES // 2)],
                    moving=moving,
                    scalars=scalars,
                    alignment=alignment,
                )
                return
            except RuntimeError:
                if alignment == ALIGNMENTS[-1]:
                    raise


def _scalars(plan: Plan) -> list[int]:
    operands = (*plan.key.inputs, *plan.key.outputs)
    return [place for place, operand in enumerate(operands) if operand.role is Role.SCALAR]
