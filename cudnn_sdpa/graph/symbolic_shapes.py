"""Comparisons of sizes that may be symbolic, as in torch.compile and torch.export.

A symbol may be unbacked: known only when the program runs, such as the number of nonzero elements of a tensor. An `if`
on an unbacked symbol aborts compilation. The functions here assume the usual case instead; operators check again when
they run.
"""

from __future__ import annotations

import torch


def is_true(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison holds; False if it depends on data."""
    if is_compiling() or isinstance(condition, torch.SymBool):  # torch.compile shows symbols as plain types
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(condition))
    return bool(condition)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no elements; False if that depends on data."""
    return any(is_true(size == 0) for size in tensor.shape)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison holds for all values of its symbols; adds no guard in compiled code."""
    if is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(condition))
    return bool(condition)


is_compiling = torch.compiler.is_dynamo_compiling
