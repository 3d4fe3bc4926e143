"""The dtypes that fused operations take, on a GPU and in their references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_OF_CUDNN = (torch.float16, torch.bfloat16, torch.float32)

EXPECTED = "float16, bfloat16 or float32"


def is_taken(tensor: Any) -> bool:
    """Whether something is a tensor of such a dtype; on the CPU float64 is one, too, for checks of gradients."""
    if not isinstance(tensor, Tensor):
        return False
    return tensor.dtype in _OF_CUDNN or (tensor.dtype is torch.float64 and not tensor.is_cuda)


def widened(tensor: Tensor) -> Tensor:
    """The numbers that a reference computes with: float64 as it is, everything else in float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()
