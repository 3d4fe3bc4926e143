"""`bench norm`, `bench silu` and `bench conv`: fused operations beside PyTorch, compiled and not, and a copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from cudnn_sdpa.bench.decode import COPIED, large_copy
from cudnn_sdpa.bench.tools import cases, tuned
from cudnn_sdpa.bench.tools.timing import Call, device_times, host_times
from cudnn_sdpa.engine.dispatch_state import tensor_guard
from cudnn_sdpa.engine.launch import GraphCall
from cudnn_sdpa.fused import activation, norm
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.fused.torch_ops import as_tuple
from cudnn_sdpa.graph import handles
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import plan_cache

Function = Callable[..., Tensor]

#: Rows and their length.
NORMS = ((16384, 8192), (16384, 4096), (16384, 2048), (4096, 4096), (131072, 128), (64, 8192))
GATES = ((16384, 8192), (4096, 14336), (8192, 11008), (2048, 4864), (64, 14336))
SMALL = (4, 1024)

EPS = 1e-6


def rms_norm_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    """What `rms_norm` is compared with."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def silu_mul_of_torch(gate: Tensor, up: Tensor) -> Tensor:
    """What `silu_mul` of two tensors is compared with."""
    return F.silu(gate) * up


def silu_mul_of_both(both: Tensor) -> Tensor:
    """What that of the halves of one is compared with."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def norm_of_sum_of_torch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `rms_norm` with a residual is compared with."""
    total = x + residual
    return rms_norm_of_torch(total, weight), total


def norm_with_silu_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    """What `rms_norm` with an activation is compared with."""
    return F.silu(rms_norm_of_torch(x, weight))


def norm_inputs(rows: int, size: int) -> tuple[Tensor, ...]:
    """Random x and weight."""
    return cases.normal(rows, size), cases.normal(size) * 0.3 + 1


def gate_inputs(rows: int, size: int) -> tuple[Tensor, ...]:
    """Random gate and up."""
    return cases.normal(rows, size), cases.normal(rows, size)


def norm_forward() -> list[dict[str, Any]]:
    """`rms_norm`: reads x and writes as much."""
    return [_forward(rms_norm, rms_norm_of_torch, shape, norm_inputs(*shape), 2) for shape in _each(NORMS)]


def norm_fused() -> list[dict[str, Any]]:
    """`rms_norm` of a sum, and with SiLU behind it, in one kernel; and in two, of which the other is PyTorch's."""
    rows = []
    for shape in _each(NORMS):
        x, weight = norm_inputs(*shape)
        of_sum, alone = (x, cases.normal(*shape), weight), (x, weight)
        rows.append(_fused("a sum", _norm_of_sum, norm_of_sum_of_torch, _sum_and_norm, shape, of_sum))
        rows.append(_fused("SiLU", _norm_with_silu, norm_with_silu_of_torch, _norm_and_silu, shape, alone))
    return rows


def _norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return rms_norm(x, weight, EPS, residual=residual)


def _sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    total = x + residual
    return rms_norm(total, weight, EPS), total


def _norm_with_silu(x: Tensor, weight: Tensor) -> Any:
    return rms_norm(x, weight, EPS, activation="silu")


def _norm_and_silu(x: Tensor, weight: Tensor) -> Any:
    return F.silu(rms_norm(x, weight, EPS))


def _fused(
    name: str, ours: Any, theirs: Any, in_two: Any, shape: tuple[int, int], inputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    in_one = compiled(theirs)

    def check(found: Any) -> None:
        results = as_tuple(found(*inputs))
        cases.check_agreement(("out", "sum")[: len(results)], results, as_tuple(theirs(*inputs)), "PyTorch's")

    calls = {"ours": ours, "two": in_two, "eager": theirs, "compiled": in_one}
    for found in calls.values():
        check(found)
    times = device_times({name: partial(call, *inputs) for name, call in calls.items()}, cold=True)
    tuned.settle(partial(ours, *inputs))
    check(ours)
    again = device_times({"ours": partial(ours, *inputs), "compiled": partial(in_one, *inputs)}, cold=True)
    plan_cache.clear()
    return {
        "rows, n": ", ".join(map(str, shape)),
        "with": name,
        "cudnn_sdpa µs": times["ours"],
        "two kernels µs": times["two"],
        "pytorch µs": times["eager"],
        "pytorch / ours": times["eager"] / times["ours"],
        "compiled µs": times["compiled"],
        "compiled / ours": times["compiled"] / times["ours"],
        "compiled / tuned": again["compiled"] / again["ours"],
    }


def norm_backward() -> list[dict[str, Any]]:
    """Its gradients by x and the weight: reads x and a gradient, writes one."""
    return [_backward(rms_norm, rms_norm_of_torch, shape, norm_inputs(*shape), 3) for shape in _each(NORMS)]


def silu_forward() -> list[dict[str, Any]]:
    """`silu_mul` of two tensors, and of the halves of one: reads both, writes half as much."""
    rows = []
    for shape in _each(GATES):
        rows.append(_forward(silu_mul, silu_mul_of_torch, shape, gate_inputs(*shape), 3))
        both = (cases.normal(shape[0], 2 * shape[1]),)
        rows.append(_forward(silu_mul, silu_mul_of_both, (*shape, "halves of one"), both, 3))
    return rows


def silu_backward() -> list[dict[str, Any]]:
    """Its gradients: reads a gradient and both, writes two."""
    rows = []
    for shape in _each(GATES):
        rows.append(_backward(silu_mul, silu_mul_of_torch, shape, gate_inputs(*shape), 5))
        both = (cases.normal(shape[0], 2 * shape[1]),)
        rows.append(_backward(silu_mul, silu_mul_of_both, (*shape, "halves of one"), both, 5))
    return rows


def norm_host() -> list[dict[str, Any]]:
    """Host time of a small warm `rms_norm`, and its parts."""
    return _host(rms_norm, rms_norm_of_torch, norm_inputs(*SMALL))


def silu_host() -> list[dict[str, Any]]:
    """Host time of a small warm `silu_mul`, and its parts."""
    return _host(silu_mul, silu_mul_of_torch, gate_inputs(*SMALL))


def _each(shapes: Sequence[tuple[int, int]]) -> Any:
    return track(shapes, "shapes", transient=True)


def compiled(function: Any) -> Function:
    """A function as `torch.compile` makes it for exactly these shapes."""
    torch._dynamo.reset()
    result: Function = torch.compile(function, dynamic=False)
    return result


def _forward(
    ours: Function, theirs: Function, shape: tuple[Any, ...], inputs: tuple[Tensor, ...], moved: int
) -> dict[str, Any]:
    """A row of a table; `moved` counts tensors (rows, n) that are read or written."""
    in_one = compiled(theirs)
    cases.check_agreement(["out"], [ours(*inputs)], [theirs(*inputs)], "PyTorch's")
    calls: dict[str, Call] = {
        "ours": lambda: ours(*inputs),
        "eager": lambda: theirs(*inputs),
        "compiled": lambda: in_one(*inputs),
        "copy": large_copy(),
    }
    row = _row(shape, device_times(calls, cold=True), moved, inputs[0].element_size())
    return {**row, "autotune's gain": tuned.gain(calls["ours"])}


def _backward(
    ours: Function, theirs: Function, shape: tuple[Any, ...], inputs: tuple[Tensor, ...], moved: int
) -> dict[str, Any]:
    inputs = tuple(tensor.requires_grad_() for tensor in inputs)
    outs = {"ours": ours(*inputs), "eager": theirs(*inputs), "compiled": compiled(theirs)(*inputs)}
    grad = torch.randn_like(outs["ours"])

    def gradients(name: str) -> Call:
        return lambda: torch.autograd.grad(outs[name], inputs, grad, retain_graph=True)

    found, expected = (torch.autograd.grad(outs[name], inputs, grad, retain_graph=True) for name in ("ours", "eager"))
    cases.check_agreement([f"gradient {number}" for number in range(len(inputs))], found, expected, "PyTorch's")
    times = device_times({**{name: gradients(name) for name in outs}, "copy": large_copy()}, cold=True)
    return _row(shape, times, moved, grad.element_size())


def _row(shape: tuple[Any, ...], times: dict[str, float], moved: int, size: int) -> dict[str, Any]:
    bytes_moved = moved * shape[0] * shape[1] * size
    return {
        "rows, n": ", ".join(map(str, shape)),
        "cudnn_sdpa µs": times["ours"],
        "of a copy's bandwidth": bytes_moved / times["ours"] / (2 * COPIED / times["copy"]),
        "pytorch µs": times["eager"],
        "pytorch / ours": times["eager"] / times["ours"],
        "compiled µs": times["compiled"],
        "compiled / ours": times["compiled"] / times["ours"],
    }


def _host(ours: Function, theirs: Function, inputs: tuple[Tensor, ...]) -> list[dict[str, Any]]:
    in_one = compiled(theirs)
    out = ours(*inputs)
    ours(*inputs)
    call = _last_call(ours)
    launch = _launch(call, inputs, out)
    guard, layout = tensor_guard(*inputs), (tuple(out.shape), out.stride(), out.dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(out)
    calls: dict[str, Call] = {
        "cudnn_sdpa": lambda: ours(*inputs),
        "  of it: cuDNN and the frontend's C++": launch,
        "  of it: an output": lambda: plans.allocate(*layout),
        "  of it: a look whether the call is like the last one": lambda: guard(*inputs),
        "pytorch": lambda: theirs(*inputs),
        "compiled": lambda: in_one(*inputs),
        "cudnn_sdpa, forward and backward": lambda: torch.autograd.grad(ours(*leaves), leaves, grad),
        "pytorch, forward and backward": lambda: torch.autograd.grad(theirs(*leaves), leaves, grad),
        "compiled, forward and backward": lambda: torch.autograd.grad(in_one(*leaves), leaves, grad),
    }
    times = host_times(calls, per_round=300, rounds=12)
    return [{"call": name, "µs": time, "× pytorch": time / times["pytorch"]} for name, time in times.items()]


def _last_call(ours: Function) -> GraphCall:
    """The bound call of a function's last call."""
    last = (norm._rms_norm_calls if ours is rms_norm else activation._SILU.calls)._calls.last
    assert last is not None
    return last.call


def _launch(call: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Call:
    """The launch of its plan and nothing else."""
    eps = array("f", [EPS])
    numbers = [eps.buffer_info()[0]] if call._numbers else []
    operands = array("Q", [*(x.data_ptr() for x in inputs), *numbers, out.data_ptr()])
    plan, slot = call.plan, handles.thread.slots[call.plan.device]
    workspace = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=out.device)
    address, count, of_workspace, handle = operands.buffer_info()[0], len(operands), workspace.data_ptr(), slot.raw
    kept = (eps, operands, workspace)
    return lambda: kept and plan._launch(address, count, of_workspace, handle, -1)
