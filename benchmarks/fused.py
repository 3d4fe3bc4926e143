"""`benchmarks norm` and `silu`: fused operations compared with PyTorch, eager and compiled, and with a copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases, tuned
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, host_times
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.activation_graphs import silu_mul_gradients, silu_mul_rows
from cudnn_sdpa.fused.activation_tiling import split
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import GraphFunction, Views, as_tuple, graph_op
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.providers import CUDNN, providers

Function = Callable[..., Tensor]
Results: TypeAlias = Tensor | tuple[Tensor, ...]
Result = TypeVar("Result")

#: Rows and their length.
NORMS = ((16384, 8192), (16384, 4096), (16384, 2048), (4096, 4096), (131072, 128), (64, 8192))
GATES = ((16384, 8192), (4096, 14336), (8192, 11008), (2048, 4864), (64, 14336))
SMALL = (4, 1024)

EPS = 1e-6


def pytorch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's `rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def pytorch_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_mul` of two tensors in PyTorch."""
    return F.silu(gate) * up


def pytorch_packed_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` of the halves of one tensor in PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def pytorch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`rms_norm` with a residual in PyTorch."""
    total = x + residual
    return pytorch_rms_norm(total, weight), total


def pytorch_rms_norm_silu(x: Tensor, weight: Tensor) -> Tensor:
    """`rms_norm` with an activation in PyTorch."""
    return F.silu(pytorch_rms_norm(x, weight))


def norm_inputs(rows: int, size: int) -> tuple[Tensor, ...]:
    """Random x and weight."""
    return cases.normal(rows, size), cases.normal(size) * 0.3 + 1


def gate_inputs(rows: int, size: int) -> tuple[Tensor, ...]:
    """Random gate and up."""
    return cases.normal(rows, size), cases.normal(rows, size)


def packed_gate_inputs(rows: int, size: int) -> tuple[Tensor, ...]:
    """Random gate and up as the halves of one tensor."""
    return (cases.normal(rows, 2 * size),)


def norm_forward() -> list[Row]:
    """`rms_norm`: reads x and writes as much."""
    return [_forward(rms_norm, pytorch_rms_norm, norm_inputs(*shape), shape=shape, moved=2) for shape in _each(NORMS)]


def norm_fused() -> list[Row]:
    """`rms_norm` with a residual or with SiLU in one kernel, compared with the same in two kernels."""
    rows = []
    for shape in _each(NORMS):
        x, weight = norm_inputs(*shape)
        rows += [
            _fused(
                "a sum",
                (x, cases.normal(*shape), weight),
                fused=_add_rms_norm,
                separate=_add_then_rms_norm,
                theirs=pytorch_add_rms_norm,
            ),
            _fused(
                "SiLU",
                (x, weight),
                fused=_rms_norm_silu,
                separate=_rms_norm_then_silu,
                theirs=pytorch_rms_norm_silu,
            ),
        ]
    return rows


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm(x, weight, EPS, residual=residual)


def _add_then_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, EPS), total


def _rms_norm_silu(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS, activation="silu")


def _rms_norm_then_silu(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(rms_norm(x, weight, EPS))


def _fused(
    name: str,
    inputs: tuple[Tensor, ...],
    *,
    fused: Callable[..., Results],
    separate: Callable[..., Results],
    theirs: Callable[..., Results],
) -> Row:
    """A row of `norm_fused`: `fused` is one kernel of cuDNN, `separate` one of cuDNN and one of PyTorch."""
    compiled_theirs = compiled(theirs)

    def check(function: Callable[..., Results]) -> None:
        results = as_tuple(function(*inputs))
        names = ("out",) if len(results) == 1 else ("out", "sum")
        cases.check_agreement(names, results, as_tuple(theirs(*inputs)), "PyTorch's")

    functions = {"ours": fused, "two": separate, "eager": theirs, "compiled": compiled_theirs}
    for function in functions.values():
        check(function)
    times = device_times({name: partial(function, *inputs) for name, function in functions.items()}, cold=True)
    ours = partial(fused, *inputs)
    tuned.settle(ours)
    check(fused)
    tuned_times = device_times({"ours": ours, "compiled": partial(compiled_theirs, *inputs)}, cold=True)
    plan_cache.clear()
    return {
        "rows, n": ", ".join(map(str, inputs[0].shape)),
        "with": name,
        "cudnn_sdpa µs": times["ours"],
        "two kernels µs": times["two"],
        "pytorch µs": times["eager"],
        "pytorch / ours": times["eager"] / times["ours"],
        "compiled µs": times["compiled"],
        "compiled / ours": times["compiled"] / times["ours"],
        "compiled / tuned": tuned_times["compiled"] / tuned_times["ours"],
    }


def norm_backward() -> list[Row]:
    """Gradients of x and weight: reads x and a gradient, writes one."""
    return [_backward(rms_norm, pytorch_rms_norm, norm_inputs(*shape), shape=shape, moved=3) for shape in _each(NORMS)]


def silu_forward() -> list[Row]:
    """`silu_mul` of two tensors, and of the halves of one: reads both, writes half as much."""
    rows = []
    for shape in _each(GATES):
        halves = packed_gate_inputs(*shape)
        rows += [
            _forward(silu_mul, pytorch_silu_mul, gate_inputs(*shape), shape=shape, moved=3),
            _forward(silu_mul, pytorch_packed_silu_mul, halves, shape=shape, moved=3, note="halves of one"),
        ]
    return rows


def silu_backward() -> list[Row]:
    """Gradients of gate and up: reads a gradient and both, writes two."""
    rows = []
    for shape in _each(GATES):
        halves = packed_gate_inputs(*shape)
        rows += [
            _backward(silu_mul, pytorch_silu_mul, gate_inputs(*shape), shape=shape, moved=5),
            _backward(silu_mul, pytorch_packed_silu_mul, halves, shape=shape, moved=5, note="halves of one"),
        ]
    return rows


def _as_rows(operands: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """Tensors (rows, n) as one matrix each, which is how they are given; of one tensor for gate and up, its halves."""
    *others, last = operands
    if last is None:
        *before, both = others
        operands = [*before, *split(both)]
        results = [half for result in results for half in result.chunk(2, dim=-1)] if before else results
    return [x.unsqueeze(0) for x in operands if isinstance(x, Tensor)], [x.unsqueeze(0) for x in results], options


def _untiled(function: GraphFunction) -> GraphFunction:
    """The same graph on tensors as they are, without the views that make it fast."""
    return graph_op(reference=function.reference, readable=function.readable, views=_as_rows)(function._builder)


def silu_views() -> list[Row]:
    """`silu_mul` and its gradients in the views that this library passes to cuDNN, and on rows as they are given."""
    with providers(CUDNN):
        return _silu_views()


def _silu_views() -> list[Row]:
    rows = []
    forward, backward = _untiled(silu_mul_rows), _untiled(silu_mul_gradients)
    for shape in _each(GATES):
        grad = cases.normal(*shape)
        for note, inputs in (("", gate_inputs(*shape)), (", halves of one", (*packed_gate_inputs(*shape), None))):
            both = {
                "forward": (silu_mul_rows, forward, inputs),
                "backward": (silu_mul_gradients, backward, (grad, *inputs)),
            }
            row: Row = {"rows, n": ", ".join(map(str, shape)) + note}
            for name, (tiled, untiled, operands) in both.items():
                found, expected = (as_tuple(function(*operands)) for function in (untiled, tiled))
                cases.check_agreement([f"result {n}" for n in range(len(found))], found, expected, "the tiled views'")
                calls = {"in views": partial(tiled, *operands), "as rows": partial(untiled, *operands)}
                times = device_times(calls, cold=True)
                row |= {f"{name}, {kind} µs": time for kind, time in times.items()}
                row[f"{name}, gain"] = times["as rows"] / times["in views"]
            rows.append(row)
    return rows


def norm_host() -> list[Row]:
    """CPU time of a small warm `rms_norm`, and its parts."""
    return _host(rms_norm, pytorch_rms_norm, norm_inputs(*SMALL))


def silu_host() -> list[Row]:
    """CPU time of a small warm `silu_mul`, and its parts."""
    return _host(silu_mul, pytorch_silu_mul, gate_inputs(*SMALL))


def _each(shapes: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    return track(shapes, "shapes", transient=True)


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function compiled for exactly the shapes of its calls."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _forward(
    ours: Function,
    theirs: Function,
    inputs: tuple[Tensor, ...],
    *,
    shape: tuple[int, int],
    moved: int,
    note: str | None = None,
) -> Row:
    """A row of a table; `moved` tensors (rows, n) are read or written."""
    compiled_theirs = compiled(theirs)
    cases.check_agreement(["out"], [ours(*inputs)], [theirs(*inputs)], "PyTorch's")
    calls: dict[str, Call] = {
        "ours": lambda: ours(*inputs),
        "eager": lambda: theirs(*inputs),
        "compiled": lambda: compiled_theirs(*inputs),
        "copy": cases.large_copy(),
    }
    times = device_times(calls, cold=True)
    row = _row(times, shape=shape, bytes_moved=_bytes(inputs[0], shape, moved), note=note)
    return {**row, "autotune's gain": tuned.gain(calls["ours"])}


def _backward(
    ours: Function,
    theirs: Function,
    inputs: tuple[Tensor, ...],
    *,
    shape: tuple[int, int],
    moved: int,
    note: str | None = None,
) -> Row:
    inputs = tuple(tensor.requires_grad_() for tensor in inputs)
    outs = {"ours": ours(*inputs), "eager": theirs(*inputs), "compiled": compiled(theirs)(*inputs)}
    grad = torch.randn_like(outs["ours"])

    def gradients(name: str) -> Call:
        return lambda: torch.autograd.grad(outs[name], inputs, grad, retain_graph=True)

    actual, expected = (torch.autograd.grad(outs[name], inputs, grad, retain_graph=True) for name in ("ours", "eager"))
    cases.check_agreement([f"gradient {number}" for number in range(len(inputs))], actual, expected, "PyTorch's")
    times = device_times({**{name: gradients(name) for name in outs}, "copy": cases.large_copy()}, cold=True)
    return _row(times, shape=shape, bytes_moved=_bytes(grad, shape, moved), note=note)


def _bytes(like: Tensor, shape: tuple[int, int], count: int) -> int:
    """The size of `count` tensors of a shape."""
    rows, size = shape
    return count * rows * size * like.element_size()


def _row(times: dict[str, float], *, shape: tuple[int, int], bytes_moved: int, note: str | None) -> Row:
    label = ", ".join(map(str, shape))
    return {
        "rows, n": label if note is None else f"{label}, {note}",
        "cudnn_sdpa µs": times["ours"],
        "of a copy's bandwidth": bytes_moved / times["ours"] / (2 * cases.COPIED / times["copy"]),
        "pytorch µs": times["eager"],
        "pytorch / ours": times["eager"] / times["ours"],
        "compiled µs": times["compiled"],
        "compiled / ours": times["compiled"] / times["ours"],
    }


def _host(ours: Function, theirs: Function, inputs: tuple[Tensor, ...]) -> list[Row]:
    compiled_theirs = compiled(theirs)
    with providers(CUDNN):
        out = ours(*inputs)
        ours(*inputs)
        launch = _launch(_last_plan(), inputs, out)
    ours(*inputs)
    layout = tuple(out.shape), out.stride(), out.dtype
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(out)
    calls: dict[str, Call] = {
        "cudnn_sdpa": lambda: ours(*inputs),
        "cuDNN and the frontend's C++ for the same": launch,
        "  of it: an output": lambda: plans.allocate(*layout),
        "pytorch": lambda: theirs(*inputs),
        "compiled": lambda: compiled_theirs(*inputs),
        "cudnn_sdpa, forward and backward": lambda: torch.autograd.grad(ours(*leaves), leaves, grad),
        "pytorch, forward and backward": lambda: torch.autograd.grad(theirs(*leaves), leaves, grad),
        "compiled, forward and backward": lambda: torch.autograd.grad(compiled_theirs(*leaves), leaves, grad),
    }
    times = host_times(calls, per_round=300, rounds=12)
    return [{"call": name, "µs": time, "× pytorch": time / times["pytorch"]} for name, time in times.items()]


def _last_plan() -> Plan:
    return max(plan_cache.plans(), key=lambda plan: plan.last_used)


def _launch(plan: Plan, inputs: tuple[Tensor, ...], out: Tensor) -> Call:
    """Only the launch of a plan."""
    eps = array("f", [EPS])
    eps_pointer, _ = eps.buffer_info()
    numbers = [eps_pointer] if any(operand.role is Role.SCALAR for operand in plan.key.inputs) else []
    operands = array("Q", [*(x.data_ptr() for x in inputs), *numbers, out.data_ptr()])
    slot = handles.thread.slots[plan.device]
    workspace = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=out.device)
    (address, count), workspace_pointer, handle = operands.buffer_info(), workspace.data_ptr(), slot.raw
    alive = (eps, operands, workspace)  # the launch has only their addresses
    # The values of `_launch` are in the order of `backend.Execute`.
    return lambda: alive and plan._execute(address, count, workspace_pointer, handle, -1)
