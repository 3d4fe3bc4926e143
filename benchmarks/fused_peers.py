"""`benchmarks fused`: norms, gates and rotations by this library, by torch.compile, quack and Liger.

Device times are interleaved, each call on data that no cache has, after each candidate's results were compared with
float64. A copy of as much data as x bounds what memory allows. quack and Liger are measured where they are installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import fused
from benchmarks.tools import cases
from benchmarks.tools.candidates import NOTHING, Timed
from benchmarks.tools.output import Row
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.graph_op import as_tuple
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.fused.rotary.rope import rope
from cudnn_sdpa.nn.rotary import RotaryEmbedding
from cudnn_sdpa.plans.providers import CUDNN, OWN, Provider, providers

OURS, COMPILED, QUACK, LIGER, COPY = "cudnn_sdpa", "compiled", "quack", "liger", "copy"
PEERS = (COMPILED, QUACK, LIGER)
CANDIDATES = (OURS, OWN, CUDNN, *PEERS, COPY)

NORMS = (*fused.NORMS, (1, 4096))
GATES = (*fused.GATES, (1, 14336))
FEW_ROWS = ((1, 4096), (2, 4096), (4, 4096))

#: Sequences, tokens, heads of queries and of keys, head dim.
ROTATIONS = ((4, 4096, 32, 8, 128), (1, 4096, 64, 8, 128), (64, 1, 32, 8, 128), (8, 2048, 16, 16, 64))

Function = Callable[..., Any]


def _quack_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    function = importlib.import_module("quack.rmsnorm").rmsnorm
    return function(x, weight, eps=fused.EPS, residual=residual, prenorm=residual is not None)  # the sum, too


def _liger_norm(x: Tensor, weight: Tensor) -> Any:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(x, weight, fused.EPS, 0.0, "llama", False)


def _liger_gate(gate: Tensor, up: Tensor) -> Any:
    return importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply(gate, up)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, fused.EPS)


def _residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm(x, weight, fused.EPS, residual=residual)


def norms() -> list[Row]:
    """`rms_norm`, with a residual, and its gradients."""
    rows = []
    for shape in track(NORMS, "norms", transient=True):
        x, weight = fused.norm_inputs(*shape)
        theirs: dict[str, Function] = {QUACK: _quack_norm, LIGER: _liger_norm}
        rows.append(_forward("norm", (x, weight), _norm, fused.pytorch_rms_norm, theirs))
        given = x, cases.normal(*shape), weight
        of_quack = {QUACK: lambda x, residual, weight: _quack_norm(x, weight, residual)}
        rows.append(_forward("norm of a sum", given, _residual_norm, fused.pytorch_add_rms_norm, of_quack))
        rows.append(_backward("gradients of norm", (x, weight), _norm, fused.pytorch_rms_norm, theirs))
    return rows


def few_rows() -> list[Row]:
    """Gradients of `rms_norm` of few rows."""
    shapes = track(FEW_ROWS, "few rows", transient=True)
    return [_backward("gradients of norm", fused.norm_inputs(*x), _norm, fused.pytorch_rms_norm, {}) for x in shapes]


def gates() -> list[Row]:
    """`silu_mul` and its gradients."""
    rows = []
    for shape in track(GATES, "gates", transient=True):
        given, theirs = fused.gate_inputs(*shape), {LIGER: _liger_gate}
        rows.append(_forward("silu_mul", given, silu_mul, fused.pytorch_silu_mul, theirs))
        rows.append(_backward("gradients of silu_mul", given, silu_mul, fused.pytorch_silu_mul, theirs))
    return rows


def rotations() -> list[Row]:
    """`rope` of queries and keys that lie in one projection, with norms and without, and its gradients."""
    rows = []
    for batch, tokens, heads_q, heads_k, dim in track(ROTATIONS, "rotations", transient=True):
        projected = cases.normal(batch, tokens, heads_q + heads_k, dim)
        cos, sin = RotaryEmbedding(dim)(torch.arange(tokens, device=projected.device))
        weights = cases.normal(dim), cases.normal(dim)

        given = {"cos": cos, "sin": sin, "sizes": [heads_q, heads_k]}
        ours, pytorch = partial(_rope, **given), partial(pytorch_rope, **given)
        for name, tensors in (("rope", (projected,)), ("norms and rope", (projected, *weights))):
            rows.append(_forward(name, tensors, ours, pytorch, {}))
            rows.append(_backward(f"gradients of {name}", tensors, ours, pytorch, {}))
    return rows


def _rope(projected: Tensor, *weights: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    q, k = (x.transpose(1, 2) for x in torch.split(projected, sizes, 2))
    q_weight, k_weight = weights or (None, None)
    return rope(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, eps=fused.EPS)


def pytorch_rope(projected: Tensor, *weights: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """`rope` of halves in PyTorch, of heads (B, S, H, D)."""
    found = []
    for x, weight in zip(torch.split(projected, sizes, 2), weights or (None, None), strict=True):
        normed = x if weight is None else fused.pytorch_rms_norm(x, weight)
        first, second = normed.transpose(1, 2).chunk(2, -1)
        found.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype))
    return tuple(found)


def _by(provider: Provider, call: Callable[[], Any]) -> Sequence[Tensor]:
    with providers(provider):
        return as_tuple(call())


def _forward(
    name: str, given: tuple[Tensor, ...], ours: Function, pytorch: Function, theirs: dict[str, Function]
) -> Row:
    with torch.no_grad():
        expected = as_tuple(pytorch(*(x.double() for x in given)))
        calls = _ours(partial(ours, *given))
        calls[COMPILED] = partial(fused.compiled(pytorch), *given)
        calls |= {peer: partial(function, *given) for peer, function in theirs.items()}
        return _row(name, given[0], calls, expected)


def _backward(
    name: str, given: tuple[Tensor, ...], ours: Function, pytorch: Function, theirs: dict[str, Function]
) -> Row:
    leaves = [x.detach().requires_grad_() for x in given]
    doubles = [x.detach().double().requires_grad_() for x in given]
    exact = as_tuple(pytorch(*doubles))
    grads = [torch.randn_like(x).to(given[0].dtype) for x in exact]
    expected = torch.autograd.grad(exact, doubles, [x.double() for x in grads])

    def of(function: Function) -> Callable[[], Sequence[Tensor]]:
        made: list[Tensor] = []
        of_made: list[Tensor] = []  # in their memory order, as attention would give them

        def gradients() -> Sequence[Tensor]:
            if not made:
                made[:] = as_tuple(function(*leaves))
                of_made[:] = (torch.empty_like(x).copy_(grad) for x, grad in zip(made, grads, strict=True))
            return torch.autograd.grad(made, leaves, of_made, retain_graph=True)

        return gradients

    calls: dict[str, Callable[[], Any]] = {**_ours(of(ours)), COMPILED: of(fused.compiled(pytorch))}
    return _row(name, given[0], calls | {peer: of(function) for peer, function in theirs.items()}, expected)


def _ours(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    return {OURS: partial(_by, "default", call), OWN: partial(_by, OWN, call), CUDNN: partial(_by, CUDNN, call)}


def _results(call: Callable[[], Any]) -> Sequence[Tensor]:
    return as_tuple(call())


def _row(name: str, like: Tensor, calls: dict[str, Callable[[], Any]], expected: Sequence[Tensor]) -> Row:
    timed, copied = Timed(), torch.empty_like(like)
    for candidate, call in calls.items():
        timed.add(candidate, partial(_results, call), tuple, expected)
    timed.add(COPY, lambda: (copied.copy_(like.detach()),), tuple, [like.detach().double()])
    timed.reasons |= {peer: "not measured on this call" for peer in PEERS if peer not in calls}
    times = timed.measure(cold=True)
    row: Row = {"call": f"{name}, {' × '.join(f'{size:,}' for size in like.shape)}"}
    row |= {f"{candidate} µs": times.get(candidate, NOTHING) for candidate in CANDIDATES}
    best = min((times[peer] for peer in PEERS if peer in times), default=float("nan"))
    row["best of peers / ours"] = best / times[OURS] if OURS in times else NOTHING
    row["why not"] = timed.why_not
    return row
