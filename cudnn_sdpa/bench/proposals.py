"""Every plan that cuDNN proposes for a call, timed: whether one is faster than its first choice."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from cudnn_sdpa.bench import fused
from cudnn_sdpa.bench.convolutions import CASES, Case, tuning_of_torch
from cudnn_sdpa.bench.decode import COPIED, large_copy
from cudnn_sdpa.bench.tools import cases, tuned
from cudnn_sdpa.bench.tools.timing import Call, device_times
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.conv import conv2d
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.plans.autotune import AutotuneEntry
from cudnn_sdpa.plans.cache import plan_cache

#: More than cuDNN proposes for anything.
ALL = 256

#: Where `rms_norm` takes longer than torch.compile's kernel and `autotune` finds nothing among its first candidates.
NORMS = (fused.NORMS[0],)

#: `silu_mul` of the same size, and where rows are few.
GATES = (fused.GATES[0], *fused.GATES[3:])

#: Where bias and SiLU in the convolution's kernel gain least.
CONVOLUTIONS = (CASES[2], CASES[4])


def norms() -> list[dict[str, Any]]:
    """All plans of `rms_norm`, beside torch.compile's kernel and what a copy of as many bytes takes."""
    rows = []
    for shape in NORMS:
        rows += _all(rms_norm, fused.rms_norm_of_torch, ", ".join(map(str, shape)), fused.norm_inputs(*shape), 2)
    return rows


def gates() -> list[dict[str, Any]]:
    """All plans of `silu_mul`, of two tensors and of the halves of one, likewise."""
    rows = []
    for shape in GATES:
        label, both = ", ".join(map(str, shape)), (cases.normal(shape[0], 2 * shape[1]),)
        rows += _all(silu_mul, fused.silu_mul_of_torch, label, fused.gate_inputs(*shape), 3)
        rows += _all(silu_mul, fused.silu_mul_of_both, f"{label}, halves of one", both, 3)
    return rows


def _all(ours: Any, theirs: Any, label: str, inputs: tuple[Tensor, ...], moved: int) -> list[dict[str, Any]]:
    """One row for each plan; `moved` counts tensors, as large as the result, that are read or written."""
    compiled = fused.compiled(theirs)
    calls: dict[str, Call] = {"fastest": lambda: ours(*inputs), "compiled": lambda: compiled(*inputs)}
    entry = _settled(calls["fastest"])
    out = ours(*inputs)
    cases.check_agreement(["out"], [out], [theirs(*inputs)], "PyTorch's")
    times = device_times({**calls, "copy": large_copy()}, cold=True)
    plan_cache.clear()
    found = [
        ("a copy of as many bytes", times["copy"] * moved * out.numel() * out.element_size() / (2 * COPIED)),
        ("torch.compile", times["compiled"]),
        ("the fastest that cuDNN proposes", times["fastest"]),
    ]
    for number, candidate in enumerate(entry.candidates, 1):
        time: Any = candidate.reason if candidate.microseconds is None else candidate.microseconds
        found.append((f"warm, cuDNN's choice {number}: {candidate}", time))
    return [{"rows, n": label, "what": what, "µs": time} for what, time in found]


def convolutions() -> list[dict[str, Any]]:
    """Convolution, bias and SiLU: all plans that cuDNN proposes, beside PyTorch's three with its fastest."""
    return [_convolution(case) for case in track(CONVOLUTIONS, "convolutions", transient=True)]


def _convolution(case: Case) -> dict[str, Any]:
    x, weight, bias = case.inputs()
    sizes: dict[str, Any] = {"stride": case.stride, "padding": case.padding, "groups": case.groups}

    def ours() -> Tensor:
        return conv2d(x, weight, bias, **sizes, activation="silu")

    def of_torch() -> Tensor:
        return F.silu(F.conv2d(x, weight, bias, **sizes))

    with tuning_of_torch():
        entry = _settled(ours)
        cases.check_agreement(["out"], [ours()], [of_torch()], "PyTorch's")
        plain: Call = lambda: conv2d(x, weight, **sizes)  # noqa: E731
        times = device_times({"ours": ours, "torch": of_torch, "plain": plain})
    plan_cache.clear()
    timed = [each.microseconds for each in entry.candidates if each.microseconds is not None]
    return {
        "convolution": case.label,
        "cuDNN's first choice µs": entry.candidates[0].microseconds,
        "plans proposed": len(entry.candidates),
        "proposed, the fastest µs": min(timed) if timed else "–",
        "the fastest": str(entry.candidates[entry.winner]),
        "the fastest, beside pytorch µs": times["ours"],
        "plain µs": times["plain"],
        "pytorch's, benchmark µs": times["torch"],
        "pytorch's / the fastest": times["torch"] / times["ours"],
        "pytorch's / plain": times["torch"] / times["plain"],
    }


def _settled(call: Call) -> AutotuneEntry:
    """What `autotune` finds among all plans that cuDNN proposes for a call; its last plan's entry."""
    return tuned.settle(call, candidates=ALL)[-1]
