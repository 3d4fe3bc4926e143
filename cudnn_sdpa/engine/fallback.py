"""`fallback`: runs calls that cuDNN declines on plain PyTorch, if the caller asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Final, Literal, TypeVar

from cudnn_sdpa.errors import ArgumentError, OptionError, UnsupportedError
from cudnn_sdpa.graph.scalars import is_compiling

_log = logging.getLogger("cudnn_sdpa")
chosen: ContextVar[str | None] = ContextVar("fallback", default=None)
_said: set[Hashable] = set()

#: Maximum number of kinds of calls remembered as logged.
MAX_SAID = 1000

T = TypeVar("T")

TORCH: Final = "torch"


def fallback(to: Literal["torch"] | None) -> AbstractContextManager[None]:
    """While active, in this thread, calls that cuDNN declines run on PyTorch instead of raising.

    A call that would raise `UnsupportedError`, or is refused only because cuDNN's attention takes float16
    and bfloat16 with head dims that are multiples of 8, runs on `torch.nn.functional.scaled_dot_product_attention` if
    that has all its options and is as deterministic as asked, otherwise on this library's reference in plain PyTorch,
    whose memory grows with Sq × Skv. Gradients follow the setting of their forward pass. It is logged once per kind of
    call, regardless of sizes, as a warning of the logger "cudnn_sdpa". None disables an outer fallback.

    It lifts the restrictions of `cpu_checks` on CPU tensors. With `providers("cudnn", "own")`, own kernels of the
    library take precedence for the calls of `sdpa` that they can serve.

    These still raise: wrong arguments, strides and addresses that cuDNN cannot read, unsupported differentiation
    (forward-mode, through `out` or the log-sum-exp, double backward), and calls declined in compiled code
    (`torch.compile`).

    Args:
        to: "torch" or None.

    Raises:
        OptionError: `to` is none of these.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = k = v = torch.randn(1, 2, 8, 16)
        >>> with cudnn_sdpa.fallback("torch"):
        ...     out = cudnn_sdpa.sdpa(q, k, v)
    """
    if to not in (TORCH, None):
        raise OptionError("to", repr(to), "'torch', or None for no fallback")
    return _with_fallback(to)


@contextmanager
def _with_fallback(to: str | None) -> Iterator[None]:
    token = chosen.set(to)
    try:
        yield
    finally:
        with suppress(ValueError):  # left in another context than it was entered in, where there is nothing to undo
            chosen.reset(token)


def is_in_force() -> bool:
    """Whether the fallback to PyTorch is in force in this thread; compilers cannot trace a context variable."""
    return not is_compiling() and chosen.get() == TORCH


def or_else(run: Callable[[], T], instead: Callable[[], T], kind: Callable[[], Hashable]) -> T:
    """`run()` or, if cuDNN declines it, `instead()`; for calls for which a fallback is in force.

    Args:
        run: The call.
        instead: The alternative.
        kind: Returns the log key of the call: each reason is logged once for each.
    """
    try:
        return run()
    except UnsupportedError as error:
        found = instead()
        said = (kind(), str(error))
        if said not in _said:
            if len(_said) >= MAX_SAID:
                _said.clear()
            _said.add(said)
            _log.warning("running on PyTorch instead: %s", error)
        return found


def check_or_decline(what: str, check: Callable[[], None], without: Callable[[], None]) -> None:
    """`check()` of a call for which a fallback is in force: errors due to cuDNN's limits become UnsupportedError."""
    try:
        check()
    except ArgumentError as error:
        refused = str(error)
    else:
        return
    without()
    raise UnsupportedError(what, [refused])
