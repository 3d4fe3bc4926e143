"""The same mathematics in plain PyTorch: what CPU tensors run, and what tests compare with.

Memory grows with Sq × Skv. Half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED


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
        softmax = Softmax.of(scores(call).masked, call.sinks)
        weights = softmax.weights
        if call.dropout_p > 0:
            weights = weights * kept(call, weights.shape, weights.dtype)
        return product(weights, repeated(call.v, call.q, precision(call))), softmax.lse


def gradients(
    grad_out: Tensor, out: Tensor, call: ForwardArguments, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients by q, k, v, attn_mask and sinks, in the precision of the computation.

    The formulas are those of FlashAttention-2 (Dao, 2023), section 2.3.2. The gradient by the mask has the shape of the
    scores. With `lse`, the keys may be a part of those that the softmax was taken over: it is the log-sum-exp of all.
    """
    exact = precision(call)
    with without_autocast(call.q):
        q, grad_out = call.q.to(exact), grad_out.to(exact)
        k, v = repeated(call.k, q, exact), repeated(call.v, q, exact)
        masked, slope = scores(call)
        softmax = Softmax.of(masked, call.sinks)
        share_of_all = None if lse is None else softmax.share(lse)
        weights = softmax.weights if share_of_all is None else softmax.weights * share_of_all.unsqueeze(-1)
        share = kept(call, weights.shape, exact) if call.dropout_p > 0 else weights.new_ones(())
        grad_v = product((weights * share).transpose(-1, -2), grad_out)
        mean = (grad_out * out.to(exact)).sum(-1)
        grad_masked = weights * (product(grad_out, v.transpose(-1, -2)) * share - mean.unsqueeze(-1))
        grad_scores = (grad_masked if slope is None else grad_masked * slope) * call.scale_value
        grad_sinks = None
        if softmax.of_sink is not None:
            of_sink = softmax.of_sink if share_of_all is None else softmax.of_sink * share_of_all
            grad_sinks = -(of_sink * mean).sum((0, 2))
        grad_q = product(grad_scores, k)
        grad_k = product(grad_scores.transpose(-1, -2), q)
        grad_mask = None if call.attn_mask is None else grad_masked
        return grad_q, summed(grad_k, call.k), summed(grad_v, call.v), grad_mask, grad_sinks


class Softmax(NamedTuple):
    """The softmax of scores, of which a sink may take a part.

    Computed from the distance to the largest score of each row. exp(score − log-sum-exp) is the same only as long as
    the logarithm of the sum is not lost beside the scores, as in rows that a mask of −10⁹ hides as a whole.

    Attributes:
        weights: Those of the keys, 0 in rows that see nothing.
        of_sink: That of the sink in each row, None without sinks.
        lse: The log-sum-exp of the scores and the sink.
    """

    weights: Tensor
    of_sink: Tensor | None
    lse: Tensor

    @classmethod
    def of(cls, masked: Tensor, sinks: Tensor | None) -> Softmax:
        """The softmax of masked scores (B, Hq, Sq, Skv), with sinks (Hq,)."""
        no_keys = masked.new_full((*masked.shape[:-1], 0 if masked.shape[-1] else 1), -math.inf)
        highest = torch.cat([masked, no_keys], dim=-1).amax(-1, keepdim=True)
        if sinks is not None:
            sinks = sinks.to(masked.dtype).view(-1, 1, 1)
            highest = torch.maximum(highest, sinks)
        base = finite(highest)
        weights = torch.exp(masked - base)
        total = weights.sum(-1, keepdim=True)
        of_sink = None if sinks is None else torch.exp(sinks - base)
        total = total if of_sink is None else total + of_sink
        lse = base + torch.log(total)  # −inf in rows that see nothing
        total = torch.where(total == 0, 1.0, total)
        of_sink = None if of_sink is None else (of_sink / total).squeeze(-1)
        return cls(weights / total, of_sink, lse.squeeze(-1))

    def share(self, lse: Tensor) -> Tensor:
        """What part these scores and the sink are of all that have the log-sum-exp `lse`, a number of float32.

        Exactly 1 where they are all, as far as float32 can tell.
        """
        lse = lse.to(self.lse.dtype)
        rounding = 8 * torch.finfo(torch.float32).eps * self.lse.abs().clamp_min(1)
        share = torch.exp(self.lse - torch.where(torch.isneginf(lse), math.inf, lse))
        return torch.where((self.lse - lse).abs() <= rounding, 1.0, share)


def without_autocast(q: Tensor) -> torch.autocast:
    """A context in which autocast leaves what is computed beside `q` alone."""
    return torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False)  # "meta" has none to switch off


def precision(call: ForwardArguments) -> torch.dtype:
    """The dtype of the computation."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def scores(call: ForwardArguments) -> Scores:
    """The scores as the softmax sees them: scaled, capped, biased and masked, in this order."""
    exact = precision(call)
    result = product(call.q.to(exact), repeated(call.k, call.q, exact).transpose(-1, -2)) * call.scale_value
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


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product; one of vectors without a library for matrices, which may round or be refused on a GPU."""
    if a.shape[-1] == 1:
        return a * b
    if b.shape[-1] == 1:
        return (a * b.transpose(-1, -2)).sum(-1, keepdim=True)
    if a.shape[-2] == 1:
        return (a.transpose(-1, -2) * b).sum(-2, keepdim=True)
    return torch.matmul(a, b)


def finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, and 0 for −inf in rows that see nothing: any finite number makes their weights exp(−inf) = 0."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def kept(call: ForwardArguments, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies the weights by: 0, or 1/(1-p). Its own random numbers, not cuDNN's.

    They are a function of seed, offset and position, computed where these are: nothing is read back from a GPU.
    """
    assert call.rng is not None
    seed, offset = call.rng.unbind()
    positions = torch.arange(math.prod(shape), device=call.rng.device).view(shape)
    numbers = _mixed(_mixed(seed ^ _mixed(offset)) + positions * -7046029254386353131)
    return ((numbers & (2**53 - 1)) >= math.ceil(call.dropout_p * 2**53)).to(dtype) / (1 - call.dropout_p)


def _mixed(x: Tensor) -> Tensor:
    """int64 numbers whose bits all depend on all bits of `x`: SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """The slopes of "Train Short, Test Long" (Press et al., 2022), section 3, as its reference code gives them.

    For a number of heads that is no power of two, every other slope of the next power fills up.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.exp2(torch.where(head < power, -8 * (head + 1), -4 * (2 * (head - power) + 1)) / power)


def repeated(tensor: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values with one head for each head of `q`."""
    return tensor.to(dtype).repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient by what `repeated` repeated."""
    batch, heads = like.shape[:2]
    return gradient.view(batch, heads, gradient.shape[1] // heads, *gradient.shape[2:]).sum(2)
