"""Errors of attention calls against the reference in float64: what `explain(..., verify=True)` reports."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import paged_operators, reference
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import cast_for_autocast, run
from cudnn_sdpa.attention.paged_arguments import PagedArguments
from cudnn_sdpa.attention.varlen import run as run_varlen
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
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


def errors(call: ForwardArguments, *, differentiate: bool) -> dict[str, float]:
    """Relative errors of a dense call's output, of its log-sum-exp if it has one, and of its gradients.

    Args:
        call: The call as it was given.
        differentiate: Whether it is differentiated by the inputs that require grad.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    found, grad_out = _run(call, DENSE, run, differentiate=differentiate)
    exact_call = _exact_inputs(cast_for_autocast(call), DENSE)
    out, lse = reference.attention(exact_call)
    if not found.gradients:
        return _compare(found, Results(out, lse, {}))
    gradients = dict(zip(DENSE, reference.gradients(grad_out.double(), out, exact_call), strict=True))
    mask, by_mask = call.attn_mask, gradients["attn_mask"]
    if mask is not None and by_mask is not None:
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        gradients["attn_mask"] = by_mask.sum_to_size(shape).reshape(mask.shape)
    return _compare(found, Results(out, lse, {name: x for name, x in gradients.items() if x is not None}))


def errors_varlen(call: VarlenArguments, *, differentiate: bool) -> dict[str, float]:
    """The same for a call over packed sequences.

    Raises:
        OptionError: There is dropout, for which the reference has other random numbers.
    """
    found, grad_out = _run(call, PACKED, run_varlen, differentiate=differentiate)
    cast = cast_for_autocast(ForwardArguments(call.q, call.k, call.v))
    exact_call = _exact_inputs(call._replace(q=cast.q, k=cast.k, v=cast.v), PACKED)
    exact = _exact_varlen(exact_call, grad_out.double() if found.gradients else None)
    return _compare(*(_of_sequences(results, call) for results in (found, exact)))


def errors_paged(call: PagedArguments) -> dict[str, float]:
    """The same for a call on a paged cache, which has no gradients."""
    out = call.out if call.out is None else _empty_like(call.out)
    result = (
        paged_operators.forward_cuda(call._replace(out=out)) if call.q.is_cuda else paged_operators.forward_cpu(call)
    )
    found, lse = result if isinstance(result, tuple) else (result, None)
    exact = reference.attention(_exact_inputs(paged_operators.as_dense(call), ("q", "k", "v", "sinks")))
    return _compare(Results(found, lse, {}), Results(*exact, {}))


def _exact_varlen(call: VarlenArguments, grad_out: Tensor | None) -> Results:
    """The results in float64, sequence by sequence: each is a dense call."""
    out = call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    lse = out.new_full(out.shape[:2], -torch.inf)
    gradients = {name: torch.zeros_like(x) for name in PACKED if (x := getattr(call, name)) is not None}
    ends = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_kv.tolist()), strict=True)
    for rows, columns in ((slice(*of_q), slice(*of_kv)) for of_q, of_kv in ends):
        one = call._replace(q=call.q[rows], k=call.k[columns], v=call.v[columns], out=None).as_dense()
        of_one, lse_of_one = reference.attention(one)
        out[rows], lse[rows] = of_one[0].transpose(0, 1), lse_of_one[0].transpose(0, 1)
        if grad_out is None:
            continue
        *by_qkv, _, by_sinks = reference.gradients(grad_out[rows].transpose(0, 1).unsqueeze(0), of_one, one)
        for name, where, found in zip("qkv", (rows, columns, columns), by_qkv, strict=True):
            gradients[name][where] = found[0].transpose(0, 1)
        if by_sinks is not None:
            gradients["sinks"] += by_sinks
    return Results(out, lse, gradients)


def _of_sequences(results: Results, call: VarlenArguments) -> Results:
    """The results without the rows past the last sequence, which belong to nobody."""
    of_q, of_kv = (slice(0, max(0, int(ends[-1]))) for ends in (call.cu_seqlens_q, call.cu_seqlens_kv))
    rows = {"q": of_q, "k": of_kv, "v": of_kv}
    gradients = {name: x[rows[name]] if name in rows else x for name, x in results.gradients.items()}
    return Results(results.out[of_q], None if results.lse is None else results.lse[of_q], gradients)


def _run(call: Any, names: tuple[str, ...], run: Callable[..., Any], *, differentiate: bool) -> tuple[Results, Tensor]:
    """Runs a call, and differentiates it for a random gradient of its output, which comes along.

    Inputs are seen anew, so that the caller's autograd takes no notice, and the output is a new one.
    """
    if call.dropout_p:
        hint = "Verify the same call without dropout."
        raise OptionError("dropout_p", repr(call.dropout_p), "0, to compare with the reference", hint)
    given: dict[str, Tensor] = {name: x for name in names if (x := getattr(call, name)) is not None}
    inputs = {name: x.detach().requires_grad_(differentiate and x.requires_grad) for name, x in given.items()}
    out = call.out if call.out is None else _empty_like(call.out)
    result = run(call._replace(**inputs, out=out), call.deterministic)
    out, lse = result if call.with_lse else (result, None)
    grad_out, wanted = torch.randn_like(out), {name: x for name, x in inputs.items() if x.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out) if wanted else ()
    return Results(out, lse, dict(zip(wanted, gradients, strict=True))), grad_out


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _exact_inputs(call: Any, names: tuple[str, ...]) -> Any:
    """The call on numbers of float64."""
    tensors = {name: x for name in names if (x := getattr(call, name)) is not None and x.dtype != torch.bool}
    return call._replace(**{name: x.detach().double() for name, x in tensors.items()})


def _compare(found: Results, exact: Results) -> dict[str, float]:
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
