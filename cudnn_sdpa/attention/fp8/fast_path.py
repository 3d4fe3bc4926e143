"""The fast path of calls in FP8, which skips the checks and PyTorch's dispatcher.

The checks and the canonical key of a call take about 60 µs on the host. The last call is recognized by a guard, one C
call; any other is found by its raw signature.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import value_checks
from cudnn_sdpa.engine.dispatch_state import Guard, can_bypass_dispatcher, is_profiling, needs_gradient, tensor_guard
from cudnn_sdpa.engine.fast_path import CallTable, PreparedCall, describe


class CachedCall(NamedTuple):
    """The last call.

    Attributes:
        options: Everything that is not a tensor.
        types: Types of the options: 1, 1.0 and True are equal, but not all are accepted.
        present: Which of the optional tensors are not None.
        is_like: Guard for its tensors.
        call: The bound call.
    """

    options: tuple[Any, ...]
    types: tuple[type, ...]
    present: tuple[bool, ...]
    is_like: Guard
    call: Any


Table = CallTable[CachedCall | None]


def find(
    table: Table, required: tuple[Tensor, ...], optional: tuple[Tensor | None, ...], options: tuple[Any, ...]
) -> Any:
    """The prepared call for these unchecked arguments, if a call like it has run and may skip the dispatcher."""
    last = table.last
    if last is None or value_checks.enabled:
        return None
    types = _types(options)
    try:
        present = tuple(tensor is not None for tensor in optional)
        tensors = [*required, *(tensor for tensor in optional if tensor is not None)]
        if (
            last.types == types
            and last.options == options
            and last.present == present
            and not any(tensor.is_nested for tensor in tensors)  # which crash a guard
            and last.is_like(*tensors)
            and not is_profiling()
            and forward_ad._current_level < 0
        ):
            return last.call
        if not can_bypass_dispatcher(*tensors) or needs_gradient(*tensors):
            return None
        return table.get(_signature(required, optional, options, types))
    except (AttributeError, TypeError, RuntimeError):  # not tensors, not hashable, nested: the checks raise
        return None


def remember(
    table: Table,
    required: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    prepared: PreparedCall,
) -> None:
    """Remembers a call whose arguments have been checked and that may skip the dispatcher."""
    if value_checks.enabled or list in map(type, options):  # a window may be a list, which no signature can hold
        return
    types = _types(options)
    table.add(_signature(required, optional, options, types), prepared)
    tensors = [*required, *(tensor for tensor in optional if tensor is not None)]
    is_like: Guard = _matches_nothing
    # A guard takes no tensor twice, and does not see whether gradients are enabled.
    if len({id(tensor) for tensor in tensors}) == len(tensors) and not any(x.requires_grad for x in tensors):
        is_like = tensor_guard(*tensors)
    present = tuple(tensor is not None for tensor in optional)
    table.remember_last(CachedCall(options, types, present, is_like, prepared), prepared.plan)


def _matches_nothing(*_: Tensor) -> bool:
    return False


def _types(options: tuple[Any, ...]) -> tuple[type, ...]:
    """The types of options and of a window's bounds: comparing with a number on the GPU would synchronize."""
    types = tuple(map(type, options))
    return (*types, *(type(bound) for option in options if type(option) is tuple for bound in option))


def _signature(
    required: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    types: tuple[type, ...],
) -> Hashable:
    if Tensor in types or any(issubclass(kind, torch.Tensor) for kind in types):
        raise TypeError("an option is a tensor")
    return ("raw", *map(describe, required), *map(describe, optional), options, types)
