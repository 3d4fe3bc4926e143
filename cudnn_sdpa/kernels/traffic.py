"""How many bytes the kernels read and write in global memory, by formulas that tests compare with counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cudnn_sdpa.kernels.arguments import FUSED, NAIVE
from cudnn_sdpa.kernels.plans import TILE, fused_rows

_BYTES = torch.float32.itemsize


class Traffic(NamedTuple):
    """Bytes of a forward pass.

    Attributes:
        read: Read from global memory; caches serve a part of it.
        kept: Of all scores, which stay there between one kernel and the next.
    """

    read: int
    written: int
    kept: int


def forward_traffic(mode: str, *, batch: int, heads: int, sq: int, skv: int, dim: int, sm: int = 90) -> Traffic:
    """What a forward pass in float32 without a mask asks for.

    Args:
        mode: "naive", "tiled" or "fused".
        batch: Batch entries.
        heads: Heads of queries: those that share keys read them once each.
        sq: Queries.
        skv: Keys.
        dim: Head dim.
        sm: Compute capability times ten, whose shared memory decides how many queries a block of the fused form keeps.
    """
    all_heads = batch * heads
    scores, out = _BYTES * all_heads * sq * skv, _BYTES * all_heads * sq * dim
    if mode == FUSED:
        passes = -(-sq // fused_rows(torch.float32, dim, sm))
        return Traffic(out + passes * 2 * _BYTES * all_heads * skv * dim, out, 0)
    softmax = 3 * scores
    if mode == NAIVE:  # each score reads a query and a key, each number of the output all its weights and values
        return Traffic(2 * dim * scores + softmax + 2 * dim * scores, 2 * scores + out, scores)
    of_queries, of_keys, of_columns = (-(-size // TILE) for size in (sq, skv, dim))
    queries, keys = _BYTES * all_heads * sq * dim, _BYTES * all_heads * skv * dim
    read = of_keys * queries + of_queries * keys + softmax + of_columns * scores + of_queries * keys
    return Traffic(read, 2 * scores + out, scores)
