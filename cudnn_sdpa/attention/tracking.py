"""What autograd would have to follow, and cannot: refused, also where a fallback is in force."""

from __future__ import annotations

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
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and _has_tangent(tensor):
            raise UnsupportedError(
                "forward-mode differentiation",
                [f"{name} has a tangent, and cuDNN has no kernel that follows it"],
                "differentiation in reverse mode, or torch.nn.functional.scaled_dot_product_attention",
            )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
