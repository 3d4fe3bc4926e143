"""`fallback`: what cuDNN declines runs on plain PyTorch, if the caller asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.runtime.eager import is_compiling

_log = logging.getLogger("cudnn_sdpa")
_chosen: ContextVar[str | None] = ContextVar("fallback", default=None)
_said: set[Hashable] = set()

T = TypeVar("T")


@contextmanager
def fallback(to: str | None) -> Iterator[None]:
    """While it is in force, in this thread, what cuDNN declines runs on PyTorch instead of raising.

    With "torch", a call that would raise `UnsupportedError` runs on `torch.nn.functional.scaled_dot_product_attention`
    where that has all its options, otherwise on this library's reference in plain PyTorch, whose memory grows with
    Sq × Skv. It is logged once for each kind of call, as a warning of the logger "cudnn_sdpa". Compiled code
    (`torch.compile`) does not fall back. None switches an outer fallback off.

    Args:
        to: "torch" or None.

    Raises:
        OptionError: `to` is neither.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> with cudnn_sdpa.fallback("torch"):
        ...     out = cudnn_sdpa.sdpa(q, k, v)
    """
    if to not in ("torch", None):
        raise OptionError("to", repr(to), "'torch', or None for no fallback")
    token = _chosen.set(to)
    try:
        yield
    finally:
        _chosen.reset(token)


def or_else(run: Callable[[], T], instead: Callable[[], T], kind: Callable[[], Hashable]) -> T:
    """`run()`, and if cuDNN declines it while a fallback is in force, `instead()`.

    Args:
        run: The call.
        instead: The same in plain PyTorch.
        kind: Gives what is logged once.
    """
    if is_compiling() or _chosen.get() is None:  # a compiler cannot follow a context variable
        return run()
    try:
        return run()
    except UnsupportedError as error:
        name = kind()
        if name not in _said:
            _said.add(name)
            _log.warning("running on PyTorch instead: %s", error)
        return instead()
