"""`benchmarks providers`: the same calls served by cuDNN, by FlashAttention-4, and by what "fastest" chooses.

Calls with large head dims are served by cuDNN and by the kernel of its frontend. Device times are interleaved, after
each provider's results were compared with float64. Others' kernels than cuDNN's are compiled at the first call of their
kind, or read from the plan store.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import peers
from benchmarks.peers import Configuration, Inputs
from benchmarks.tools import processes
from benchmarks.tools.candidates import NOTHING, Timed, ratio, served_by
from benchmarks.tools.cases import Shape
from benchmarks.tools.output import Row
from benchmarks.tools.timing import host_times
from benchmarks.tools.ways import until_recorded, wait_for_native_calls
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.providers import CUDNN, FASTEST, FLASH4, FRONTEND, Provider, providers

PROVIDERS: tuple[Provider, ...] = (CUDNN, FLASH4, FASTEST)

#: Those of calls with large head dims.
OF_LARGE: tuple[Provider, ...] = (CUDNN, FRONTEND)

#: Calls of each length have this many tokens in all.
TOKENS = 16384


def _causal(kinds: Iterable[tuple[int, int, int]], lengths: Sequence[int]) -> tuple[Configuration, ...]:
    """Calls of these query heads, key heads and head dims, of each of the lengths."""
    return tuple(
        Configuration(
            f"{heads}/{heads_kv} heads, D={dim}, causal, {TOKENS // length} × {length:,}",
            (heads, heads_kv),
            (length,) * (TOKENS // length),
            dim=dim,
        )
        for heads, heads_kv, dim in kinds
        for length in lengths
    )


LENGTHS = _causal(((32, 8, 64), (32, 8, 128), (16, 8, 256)), (512, 1024, 2048, 4096, 8192, 16384))

#: Calls with as many key heads as query heads: kernels that differ from those of groups.
UNGROUPED = _causal(((32, 32, 64), (32, 32, 128), (16, 16, 256)), (512, 2048, 8192, 16384))

FORWARD, BACKWARD, TRAINING = (*peers.FORWARD, *UNGROUPED), (*peers.TRAINING, *UNGROUPED), peers.TRAINING

LARGE = (
    *(
        Configuration(f"16/2 heads, D=512, causal, 1 × {length:,}", (16, 2), (length,), dim=512)
        for length in (256, 512, 1024, 2048, 4096, 8192, 16384)
    ),
    Configuration("16/2 heads, D=512, causal, 8 × 1,024", (16, 2), (1024,) * 8, dim=512),
    Configuration("16/2 heads, D=512, full, 1 × 4,096", (16, 2), (4096,), dim=512, causal=False),
    Configuration("16/2 heads, D=512, window 1,024, 1 × 8,192", (16, 2), (8192,), dim=512, left=1023),
    Configuration("16/2 heads, D=512, causal, 2,048 queries on 8,192 keys", (16, 2), (2048,), keys=8192, dim=512),
    Configuration("32/8 heads, D=320, causal, 1 × 4,096", (32, 8), (4096,), dim=320),
)

#: Processes whose first calls are measured.
PROCESSES = 5

#: Where the host's time shows: calls whose kernels are short. "fastest" gives the longer to FlashAttention-4.
SMALL = Shape(batch=1, heads_q=8, heads_kv=2, length=128, dim=128, causal=True)
LONGER = SMALL._replace(length=512)


def forward() -> list[Row]:
    """Device time of the forward pass without gradients."""
    with torch.no_grad():
        return _rows(FORWARD, "forward", requires_grad=False)


def training() -> list[Row]:
    """Device time of a forward and a backward pass together."""
    return _rows(TRAINING, "training", requires_grad=True)


def lengths() -> list[Row]:
    """Device time of the forward pass by length."""
    with torch.no_grad():
        return _rows(LENGTHS, "lengths", requires_grad=False)


def backward() -> list[Row]:
    """Device time of the backward pass alone."""
    return [_row_of_backward(asked) for asked in track(BACKWARD, "backward", transient=True)]


def backward_lengths() -> list[Row]:
    """Device time of the backward pass by length."""
    return [_row_of_backward(asked) for asked in track(LENGTHS, "lengths", transient=True)]


def large() -> list[Row]:
    """Device time of the forward pass with large head dims."""
    with torch.no_grad():
        return _rows(LARGE, "large", requires_grad=False, by=OF_LARGE)


def host() -> list[Row]:
    """CPU time of one warm call by each provider; one setting is in force at a time.

    Calls take turns, many times over several seconds, as a processor may be slower for seconds.
    """
    wait_for_native_calls()
    calls = _host_calls(SMALL) | {f"{name}, 1 × {LONGER.length}": x for name, x in _host_calls(LONGER).items()}
    best: dict[str, dict[str, float]] = {name: {x: float("inf") for x in PROVIDERS} for name in calls}
    for provider in PROVIDERS:
        with providers(provider):
            for call in calls.values():
                until_recorded(call)
    for _ in range(25):
        for provider in PROVIDERS:
            with providers(provider):
                for name, call in calls.items():
                    found = host_times({"": call}, per_round=100, rounds=2)[""]
                    best[name][provider] = min(best[name][provider], found)
    return [
        {"call": name, **{f"{x} µs": times[x] for x in PROVIDERS}, **_ratios(times)} for name, times in best.items()
    ]


def first_calls() -> list[Row]:
    """Time until the GPU is done with a first call of a kind that the plan store has, in new processes."""
    store = default_store.active()
    if store is None:
        raise RuntimeError(f"the plan store is off; {default_store.VARIABLE} can name one")
    run = partial(processes.run_module, "benchmarks.programs.first_call", FLASH4, store=str(store.folder))
    run()  # compiles what is missing
    measured = [run() for _ in track(range(PROCESSES), "first calls", transient=True)]
    return [
        {
            "kind": kind,
            "first call ms": statistics.median(times[kind]["first"] for times in measured),
            "worst ms": max(times[kind]["first"] for times in measured),
            "another shape ms": statistics.median(times[kind]["another"] for times in measured),
            "processes": PROCESSES,
        }
        for kind in measured[0]
    ]


def _host_calls(shape: Shape) -> dict[str, Callable[[], object]]:
    q, k, v = shape.tensors(requires_grad=True)
    detached, grad_out = tuple(x.detach() for x in (q, k, v)), torch.randn_like(q)
    return {
        "forward": lambda: sdpa(*detached, is_causal=True),
        "forward and backward": lambda: torch.autograd.grad(_attend(q, k, v), (q, k, v), grad_out),
    }


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = sdpa(q, k, v, is_causal=True)
    assert isinstance(out, Tensor)
    return out


def _rows(
    configurations: Sequence[Configuration], title: str, *, requires_grad: bool, by: Sequence[Provider] = PROVIDERS
) -> list[Row]:
    return [_row(asked, requires_grad=requires_grad, by=by) for asked in track(configurations, title, transient=True)]


def _row(asked: Configuration, *, requires_grad: bool, by: Sequence[Provider]) -> Row:
    torch.cuda.empty_cache()
    plan_cache.clear()
    given = Inputs(asked, requires_grad=requires_grad)
    expected, timed = peers.in_float64(given, gradients=requires_grad), Timed()
    attend = partial(peers.both_passes if requires_grad else peers.only_forward, peers.ours, given)
    for provider in by:
        timed.add(provider, partial(served_by, provider, attend), given.sampled, expected)
    return _row_of(asked, timed, by)


def _row_of_backward(asked: Configuration) -> Row:
    torch.cuda.empty_cache()
    plan_cache.clear()
    given, timed = Inputs(asked, requires_grad=True), Timed()
    _, *expected = peers.in_float64(given, gradients=True)
    out = peers.ours(given)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given.differentiable, given.grad_out, retain_graph=True)

    for provider in PROVIDERS:
        timed.add(provider, partial(served_by, provider, gradients), given.sampled, expected)
    return _row_of(asked, timed, PROVIDERS)


def _row_of(asked: Configuration, timed: Timed, by: Sequence[Provider]) -> Row:
    times = timed.measure()
    row: Row = {"call": asked.name}
    row |= {f"{name} µs": times.get(name, NOTHING) for name in by}
    row |= _ratios(times, by)
    row["why not"] = timed.why_not
    return row


def _ratios(times: Mapping[str, float], by: Sequence[Provider] = PROVIDERS) -> Row:
    first, second, *chosen = by
    best = min((times[name] for name in (first, second) if name in times), default=float("nan"))
    return {
        f"{second} / {first}": ratio(times, second, first),
        **{f"{name} / best": times[name] / best if name in times else NOTHING for name in chosen},
    }
