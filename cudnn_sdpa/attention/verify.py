"""Errors of attention calls against the reference in float64: what `explain(..., verify=True)` reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.errors import OptionError

DENSE = ("q", "k", "v", "attn_mask", "sinks")
PACKED = ("q", "k", "v", "sinks")


class Results(NamedTuple):
    """What a call gives.

    Attributes:
        out: The output.
        lse: The log-sum-exp, if the call has one.
        gradients: Those that were asked for, by the name of the input.
    """

    out: Tensor
    lse: Tensor | None
    gradients: dict[str, Tensor]


def run_anew(
    call: Any, names: tuple[str, ...], run: Callable[..., Any], *, differentiate: bool
) -> tuple[Results, Tensor]:
    """Runs a call, and differentiates it for a random gradient of its output, which comes along.

    Inputs are seen anew, so that the caller's autograd takes no notice, and the output is a new one.
    """
    if call.dropout_p:
        hint = "Verify the same call without dropout."
        raise OptionError("dropout_p", repr(call.dropout_p), "0, to compare with the reference", hint)
    given: dict[str, Tensor] = {name: x for name in names if (x := getattr(call, name)) is not None}
    inputs = {name: x.detach().requires_grad_(differentiate and x.requires_grad) for name, x in given.items()}
    out = call.out if call.out is None else empty_like(call.out)
    result = run(call._replace(**inputs, out=out), call.deterministic)
    out, lse = result if call.with_lse else (result, None)
    grad_out, wanted = torch.randn_like(out), {name: x for name, x in inputs.items() if x.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out) if wanted else ()
    return Results(out, lse, dict(zip(wanted, gradients, strict=True))), grad_out


def empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype, its values undefined."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def exact_inputs(call: Any, names: tuple[str, ...]) -> Any:
    """The call on numbers of float64."""
    tensors = {name: x for name in names if (x := getattr(call, name)) is not None and x.dtype != torch.bool}
    return call._replace(**{name: x.detach().double() for name, x in tensors.items()})


def compare(found: Results, exact: Results) -> dict[str, float]:
    """The relative error of each result."""
    pairs = {"out": (found.out, exact.out)} | ({} if found.lse is None else {"lse": (found.lse, exact.lse)})
    pairs |= {f"grad {name}": (gradient, exact.gradients[name]) for name, gradient in found.gradients.items()}
    return {name: _error(*pair) for name, pair in pairs.items()}


def _error(actual: Tensor, exact: Any) -> float:
    """Relative error in the Frobenius norm, where the exact result is finite."""
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    difference = (actual.detach().double() - exact)[finite].norm()
    return float(difference / exact[finite].norm().clamp_min(1e-30))
