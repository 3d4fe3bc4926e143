"""PyTorch settings that a call follows: autocast and deterministic algorithms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.scalars import as_bool

TensorT = TypeVar("TensorT", Tensor, "Tensor | None")


def cast_tensor(tensor: TensorT, q: Tensor) -> TensorT:
    """A tensor cast as autocast, if enabled for the device of `q`, casts inputs of lower-precision operations."""
    kind = q.device.type
    if tensor is None or kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensor
    lower = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if lower else tensor


def could_cast(tensors: Iterable[Tensor]) -> bool:
    """Whether autocast, if it is on, could cast one of these tensors: not if they have its dtype."""
    for tensor in tensors:
        kind = tensor.device.type
        follows = tensor.is_floating_point() and kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)
        if follows and tensor.dtype not in (torch.float64, torch.get_autocast_dtype(kind)):
            return True
    return False


class _WithQueries(Protocol):
    @property
    def q(self) -> Tensor: ...


def cast_fields(call: _WithQueries, *names: str) -> dict[str, Any]:
    return {name: cast_tensor(getattr(call, name), call.q) for name in names}


def is_deterministic(deterministic: object) -> bool:
    """Whether gradients must be bitwise deterministic: the given value, or PyTorch's setting."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    deterministic = as_bool(deterministic)
    if not isinstance(deterministic, bool):
        expected = "True, False, or None to follow torch.use_deterministic_algorithms"
        raise OptionError("deterministic", repr(deterministic), expected)
    return deterministic
