"""The gain of `autotune` over the first plan of cuDNN's heuristics."""

from __future__ import annotations

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases
from benchmarks.tools.cases import Sizes
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.plans.autotune import DEFAULT_CANDIDATES, AutotuneEntry, autotune
from cudnn_sdpa.plans.cache import plan_cache


def settle(call: Call, *, keep: bool = False, candidates: int = DEFAULT_CANDIDATES) -> list[AutotuneEntry]:
    """Autotunes a call: the measurements of each of its plans.

    The plan cache holds the winners afterwards; its earlier plans are dropped unless `keep` is set.
    """
    if not keep:
        plan_cache.clear()
    with autotune(candidates=candidates) as report:
        call()
    return report.entries


def gain(call: Call) -> float:
    """The time of a call's first plan relative to the winner of `autotune`; of several plans, the last one.

    The plan cache is empty afterwards.
    """
    gains = [entry.gain for entry in settle(call) if not entry.reason]
    plan_cache.clear()
    return gains[-1] if gains else 1.0


def autotune_gains(sizes: Sizes = cases.FULL) -> list[Row]:
    """The first plan's time and the winner's, as `autotune` measured them, for kernels and a single query."""
    rows = []
    for shape in track(sizes.kernels, "autotune", transient=True):
        q, k, v = shape.tensors(requires_grad=True)
        forward, backward = _settled(q, k, v, is_causal=shape.causal)
        rows += [_row(shape.label, "forward", forward), _row(shape.label, "backward", backward)]
        with torch.no_grad():
            (single,) = _settled(q[:, :, :1].contiguous(), k, v, is_causal=False)
        rows.append(_row(shape.label, "one query on the keys", single))
    return rows


def _settled(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> list[AutotuneEntry]:
    """Autotunes a call, and its gradient if q requires one."""

    def call() -> None:
        out = sdpa(q, k, v, is_causal=is_causal)
        if out.requires_grad:
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))

    return settle(call)


def _row(label: str, which: str, entry: AutotuneEntry) -> Row:
    timed = [candidate for candidate in entry.candidates if candidate.microseconds is not None]
    first = entry.candidates[0].microseconds
    return {
        "B, Hq, Hkv, S, D": label,
        "pass": which,
        "plans": len(entry.candidates),
        "timed": len(timed),
        "first µs": "–" if first is None else first,
        "gain": entry.gain,
        "winner": str(entry.candidates[entry.winner]) if entry.winner else "the first",
    }
