"""Two processes train a block: `python distributed_training.py gloo|nccl PORT`. Run by tests; prints what agrees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from cudnn_sdpa import UnsupportedError, nn
from tests.unit.small_model import gradients, model_and_reference

PROCESSES = 2


def train(rank: int, backend: str, port: int) -> None:
    on_gpu = backend == "nccl"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    dtype, width = (torch.bfloat16, 256) if on_gpu else (torch.float32, 32)
    for name in ("ddp", "fsdp2", *(["fsdp2, compiled"] if on_gpu else [])):
        torch.manual_seed(7)
        ours, theirs = model_and_reference(device, dtype, width)
        x = torch.randn(2 * PROCESSES, 16, width, device=device, dtype=dtype)
        _, *expected = gradients(theirs, x)
        wrapped = wrap(name, ours, on_gpu=on_gpu)
        mine = x[2 * rank : 2 * rank + 2]
        wrapped(mine).float().square().mean().backward()
        for parameter, wanted in zip(ours.parameters(), expected, strict=True):
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            difference = (found - wanted).float().norm() / wanted.float().norm()
            assert difference < (3e-2 if on_gpu else 1e-5), (name, difference)
        if rank == 0:
            print(f"{name}: gradients agree", flush=True)
    divide(device, dtype, width)
    if rank == 0:
        print("tensor parallelism: right or refused", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def divide(device: str, dtype: torch.dtype, width: int) -> None:
    """Tensor parallelism by rows of the projections: each module matches a single process, or raises."""
    mesh = dist.device_mesh.init_device_mesh(torch.device(device).type, (PROCESSES,))
    made = {"device": device, "dtype": dtype}
    x = torch.randn(2, 16, width, **made)
    by_rows, by_columns = ColwiseParallel(), RowwiseParallel()
    of_all = RowwiseParallel(input_layouts=Replicate())  # all outputs in each process: packed projections stay whole
    heads = {"num_heads": 4, "context_dim": width, **made}
    cases = [
        ("gate_up_proj", nn.SwiGLU(width, 2 * width, **made), {"gate_up_proj": by_rows, "down_proj": by_columns}),
        ("qkv_proj", nn.Attention(width, 4, **made), {"qkv_proj": by_rows, "out_proj": by_columns}),
        (
            "q_proj",
            nn.Attention(width, **heads),
            {"q_proj": by_rows, "kv_proj": by_rows, "out_proj": by_columns},
        ),
        ("q_proj", nn.Attention(width, num_kv_heads=2, **heads), {"q_proj": by_rows, "out_proj": by_columns}),
        ("kv_proj", nn.Attention(width, **heads), {"kv_proj": by_rows}),
        (None, nn.Attention(width, num_kv_heads=1, **heads), {"q_proj": by_rows, "out_proj": by_columns}),
        (None, nn.FeedForward(width, 2 * width, **made), {"linear1": by_rows, "linear2": by_columns}),
        (None, nn.SwiGLU(width, 2 * width, **made), {"gate_up_proj": of_all}),
    ]
    for refused, module, plan in cases:
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        dist.broadcast(x, 0)
        given = (x, x) if getattr(module, "context_dim", None) else (x,)
        expected = module(*given).detach()
        divided = parallelize_module(module, mesh, plan)
        if refused is None:
            difference = (divided(*given) - expected).float().norm() / expected.float().norm()
            assert difference < (3e-2 if device != "cpu" else 1e-5), (plan, difference)
            continue
        with pytest.raises(UnsupportedError, match=rf"{refused} returned \d+ of its(.|\n)*fully_shard"):
            divided(*given)


def wrap(name: str, model: torch.nn.Module, *, on_gpu: bool) -> torch.nn.Module:
    if name == "ddp":
        return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if on_gpu else None)
    mesh = dist.device_mesh.init_device_mesh("cuda" if on_gpu else "cpu", (PROCESSES,))
    fully_shard(model, mesh=mesh)
    if name.endswith("compiled"):
        model.compile(backend="aot_eager")
    return model


if __name__ == "__main__":
    how = "spawn" if sys.argv[1] == "nccl" else "fork"  # without CUDA, a fork saves the imports
    mp.start_processes(train, args=(sys.argv[1], int(sys.argv[2])), nprocs=PROCESSES, start_method=how)
