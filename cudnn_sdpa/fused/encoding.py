"""Calls of graph functions as arguments of their torch operator, which PyTorch's compiler traces and stores."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, cast

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError

#: An operand of a graph function: a tensor, a number that cuDNN reads at launch, or None for an optional one.
Value: TypeAlias = Tensor | float | None

#: The static options of a call, by name.
Options: TypeAlias = dict[str, object]

_INFINITY = float("inf")

#: Types of options; a `SymInt` is an integer where a gradient is traced for any size.
_PLAIN = (bool, int, float, str, torch.SymInt)


def encoded(
    values: Sequence[Value], static: Options
) -> tuple[str, list[Tensor], list[float], list[torch.SymInt] | None, str]:
    """A call's operands and options as the operator's arguments, in the order of its schema."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    numbers = [float(x) for x in values if x is not None and not isinstance(x, Tensor)]
    symbols: list[torch.SymInt] = []
    options = _encoded(static.values(), symbols, numbers)
    return operand_kinds(values), tensors, numbers, symbols or None, options


def operand_kinds(values: Iterable[Value]) -> str:
    """A character for each operand: "t" for a tensor, "n" for a number, "-" for one that is left out."""
    return "".join(["t" if isinstance(x, Tensor) else "-" if x is None else "n" for x in values])


def joined(kinds: str, tensors: Iterable[Tensor], numbers: Iterable[float]) -> tuple[Value, ...]:
    """The operands of these kinds, in their order."""
    remaining: dict[str, Iterator[Value]] = {"t": iter(tensors), "n": iter(numbers)}
    return tuple([None if kind == "-" else next(remaining[kind]) for kind in kinds])


def checked_option(name: str, value: object) -> object:
    """An option as a plain value, which `_encoded` supports: `numpy.float64`, for one, is a float of another type."""
    if isinstance(value, tuple):
        return tuple([checked_option(name, item) for item in value])
    if value is not None and (not isinstance(value, _PLAIN) or isinstance(value, Enum)):
        raise OptionError(name, type(value).__name__, "None, a bool, a number, a string or a tuple of these")
    if isinstance(value, float) and not -_INFINITY < value < _INFINITY:
        raise OptionError(name, str(value), "a finite number")
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return float.__float__(value) if isinstance(value, float) else int.__int__(cast(int, value))


def _encoded(values: Iterable[object], symbols: list[torch.SymInt], numbers: list[float]) -> str:
    """Options as text, which refers to sizes and floats in the lists by their index."""
    # torch.compile traces this: integers may be symbolic until `index` gets their value, and floats that vary between
    # calls stay symbolic.
    text = ""
    for value in values:
        if isinstance(value, tuple):
            text += "(" + _encoded(value, symbols, numbers) + "),"
        elif isinstance(value, torch.SymInt):
            text += f"_{len(symbols)},"
            symbols.append(value)
        elif isinstance(value, float):
            text += f"f{len(numbers)},"
            numbers.append(float(value))
        else:
            plain = operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value
            text += (repr(plain) if isinstance(plain, str) else str(plain)) + ","
    return text


def decoded_options(text: str, symbols: Sequence[int], numbers: Sequence[float]) -> tuple[object, ...]:
    lists: Mapping[str, Sequence[float]] = {"_": symbols, "f": numbers}

    def value(node: ast.expr) -> object:
        if isinstance(node, ast.Name):  # a reference of `_encoded`
            return lists[node.id[0]][int(node.id[1:])]
        return tuple(map(value, node.elts)) if isinstance(node, ast.Tuple) else ast.literal_eval(node)

    return tuple(map(value, cast("ast.Tuple", ast.parse(f"({text})", mode="eval").body).elts))
