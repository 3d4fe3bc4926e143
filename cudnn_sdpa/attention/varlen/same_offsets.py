"""Offsets of queries and keys that code for FlashAttention gives as two tensors with the same numbers."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.graph.scalars import is_compiling


def of_keys(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> Tensor:
    """The offsets of keys; the tensor of the queries if its numbers are the same.

    cuDNN has dropout with a bottom-right diagonal only where sequences are known to have as many queries as keys. This
    reads the numbers, which waits for the GPU, once for all layers of a step; in compiled code and captures, and where
    a mode intercepts operators, it reads none.

    Args:
        cu_seqlens_q: Offsets of the sequences of queries, (B + 1,) integers.
        cu_seqlens_kv: Those of keys.

    Returns:
        One of both tensors.
    """
    q, kv = cu_seqlens_q, cu_seqlens_kv
    if q is kv or is_compiling() or not is_plain_memory(q, kv):
        return kv
    if q.shape != kv.shape or q.device != kv.device or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return kv
    known = _Last.known
    if known is None or not known.is_of(q, kv):
        known = _Comparison(weakref.ref(q), weakref.ref(kv), _versions(q, kv), torch.equal(q, kv))
        _Last.known = known
    return q if known.are_same else kv


class _Comparison(NamedTuple):
    q: weakref.ref[Tensor]
    kv: weakref.ref[Tensor]
    versions: tuple[int, int] | None
    are_same: bool

    def is_of(self, q: Tensor, kv: Tensor) -> bool:
        """Whether it is of these tensors, which nothing has written to since."""
        return self.q() is q and self.kv() is kv and self.versions is not None and self.versions == _versions(q, kv)


class _Last:
    """The last comparison: all layers of a step have the same offsets."""

    known: _Comparison | None = None


def _versions(q: Tensor, kv: Tensor) -> tuple[int, int] | None:
    """Inference tensors have none."""
    return None if q.is_inference() or kv.is_inference() else (q._version, kv._version)
