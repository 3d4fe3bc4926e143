"""The times of all plans that cuDNN proposes for a call, to see whether one is faster than its first choice."""

from __future__ import annotations

import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks import fused
from benchmarks.convolutions import Case, pytorch_benchmark
from benchmarks.fused import Function
from benchmarks.tools import cases, tuned
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.conv import conv2d
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.plans.autotune import AutotuneEntry
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.providers import CUDNN, providers

#: More plans than cuDNN proposes for any call.
ALL = 256

#: The size at which `rms_norm` is slower than torch.compile's kernel, also with `autotune`'s default candidates.
NORMS = ((16384, 8192),)

#: `silu_mul` of the same size, and sizes with few rows.
GATES = ((16384, 8192), (2048, 4864), (64, 14336))

#: The convolutions that gain least from fused bias and SiLU.
CONVOLUTIONS = (
    Case(batch=8, channels=512, size=64, filters=512, extent=3, padding=1),
    Case(batch=4, channels=320, size=96, filters=320, extent=3, padding=1),
)


def norms() -> list[Row]:
    """All plans of `rms_norm`, compared with torch.compile's kernel and with a copy of as many bytes."""
    rows = []
    for shape in NORMS:
        label = ", ".join(map(str, shape))
        rows += _all(rms_norm, fused.pytorch_rms_norm, fused.norm_inputs(*shape), label=label, moved=2)
    return rows


def gates() -> list[Row]:
    """The same of `silu_mul`, of two tensors and of the halves of one."""
    rows = []
    for shape in GATES:
        label, halves = ", ".join(map(str, shape)), fused.packed_gate_inputs(*shape)
        rows += _all(silu_mul, fused.pytorch_silu_mul, fused.gate_inputs(*shape), label=label, moved=3)
        rows += _all(silu_mul, fused.pytorch_packed_silu_mul, halves, label=f"{label}, halves of one", moved=3)
    return rows


def _all(ours: Function, theirs: Function, inputs: tuple[Tensor, ...], *, label: str, moved: int) -> list[Row]:
    """One row for each plan; `moved` tensors, as large as the result, are read or written."""
    compiled = fused.compiled(theirs)
    calls: dict[str, Call] = {"fastest": lambda: ours(*inputs), "compiled": lambda: compiled(*inputs)}
    with providers(CUDNN):
        entry = _settled(calls["fastest"])
        out = ours(*inputs)
        cases.check_agreement(["out"], [out], [theirs(*inputs)], "PyTorch's")
        times = device_times({**calls, "copy": cases.large_copy()}, cold=True)
        plan_cache.clear()
    times_by_kernel: list[tuple[str, float | str]] = [
        ("a copy of as many bytes", times["copy"] * moved * out.numel() * out.element_size() / (2 * cases.COPIED)),
        ("torch.compile", times["compiled"]),
        ("the fastest that cuDNN proposes", times["fastest"]),
    ]
    for number, candidate in enumerate(entry.candidates, 1):
        time = candidate.reason if candidate.microseconds is None else candidate.microseconds
        times_by_kernel.append((f"warm, cuDNN's choice {number}: {candidate}", time))
    return [{"rows, n": label, "what": kernel, "µs": time} for kernel, time in times_by_kernel]


def convolutions() -> list[Row]:
    """Convolution, bias and SiLU: all plans that cuDNN proposes, compared with PyTorch's benchmarked convolution."""
    return [_convolution(case) for case in track(CONVOLUTIONS, "convolutions", transient=True)]


def _convolution(case: Case) -> Row:
    x, weight, bias = case.inputs()
    sizes = case.sizes

    def ours() -> Tensor:
        return conv2d(x, weight, bias, **sizes, activation="silu")

    def theirs() -> Tensor:
        return F.silu(F.conv2d(x, weight, bias, **sizes))

    with pytorch_benchmark():
        entry = _settled(ours)
        cases.check_agreement(["out"], [ours()], [theirs()], "PyTorch's")
        plain: Call = lambda: conv2d(x, weight, **sizes)  # noqa: E731
        times = device_times({"ours": ours, "torch": theirs, "plain": plain})
    plan_cache.clear()
    timed = [each.microseconds for each in entry.candidates if each.microseconds is not None]
    return {
        "convolution": case.label,
        "cuDNN's first choice µs": entry.candidates[0].microseconds,
        "plans proposed": len(entry.candidates),
        "proposed, the fastest µs": min(timed) if timed else "–",
        "the fastest": str(entry.candidates[entry.winner]),
        "the fastest, against pytorch µs": times["ours"],
        "plain µs": times["plain"],
        "pytorch's, benchmark µs": times["torch"],
        "pytorch's / the fastest": times["torch"] / times["ours"],
        "pytorch's / plain": times["torch"] / times["plain"],
    }


def _settled(call: Call) -> AutotuneEntry:
    """Autotunes a call over all plans that cuDNN proposes; the measurements of its last plan."""
    return tuned.settle(call, candidates=ALL)[-1]
