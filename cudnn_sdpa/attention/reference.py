"""The same mathematics in plain PyTorch: what CPU tensors run, and what tests compare with.

Memory grows with Sq × Skv. Half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, UNBOUNDED


class Scores(NamedTuple):
    """What the softmax sees, and what its gradient needs.

    Attributes:
        masked: The scores (B, Hq, Sq, Skv); −inf where a query does not see a key.
        slope: The derivative of the soft cap there, or None without one.
    """

    masked: Tensor
    slope: Tensor | None


def attention(call: ForwardArguments) -> tuple[Tensor, Tensor]:
    """The output (B, Hq, Sq, Dv) and the log-sum-exp (B, Hq, Sq), both in the precision of the computation.

    A query that sees nothing gets zeros and minus infinity, or the sink alone.
    """
    with without_autocast(call.q):
        masked = scores(call).masked
        lse = _lse(masked, call.sinks)
        weights = _weights(masked, lse)
        if call.dropout_p > 0:
            weights = weights * kept(call, weights.shape, weights.dtype)
        return torch.matmul(weights, repeated(call.v, call.q, precision(call))), lse


def gradients(
    grad_out: Tensor, out: Tensor, call: ForwardArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients by q, k, v, attn_mask and sinks, in the precision of the computation.

    The formulas are those of FlashAttention-2 (Dao, 2023), section 2.3.2. The gradient by the mask has the shape of the
    scores.
    """
    exact = precision(call)
    with without_autocast(call.q):
        q, grad_out = call.q.to(exact), grad_out.to(exact)
        k, v = repeated(call.k, q, exact), repeated(call.v, q, exact)
        masked, slope = scores(call)
        lse = _lse(masked, call.sinks)  # again, since what was saved of it is in float32
        weights = _weights(masked, lse)
        share = kept(call, weights.shape, exact) if call.dropout_p > 0 else weights.new_ones(())
        grad_v = torch.matmul((weights * share).transpose(-1, -2), grad_out)
        mean = (grad_out * out.to(exact)).sum(-1)
        grad_masked = weights * (torch.matmul(grad_out, v.transpose(-1, -2)) * share - mean.unsqueeze(-1))
        grad_scores = (grad_masked if slope is None else grad_masked * slope) * call.scale_value
        grad_sinks = None
        if call.sinks is not None:
            of_sink = torch.exp(call.sinks.to(exact).view(-1, 1) - finite(lse))
            grad_sinks = -(of_sink * mean).sum((0, 2))
        grad_q = torch.matmul(grad_scores, k)
        grad_k = torch.matmul(grad_scores.transpose(-1, -2), q)
        grad_mask = None if call.attn_mask is None else grad_masked
        return grad_q, summed(grad_k, call.k), summed(grad_v, call.v), grad_mask, grad_sinks


def without_autocast(q: Tensor) -> torch.autocast:
    """A context in which autocast leaves what is computed beside `q` alone."""
    return torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False)  # "meta" has none to switch off


def precision(call: ForwardArguments) -> torch.dtype:
    """The dtype of the computation."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def scores(call: ForwardArguments) -> Scores:
    """The scores as the softmax sees them: scaled, capped, biased and masked, in this order."""
    exact = precision(call)
    result = torch.matmul(call.q.to(exact), repeated(call.k, call.q, exact).transpose(-1, -2)) * call.scale_value
    slope = None
    if call.softcap is not None:
        tanh = torch.tanh(result / call.softcap)
        result, slope = tanh * call.softcap, 1 - tanh * tanh
    row, column, diagonal = _positions(call)
    if call.alibi:
        slopes = alibi_slopes(call.q.shape[1], result.device).to(exact).view(-1, 1, 1)
        result = result - slopes * (column - row - diagonal).abs()
    if call.attn_mask is not None:
        if call.attn_mask.dtype == torch.bool:
            result = result.masked_fill(~call.attn_mask, -math.inf)
        else:
            result = result + call.attn_mask.to(exact)
    return Scores(result.masked_fill(~visible(call), -math.inf), slope)


def visible(call: ForwardArguments) -> Tensor:
    """Which key each query sees by lengths, causal mask and window: booleans of shape (B or 1, 1, Sq, Skv)."""
    sq, skv = call.q.shape[2], call.k.shape[2]
    row, column, diagonal = _positions(call)
    lengths_q, lengths_kv = _length(call.seq_lens_q, sq), _length(call.seq_lens_kv, skv)
    seen = (row < lengths_q) & (column < lengths_kv)
    position = row + diagonal
    right = 0 if call.is_causal else call.window_right
    if right != UNBOUNDED:
        seen = seen & (column <= position + right)
    if call.window_left != UNBOUNDED:
        seen = seen & (column >= position - call.window_left)
    return seen


def _positions(call: ForwardArguments) -> tuple[Tensor, Tensor, Tensor | int]:
    """Rows, columns, and the column of the first row's diagonal."""
    sq, skv, device = call.q.shape[2], call.k.shape[2], call.q.device
    row = torch.arange(sq, device=device).view(1, 1, sq, 1)
    column = torch.arange(skv, device=device).view(1, 1, 1, skv)
    if call.causal_alignment != BOTTOM_RIGHT:
        return row, column, 0
    return row, column, _length(call.seq_lens_kv, skv) - _length(call.seq_lens_q, sq)


def _length(lengths: Tensor | None, size: int) -> Tensor | int:
    return size if lengths is None else lengths.clamp(0, size).view(-1, 1, 1, 1)


def _lse(masked: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sum-exp of the masked scores and of the sinks."""
    lse = torch.logsumexp(masked, dim=-1) if masked.shape[-1] > 0 else masked.new_full(masked.shape[:-1], -math.inf)
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))


def _weights(masked: Tensor, lse: Tensor) -> Tensor:
    """exp(score − log-sum-exp), and 0 in rows that see nothing."""
    return torch.exp(masked - finite(lse).unsqueeze(-1))


def finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, and 0 for −inf in rows that see nothing: any finite number makes their weights exp(−inf) = 0."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def kept(call: ForwardArguments, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies the weights by: 0, or 1/(1-p). Its own random numbers, not cuDNN's."""
    assert call.rng is not None
    generator = torch.Generator(call.rng.device)
    seed, offset = call.rng.tolist()
    generator.manual_seed((seed * 1_000_003 + offset) % 2**63)
    numbers = torch.rand(shape, generator=generator, device=call.rng.device, dtype=dtype)
    return (numbers >= call.dropout_p) / (1 - call.dropout_p)


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """The slopes of "Train Short, Test Long" (Press et al., 2022), section 3, as its reference code gives them.

    For a number of heads that is no power of two, every other slope of the next power fills up.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64, device=device)


def repeated(tensor: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values with one head for each head of `q`."""
    return tensor.to(dtype).repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient by what `repeated` repeated."""
    batch, heads = like.shape[:2]
    return gradient.view(batch, heads, gradient.shape[1] // heads, *gradient.shape[2:]).sum(2)
