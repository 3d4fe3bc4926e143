"""Captures of a plan at addresses of which no two move alike. Nothing runs meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.key import Operand, Role
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.plan import Plan, allocate

#: Bytes in which operands begin.
SPREAD = 8 << 20

#: All operands of every other launch begin at multiples of this, as PyTorch's memory does, and those of the others at
#: odd multiples of 16, or no kernel for a coarser alignment may be seen as such; of all launches at multiples of this,
#: if what is launched depends on it.
_COARSE = 256

#: Bytes that half an address tells apart, and how many of them may be a GPU's on all machines; not the first, as tensor
#: maps of packed sequences begin 2 TiB ahead of their tensor.
_HALF, _FIRST_HALVES, _MOST_HALVES = 1 << 32, 1 << 10, 1 << 15

#: The sets of addresses that are launched, two at a time, and the noise on the stack of each. The first set finds what
#: host code leaves unwritten of an argument: noises 1 and 2 are complements, in an order in which nothing comes that
#: recurs in each second, third or fourth launch. The last two launches must be as the others predict.
ORDER = ((0, 1), (0, 1), (0, 2), (0, 1), (0, 2), (1, 3), (2, 5), (3, 7), (4, 9), (5, 11))

_SETS = 1 + max(number for number, _ in ORDER)


def scalars_at(plan: Plan, pointers: Sequence[int]) -> list[float]:
    """The values of a launch's host scalars."""
    return [ctypes.c_float.from_address(pointers[index]).value for index in _scalars(plan)]


def record(native: Any, plan: Plan, values: Sequence[float], sizes: Sequence[int]) -> None:
    """Finds what the plan launches, for these values of its host scalars. Its device is the current one.

    Args:
        native: The launches in the native module.
        plan: The plan.
        values: The values.
        sizes: Bytes of each output.

    Raises:
        RuntimeError: What it launches is more than kernels and memsets whose arguments are operands' addresses.
    """
    count, operands, scalars = plan.count, (*plan.key.inputs, *plan.key.outputs), _scalars(plan)
    numbers = array("f", [*values] * _SETS)  # elsewhere in each set: their addresses must not be taken for data
    # Operands may overlap, as nothing is read or written. They are anywhere: the upper halves of addresses in one piece
    # of memory are all the same, and would be taken for numbers. But CUDA checks that memory which is set exists.
    written = max(plan.workspace, *sizes)
    memory = allocate((2 * _COARSE + SPREAD + written,), (1,), torch.uint8)
    first, draw = -(-memory.data_ptr() // (2 * _COARSE)) * 2 * _COARSE, random.Random()

    def address(alignment: int, *, odd: bool) -> int:
        return first + alignment * (draw.randrange(1, SPREAD // alignment - _COARSE) | odd)

    def capture(alignment: int, anywhere: int) -> None:
        """Records launches. The first operands are anywhere, the others and the workspace in `memory`."""
        moving = {index: _alignment(x, alignment) for index, x in enumerate(operands) if index not in scalars}
        moving |= {count: _COARSE} if plan.workspace else {}
        coarse, halves = dict.fromkeys(moving, _COARSE), dict[int, int]()
        sets = [[0] * (1 + count) for _ in range(_SETS)]
        for number, words in enumerate(sets):
            for index, each in (moving if number % 2 else coarse).items():
                words[index] = address(each, odd=bool(number % 2))
                if index < anywhere:  # every other one is the complement: all bits differ
                    drawn = draw.randrange(_FIRST_HALVES, _MOST_HALVES - _FIRST_HALVES)
                    halves[index] = _MOST_HALVES - 1 - halves[index] if number % 2 else drawn
                    words[index] = words[index] % _HALF + _HALF * halves[index]
            for at, index in enumerate(scalars):
                words[index] = numbers.buffer_info()[0] + numbers.itemsize * (number * len(scalars) + at)
        execute, given = plan.execution(native, handle, stream)
        native.record(
            stream=stream,
            handle=given,
            execute=execute,
            sets=[sets[number] for number, _ in ORDER],
            noise=[noise for _, noise in ORDER],
            moving=list(moving.items()),
            scalars=scalars,
            workspace=plan.workspace,
        )

    with handles.capturing_handle(plan.device) as (handle, stream):
        for alignment in (ALIGNMENT, _COARSE):
            with contextlib.suppress(*[RuntimeError] * (alignment < _COARSE)):
                try:
                    capture(alignment, anywhere=count)
                except RuntimeError:
                    capture(alignment, anywhere=len(plan.key.inputs))
                    if not native.sets_operands:
                        raise
                break


def _alignment(operand: Operand, alignment: int) -> int:
    """The alignment of an operand's addresses; kernels read lengths, offsets and single numbers anywhere."""
    layout = operand.layout
    is_read_by_element = layout.dtype in (torch.int32, torch.int64) or math.prod(layout.shape) == 1
    return layout.dtype.itemsize if is_read_by_element else alignment


def _scalars(plan: Plan) -> list[int]:
    operands = (*plan.key.inputs, *plan.key.outputs)
    return [index for index, operand in enumerate(operands) if operand.role is Role.SCALAR]
