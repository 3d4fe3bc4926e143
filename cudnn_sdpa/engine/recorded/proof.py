"""Launches of one call in all ways, compared bit by bit, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import ExecutionError
from cudnn_sdpa.graph import handles
from cudnn_sdpa.plans.device_memory import take_memory
from cudnn_sdpa.plans.plan import Plan, allocate, current_raw_stream, side_by_side

#: What results and workspaces contain before a launch, in each byte, and in words of eight.
_POISON = 0xA5
_POISON_WORD = int.from_bytes([_POISON] * 8, "little", signed=True)

#: Bytes of results that are looked at in words.
_IN_WORDS = 4096


def compare(native: Any, plan: Plan, pointers: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Launches the call of these operands twice by its provider, and as recorded, with results of its own.

    Gives four flags on the GPU: whether the provider's results differ from each other; whether the recorded launch's
    differ from these; whether every result tells something, as most wrong launches agree where a result is all zeros;
    and whether a launch that is given zeros has other results, or writes to other memory. `sizes` are the bytes of each
    output, which may be more or less than those of its layout.
    """
    inputs, (offsets, size) = pointers[: len(plan.key.inputs)], side_by_side(sizes)
    touched: list[Tensor] = []

    def as_recorded(moved: list[int], zeros: int = 0) -> Tensor:
        workspace: Tensor = _poisoned(max(1, plan.workspace))
        if error := native.launch(moved, workspace.data_ptr(), current_raw_stream(plan.device), zeros):
            raise ExecutionError(f"CUDA reports error {error} for a recorded launch")
        return workspace

    def with_zeros(moved: list[int]) -> None:
        zeros = _poisoned(native.zeros + plan.workspace)  # what a kernel uses beside counters is there, and seen
        counters = [(offset, size, zeros[begin:][:size]) for offset, size, begin in native.counters]
        for _, _, counter in counters:
            counter.zero_()
        workspace = as_recorded(moved, zeros.data_ptr())
        for _, _, counter in counters:
            counter.fill_(_POISON)
        unused = (zeros, *(workspace[offset:][:size] for offset, size, _ in counters))
        touched.extend((x != _POISON).any() for x in unused)

    def results(launch: Callable[[list[int]], object]) -> Tensor:
        memory: Tensor = allocate((-(-size // 8),), (1,), torch.int64).fill_(_POISON_WORD)
        launch([*inputs, *(memory.data_ptr() + offset for offset in offsets)])
        return memory

    first, again, recorded = (results(launch) for launch in (plan.launch, plan.launch, as_recorded))
    counted = results(with_zeros) if native.zeros else recorded
    in_bytes = first.view(torch.uint8)
    tells = torch.stack([_tells(in_bytes[at:][:size]) for at, size in zip(offsets, sizes, strict=True) if size]).all()
    is_wrong = torch.stack([(first != counted).any(), *touched]).any()
    return torch.stack([(first != again).any(), (first != recorded).any(), tells, is_wrong])


def _tells(result: Tensor) -> Tensor:
    """Whether anything is neither zero nor unwritten; where that is much, in words, as the answer takes memory, too."""
    poison = _POISON
    if result.numel() >= _IN_WORDS:
        result, poison = result[: result.numel() & -8].view(torch.int64), _POISON_WORD
    return ((result != 0) & (result != poison)).any()


def _poisoned(size: int) -> Tensor:
    memory: Tensor = allocate((size,), (1,), torch.uint8).fill_(_POISON)
    return memory


class Verdict:
    """The flags of a comparison, once the GPU has made it.

    It is kept outside the memory pools of CUDA graphs: their warm-up expects all of its memory back.
    """

    def __init__(self, flags: Tensor, device: int) -> None:
        self._flags = take_memory(device, flags.numel())[: flags.numel()].view(torch.bool).copy_(flags)
        self._flags.record_stream(torch.cuda.current_stream(device))
        self._device, self._mark = device, _mark()

    def is_known(self) -> bool:
        return bool(self._mark.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[bool]:
        """Reads it, once it is known, on a stream that nobody captures.

        It waits for an event alone, as PyTorch's debug mode of synchronizations, that of all threads, allows it.
        """
        stream = handles.capturing_handle(self._device)
        with stream as (_, raw), torch.cuda.stream(torch.cuda.ExternalStream(raw)):  # type: ignore[no-untyped-call]
            on_host = torch.empty(self._flags.shape, dtype=torch.bool, pin_memory=True)
            on_host.copy_(self._flags, non_blocking=True)
            _mark().synchronize()
            found: list[bool] = on_host.tolist()
            del on_host  # PyTorch marks the stream then, which the next one may capture
        return found


def _mark() -> torch.cuda.Event:
    """An event behind all work that is enqueued."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
