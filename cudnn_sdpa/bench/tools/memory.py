"""Peak memory of a call."""

from __future__ import annotations

import gc

import torch

from cudnn_sdpa.bench.tools.timing import Call


def peak_memory(step: Call) -> int:
    """Bytes of PyTorch's allocator at the peak of a step, minus those before."""
    step()  # allocates plans, handles, and memory that libraries keep
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
