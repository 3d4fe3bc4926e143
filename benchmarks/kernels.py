"""`benchmarks kernels`: attention by this library's own kernels, PyTorch's backends and cuDNN: time, memory, errors.

All candidates of a row are interleaved in one run. PyTorch computes float32 products without TF32, as the kernels do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.tools import cases
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, peak_memory
from cudnn_sdpa import kernels
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.kernels.arguments import Mode

FORWARD, BOTH = "forward", "forward and backward"
GRADIENTS = ("grad_q", "grad_k", "grad_v")

#: Relative errors, in the norm, beyond which a candidate's time means nothing.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: cases.TOLERANCE}

#: What PyTorch says where a backend does not take a call, on a GPU and on the CPU.
NO_KERNEL = ("No available kernel", "No viable backend")

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        batch: Batch entries.
        heads: Heads of queries, keys and values.
        dim: Head dim.
        lengths: Numbers of queries and keys.
        exact_length: That of the comparison with float64.
        repeats: Number of timed calls of each candidate.
    """

    batch: int
    heads: int
    dim: int
    lengths: tuple[int, ...]
    exact_length: int
    repeats: int


FULL = Sizes(batch=4, heads=8, dim=64, lengths=(128, 256, 512, 1024, 2048, 4096), exact_length=512, repeats=40)
SMALL = Sizes(batch=1, heads=2, dim=64, lengths=(16, 40), exact_length=40, repeats=3)


def _pytorch(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attend


def _ours(mode: Mode) -> Attend:
    return lambda q, k, v, is_causal: kernels.attention(q, k, v, mode, is_causal=is_causal)


#: Each candidate by its name in tables, the one that others are compared with first.
IN_FLOAT32: dict[str, Attend] = {
    "fused": _ours("fused"),
    "tiled": _ours("tiled"),
    "naive": _ours("naive"),
    "pytorch math": _pytorch(SDPBackend.MATH),
    "pytorch efficient": _pytorch(SDPBackend.EFFICIENT_ATTENTION),
}
IN_HALF: dict[str, Attend] = {
    "fused": _ours("fused"),
    "sdpa": lambda q, k, v, is_causal: sdpa(q, k, v, is_causal=is_causal),
    "pytorch flash": _pytorch(SDPBackend.FLASH_ATTENTION),
}


class Setting(NamedTuple):
    """Calls that are compared with each other."""

    dtype: torch.dtype
    is_causal: bool
    candidates: Mapping[str, Attend]

    @property
    def label(self) -> str:
        """The column "dtype" of a table."""
        return str(self.dtype).removeprefix("torch.") + (", causal" if self.is_causal else "")

    def inputs(self, sizes: Sizes, length: int) -> list[Tensor]:
        """Random q, k, v and the gradient of the output."""
        shape = (sizes.batch, sizes.heads, length, sizes.dim)
        return [torch.randn(shape, device=_device(), dtype=self.dtype) for _ in range(4)]


IN_FULL = [Setting(torch.float32, causal, IN_FLOAT32) for causal in (False, True)]
IN_HALVES = [Setting(x, causal, IN_HALF) for x in (torch.float16, torch.bfloat16) for causal in (False, True)]
EVERY = [*IN_FULL, *IN_HALVES]


def float32(sizes: Sizes = FULL) -> list[Row]:
    """The three forms, and PyTorch's backends that take float32."""
    return _timed(IN_FULL, sizes)


def half(sizes: Sizes = FULL) -> list[Row]:
    """The fused form, cuDNN and FlashAttention."""
    return _timed(IN_HALVES, sizes)


def memory(sizes: Sizes = FULL) -> list[Row]:
    """Peak memory of each beyond inputs and outputs, which are the gradients, too, in a backward pass."""
    if not torch.cuda.is_available():
        print("memory is skipped: it is counted on a GPU")
        return []
    rows: list[Row] = []
    for setting, length in _each(EVERY, sizes):
        given = setting.inputs(sizes, length)
        size = given[0].numel() * given[0].element_size()
        for which, outputs in ((FORWARD, 1), (BOTH, 4)):
            row = _row(setting, sizes, length, which)
            for name, call in _calls(setting, given, which).items():
                row[f"{name} MB"] = max(0, peak_memory(call) - outputs * size) / 1e6
            rows.append(row)
    return rows


def errors(sizes: Sizes = FULL) -> list[Row]:
    """The largest difference to float64 of an output and of a gradient, of everything that is timed."""
    rows: list[Row] = []
    for setting in EVERY:
        *qkv, grad_out = setting.inputs(sizes, sizes.exact_length)
        leaves = [x.double().requires_grad_() for x in qkv]
        exact = kernels.reference_attention(leaves[0], leaves[1], leaves[2], is_causal=setting.is_causal)
        wanted = [exact, *torch.autograd.grad(exact, leaves, grad_out.double())]
        for name, call in _calls(setting, [*qkv, grad_out], BOTH).items():
            found = call()
            off = [float((x.double() - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True)]
            row: Row = {"call": name, "dtype": setting.label, "B, H, S, D": _label(sizes, sizes.exact_length)}
            rows.append(row | {"out": off[0], "gradients": max(off[1:]), "largest gradient": _largest(wanted[1:])})
    return rows


def _timed(settings: Sequence[Setting], sizes: Sizes) -> list[Row]:
    rows: list[Row] = []
    for setting, length in _each(settings, sizes):
        given = setting.inputs(sizes, length)
        for which in (FORWARD, BOTH):
            calls = _calls(setting, given, which)
            _check(setting, calls, length)
            times = _times(calls, sizes.repeats)
            row = _row(setting, sizes, length, which) | {f"{name} µs": value for name, value in times.items()}
            best = min((times[name] for name in list(setting.candidates)[1:] if name in times), default=None)
            rows.append(row if best is None else row | {"fused / fastest other": times["fused"] / best})
    return rows


def _each(settings: Sequence[Setting], sizes: Sizes) -> Iterator[tuple[Setting, int]]:
    found = [(setting, length) for setting in settings for length in sizes.lengths]
    yield from track(found, "kernels", transient=True)


def _row(setting: Setting, sizes: Sizes, length: int, which: str) -> Row:
    return {"B, H, S, D": _label(sizes, length), "dtype": setting.label, "pass": which}


def _label(sizes: Sizes, length: int) -> str:
    return f"{sizes.batch}, {sizes.heads}, {length}, {sizes.dim}"


def _largest(tensors: Sequence[Tensor]) -> float:
    return max(float(x.detach().abs().max()) for x in tensors)


Results = Callable[[], tuple[Tensor, ...]]


def _calls(setting: Setting, given: Sequence[Tensor], which: str) -> dict[str, Results]:
    """What is measured of each candidate that has a kernel for it: it gives the output, and with it the gradients."""
    *qkv, grad_out = given
    leaves = [x.detach().requires_grad_() for x in qkv]
    calls: dict[str, Results] = {}
    for name, attend in setting.candidates.items():
        if which == FORWARD:
            call: Results = partial(_forward, attend, qkv, setting.is_causal)
        else:
            call = partial(_both, attend, leaves, is_causal=setting.is_causal, grad_out=grad_out)
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not any(text in str(error) for text in NO_KERNEL):
                raise
            continue
        calls[name] = call
    return calls


def _forward(attend: Attend, qkv: Sequence[Tensor], is_causal: bool) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (attend(qkv[0], qkv[1], qkv[2], is_causal),)


def _both(attend: Attend, leaves: Sequence[Tensor], is_causal: bool, grad_out: Tensor) -> tuple[Tensor, ...]:
    out = attend(leaves[0], leaves[1], leaves[2], is_causal)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def _check(setting: Setting, calls: Mapping[str, Results], length: int) -> None:
    """Compares what is timed with the first candidate, in all shapes; `errors` compares with float64."""
    expected = calls["fused"]()
    names = ("out", *GRADIENTS)[: len(expected)]
    for name, call in calls.items():
        reference = f"that of the fused form ({name}, {setting.label}, S={length})"
        cases.check_agreement(names, call(), expected, reference, tolerance=TOLERANCE[setting.dtype])


def _times(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Medians in µs by CUDA events; without a GPU by the host's clock, to show that all of it runs."""
    if torch.cuda.is_available():
        return device_times(calls, repeats=repeats)
    found: dict[str, list[float]] = {name: [] for name in calls}
    order, chance = list(calls.items()), random.Random(0)
    for _ in range(repeats):
        chance.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
