"""The CPU overhead of a training step of a small attention: part of `benchmarks host`."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import fused
from benchmarks.tools import peers
from benchmarks.tools.cases import Shape
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, host_times
from benchmarks.tools.ways import in_python, wait_for_native_calls
from cudnn_sdpa.attention.arguments import Needs
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.dense.drop_in import scaled_dot_product_attention
from cudnn_sdpa.attention.dense.sdpa import SDPA, sdpa
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.engine.native import build
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import plan_cache

SHAPE = Shape(batch=1, heads_q=8, heads_kv=8, length=128, dim=64, causal=False)

#: Rows and elements of a row for norms and gates.
ROWS = (512, 1024)

#: A round fits in the GPU's queue of launches, although a backward pass takes the GPU longer than the host.
CALLS_PER_ROUND = 50


class Empty(torch.autograd.Function):
    """Allocates the output and gradients of attention without computing them: the least time of an `autograd.Function`.

    It also allocates and saves a log-sum-exp, as attention does.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """An uninitialized output."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - autograd's signature
        """Uninitialized gradients."""
        q, k, v, _out, _lse = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def empty_in_cpp() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same as `Empty` with a node in C++, which is compiled."""
    sources = Path(__file__).parents[1] / "programs" / "empty_node"
    path = build.compile_module(sources)  # its digest has none of the headers that are the package's
    loader = ExtensionFileLoader("_empty_node", str(path))
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = module.attend
    return attend


class Launches(NamedTuple):
    """The launches of the plans of both passes on prepared operands."""

    forward: Call
    backward: Call


class Launching(Empty):
    """The same with the launches of both plans on prepared operands: the least time with cuDNN."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, launches: Launches) -> Tensor:  # type: ignore[override]
        """An uninitialized output."""
        launches.forward()
        ctx.launch = launches.backward
        return Empty.forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Uninitialized gradients."""
        ctx.launch()
        return (*Empty.backward(ctx, grad_out), None)


def _apply(launches: Launches, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = Launching.apply(q, k, v, launches)  # type: ignore[no-untyped-call]
    return out


def training() -> list[Row]:
    """CPU time of a forward and a backward pass, B=1, H=8, S=128, D=64, bfloat16, and its parts.

    Our own functions are called both ways: natively, and in Python.
    """
    wait_for_native_calls()
    q, k, v = SHAPE.tensors(requires_grad=True)
    grad_out = torch.randn_like(q)

    def step(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        def run() -> None:
            q.grad = k.grad = v.grad = None
            attend(q, k, v).backward(grad_out)  # type: ignore[no-untyped-call]

        return run

    launches = _launches(q, k, v, grad_out)
    ours = {
        "sdpa": step(sdpa),
        "drop-in": step(scaled_dot_product_attention),
        "sdpa, window": step(functools.partial(sdpa, window_size=(31, 0))),
        **_others(packed=[x[0].transpose(0, 1).contiguous() for x in (q.detach(), k.detach(), v.detach())]),
    }
    parts = {
        "empty node in C++": step(empty_in_cpp()),
        "empty autograd.Function": step(Empty.apply),
        "  with the launches of both plans": step(functools.partial(_apply, launches)),
        **_parts(q, k, v, grad_out),
    }
    pytorch = step(pytorch_attention)
    rounds = []
    for _ in range(5):  # PyTorch's backends have rounds of their own, because sdpa_kernel() is not part of a call
        times = host_times({**ours, **parts, **_eager()}, per_round=CALLS_PER_ROUND, rounds=20)
        with in_python():
            python = host_times(ours, per_round=CALLS_PER_ROUND, rounds=8)
        times |= {f"{name}, Python": time for name, time in python.items()}
        for name in peers.PYTORCH_BACKENDS:
            with peers.only(name):
                times |= host_times({name: pytorch}, per_round=CALLS_PER_ROUND, rounds=20)
        rounds.append(times)
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    order = [*ours, *peers.PYTORCH_BACKENDS, *_eager(), *parts]
    cudnn = best["pytorch cudnn"]
    return [
        {
            "forward and backward": name,
            "µs": best[name],
            "× pytorch cudnn": best[name] / cudnn,
            "in Python µs": best.get(f"{name}, Python"),
        }
        for name in order
    ]


def _pass(function: Callable[..., Tensor], *leaves: Tensor) -> Call:
    """A forward and a backward pass."""
    leaves = tuple(x.clone().requires_grad_() for x in leaves)
    grad = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def _others(packed: list[Tensor]) -> dict[str, Call]:
    length = packed[0].shape[0]
    cu_seqlens = torch.tensor((0, length), dtype=torch.int32, device=packed[0].device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=length,
            max_seqlen_kv=length,
        )

    return {
        "sdpa_varlen": _pass(attend, *packed),
        "rms_norm": _pass(rms_norm, *fused.norm_inputs(*ROWS)),
        "silu_mul": _pass(silu_mul, *fused.gate_inputs(*ROWS)),
    }


def both_passes() -> dict[str, Call]:
    """Forward and backward passes that return all that their launches write."""
    q, k, v = SHAPE.tensors(requires_grad=True)

    def call(function: Callable[..., Tensor], *leaves: Tensor) -> Call:
        leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
        grad = torch.randn_like(function(*leaves))

        def run() -> tuple[Tensor, ...]:
            out = function(*leaves)
            return out, *torch.autograd.grad(out, leaves, grad, retain_graph=True)

        return run

    return {
        "sdpa, forward and backward": call(sdpa, q, k, v),
        "rms_norm, forward and backward": call(rms_norm, *fused.norm_inputs(*ROWS)),
        "silu_mul, forward and backward": call(silu_mul, *fused.gate_inputs(*ROWS)),
    }


@functools.cache
def _eager() -> dict[str, Call]:
    """The same in PyTorch."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (ROWS[1],), weight, 1e-6)

    return {
        "pytorch rms_norm": _pass(norm, *fused.norm_inputs(*ROWS)),
        "pytorch silu, mul": _pass(lambda gate, up: torch.nn.functional.silu(gate) * up, *fused.gate_inputs(*ROWS)),
    }


def _launches(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Launches:
    """The launches of the plans of both passes, on operands that the functions keep alive."""
    for _ in range(3):
        torch.autograd.grad(sdpa(q, k, v), (q, k, v), grad_out)
    out, lse = sdpa(q.detach(), k.detach(), v.detach(), return_lse=True)
    of = _backward_call(q.detach(), k.detach(), v.detach(), grad_out=grad_out, out=out, lse=lse)
    target, device = live_target(q.get_device()), q.get_device()
    (forward,), (backward,) = of.call.keys(target, device), of.make_readable().keys(target, device)
    scale = array("f", [of.call.scale_value])

    def launch(key: PlanKey, **tensors: Tensor) -> Call:
        plan = plan_cache.peek(key)
        assert plan is not None
        known = {name: x.data_ptr() for name, x in {**plan.constants, **tensors}.items()}
        known["scale"] = scale.buffer_info()[0]
        pointers = [known[operand.name] for operand in (*key.inputs, *key.outputs)]

        def run(_alive: object = (tensors, scale)) -> None:
            plan.launch(pointers)

        return run

    saved = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "out": out, "lse": lse}
    gradients = {f"grad_{name}": torch.empty_like(saved[name]) for name in "qkv"}
    return Launches(
        forward=launch(forward, **saved), backward=launch(backward, **saved, grad_out=grad_out, **gradients)
    )


def _backward_call(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> SdpaBackwardCall:
    needs = Needs(q=True, k=True, v=True, attn_mask=False, sinks=False)
    return SdpaBackwardCall(grad_out=grad_out, out=out, lse=lse, call=SdpaCall(q, k, v, with_lse=True), needs=needs)


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's `scaled_dot_product_attention`, on the enabled backend."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _parts(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Call]:
    """Forward and backward pass, each with autograd and without."""
    detached = (q.detach(), k.detach(), v.detach())
    retained = sdpa(q, k, v)
    out, lse = sdpa(*detached, return_lse=True)
    backward = _backward_call(*detached, grad_out, out, lse)
    return {
        "of sdpa: forward call": lambda: sdpa(q, k, v),
        "  the same without autograd, return_lse": lambda: sdpa(*detached, return_lse=True),
        "of sdpa: torch.autograd.grad of a kept graph": lambda: torch.autograd.grad(
            retained, (q, k, v), grad_out, retain_graph=True
        ),
        "  the same without autograd": lambda: SDPA.gradients_on_gpu(backward),
    }
