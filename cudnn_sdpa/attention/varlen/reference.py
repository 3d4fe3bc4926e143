"""Attention over packed sequences in plain PyTorch, one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments, results
from cudnn_sdpa.attention.dense.reference import flops_of_backward, flops_of_forward
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments, VarlenGradientCall
from cudnn_sdpa.engine.tensor_checks import like_in_memory


def sequences(call: VarlenArguments) -> Iterator[tuple[slice, slice, ForwardArguments]]:
    """The rows of queries and of keys of each sequence, and the dense call that it is."""
    ends_q, ends_kv = (pairwise(offsets.tolist()) for offsets in call.offsets)
    for number, (of_q, of_kv) in enumerate(zip(ends_q, ends_kv, strict=False)):
        rows, columns = slice(*of_q), slice(*of_kv)
        one = call._replace(q=call.q[rows], k=call.k[columns], v=call.v[columns], out=None).as_dense()
        yield rows, columns, one._replace(rng=None if call.rng is None else call.rng + number)


def attention(call: VarlenArguments, lse_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    new = call._replace(out=None, with_lse=True)
    out, lse = reference.fill_without_keys(new, results(new))
    lse = lse.to(lse_dtype)
    for rows, _, one in sequences(call):
        out_one, lse_one = reference.attention(one)
        out[rows] = out_one[0].transpose(0, 1).to(out.dtype)
        lse[rows] = lse_one[0].transpose(0, 1).to(lse_dtype)
    return out, lse


def gradients(of: VarlenGradientCall) -> list[Tensor]:
    call = of.call
    found = [like_in_memory(tensor).zero_() for tensor in call.qkv]
    grad_sinks = torch.zeros(call.q.shape[1], dtype=torch.float64, device=call.q.device)
    for rows, columns, one in sequences(call):
        grad_out, out, lse = (x[rows].transpose(0, 1).unsqueeze(0) for x in (of.grad_out, of.out, of.lse))
        *parts, _, sinks_one = reference.gradients(grad_out, out, one, lse)
        for whole, part, where in zip(found, parts, (rows, columns, columns), strict=True):
            whole[where] = part[0].transpose(0, 1).to(whole.dtype)
        grad_sinks += 0 if sinks_one is None else sinks_one
    return [x for x, need in zip((*found, grad_sinks.to(of.lse.dtype)), of.needs, strict=True) if need]


def flops(call: VarlenArguments) -> tuple[int, int]:
    """Floating-point operations of both passes, by lengths where these can be read, which waits for the GPU."""
    rows, columns = map(_lengths, call.offsets, (call.max_seqlen_q, call.max_seqlen_kv))
    scores = call.q.shape[1] * sum(a * b for a, b in zip(rows, columns, strict=True))
    dims = call.q.shape[2], call.v.shape[2]
    return flops_of_forward(scores, *dims), flops_of_backward(scores, *dims)


def _lengths(offsets: Tensor, max_seqlen: int) -> list[int]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if offsets.is_meta or isinstance(offsets, (FakeTensor, FunctionalTensor)):
        return [max_seqlen] * (offsets.shape[0] - 1)
    lengths: list[int] = offsets.diff().tolist()
    return lengths
