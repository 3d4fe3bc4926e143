"""How many floating-point operations a call is: what `torch.utils.flop_counter.FlopCounterMode` adds up.

Counted as PyTorch counts its own attention: two for each multiplication with its addition, in matrix products alone,
and for all keys even where a mask hides them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cudnn_sdpa.attention import fp8_operators as _fp8_operators  # noqa: F401 - defines what is counted
from cudnn_sdpa.attention import operators as _dense_operators  # noqa: F401
from cudnn_sdpa.attention import varlen_operators as _packed_operators  # noqa: F401


def forward(scores: int, head_dim: int, head_dim_v: int) -> int:
    """Of the scores, and of the weights times the values."""
    return 2 * scores * (head_dim + head_dim_v)


def backward(scores: int, head_dim: int, head_dim_v: int) -> int:
    """Of the scores again, and of the gradients by the weights, v, q and k."""
    return 2 * scores * (3 * head_dim + 2 * head_dim_v)


def _dense_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The number of scores, and the head dims."""
    batch, heads, sq, head_dim = q.shape
    return batch * heads * sq * k.shape[2], head_dim, v.shape[3]


def _packed_sizes(
    q: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> tuple[int, int, int]:
    """The same for packed sequences, by their true lengths where these can be read, which waits for the GPU."""
    rows, columns = map(_lengths, offsets, longest)
    scores = sum(a * b for a, b in zip(rows, columns, strict=True))
    return q.shape[1] * scores, q.shape[2], v.shape[2]


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if offsets.is_meta or isinstance(offsets, (FakeTensor, FunctionalTensor)):
        return [longest] * (offsets.shape[0] - 1)
    lengths: list[int] = offsets.diff().tolist()
    return lengths


_sdpa = torch.ops.cudnn_sdpa


@register_flop_formula(
    [
        _sdpa.sdpa_forward,
        _sdpa.sdpa_forward_lse,
        _sdpa.sdpa_forward_out,
        _sdpa.sdpa_forward_lse_out,
        _sdpa.sdpa_fp8_forward,
    ],
    get_raw=True,
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return forward(*_dense_sizes(q, k, v))


@register_flop_formula(_sdpa.sdpa_backward, get_raw=True)
def _backward(*inputs: Any, **_: Any) -> int:
    return backward(*_dense_sizes(*inputs[3:6]))


@register_flop_formula(_sdpa.sdpa_fp8_backward, get_raw=True)
def _fp8_backward(*inputs: Any, **_: Any) -> int:
    return backward(*_dense_sizes(*inputs[1:4]))


@register_flop_formula([_sdpa.varlen_forward, _sdpa.varlen_forward_lse, _sdpa.varlen_forward_out], get_raw=True)
def _varlen_forward(*inputs: Any, **_: Any) -> int:
    q, _k, v, _sinks, offsets_q, offsets_kv, _rng, longest_q, longest_kv = inputs[:9]
    return forward(*_packed_sizes(q, v, (offsets_q, offsets_kv), (longest_q, longest_kv)))


@register_flop_formula(_sdpa.varlen_backward, get_raw=True)
def _varlen_backward(*inputs: Any, **_: Any) -> int:
    q, _k, v, _sinks, offsets_q, offsets_kv, _rng, longest_q, longest_kv = inputs[3:12]
    return backward(*_packed_sizes(q, v, (offsets_q, offsets_kv), (longest_q, longest_kv)))
