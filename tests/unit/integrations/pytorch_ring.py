"""PyTorch's DTensor rules and ring attention over this library's kernels: functions that each rank of a group runs."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as context
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from cudnn_sdpa import sdpa
from cudnn_sdpa.integrations.pytorch import register, unregister

forward = torch.ops.aten._scaled_dot_product_cudnn_attention


def attend(q, k, v, *, is_causal):
    """What PyTorch's `scaled_dot_product_attention` does on a GPU with the cuDNN backend."""
    return forward(q, k, v, None, True, 0.0, is_causal)[0]


def error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check(found, wanted, name):
    worst = max(map(error, found, wanted))
    assert worst < 1e-5, (name, worst)


class Case:
    """Inputs, and what one process makes of them."""

    def __init__(self, heads_kv: int, is_causal: bool) -> None:
        length = 16 * dist.get_world_size()
        torch.manual_seed(heads_kv)
        *self.inputs, self.grad_out = (torch.randn(4, h, length, 8) for h in (8, heads_kv, heads_kv, 8))
        self.is_causal = is_causal
        leaves = [x.clone().requires_grad_() for x in self.inputs]
        out = sdpa(*leaves, is_causal=is_causal)
        self.wanted = (out, *torch.autograd.grad(out, leaves, self.grad_out))


def shard_operators(mesh) -> int:
    cases = ((Shard(0), 4), (Shard(1), 4), (Shard(1), 8))
    for placement, heads_kv in cases:
        case = Case(heads_kv, is_causal=True)
        leaves = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in case.inputs]
        out = attend(*leaves, is_causal=True)
        grads = torch.autograd.grad(out, leaves, distribute_tensor(case.grad_out, mesh, [placement]))
        check([x.full_tensor() for x in (out, *grads)], case.wanted, (placement, heads_kv))
    return len(cases)


def rotate(mesh) -> int:
    ranks, number = mesh.size(), 0
    for method in ("allgather", "alltoall"):
        context.set_rotate_method(method)
        for is_causal, is_balanced, heads_kv in ((True, True, 8), (True, False, 8), (False, False, 8), (True, True, 4)):
            case = Case(heads_kv, is_causal)
            balancer = context._HeadTailLoadBalancer(16 * ranks, ranks, "cpu") if is_balanced else None
            tensors = [x.clone() for x in (*case.inputs, case.grad_out)]
            *parts, grad_part = context._context_parallel_shard(mesh, tensors, [2] * 4, balancer)
            context._enable_context_parallel_dispatcher()
            try:
                leaves = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False).requires_grad_() for x in parts]
                out = attend(*leaves, is_causal=is_causal)
                grad_out = DTensor.from_local(grad_part, mesh, [Shard(2)], run_check=False)
                grads = torch.autograd.grad(out, leaves, grad_out)
            finally:
                context._disable_context_parallel_dispatcher()
            local = [x.to_local().detach() for x in (out, *grads)]
            whole = context.context_parallel_unshard(mesh, local, [2] * 4, balancer)
            check(whole, case.wanted, (method, is_causal, is_balanced, heads_kv))
            number += 1
    context.set_rotate_method("allgather")  # PyTorch's default
    return number


def in_context(mesh) -> int:
    """The context manager, around the attention that PyTorch would choose on a GPU."""
    case = Case(8, is_causal=True)
    buffers = [x.clone() for x in (*case.inputs, case.grad_out)]

    def scaled_dot_product_attention(q, k, v, *, is_causal):  # the name by which the context manager replaces it
        return attend(q, k, v, is_causal=is_causal)

    with (
        mock.patch.object(functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        *inputs, grad_out = buffers
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        out.backward(grad_out)
        local = [out.detach(), *(x.grad for x in leaves)]
    balancer = context._HeadTailLoadBalancer(16 * mesh.size(), mesh.size(), "cpu")
    check(context.context_parallel_unshard(mesh, local, [2] * 4, balancer), case.wanted, "context_parallel")
    return 1


def run(part: Callable[[DeviceMesh], int]) -> int:
    """How many cases of a part agree with one process."""
    register(device="cpu")
    try:
        return part(init_device_mesh("cpu", (dist.get_world_size(),)))
    finally:
        unregister()
