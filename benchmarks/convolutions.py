"""`benchmarks conv`: convolutions and PyTorch's, which also call cuDNN, all channels last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks import fused
from benchmarks.tools import cases, tuned
from benchmarks.tools.candidates import NOTHING, Timed
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times
from cudnn_sdpa.fused.conv import conv2d
from cudnn_sdpa.fused.conv_graphs import channels_last
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.providers import CUDNN, providers


class Sizes(TypedDict):
    """Options of a convolution, ours and PyTorch's."""

    stride: int
    padding: int
    groups: int


class Case(NamedTuple):
    """A convolution of square images (`size`) with square filters (`extent`)."""

    batch: int
    channels: int
    size: int
    filters: int
    extent: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    @property
    def label(self) -> str:
        """The label of a table's row."""
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        image = f"{self.batch}×{self.channels}×{self.size}×{self.size}"
        return f"{image}, {self.filters} of {self.extent}×{self.extent}{stride}{groups}"

    @property
    def sizes(self) -> Sizes:
        """The options of its calls."""
        return {"stride": self.stride, "padding": self.padding, "groups": self.groups}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random x, weight and bias, channels last."""
        x = channels_last(cases.normal(self.batch, self.channels, self.size, self.size))
        fan = self.channels // self.groups * self.extent**2
        weight = cases.normal(self.filters, self.channels // self.groups, self.extent, self.extent) * fan**-0.5
        return x, channels_last(weight), cases.normal(self.filters)


CASES = (
    Case(batch=32, channels=256, size=56, filters=256, extent=3, padding=1),
    Case(batch=32, channels=64, size=112, filters=256, extent=1),
    Case(batch=8, channels=512, size=64, filters=512, extent=3, padding=1),
    Case(batch=32, channels=128, size=56, filters=256, extent=3, stride=2, padding=1),
    Case(batch=4, channels=320, size=96, filters=320, extent=3, padding=1),
    Case(batch=64, channels=3, size=224, filters=1024, extent=14, stride=14),
)

OURS, PYTORCH, COMPILED = "cudnn_sdpa", "pytorch", "compiled"
PYTORCH_BENCHMARK, COMPILED_BENCHMARK = f"{PYTORCH}, benchmark", f"{COMPILED}, benchmark"
PEERS = (PYTORCH, PYTORCH_BENCHMARK, COMPILED, COMPILED_BENCHMARK)

#: Another of as many operations as one of those, where its activation is faster within the convolution.
MORE = Case(batch=4, channels=640, size=48, filters=640, extent=3, padding=1)


def forward() -> list[Row]:
    """The convolution alone, and with bias and SiLU, with cuDNN's first choice and tuned."""
    return [_forward(case) for case in track(CASES, "convolutions", transient=True)]


def activations() -> list[Row]:
    """SiLU within the convolution's kernel, and in one of its own."""
    return [_activation(case) for case in track((*CASES[:-1], MORE), "activations", transient=True)]


def backward() -> list[Row]:
    """The gradients of x, weight and bias, with cuDNN's first choice and tuned."""
    return [_backward(case) for case in track(CASES, "convolutions", transient=True)]


def peers() -> list[Row]:
    """Convolution, bias and SiLU, and PyTorch's, eager and compiled, with cuDNN's first choice and the fastest."""
    return [_beside_peers(case) for case in track((*CASES, MORE), "beside torch.compile", transient=True)]


def pytorch_conv_silu(x: Tensor, weight: Tensor, bias: Tensor, **sizes: int) -> Tensor:
    """Convolution, bias and SiLU in PyTorch."""
    return F.silu(F.conv2d(x, weight, bias, **sizes))


@torch.no_grad()
def _beside_peers(case: Case) -> Row:
    tensors = case.inputs()
    eager = partial(pytorch_conv_silu, **case.sizes)
    compiled = fused.compiled(eager)
    functions: dict[str, Callable[..., Tensor]] = {
        OURS: partial(conv2d, **case.sizes, activation="silu"),
        PYTORCH: eager,
        PYTORCH_BENCHMARK: partial(_benchmarked, eager),
        COMPILED: compiled,
        COMPILED_BENCHMARK: partial(_benchmarked, compiled),
    }
    timed, expected = Timed(), [eager(*(x.double() for x in tensors))]

    def add(name: str) -> None:
        timed.add(name, lambda: (functions[name](*tensors),), tuple, expected)

    for name in functions:
        add(name)
    times = timed.measure()
    row: Row = {"convolution": case.label}
    row |= {f"{name} µs": times.get(name, NOTHING) for name in functions}
    row["best of peers / ours"] = _best_peer(times)
    if OURS in timed.calls:
        tuned.settle(timed.calls.pop(OURS))
        add(OURS)
        times = timed.measure()
    row |= {"tuned µs": times.get(OURS, NOTHING), "best of peers / tuned": _best_peer(times)}
    plan_cache.clear()
    return {**row, "why not": timed.why_not}


def _best_peer(times: dict[str, float]) -> float | str:
    found = [times[name] for name in PEERS if name in times]
    return min(found) / times[OURS] if found and OURS in times else NOTHING


def _benchmarked(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    with pytorch_benchmark():
        return function(*tensors)


def _activation(case: Case) -> Row:
    x, weight, bias = case.inputs()

    def fused() -> Tensor:
        return conv2d(x, weight, bias, **case.sizes, activation="silu")

    def separate() -> Tensor:
        return F.silu(conv2d(x, weight, bias, **case.sizes))

    with torch.no_grad(), providers(CUDNN):
        cases.check_agreement(["out"], [fused()], [separate()], "the separate one's")
        times = device_times({"fused": fused, "separate": separate})
    return {"convolution": case.label} | {f"{name} µs": time for name, time in times.items()}


@contextmanager
def pytorch_benchmark() -> Iterator[None]:
    """While active, PyTorch times cuDNN's algorithms for each new shape.

    PyTorch keeps one plan for a shape, whether it was timed or not, and another if TF32 is off, which changes nothing
    else in bfloat16: so calls outside have left no plan for those within.
    """
    flags = torch.backends.cudnn
    before = flags.benchmark, flags.allow_tf32
    flags.benchmark, flags.allow_tf32 = True, False
    try:
        yield
    finally:
        flags.benchmark, flags.allow_tf32 = before


def _forward(case: Case) -> Row:
    x, weight, bias = case.inputs()
    sizes = case.sizes

    def plain(x: Tensor) -> Tensor:
        return conv2d(x, weight, **sizes)

    def fused(x: Tensor) -> Tensor:
        return conv2d(x, weight, bias, **sizes, activation="silu")

    expected = F.silu(F.conv2d(x, weight, bias, **sizes))
    cases.check_agreement(["out"], [fused(x)], [expected], "PyTorch's")
    cases.check_agreement(["out"], [plain(x)], [F.conv2d(x, weight, **sizes)], "PyTorch's")
    calls: dict[str, Call] = {"plain": lambda: plain(x), "fused": lambda: fused(x)}
    calls |= {"torch": lambda: F.conv2d(x, weight, **sizes)}
    calls |= {"torch fused": lambda: F.silu(F.conv2d(x, weight, bias, **sizes))}
    times = device_times(calls)
    with pytorch_benchmark():
        torch_times = device_times({f"{name} tuned": call for name, call in calls.items() if "torch" in name})
        tuned.settle(calls["fused"])
        cases.check_agreement(["out"], [fused(x)], [expected], "PyTorch's")
        tuned_times = device_times({"fused": calls["fused"], "torch fused": calls["torch fused"]})
    plan_cache.clear()
    return {
        "convolution": case.label,
        "plain µs": times["plain"],
        "pytorch µs": times["torch"],
        "pytorch, benchmark µs": torch_times["torch tuned"],
        "with bias, SiLU µs": times["fused"],
        "pytorch's µs": times["torch fused"],
        "pytorch's, benchmark µs": torch_times["torch fused tuned"],
        "pytorch's / ours": torch_times["torch fused tuned"] / times["fused"],
        "tuned µs": tuned_times["fused"],
        "pytorch's / tuned": tuned_times["torch fused"] / tuned_times["fused"],
    }


def _backward(case: Case) -> Row:
    x, weight, bias = inputs = case.inputs()
    for tensor in inputs:
        tensor.requires_grad_()
    sizes = case.sizes
    with pytorch_benchmark():
        outs = {"ours": conv2d(x, weight, bias, **sizes), "torch": F.conv2d(x, weight, bias, **sizes)}
        grad = torch.randn_like(outs["torch"])

        def gradients(name: str) -> tuple[Tensor, ...]:
            return torch.autograd.grad(outs[name], inputs, grad, retain_graph=True)

        names = ["grad_x", "grad_weight", "grad_bias"]
        cases.check_agreement(names, gradients("ours"), gradients("torch"), "PyTorch's")
        calls: dict[str, Call] = {"ours": lambda: gradients("ours"), "torch": lambda: gradients("torch")}
        times = device_times(calls)
        tuned.settle(lambda: gradients("ours"))
        cases.check_agreement(names, gradients("ours"), gradients("torch"), "PyTorch's")
        tuned_times = device_times(calls)
        plan_cache.clear()
    return {
        "convolution": case.label,
        "cudnn_sdpa µs": times["ours"],
        "tuned µs": tuned_times["ours"],
        "pytorch, benchmark µs": times["torch"],
        "pytorch / ours": times["torch"] / times["ours"],
        "pytorch / tuned": tuned_times["torch"] / tuned_times["ours"],
    }
