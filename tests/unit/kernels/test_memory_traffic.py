"""The formulas of docs/kernels.md, against what the kernels read and write when they run thread by thread."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import EmulatedKernel, gpu_on_the_cpu

from cudnn_sdpa import kernels

BATCH, HEADS, SQ, SKV, DIM = 1, 2, 128, 256, 64
SCORES, OUT = BATCH * HEADS * SQ * SKV, 4 * BATCH * HEADS * SQ * DIM


@pytest.mark.parametrize(
    ("mode", "read", "written"),
    [
        ("naive", SCORES * (16 * DIM + 12), 8 * SCORES + OUT),
        ("tiled", SCORES * (DIM // 4 + 12), 8 * SCORES + OUT),
        ("fused", SCORES * DIM // 16 + OUT, OUT),
    ],
)
def test_bytes_read_and_written(mode, read, written):
    q, k, v = (torch.randn(BATCH, HEADS, size, DIM) for size in (SQ, SKV, SKV))
    EmulatedKernel.traffic[:] = 0, 0
    with gpu_on_the_cpu():
        kernels.attention(q, k, v, mode)
    assert EmulatedKernel.traffic == [read, written]
