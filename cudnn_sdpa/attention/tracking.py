"""What autograd would have to follow, and cannot: refused, also where a fallback is in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.eager import needs_gradient


def check(out: Tensor | None, **inputs: Tensor | None) -> None:
    """Refuses results that would silently be cut off from their inputs.

    Raises:
        UnsupportedError: A tensor has a tangent of forward-mode differentiation, or what is written into `out` would
            need a gradient.
    """
    _check_no_tangent(**inputs, out=out)
    if out is not None and needs_gradient(*inputs.values(), out):
        raise UnsupportedError(
            "out with a gradient",
            ["an input requires grad, and autograd does not follow what is written into a given tensor"],
            "calling it under torch.no_grad(), or without out",
        )


def _check_no_tangent(**tensors: Tensor | None) -> None:
    refuse_tangents(tensors, "torch.nn.functional.scaled_dot_product_attention")


def refuse_tangents(tensors: Mapping[str, Any], alternative: str = "PyTorch's own functions") -> None:
    """Refuses tensors with tangents of forward-mode differentiation; what is no tensor is passed over.

    Raises:
        UnsupportedError: One has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and _has_tangent(tensor):
            raise UnsupportedError(
                "forward-mode differentiation",
                [f"{name} has a tangent, and cuDNN has no kernel that follows it"],
                f"differentiation in reverse mode, or {alternative}",
            )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
