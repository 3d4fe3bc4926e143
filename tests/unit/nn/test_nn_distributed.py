"""Modules under PyTorch's distributed wrappers, in two processes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import cudnn_sdpa
from cudnn_sdpa import nn

if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make():
    rope = nn.RotaryEmbedding(8)
    return nn.TransformerLayer(32, 4, 48, num_kv_heads=2, is_causal=True, sinks=True, rope=rope)


def ddp(plain):
    return torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))


def fsdp2(plain):
    """Of a module that gets its memory and its weights afterwards."""
    with torch.device("meta"):
        sharded = make()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded.to_empty(device="cpu")
    set_model_state_dict(sharded, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    return sharded


def check_wrapped(wrap):
    """Each rank has some of the batch: the mean of the ranks' gradients is that of the mean loss."""
    with cudnn_sdpa.cpu_checks(None):  # the layers have sinks, which cuDNN lacks before 9.13
        plain = make()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        x, grad = torch.randn(2 * ranks, 9, 32), torch.randn(2 * ranks, 9, 32)
        expected = plain(x)
        wanted = torch.autograd.grad(expected, list(plain.parameters()), grad / ranks)
        wrapped = wrap(plain)
        mine = slice(2 * rank, 2 * rank + 2)
        out = wrapped(x[mine])
        out.backward(grad[mine])
        torch.testing.assert_close(out, expected[mine])
        for one, other in zip(wrapped.parameters(), wanted, strict=True):
            found = one.grad.full_tensor() if wrap is fsdp2 else one.grad
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
        return len(wanted)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_wrapped_modules_compute_the_same(ranks, wrap):
    gradients = len(list(make().parameters()))
    assert ranks(check_wrapped, wrap) == [gradients] * 2
