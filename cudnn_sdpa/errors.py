"""Every exception that the library raises, and its one warning.

```text
CudnnSdpaError
├── ArgumentError (ValueError)          what the caller passed
│   ├── ShapeError
│   ├── DtypeError (TypeError)
│   ├── DeviceError
│   ├── LayoutError                     strides, alignment, aliasing
│   └── OptionError (TypeError)         an argument that is not a tensor
├── UnsupportedError (NotImplementedError)   valid arguments, but no kernel on this GPU
├── PlanBuildError (RuntimeError)       a plan is missing where none may be built
├── ExecutionError (RuntimeError)       cuDNN refused to launch a plan
├── OutOfPagesError (RuntimeError)      a paged cache has too few free pages; it is unchanged
├── LibraryError (ImportError)          cuDNN, its frontend or a demanded native module is missing or unusable
└── OfflineError (RuntimeError)         planning without the GPU could not start

LayoutWarning (UserWarning)             tensors that fit, but probably with their dimensions in another order
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = [
    "ArgumentError",
    "CudnnSdpaError",
    "DeviceError",
    "DtypeError",
    "ExecutionError",
    "LayoutError",
    "LayoutWarning",
    "LibraryError",
    "OfflineError",
    "OptionError",
    "OutOfPagesError",
    "PlanBuildError",
    "ShapeError",
    "UnsupportedError",
]


def _renamer(names: Mapping[str, str]) -> Callable[[object], str]:
    word = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, names)) + r")(?!\w)")  # `\b` ends no "lses[1]"
    return lambda text: word.sub(lambda match: names[match[0]], str(text))


class CudnnSdpaError(Exception):
    """Base of all errors raised by this library."""


class ArgumentError(CudnnSdpaError, ValueError):
    """An argument is wrong; nothing was launched.

    Attributes:
        argument: The name of the wrong argument.
        got: Its value, or a description of it.
        expected: The values that are valid.
        hint: A way to fix the call, or an empty string.
    """

    def __init__(self, argument: str, got: object, expected: object, hint: str = "") -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        self.hint = hint
        # `args` instead of super().__init__, and an f-string instead of a sum of strings: torch.compile cannot trace
        # the others (the sum with symbolic sizes only) and would raise its own error.
        rest = f" {hint}" if hint else ""
        self.args = (f"{argument}: got {got}; expected {expected}.{rest}",)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.argument, self.got, self.expected, self.hint)

    def renamed(self, names: Mapping[str, str]) -> ArgumentError:
        """A copy of the error for a function that names its arguments differently."""
        rename = _renamer(names)
        # By position: torch.compile drops keyword arguments of an exception from its message.
        return type(self)(rename(self.argument), rename(self.got), rename(self.expected), rename(self.hint))


class ShapeError(ArgumentError):
    """A tensor has the wrong rank or size."""


class DtypeError(ArgumentError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(ArgumentError):
    """A tensor is on the wrong device."""


class LayoutError(ArgumentError):
    """A tensor's strides, alignment or storage cannot be used."""


class LayoutWarning(UserWarning):
    """Tensors fit, but probably have their dimensions in another order, and the results are then wrong.

    Attention takes (batch, heads, sequence, head dim). Queries and keys in the order of FlashAttention, (batch,
    sequence, heads, head dim), with fewer key heads fit, too: as many heads, and other numbers of queries and keys. If
    the call is meant, filter the warning.

    Examples:
        >>> import warnings, cudnn_sdpa
        >>> warnings.filterwarnings("ignore", category=cudnn_sdpa.LayoutWarning)
    """


class OptionError(ArgumentError, TypeError):
    """An argument that is not a tensor has the wrong type or value."""


def check_choice(name: str, choice: object, choices: Collection[str]) -> None:
    if not isinstance(choice, str) or choice not in choices:
        raise OptionError(name, repr(choice), " or ".join(map(repr, choices)))


class UnsupportedError(CudnnSdpaError, NotImplementedError):
    """The arguments are valid, but no kernel supports them here.

    Attributes:
        what: The call or option that is not supported.
        reasons: All known reasons.
        suggestion: The nearest call that is supported, or an empty string.
    """

    def __init__(self, what: str, reasons: Sequence[str], suggestion: str = "") -> None:
        self.what = what
        self.reasons = list(reasons)
        self.suggestion = suggestion
        lines = [f"{what} is not supported here:", *(f"  - {reason}" for reason in self.reasons)]
        if suggestion:
            lines.append(f"What works: {suggestion}")
        self.args = ("\n".join(lines),)  # as in `ArgumentError`

    @classmethod
    def of(cls, check: Callable[..., object], *args: object, **kwargs: object) -> UnsupportedError | None:
        """The error that `check` raises with these arguments, or None."""
        try:
            check(*args, **kwargs)
        except UnsupportedError as error:
            return error
        return None

    def renamed(self, names: Mapping[str, str]) -> UnsupportedError:
        """A copy of the error for a function that names its arguments differently."""
        rename = _renamer(names)
        return type(self)(rename(self.what), [rename(reason) for reason in self.reasons], rename(self.suggestion))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.reasons, self.suggestion)


def raise_if_unsupported(what: str, reasons: Mapping[str, bool], suggestion: str = "") -> None:
    """Raises `UnsupportedError` with all reasons whose value is true, if there are any."""
    true_reasons = [reason for reason, is_true in reasons.items() if is_true]
    if true_reasons:
        raise UnsupportedError(what, true_reasons, suggestion)


class PlanBuildError(CudnnSdpaError, RuntimeError):
    """A plan is missing and may not or cannot be built now.

    Attributes:
        key: The `PlanKey` that has no plan.
    """

    def __init__(self, key: object, why: str) -> None:
        self.key = key
        self.why = why
        super().__init__(f"{why}\nThe missing plan is {key}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.why)


class ExecutionError(CudnnSdpaError, RuntimeError):
    """cuDNN refused to launch a plan."""


class OutOfPagesError(CudnnSdpaError, RuntimeError):
    """A `PagedKVCache` has too few free pages. The cache is unchanged.

    Attributes:
        needed: The number of pages that the call needs.
        free: The number of free pages.
    """

    def __init__(self, needed: int, free: int) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"{needed} pages are needed and {free} are free; free or evict a sequence, or make a larger cache"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.needed, self.free)


class LibraryError(CudnnSdpaError, ImportError):
    """cuDNN or its Python frontend is missing, too old, or cannot be loaded.

    With `CUDNN_SDPA_NATIVE=on`, also: the native module cannot be compiled or loaded.
    """


class OfflineError(CudnnSdpaError, RuntimeError):
    """Planning for a GPU that is not in this machine could not start, or was aborted."""
