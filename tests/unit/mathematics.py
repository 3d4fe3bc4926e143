"""Attention in float64, written a second time with explicit loops over positions, differentiable by autograd.

It shares no formula with the library: what a query sees is decided key by key, the softmax is PyTorch's own over the
visible scores with the sink as one more column, and gradients come from autograd.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "sinks")


def sees(i: int, j: int, nq: int, nk: int, options: dict[str, Any]) -> bool:
    """Whether query i of nq sees key j of nk."""
    if i >= nq or j >= nk:
        return False
    diagonal = i + nk - nq if options.get("causal_alignment") == "bottom_right" else i
    left, right = options.get("window") or (-1, -1)
    if options.get("is_causal") and j > diagonal:
        return False
    return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)


def seen_keys(batch: int, sq: int, skv: int, options: dict[str, Any]) -> Tensor:
    """Booleans (B, 1, Sq, Skv)."""
    lengths = [options.get(name) for name in ("seq_lens_q", "seq_lens_kv")]
    rows = []
    for b in range(batch):
        nq, nk = (n if given is None else int(given[b]) for n, given in zip((sq, skv), lengths, strict=True))
        rows.append([[sees(i, j, nq, nk, options) for j in range(skv)] for i in range(sq)])
    return torch.tensor(rows, dtype=torch.bool).view(batch, 1, sq, skv)


def slopes(heads: int) -> list[float]:
    """Of the linear biases: a geometric series for a power of two, filled up from the series of twice as many."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * (n + 1) / heads) for n in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return slopes(below) + slopes(2 * below)[::2][: heads - below]


def attend(q: Tensor, k: Tensor, v: Tensor, *, kept: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        kept: Which weights dropout keeps.
        **options: Those of `sdpa`; what is not said is off.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scale = options.get("scale")
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    if options.get("softcap") is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    seen = seen_keys(q.shape[0], q.shape[2], k.shape[2], options)
    if options.get("alibi"):  # aligned top-left: the diagonal of query i is key i
        distance = torch.tensor([[abs(i - j) for j in range(k.shape[2])] for i in range(q.shape[2])])
        scores = scores - torch.tensor(slopes(q.shape[1]), dtype=torch.float64).view(-1, 1, 1) * distance
    mask = options.get("attn_mask")
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else ~mask.isneginf())
        scores = scores if mask.dtype == torch.bool else scores + mask.double().masked_fill(mask.isneginf(), 0.0)
    seen = seen.expand_as(scores)
    columns = [torch.where(seen, scores, -math.inf)]
    if options.get("sinks") is not None:
        columns.append(options["sinks"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1))
    else:  # a column for the rows that see nothing, which no other row sees
        columns.append(torch.where(seen.any(-1, keepdim=True), -math.inf, 0.0).double())
    everything = torch.cat(columns, dim=-1)
    weights = torch.softmax(everything, dim=-1)[..., :-1]
    lse = torch.logsumexp(everything, dim=-1).detach()
    if options.get("sinks") is None:
        lse = torch.where(seen.any(-1), lse, -math.inf)
    if kept is not None:
        weights = weights * kept / (1 - options["dropout_p"])
    return weights @ values, lse


def gradients(
    tensors: dict[str, Tensor], grad_out: Tensor, *, kept: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, log-sum-exp, and the gradients by those of `tensors` that are differentiable."""
    leaves = {
        name: x.detach().double().requires_grad_() if name in DIFFERENTIABLE and x.is_floating_point() else x
        for name, x in tensors.items()
    }
    out, lse = attend(**leaves, kept=kept, **options)
    wanted = [name for name in DIFFERENTIABLE if name in leaves and leaves[name].requires_grad]
    found = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out.double(), allow_unused=True)
    zeros = (torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(wanted, found, strict=True))
    return out.detach(), lse, dict(zip(wanted, zeros, strict=True))
