"""How `explain` learns what a public function would run, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cudnn_sdpa.runtime.graph_op import GraphOp
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.target import Target


@dataclass(frozen=True)
class Description:
    """What one call would run.

    Attributes:
        operation: The operation.
        key: Gives the key of its plan for a target and a device; raises UnsupportedError if there can be none.
        device: Index of the GPU that the tensors are on; None for tensors elsewhere.
        is_empty: Whether there is nothing to compute, and so no plan.
        extra_kernels: What runs on the GPU beside the plan, in words.
        backward: The same of its gradient, if an input requires grad.
        bucket: Gives the key of its bucket's plan, None if it fits none; see `shape_policy`.
        verify: Runs the call and the reference, and gives the relative error of each result; of the gradients too, if
            that is asked for.
    """

    operation: GraphOp
    key: Callable[[Target, int | None], PlanKey]
    device: int | None
    is_empty: bool = False
    extra_kernels: list[str] = field(default_factory=list)
    backward: Description | None = None
    bucket: Callable[[Target, int | None], PlanKey | None] | None = None
    verify: Callable[[bool], dict[str, float]] | None = None


_describers: dict[Callable[..., Any], Callable[..., Description]] = {}


def describes(function: Callable[..., Any]) -> Callable[[Callable[..., Description]], Callable[..., Description]]:
    """Registers the decorated function, called with the same arguments, as what describes calls of `function`.

    It takes over the function's name, by which Python calls it when arguments are missing or have other names.
    """

    def register(describer: Callable[..., Description]) -> Callable[..., Description]:
        describer.__qualname__ = function.__qualname__
        _describers[function] = describer
        return describer

    return register


def describer_of(function: Callable[..., Any]) -> Callable[..., Description] | None:
    """What describes calls of `function`, if anything does."""
    own: Callable[..., Description] | None = getattr(function, "describe", None)  # graph functions know it themselves
    return _describers.get(function, own)


def functions() -> list[Callable[..., Any]]:
    """The functions that can be described."""
    return list(_describers)


def described_functions() -> list[str]:
    """Names of the functions that can be described."""
    return sorted(function.__name__ for function in _describers)
