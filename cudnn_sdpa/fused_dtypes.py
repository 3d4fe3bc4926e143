"""The dtypes that fused operations take, on a GPU and in their references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import DtypeError

_OF_CUDNN = (torch.float16, torch.bfloat16, torch.float32)

EXPECTED = "float16, bfloat16 or float32"


def check_dtype(name: str, tensor: Any) -> None:
    """Something is a tensor of such a dtype; on the CPU it may be float64, too, for checks of gradients.

    Raises:
        DtypeError: It is not.
    """
    if not isinstance(tensor, Tensor):
        raise DtypeError(name, type(tensor).__name__, EXPECTED)
    if tensor.dtype is torch.float64 and not tensor.is_cuda:
        return
    if tensor.dtype not in _OF_CUDNN:
        hint = "It runs in float64 on the CPU alone." if tensor.dtype is torch.float64 else ""
        raise DtypeError(name, str(tensor.dtype), EXPECTED, hint)


def widened(tensor: Tensor) -> Tensor:
    """The numbers that a reference computes with: float64 as it is, everything else in float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()
