"""Gradients of gradients: refused where nothing computes them, instead of being taken for zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from cudnn_sdpa.errors import UnsupportedError


def refuse_second_gradient(what: str) -> NoReturn:
    """Refuses the gradient of a gradient.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"a gradient of {what}'s gradient (double backward)",
        ["cuDNN has no kernel for it"],
        "PyTorch's own functions where gradients are differentiated again",
    )


def no_second_gradient(what: str) -> Callable[..., Any]:
    """What a graph function that computes gradients of `what` has as its `backward`."""

    def backward(grads: Any, operands: Any, results: Any, **options: Any) -> NoReturn:
        del grads, operands, results, options
        refuse_second_gradient(what)

    return backward
