"""Errors of attention calls against the reference in float64: what `explain(..., verify=True)` reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference, varlen_operators
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import run
from cudnn_sdpa.attention.varlen import run as run_varlen
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.attention.varlen_calls import VarlenBackwardArguments
from cudnn_sdpa.errors import OptionError

Inputs = dict[str, Any]  #: tensors or None by the name of the argument


def errors(call: ForwardArguments) -> dict[str, float]:
    """Relative errors of the output, the log-sum-exp and the gradients of a dense call.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    _refuse_dropout(call.dropout_p)
    inputs: Inputs = {name: getattr(call, name) for name in ("q", "k", "v", "attn_mask", "sinks")}
    watched, (out, lse), gradients, grad_out = _run(call, inputs, run)
    exact_inputs: Inputs = {name: _exact(tensor) for name, tensor in watched.items()}
    exact_call = call._replace(**exact_inputs)
    exact_out, exact_lse = reference.attention(exact_call)
    found = {"out": _error(out, exact_out), "lse": _error(lse, exact_lse)}
    if gradients:
        exact = dict(zip(inputs, reference.gradients(grad_out.double(), exact_out, exact_call), strict=True))
        mask = call.attn_mask
        if mask is not None and exact["attn_mask"] is not None:
            shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
            exact["attn_mask"] = exact["attn_mask"].sum_to_size(shape).reshape(mask.shape)
        found |= {f"grad {name}": _error(gradient, exact[name]) for name, gradient in gradients.items()}
    return found


def errors_varlen(call: VarlenArguments) -> dict[str, float]:
    """The same for a call over packed sequences.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    _refuse_dropout(call.dropout_p)
    inputs: Inputs = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    watched, (out, lse), gradients, grad_out = _run(call, inputs, run_varlen)
    exact_inputs: Inputs = {name: _exact(watched[name]) for name in ("q", "k", "v")}
    exact_call = call._replace(**exact_inputs)._replace(with_lse=True, out=None)
    exact_out, exact_lse = varlen_operators.forward_cpu(exact_call)
    found = {"out": _error(out, exact_out), "lse": _error(lse, exact_lse)}
    if gradients:
        of = VarlenBackwardArguments(grad_out.double(), exact_out, exact_lse, exact_call, call.sinks is not None)
        exact = dict(zip(inputs, [*varlen_operators.backward_cpu(of), None], strict=False))
        found |= {f"grad {name}": _error(gradient, exact[name]) for name, gradient in gradients.items()}
    return found


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        hint = "Verify the same call without dropout."
        raise OptionError("dropout_p", repr(dropout_p), "0, to compare with the reference", hint)


def _run(call: Any, inputs: Inputs, run: Any) -> Any:
    """Runs a call on copies of its inputs, and differentiates it by those that require grad."""
    watched: Inputs = {
        name: None if x is None else x.detach().requires_grad_(x.requires_grad) for name, x in inputs.items()
    }
    wanted = [name for name, tensor in watched.items() if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        out, lse = run(call._replace(**watched, with_lse=True, out=None), call.deterministic)
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, [watched[name] for name in wanted], grad_out) if wanted else ()
    return watched, (out, lse), dict(zip(wanted, found, strict=True)), grad_out


def _exact(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype == torch.bool else tensor.detach().double()


def _error(actual: Tensor, exact: Any) -> float:
    """Relative error in the Frobenius norm, where the exact result is finite."""
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(actual), finite):
        return float("inf")
    difference = (actual.detach().double() - exact)[finite].norm()
    return float(difference / exact[finite].norm().clamp_min(1e-30))
