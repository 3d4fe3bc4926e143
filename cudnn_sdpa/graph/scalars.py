"""Numbers and flags that may be numpy's, or symbols of torch.compile and torch.export.

A symbol may be unbacked: known only when the program runs, such as the number of nonzero elements of a tensor. An `if`
on an unbacked symbol aborts compilation. Comparisons here assume the usual case instead; operators check again when
they run.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError

#: The type that a caller expects: a value of it may be numpy's.
ValueT = TypeVar("ValueT")

is_compiling = torch.compiler.is_dynamo_compiling

#: Larger than any sequence, and small enough that adding a position to it does not overflow.
LARGEST = 2**31 - 1


def is_true(condition: bool | torch.SymBool) -> bool:
    """False if the comparison depends on data."""
    if is_compiling() or isinstance(condition, torch.SymBool):  # torch.compile shows symbols as plain types
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(condition))
    return bool(condition)


def is_empty(tensor: torch.Tensor) -> bool:
    """False if the number of elements depends on data."""
    return any(is_true(size == 0) for size in tensor.shape)


def is_known(condition: bool | torch.SymBool) -> bool:
    """True if the comparison holds for all values of its symbols; adds no guard in compiled code."""
    if is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(condition))
    return bool(condition)


def is_integer(number: object) -> TypeGuard[int]:
    """The operators accept integers; in compiled code one may be a symbol."""
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)


def as_index(number: ValueT) -> ValueT:
    """An integer, also numpy's, as an int; other types are returned unchanged."""
    if isinstance(number, (int, torch.SymInt, Tensor)) or is_compiling() or is_numpy_bool(number):  # that has an index
        return number
    try:
        return operator.index(number)  # type: ignore[arg-type, return-value]
    except TypeError:
        return number


def as_int(number: ValueT) -> ValueT:
    """A length or bound as an int of at most `LARGEST`, also from numpy; other types are returned unchanged.

    A symbol that depends on data is returned unchanged, too: the operators check it when they run.
    """
    number = as_index(number)
    # torch.compile shows symbols as plain integers.
    is_larger = isinstance(number, int) and not isinstance(number, bool) and is_true(number > LARGEST)
    return LARGEST if is_larger else number  # type: ignore[return-value]


def as_float(number: ValueT) -> ValueT:
    """A real number, such as 1 or numpy's, as a float; other types are returned unchanged."""
    if number is None or type(number) in (float, bool):
        return number
    if not isinstance(number, (int, float)) and (is_compiling() or not isinstance(number, Real)):
        return number
    try:
        return float(number)  # type: ignore[return-value]
    except OverflowError:  # left unchanged for the checks to report
        return number


def as_bool(flag: ValueT) -> ValueT:
    """A flag, also numpy's, as a bool; other types are returned unchanged."""
    is_plain = type(flag) is bool or is_compiling() or not is_numpy_bool(flag)
    return flag if is_plain else bool(flag)  # type: ignore[return-value]


def is_numpy_bool(value: object) -> bool:
    """Numpy's truth value has one of two class names, and is no Python bool."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def depends_on_data(value: object) -> bool:
    """A number or a flag, as that of `.item()`, may be unknown until compiled code runs."""
    if not is_compiling() and not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if not isinstance(value, (bool, torch.SymBool)):
        if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            return False
        value = value >= 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_true(value)) and not guard_or_false(value)


def check_known(name: str, value: object, hint: str = "") -> None:
    """Refuses an option that depends on data, as `.item()` gives it in compiled code: a plan or a branch needs it."""
    if depends_on_data(value):
        expected = "a value that is known when the code is compiled"
        otherwise = "Read it before the compiled code, and pass it as an argument."
        raise OptionError(name, "a value that depends on data, as from .item()", expected, hint or otherwise)
