"""Launches of one call both ways, compared bit by bit, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import handles
from cudnn_sdpa.plans.plan import Plan, allocate, current_raw_stream, side_by_side

#: What results and workspaces contain before a launch, in each byte.
_POISON = 0xA5


def compare(native: Any, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Launches the call of these operands twice by cuDNN, and once as recorded, with results of its own.

    `sizes` are the bytes of each output: what is written to is not always as large as its layout.

    Gives on the GPU whether cuDNN's results differ from each other, whether the recorded launch's differ from cuDNN's,
    and whether they tell anything: most wrong launches agree where all results are zeros.
    """

    def as_recorded(moved: list[int]) -> None:
        workspace = allocate((max(1, plan.workspace),), (1,), torch.uint8).fill_(_POISON)
        if error := native.launch(moved, workspace.data_ptr(), current_raw_stream(plan.device)):
            raise ExecutionError(f"CUDA reports error {error} for a recorded launch")

    first, again, recorded = (_results(plan, pointers, sizes, launch) for launch in (plan.launch, plan.launch, as_recorded))
    tells = (first != 0) & (first != _POISON)
    return torch.stack([(first != again).any(), (first != recorded).any(), tells.any()])


def _results(
    plan: Plan, pointers: Sequence[int], sizes: Sequence[int], launch: Callable[[list[int]], None]
) -> Tensor:
    offsets, size = side_by_side(sizes)
    memory: Tensor = allocate((size,), (1,), torch.uint8).fill_(_POISON)
    launch([*pointers[: len(plan.key.inputs)], *(memory.data_ptr() + offset for offset in offsets)])
    return memory


def marked() -> torch.cuda.Event:
    """An event behind all work that is enqueued."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def read(flags: Tensor, mark: torch.cuda.Event, device: int) -> list[bool]:
    """Waits for flags behind an event, on a stream that nobody captures.

    By events alone: PyTorch's debug mode of synchronizations, which is that of all threads, allows them.
    """
    mark.synchronize()
    with handles.capturing_handle(device) as (_, stream), torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]
        on_host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        on_host.copy_(flags, non_blocking=True)
        marked().synchronize()
        found: list[bool] = on_host.tolist()
        del on_host  # PyTorch marks the stream then, which the next one may capture
    return found
