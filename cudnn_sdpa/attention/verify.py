"""Errors of attention calls against the reference in float64: what `explain(..., verify=True)` reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import AttentionCall, AttentionT, Softmax
from cudnn_sdpa.engine.launch import Result
from cudnn_sdpa.errors import OptionError


class Results(NamedTuple):
    """The results of a call.

    Attributes:
        lse: The LSE, if the call returns it.
        gradients: The gradients of the inputs that require grad, by name.
    """

    out: Tensor
    lse: Tensor | None
    gradients: dict[str, Tensor]


class _TrainableCall(AttentionCall, Protocol):
    @property
    def softmax(self) -> Softmax: ...
    @property
    def out(self) -> Tensor | None: ...


TrainableT = TypeVar("TrainableT", bound=_TrainableCall)


def run_detached(
    call: TrainableT, run: Callable[[TrainableT], Result], *, differentiate: bool
) -> tuple[Results, Tensor]:
    """Runs a call and differentiates it; returns the results and the random gradient of the output.

    Inputs are detached, so the caller's autograd graph is not involved, and the output is a new one.
    """
    if call.softmax.dropout_p:
        hint = "Verify the same call without dropout."
        raise OptionError("dropout_p", repr(call.softmax.dropout_p), "0, to compare with the reference", hint)
    originals = _floating_point(call)
    inputs = {name: x.detach().requires_grad_(differentiate and x.requires_grad) for name, x in originals.items()}
    inputs.pop("out", None)
    out = call.out if call.out is None else empty_like(call.out)
    result = run(call._replace(**inputs, out=out))
    out, lse = result if isinstance(result, tuple) else (result, None)
    grad_out, wanted = torch.randn_like(out), {name: x for name, x in inputs.items() if x.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out) if wanted else ()
    return Results(out, lse, dict(zip(wanted, gradients, strict=True))), grad_out


def empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def exact_inputs(call: AttentionT) -> AttentionT:
    """The call with its floating-point tensors in float64."""
    return call._replace(**{name: x.detach().double() for name, x in _floating_point(call).items()})


def _floating_point(call: AttentionCall) -> dict[str, Tensor]:
    return {name: x for name, x in call._asdict().items() if isinstance(x, Tensor) and x.is_floating_point()}


def compare(actual: Results, exact: Results) -> dict[str, float]:
    pairs = {"out": (actual.out, exact.out)} | ({} if actual.lse is None else {"lse": (actual.lse, exact.lse)})
    pairs |= {f"grad {name}": (gradient, exact.gradients[name]) for name, gradient in actual.gradients.items()}
    return {name: _error(*pair) for name, pair in pairs.items()}


def _error(actual: Tensor, exact: Tensor) -> float:
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    difference = (actual.detach().double() - exact)[finite].norm()
    return float(difference / exact[finite].norm().clamp_min(1e-30))
