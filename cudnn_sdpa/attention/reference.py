"""The PyTorch reference of attention: runs calls on CPU tensors, and tests compare with it.

Memory grows with Sq × Skv. Half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED, as_kernels_see
from cudnn_sdpa.attention.parts import ForwardCall
from cudnn_sdpa.attention.sink_scores import WithSinks, raise_lse
from cudnn_sdpa.engine.launch import Layout, new_tensor


class Scores(NamedTuple):
    """The masked scores, and what their gradient needs.

    Attributes:
        masked: The scores (B, Hq, Sq, Skv); −inf where a query does not see a key.
        slope: The derivative of logit soft-capping at each score, None without it.
    """

    masked: Tensor
    slope: Tensor | None


def attention(call: ForwardArguments) -> tuple[Tensor, Tensor]:
    """The output (B, Hq, Sq, Dv) and the LSE (B, Hq, Sq), both in the precision of the computation.

    A fully masked row gets zeros and an LSE of minus infinity, or of its sink.
    """
    with without_autocast(call.q):
        softmax = Weights.of(scores(call).masked, call.sinks)
        weights = softmax.weights
        if call.softmax.dropout_p > 0:
            weights = weights * kept(call, weights.shape, weights.dtype)
        return product(weights, repeated(call.v, call.q, precision(call))), softmax.lse


def gradients(
    grad_out: Tensor, out: Tensor, call: ForwardArguments, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v, attn_mask and sinks, in the precision of the computation.

    The formulas are those of FlashAttention-2 (Dao, 2023), section 2.3.2. The gradient of the mask has the shape of the
    scores. `lse` may be the LSE over more keys than those of the call, as in split-KV attention.
    """
    exact = precision(call)
    with without_autocast(call.q):
        q, grad_out = call.q.to(exact), grad_out.to(exact)
        k, v = repeated(call.k, q, exact), repeated(call.v, q, exact)
        masked, slope = scores(call)
        softmax = Weights.of(masked, call.sinks)
        share_of_all = None if lse is None else softmax.share(lse)
        weights = softmax.weights if share_of_all is None else softmax.weights * share_of_all.unsqueeze(-1)
        share = kept(call, weights.shape, exact) if call.softmax.dropout_p > 0 else weights.new_ones(())
        grad_v = product((weights * share).transpose(-1, -2), grad_out)
        mean = (grad_out * out.to(exact)).sum(-1)
        grad_masked = weights * (product(grad_out, v.transpose(-1, -2)) * share - mean.unsqueeze(-1))
        grad_scores = (grad_masked if slope is None else grad_masked * slope) * call.scale_value
        grad_sinks = None
        if softmax.sink_weight is not None:
            sink_weight = softmax.sink_weight if share_of_all is None else softmax.sink_weight * share_of_all
            grad_sinks = -(sink_weight * mean).sum((0, 2))
        grad_q = product(grad_scores, k)
        grad_k = product(grad_scores.transpose(-1, -2), q)
        grad_mask = None if call.attn_mask is None else grad_masked
        return grad_q, summed(grad_k, call.k), summed(grad_v, call.v), grad_mask, grad_sinks


class Weights(NamedTuple):
    """The softmax of scores and, optionally, a sink.

    Computed from the difference to the largest score of each row. exp(score − LSE) would lose the logarithm of the sum
    to rounding where scores are huge, as in rows that a mask of −10⁹ covers entirely.

    Attributes:
        weights: The weights of the keys, 0 in fully masked rows.
        sink_weight: The weight of the sink in each row, None without sinks.
    """

    weights: Tensor
    sink_weight: Tensor | None
    lse: Tensor

    @classmethod
    def of(cls, masked: Tensor, sinks: Tensor | None) -> Weights:
        """The softmax of masked scores (B, Hq, Sq, Skv), with sinks (Hq,)."""
        no_keys = masked.new_full((*masked.shape[:-1], 0 if masked.shape[-1] else 1), -math.inf)
        highest = torch.cat([masked, no_keys], dim=-1).amax(-1, keepdim=True)
        if sinks is not None:
            sinks = sinks.to(masked.dtype).view(-1, 1, 1)
            highest = torch.maximum(highest, sinks)
        base = finite(highest)
        weights = torch.exp(masked - base)
        total = weights.sum(-1, keepdim=True)
        sink_weight = None if sinks is None else torch.exp(sinks - base)
        total = total if sink_weight is None else total + sink_weight
        lse = base + torch.log(total)  # −inf in fully masked rows
        total = torch.where(total == 0, 1.0, total)
        sink_weight = None if sink_weight is None else (sink_weight / total).squeeze(-1)
        return cls(weights / total, sink_weight, lse.squeeze(-1))

    def share(self, lse: Tensor) -> Tensor:
        """The share of these scores and the sink in a softmax whose LSE is `lse`, in float32.

        Exactly 1 where the two LSEs are equal within the rounding of float32.
        """
        lse = lse.to(self.lse.dtype)
        rounding = 8 * torch.finfo(torch.float32).eps * self.lse.abs().clamp_min(1)
        share = torch.exp(self.lse - torch.where(torch.isneginf(lse), math.inf, lse))
        return torch.where((self.lse - lse).abs() <= rounding, 1.0, share)


def without_autocast(q: Tensor) -> torch.autocast:
    """A context that disables autocast on the device of `q`."""
    return torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False)  # there is no autocast for "meta"


def precision(call: ForwardArguments) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def scores(call: ForwardArguments) -> Scores:
    """The scores after scale, soft-capping, bias and mask, in this order."""
    exact = precision(call)
    result = product(call.q.to(exact), repeated(call.k, call.q, exact).transpose(-1, -2)) * call.scale_value
    slope = None
    softcap = call.softmax.softcap
    if softcap is not None:
        tanh = torch.tanh(result / softcap)
        result, slope = tanh * softcap, 1 - tanh * tanh
    row, column, diagonal = _positions(call)
    if call.softmax.alibi:
        slopes = alibi_slopes(call.q.shape[1], result.device).to(exact).view(-1, 1, 1)
        result = result - slopes * (column - row - diagonal).abs()
    if call.attn_mask is not None:
        if call.attn_mask.dtype == torch.bool:
            result = result.masked_fill(~call.attn_mask, -math.inf)
        else:
            result = result + as_kernels_see(call.attn_mask).to(exact)
    return Scores(result.masked_fill(~visible(call), -math.inf), slope)


def visible(call: ForwardArguments) -> Tensor:
    """The keys that each query sees by lengths, causal mask and window: bool (B or 1, 1, Sq, Skv)."""
    sq, skv = call.q.shape[2], call.k.shape[2]
    row, column, diagonal = _positions(call)
    lengths_q, lengths_kv = _length(call.seq_lens_q, sq), _length(call.seq_lens_kv, skv)
    seen = (row < lengths_q) & (column < lengths_kv)
    position = row + diagonal
    softmax = call.softmax
    right = 0 if softmax.is_causal else softmax.window_right
    if right != UNBOUNDED:
        seen = seen & (column <= position + right)
    if softmax.window_left != UNBOUNDED:
        seen = seen & (column >= position - softmax.window_left)
    return seen


def _positions(call: ForwardArguments) -> tuple[Tensor, Tensor, Tensor | int]:
    """Row indices, column indices, and the column of the diagonal in the first row."""
    sq, skv, device = call.q.shape[2], call.k.shape[2], call.q.device
    row = torch.arange(sq, device=device).view(1, 1, sq, 1)
    column = torch.arange(skv, device=device).view(1, 1, 1, skv)
    if call.softmax.causal_alignment != BOTTOM_RIGHT:
        return row, column, 0
    return row, column, _length(call.seq_lens_kv, skv) - _length(call.seq_lens_q, sq)


def _length(lengths: Tensor | None, size: int) -> Tensor | int:
    return size if lengths is None else lengths.clamp(0, size).view(-1, 1, 1, 1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product; products of vectors avoid GEMM libraries, which may round or refuse them on a GPU."""
    if a.shape[-1] == 1:
        return a * b
    if b.shape[-1] == 1:
        return (a * b.transpose(-1, -2)).sum(-1, keepdim=True)
    if a.shape[-2] == 1:
        return (a.transpose(-1, -2) * b).sum(-2, keepdim=True)
    return torch.matmul(a, b)


def finite(lse: Tensor) -> Tensor:
    """The LSE with 0 in place of −inf in fully masked rows: any finite value makes their weights exp(−inf) = 0."""
    return torch.where(torch.isneginf(lse), 0.0, lse)


def kept(call: ForwardArguments, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The factors that dropout multiplies the weights by, 0 or 1/(1-p). The random numbers differ from cuDNN's.

    They are a function of seed, offset and position, computed on the device of the seed without a host copy.
    """
    assert call.rng is not None
    seed, offset = call.rng.unbind()
    positions = torch.arange(math.prod(shape), device=call.rng.device).view(shape)
    random = _mixed(_mixed(seed ^ _mixed(offset)) + positions * -7046029254386353131)
    dropout_p = call.softmax.dropout_p
    return ((random & (2**53 - 1)) >= math.ceil(dropout_p * 2**53)).to(dtype) / (1 - dropout_p)


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64 values in which each bit depends on all bits of `x`: SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """The slopes of "Train Short, Test Long" (Press et al., 2022), section 3, as its reference code gives them.

    If the number of heads is not a power of two, every other slope of the next power of two is appended.
    """
    power = 2 ** math.floor(math.log2(heads))
    head = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.exp2(torch.where(head < power, -8 * (head + 1), -4 * (2 * (head - power) + 1)) / power)


def repeated(tensor: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values repeated to the heads of `q`."""
    return tensor.to(dtype).repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of keys or values: summed over the heads that `repeated` made."""
    batch, heads = like.shape[:2]
    return gradient.view(batch, heads, gradient.shape[1] // heads, *gradient.shape[2:]).sum(2)


class _CallWithSinks(ForwardCall, WithSinks, Protocol): ...


def fill_without_keys(call: _CallWithSinks, layouts: tuple[Layout, Layout]) -> Tensor | tuple[Tensor, Tensor]:
    """The results where there are no queries or no keys: zeros, and the LSE of the sinks alone.

    Args:
        call: A dense, packed or paged call.
        layouts: Those of the output and the LSE.
    """
    out, lse = (new_tensor(layout, call.q.device) for layout in layouts)
    out = (out if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    raise_lse(call, lse.fill_(-torch.inf))
    return out, lse
