"""The same mathematics in plain PyTorch: what CPU tensors run, and what tests compare with.

Memory grows with Sq × Skv. Half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cudnn_sdpa.attention.options import BOTTOM_RIGHT


def visible(
    sq: int,
    skv: int,
    *,
    is_causal: bool,
    causal_alignment: str,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which key each query sees, as booleans of shape (B or 1, 1, Sq, Skv)."""
    row = torch.arange(sq, device=device).view(1, 1, sq, 1)
    column = torch.arange(skv, device=device).view(1, 1, 1, skv)
    lengths_q = sq if seq_lens_q is None else seq_lens_q.clamp(0, sq).view(-1, 1, 1, 1).to(device)
    lengths_kv = skv if seq_lens_kv is None else seq_lens_kv.clamp(0, skv).view(-1, 1, 1, 1).to(device)
    seen = (row < lengths_q) & (column < lengths_kv)
    if is_causal:
        diagonal = lengths_kv - lengths_q if causal_alignment == BOTTOM_RIGHT else 0
        seen = seen & (column <= row + diagonal)
    return seen


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over the keys that each query sees.

    Args:
        q: Queries (B, Hq, Sq, D).
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        seen: Booleans broadcastable to (B, 1, Sq, Skv).
        scale: Factor of the scores.

    Returns:
        The output (B, Hq, Sq, Dv) and the log-sum-exp (B, Hq, Sq), both in the precision of the computation. A query
        that sees nothing gets zeros and minus infinity.
    """
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads_q, sq, _ = q.shape
    heads_kv, skv = k.shape[1], k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        grouped = q.to(precision).reshape(batch, heads_kv, heads_q // heads_kv, sq, q.shape[3])
        scores = torch.matmul(grouped, k.to(precision).unsqueeze(2).transpose(-1, -2)) * scale
        scores = scores.masked_fill(~seen.unsqueeze(2), -math.inf)
        lse = torch.logsumexp(scores, dim=-1) if skv > 0 else scores.new_full(scores.shape[:-1], -math.inf)
        # Rows that see nothing have lse = -inf; any finite number in its place makes all their weights exp(-inf) = 0.
        weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1))
        out = torch.matmul(weights, v.to(precision).unsqueeze(2))
    return out.reshape(batch, heads_q, sq, v.shape[3]), lse.reshape(batch, heads_q, sq)
