"""Attention sinks: a score of each query head that takes part in the softmax and has no value.

Most plans read them. Where cuDNN has none, they are applied to the output from the LSE. In both cases plans give an LSE
of minus infinity to queries that see no key, which becomes that of the sink. Gradients come from the output as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.engine.launch import Address, LaunchExtras
from cudnn_sdpa.engine.tensor_checks import Fields, check_present
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout

LOWEST_LSE = torch.finfo(torch.float32).min  #: replaces an LSE of -inf, because -inf - (-inf) is NaN


class SinkUse(Enum):
    """Where the sinks of a call enter its results: nowhere, in the plan, or after it, from the LSE."""

    ABSENT = "absent"
    IN_PLAN = "in the plan"
    AFTER_PLAN = "after the plan"


class WithSinks(Protocol):
    @property
    def sinks(self) -> Tensor | None: ...


def as_sinks(sinks: Tensor | None) -> Tensor | None:
    """Sinks in float32, which the kernels read; anything but a half-precision tensor is returned unchanged."""
    if isinstance(sinks, Tensor) and sinks.dtype in (torch.float16, torch.bfloat16):
        return sinks.float()
    return sinks


# A plan that reads them.


def operand(heads: int) -> Operand:
    return Operand("sink", TensorLayout.contiguous((1, heads, 1, 1), torch.float32))


#: Launch extras of such a plan.
EXTRAS = LaunchExtras(operands=("sinks",), copy_if_unaligned=("sinks",), addresses={"sink": Address("sinks")})


# After a plan.


def complete(call: WithSinks, out: Tensor, lse: Tensor, use: SinkUse) -> None:
    """Changes the results of a plan in place: its LSE where a query sees no key, or all if it read no sinks.

    Args:
        call: The call.
        out: The output (B, H, S, D), or (T, H, D) of packed sequences.
        lse: The LSE (B, H, S) or (T, H).
        use: Whether the plan read the sinks.
    """
    if call.sinks is None:
        return
    if use is not SinkUse.AFTER_PLAN:
        raise_lse(call, lse)
        return
    check_present("sinks", call.sinks)  # PyTorch's kernels would read a null pointer
    total = torch.logaddexp(lse, like_rows(call.sinks, lse))
    out.mul_(torch.exp(lse - total.clamp_min(LOWEST_LSE)).unsqueeze(-1))  # 0 where there is neither a key nor a sink
    lse.copy_(total)


def raise_lse(call: WithSinks, lse: Tensor) -> None:
    """Raises an LSE in place to the sinks, which is exact for queries that see no key and changes no other."""
    if call.sinks is not None:
        torch.maximum(lse, like_rows(call.sinks, lse), out=lse)


def like_rows(sinks: Tensor, lse: Tensor) -> Tensor:
    """The sinks in a shape that broadcasts to an LSE, whose heads are its second dimension."""
    return sinks.view(-1, *[1] * (lse.dim() - 2))


# Their gradient.


class _CallWithSinks(WithSinks, Fields, Protocol): ...


class _BackwardCall(Protocol):
    @property
    def call(self) -> _CallWithSinks: ...
    @property
    def needs(self) -> tuple[bool, ...]: ...
    @property
    def grad_out(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


def is_needed(of: _BackwardCall) -> bool:
    """Whether a backward call needs the gradient of the sinks. What can have one comes first in a forward call."""
    return of.call.sinks is not None and of.needs[of.call._fields.index("sinks")]


def needed_gradient(of: _BackwardCall, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """The gradient of the sinks if a backward call needs it, which is of packed sequences if these are given."""
    sinks = of.call.sinks
    if sinks is None or not is_needed(of):
        return []
    return [gradient(of.grad_out, of.out, of.lse, sinks, tokens=None if cu_seqlens is None else cu_seqlens[-1])]


def gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, tokens: Tensor | None = None) -> Tensor:
    """The gradient of the sinks, in PyTorch: minus the sum of the sink's weight times grad_out · out.

    cuDNN's own takes 2.5 times as long, and with dropout it is too small by a factor of (1 - p) (seen on 9.19).

    Args:
        grad_out: The gradient of the output (B, H, S, D), or (T, H, D) of packed sequences.
        out: The output.
        lse: The LSE (B, H, S) or (T, H).
        sinks: The sinks (H,).
        tokens: How many tokens there are, on the device, if fewer than T: the gradient of the rest may be NaN.
    """
    check_present("sinks", sinks)  # PyTorch's kernels would read a null pointer
    mean = (grad_out.float() * out).sum(-1)
    if tokens is not None:
        rows = torch.arange(mean.shape[0], device=mean.device).unsqueeze(1)
        mean.masked_fill_(rows >= tokens, 0.0)
    weights = torch.exp(like_rows(sinks, lse) - lse.clamp_min(LOWEST_LSE))  # also right for a sink of -inf
    return -(weights * mean).sum((0, 2) if lse.dim() == 3 else 0)


# Notes for `explain`.


def notes_on_results(use: SinkUse, why_after: str, *, raises_lse: bool = False) -> list[str]:
    """The completion of a plan's results; `why_after` says why a plan cannot read the sinks."""
    if use is SinkUse.AFTER_PLAN:
        return [f"the sinks are applied to the output from the log-sum-exp ({why_after})"]
    is_raised = use is SinkUse.IN_PLAN and raises_lse
    return ["the log-sum-exp is raised to the sinks where it is lower, for queries that see no key"] * is_raised


def notes_on_gradient(of: _BackwardCall) -> list[str]:
    return ["the gradient of the sinks is computed from the output and its gradient"] if is_needed(of) else []


def notes_on_conversion(given: Mapping[str, Any]) -> list[str]:
    """The conversion of sinks in half precision, which kernels read in float32, given a function's arguments."""
    sinks = given["sinks"]
    return ["sinks are converted to float32"] if sinks is not None and sinks.dtype != torch.float32 else []


def notes_on_converted_gradient(given: Mapping[str, Any], of: _BackwardCall) -> list[str]:
    return ["the gradient of sinks is converted back"] if is_needed(of) and notes_on_conversion(given) else []
