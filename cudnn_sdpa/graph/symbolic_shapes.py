"""Questions about sizes that may be symbols, as torch.compile and torch.export have them.

A symbol may stand for a number that is known to nobody before the program runs ("unbacked": how many elements of a
tensor are not zero). Whoever asks about such a one in an `if` ends the compilation. The functions here give the answer
for the usual case instead; operators ask again when they run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


def is_true(condition: Any) -> bool:
    """Whether a comparison holds; False if only data can tell."""
    if is_compiling() or isinstance(condition, torch.SymBool):  # torch.compile shows symbols as what they stand for
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(condition))
    return bool(condition)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no elements; False if only data can tell."""
    return any(is_true(size == 0) for size in tensor.shape)


def is_known(condition: Any) -> bool:
    """Whether a comparison holds whatever symbols stand for; a compiler keeps no note that it was asked."""
    if is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(condition))
    return bool(condition)


def is_larger(a: Any, b: Any) -> bool:
    """Whether one stride is larger than another; if only data can tell, whether it is a multiple."""
    condition = a > b
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true, statically_known_true

    if guard_or_false(condition):
        return True
    return bool(guard_or_true(condition)) and bool(statically_known_true(a % b == 0))


Question = Callable[..., bool]


def questions(*sizes: Sequence[Any]) -> tuple[Question, Question]:
    """`is_true` and `is_larger` for these sizes; where all are numbers, what is quicker, as compiled code needs it."""
    if not is_compiling() and type(sum(map(sum, sizes))) is int:
        return bool, operator.gt
    return is_true, is_larger


is_compiling = torch.compiler.is_dynamo_compiling
