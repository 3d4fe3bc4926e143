"""`benchmarks replacements`: PyTorch's own attention operators on this library, the frontend's module, and PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.programs.many_lengths import COUNT, MAX_LENGTH
from benchmarks.tools import cases, peers
from benchmarks.tools import replacements as installed
from benchmarks.tools.cases import Shape
from benchmarks.tools.output import Row
from benchmarks.tools.processes import run_module
from benchmarks.tools.replacements import OURS, PYTORCH, REPLACEMENTS
from benchmarks.tools.timing import Call, device_times, host_times
from benchmarks.tools.ways import wait_for_native_calls
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.plans.default_store import OFF

#: Where the host's time shows: a call whose kernel is short.
SMALL = Shape(batch=1, heads_q=8, heads_kv=8, length=128, dim=64, causal=True)

#: Shapes of kernels; of each also a packed batch with its tokens.
SHAPES = (
    Shape(batch=4, heads_q=32, heads_kv=32, length=2048, dim=128, causal=True),
    Shape(batch=1, heads_q=32, heads_kv=32, length=16384, dim=128, causal=True),
    Shape(batch=4, heads_q=16, heads_kv=16, length=4096, dim=64, causal=False),
)

_CALLS_PER_ROUND = 200
_ROUNDS = 3  #: of all in turn, because one is not part of a call


class Case(NamedTuple):
    """Something that is measured with each replacement.

    Attributes:
        name: Its name in tables.
        call: The call; it gives what must agree.
    """

    name: str
    call: Callable[[], Sequence[Tensor]]


def host() -> list[Row]:
    """CPU time of one warm call of PyTorch's functions, with each replacement."""
    wait_for_native_calls()

    def measure(call: Call) -> float:
        return host_times({"": call}, per_round=_CALLS_PER_ROUND, rounds=5)[""]

    return [_row("call", case, measure) for case in _cases(SMALL)]


def kernels() -> list[Row]:
    """Device time of the same on larger shapes."""

    def measure(call: Call) -> float:
        return device_times({"": call})[""]

    return [
        _row("B, Hq, Hkv, S, D", case._replace(name=f"{shape.label}: {case.name}"), measure)
        for shape in track(SHAPES, "kernels", transient=True)
        for case in _cases(shape)
    ]


def new_shapes(repeats: int = 1) -> list[Row]:
    """Calls of many lengths that a process has not seen, without stored plans; each has its own processes."""
    rows: list[Row] = []
    for name in REPLACEMENTS:
        for policy in ("exact", "bucketed") if name == OURS else ("",):
            results = [run_module("benchmarks.programs.new_shapes", name, policy, store=OFF) for _ in range(repeats)]
            is_there = all(result.get("why") is None for result in results)
            rows.append(
                {
                    "replacements": f"{name}, {policy}" if policy else name,
                    f"{COUNT} lengths up to {MAX_LENGTH}, s": _median(results, "seconds") if is_there else "–",
                    "first call, ms": _median(results, "first_ms") if is_there else "–",
                    "longest wait, ms": _median(results, "longest_wait_ms") if is_there else "–",
                    "why not": "–" if is_there else str(results[0]["why"]),
                }
            )
    return rows


def _median(results: list[JsonObject], name: str) -> float:
    return statistics.median(float(result[name]) for result in results)


def _cases(shape: Shape) -> list[Case]:
    q, k, v = shape.tensors(requires_grad=True)
    detached = (q.detach(), k.detach(), v.detach())
    grad_out = torch.randn_like(q)
    found = [
        Case("forward", lambda: (_attend(*detached, shape),)),
        Case("forward and backward", lambda: torch.autograd.grad(_attend(q, k, v, shape), (q, k, v), grad_out)),
    ]
    varlen = peers.pytorch_varlen()
    if varlen is None:
        return found
    packed = [x.detach().transpose(1, 2).flatten(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    lengths = cases.random_lengths(packed[0].shape[0], shape.length)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=q.device)
    grad_packed, window = torch.randn_like(packed[0]), (-1, 0 if shape.causal else -1)

    def attend_packed(*tensors: Tensor) -> Any:
        return varlen(*tensors, offsets, offsets, shape.length, shape.length, window_size=window)

    without = [x.detach() for x in packed]
    return [
        *found,
        Case("varlen_attn, forward", lambda: (attend_packed(*without),)),
        Case(
            "varlen_attn, forward and backward",
            lambda: torch.autograd.grad(attend_packed(*packed), packed, grad_packed),
        ),
    ]


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    with peers.only(peers.CUDNN):
        return peers.pytorch(q, k, v, is_causal=shape.causal)()


def _row(label: str, case: Case, measure: Callable[[Call], float]) -> Row:
    """The times of a case with each replacement: the best of some rounds, in which they take turns."""
    times: dict[str, float] = {}
    reasons: dict[str, str] = {}
    expected: Sequence[Tensor] | None = None
    for _ in range(_ROUNDS):
        for name in (PYTORCH, *(x for x in REPLACEMENTS if x != PYTORCH)):
            if name in reasons:
                continue
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(installed.replaced_by(name))
                    found = case.call()
                except torch.OutOfMemoryError:
                    raise
                except (ImportError, RuntimeError, ValueError) as error:  # what a replacement declines
                    reasons[name] = str(error).splitlines()[0]
                    continue
                if expected is None:
                    expected = [x.detach().clone() for x in found]
                cases.check_agreement([case.name] * len(found), found, expected, "that of the first")
                times[name] = min(times.get(name, float("inf")), measure(case.call))
    row: Row = {label: case.name}
    row |= {f"{name} µs": times.get(name, "–") for name in REPLACEMENTS}
    ours, pytorchs = times.get(OURS), times.get(PYTORCH)
    row[f"{OURS} / {PYTORCH}"] = ours / pytorchs if ours is not None and pytorchs is not None else "–"
    row["why not"] = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "–"
    return row
