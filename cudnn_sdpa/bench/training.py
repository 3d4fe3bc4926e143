"""What a training step of a tiny attention costs the host: part of `bench host`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import launch as dense_launch
from cudnn_sdpa.attention.dense import torch_ops
from cudnn_sdpa.attention.dense.drop_in import scaled_dot_product_attention
from cudnn_sdpa.attention.dense.launch import BoundCall
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.bench.tools import peers
from cudnn_sdpa.bench.tools.cases import Shape
from cudnn_sdpa.bench.tools.timing import Call, host_times

SHAPE = Shape(1, 8, 8, 128, 64, False)

#: A round stays shorter than the GPU's queue of launches: backward passes take the GPU longer than the host.
CALLS_IN_A_ROUND = 200


class Empty(torch.autograd.Function):
    """Allocates what attention and its gradients return, and computes nothing: the floor for any `autograd.Function`.

    The log-sum-exp is kept beside the output, as any attention keeps it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """An output without values."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # noqa: ARG004 - autograd's signature
        """Gradients without values."""
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class Launches(Empty):
    """The same with the launches of both plans, on operands that lie ready: the floor with cuDNN in it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *launches: Call) -> Tensor:
        """An output without values."""
        launches[0]()
        ctx.launch = launches[1]
        return Empty.forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """Gradients without values."""
        ctx.launch()
        return (*Empty.backward(ctx, grad_out), None, None)


def _apply(launches: tuple[Call, Call], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = Launches.apply(q, k, v, *launches)  # type: ignore[no-untyped-call]
    return out


def training() -> list[dict[str, Any]]:
    """Host time of a forward and a backward pass, B=1, H=8, S=128, D=64, bfloat16, beside its peers and in parts."""
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
        "empty autograd.Function": step(Empty.apply),
        "  with the launches of both plans": step(functools.partial(_apply, launches)),
        **_parts(q, k, v, grad_out),
    }
    pytorch = step(scaled_dot_product_attention_of_pytorch)
    rounds = []
    for _ in range(5):  # sdpa_kernel() is no part of a call, so PyTorch's backends alternate with ours by rounds
        times = host_times(ours, per_round=CALLS_IN_A_ROUND, rounds=5)
        for name in peers.PYTORCH_BACKENDS:
            with peers.only(name):
                times |= host_times({name: pytorch}, per_round=CALLS_IN_A_ROUND, rounds=5)
        rounds.append(times)
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    order = [*list(ours)[:2], *peers.PYTORCH_BACKENDS, *list(ours)[2:]]
    cudnn = best["pytorch cudnn"]
    return [{"forward and backward": name, "µs": best[name], "× pytorch cudnn": best[name] / cudnn} for name in order]


def _launches(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Call, Call]:
    """The launches of the plans of both passes, on operands of their own that live as long as the functions."""
    for _ in range(3):
        torch.autograd.grad(sdpa(q, k, v), (q, k, v), grad_out)
    prepared = dense_launch.calls.last.run.__self__
    backward = prepared.gradients._cached.call()
    bare = (q.detach(), k.detach(), v.detach())
    out, lse = prepared.forward.run_plain(*bare)
    gradients = backward.run_plain(*bare, out, grad_out, lse)

    def launch(call: BoundCall, **tensors: Tensor) -> Call:
        known = call._fixed | {name: tensor.data_ptr() for name, tensor in tensors.items()}
        pointers = [known[name] for name in call._names]

        def run(_operands: dict[str, Tensor] = tensors) -> None:
            call.plan.launch(pointers)

        return run

    operands = dict(zip("qkv", bare, strict=True))
    of_gradients = dict(zip(("grad_q", "grad_k", "grad_v"), gradients, strict=True))
    return (
        launch(prepared.forward, **operands, out=out, lse=lse),
        launch(backward, **operands, out=out, lse=lse, grad_out=grad_out, **of_gradients),
    )


def scaled_dot_product_attention_of_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own call, on whichever backend is enabled around it."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _parts(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Call]:
    """The two passes one by one, with autograd and without it."""
    bare = (q.detach(), k.detach(), v.detach())
    kept = sdpa(q, k, v)
    out, lse = sdpa(*bare, return_lse=True)
    call = ForwardArguments(*bare, with_lse=True)
    backward = BackwardArguments(grad_out, out, lse, call, False, Needs(True, True, True, False, False))
    return {
        "of sdpa: forward call": lambda: sdpa(q, k, v),
        "  the same without autograd, return_lse": lambda: sdpa(*bare, return_lse=True),
        "of sdpa: torch.autograd.grad of a kept graph": lambda: torch.autograd.grad(
            kept, (q, k, v), grad_out, retain_graph=True
        ),
        "  the same without autograd": lambda: torch_ops.run_backward_cuda(backward),
    }
