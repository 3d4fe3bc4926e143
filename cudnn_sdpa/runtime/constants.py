"""Device tensors of the operands whose values a plan's key fixes."""

from __future__ import annotations

import math
import threading

import torch

from cudnn_sdpa.runtime import arena
from cudnn_sdpa.runtime.key import PlanKey, Role
from cudnn_sdpa.runtime.layouts import TensorLayout

_constants: dict[tuple[int, TensorLayout, int], torch.Tensor] = {}
_lock = threading.Lock()


def constants_of(key: PlanKey) -> dict[str, torch.Tensor]:
    """The constants of a plan by name, on its GPU, which must be the current one."""
    assert key.device is not None
    fills = [operand for operand in key.inputs if operand.role is Role.FILL]
    return {operand.name: _constant(key.device, operand.layout, operand.fill) for operand in fills}


def _constant(device: int, layout: TensorLayout, value: int) -> torch.Tensor:
    """A filled tensor that lives as long as the process: when a plan goes, launches of it may still be waiting.

    There is one for each batch size and value, of half a kilobyte on the GPU.
    """
    with _lock:  # two threads must not make two, of which one would go with its plan
        tensor = _constants.get((device, layout, value))
        if tensor is None:
            size = math.prod(layout.shape) * layout.dtype.itemsize
            tensor = arena.take(device, size)[:size].view(layout.dtype).view(layout.shape).fill_(value)
            torch.cuda.current_stream(device).synchronize()  # launches may come on other streams
            _constants[device, layout, value] = tensor
    return tensor
