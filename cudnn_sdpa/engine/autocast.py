"""What autocast casts, and whether gradients must be bit-exact: settings of PyTorch that a call follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError


def cast_tensor(tensor: Any, q: Tensor) -> Any:
    """A tensor as autocast, if it is on for the device of `q`, casts it for a lower-precision operation."""
    kind = q.device.type
    if tensor is None or kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensor
    lower = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if lower else tensor


def is_deterministic(deterministic: Any) -> bool:
    """Whether gradients must be bit-exact: as said, or as PyTorch is set."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        expected = "True, False, or None to follow torch.use_deterministic_algorithms"
        raise OptionError("deterministic", repr(deterministic), expected)
    return deterministic
