"""What ranks without GPUs do about symmetric memory, as functions that each rank runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cudnn_sdpa.distributed.ulysses as by_exchange
from cudnn_sdpa import ArgumentError, DeviceError
from cudnn_sdpa.distributed import (
    collectives,
    context_parallel,
    context_parallel_varlen,
    disable_symmetric_memory,
    enable_symmetric_memory,
    shard,
)


def refusals() -> str:
    """Without GPUs every rank is told so, and goes on by its backend."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in (None, mesh):
        with pytest.raises(
            DeviceError, match=r"group: got cpu:gloo.* without GPUs; expected a group of GPUs with NCCL"
        ) as refused:
            enable_symmetric_memory(group)
        disable_symmetric_memory(group)
    for function in (enable_symmetric_memory, disable_symmetric_memory):
        with pytest.raises(ArgumentError, match="group: got int"):
            function(3)
    q, k, v = (shard(torch.randn(1, heads, 16, 16), 2) for heads in (4, 2, 2))
    wanted = context_parallel(q, k, v, is_causal=True)
    torch.testing.assert_close(context_parallel(q, k, v, is_causal=True, method="ulysses"), wanted)
    return str(refused.value)


def sent_and_foreseen() -> list[tuple[int, int]]:
    """The most bytes that a rank sends another at a time, and `max_message_bytes`, for several calls."""
    ranks, found = dist.get_world_size(), []
    exchange, largest = collectives.exchange, by_exchange.max_message_bytes
    for batch, heads, head_dims, is_packed, dropout_p in (
        (1, (4, 4), (16, 16), False, 0.0),
        (2, (8, 2), (16, 64), False, 0.0),
        (3, (8, 1), (32, 16), False, 0.2),
        (1, (8, 4), (64, 64), True, 0.0),
        (1, (8, 4), (16, 128), True, 0.0),
    ):
        bytes_to: list[int] = []
        foreseen: list[int] = []

        def counted(sent: Any, *rest: Any, bytes_to: list[int] = bytes_to) -> Any:
            of_ranks: Counter[int] = Counter()
            for tensor, rank in sent:
                of_ranks[rank] += tensor.nbytes
            assert len(of_ranks) == ranks - 1
            assert len(set(of_ranks.values())) == 1
            bytes_to.append(max(of_ranks.values()))
            return exchange(sent, *rest)

        sizes = [(heads[0], head_dims[0]), (heads[1], head_dims[0]), (heads[1], head_dims[1])]
        whole = [torch.randn(batch, 16 * ranks, *size) for size in sizes]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "exchange", counted)
            patch.setattr(by_exchange, "MIN_BYTES", 1)
            patch.setattr(
                by_exchange, "max_message_bytes", lambda *given, to=foreseen: to.append(largest(*given)) or to[-1]
            )
            if is_packed:
                leaves = [shard(x[0], 0).requires_grad_() for x in whole]
                offsets = torch.tensor([0, 9, 16 * ranks]).int()
                out = context_parallel_varlen(*leaves, offsets, 16 * ranks, method="ulysses")
            else:
                leaves = [shard(x.transpose(1, 2), 2).requires_grad_() for x in whole]
                out = context_parallel(*leaves, method="ulysses", dropout_p=dropout_p)
            out.sum().backward()
        found.append((max(bytes_to), *foreseen))
    return found
