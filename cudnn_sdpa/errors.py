"""Every exception that the library raises.

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
├── OutOfPagesError (RuntimeError)      a paged cache has too few pages left; nothing was taken
├── LibraryError (ImportError)          cuDNN or its frontend is missing, too old, or mixed up
└── OfflineError (RuntimeError)         planning without the GPU could not start
```
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "ArgumentError",
    "CudnnSdpaError",
    "DeviceError",
    "DtypeError",
    "ExecutionError",
    "LayoutError",
    "LibraryError",
    "OfflineError",
    "OptionError",
    "OutOfPagesError",
    "PlanBuildError",
    "ShapeError",
    "UnsupportedError",
]


def _in_words_of(names: Mapping[str, str], *texts: object) -> list[str]:
    """Texts with a function's arguments renamed."""
    word = re.compile(r"\b(?:" + "|".join(map(re.escape, names)) + r")\b")
    return [word.sub(lambda found: names[found[0]], str(text)) for text in texts]


class CudnnSdpaError(Exception):
    """Base of all errors raised by this library."""


class ArgumentError(CudnnSdpaError, ValueError):
    """An argument is wrong; nothing was launched.

    Attributes:
        argument: Name of the argument at fault.
        got: What it was.
        expected: What it should have been.
    """

    def __init__(self, argument: str, got: object, expected: object, hint: str = "") -> None:
        self.argument = argument
        self.got = got
        self.expected = expected
        self.hint = hint
        # torch.compile does not trace super().__init__, and with symbolic sizes it cannot trace a sum of strings: it
        # would raise an error of its own instead.
        rest = f" {hint}" if hint else ""
        self.args = (f"{argument}: got {got}; expected {expected}.{rest}",)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.argument, self.got, self.expected, self.hint)

    def renamed(self, names: Mapping[str, str]) -> ArgumentError:
        """The same error for a function that names its arguments differently."""
        return type(self)(*_in_words_of(names, self.argument, self.got, self.expected, self.hint))


class ShapeError(ArgumentError):
    """A tensor has the wrong rank or size."""


class DtypeError(ArgumentError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(ArgumentError):
    """A tensor is on the wrong device."""


class LayoutError(ArgumentError):
    """A tensor's strides, alignment or storage cannot be used."""


class OptionError(ArgumentError, TypeError):
    """An argument that is not a tensor has the wrong type or value."""


class UnsupportedError(CudnnSdpaError, NotImplementedError):
    """The arguments make sense, but there is no kernel for them here.

    Attributes:
        reasons: Every known reason, in the order found.
        suggestion: The nearest thing that works, or an empty string.
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

    def joined(self, other: UnsupportedError) -> UnsupportedError:
        """One error with the reasons of both."""
        suggestions = filter(None, (self.suggestion, other.suggestion))
        return type(self)(other.what, [*self.reasons, *other.reasons], "; ".join(suggestions))

    def renamed(self, names: Mapping[str, str]) -> UnsupportedError:
        """The same error for a function that names its arguments differently."""
        what, suggestion, *reasons = _in_words_of(names, self.what, self.suggestion, *self.reasons)
        return type(self)(what, reasons, suggestion)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.reasons, self.suggestion)


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
        needed: Pages that the call needs.
        free: Pages that are free.
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
    """cuDNN or its Python frontend is missing, too old, or cannot be loaded."""


class OfflineError(CudnnSdpaError, RuntimeError):
    """Planning for a GPU that is not in this machine could not start, or was aborted."""
