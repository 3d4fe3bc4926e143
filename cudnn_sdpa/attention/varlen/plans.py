"""Specs of calls over packed sequences, forward and backward, and the keys of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import with_positive_scale
from cudnn_sdpa.attention.dense import large_backward
from cudnn_sdpa.attention.dense.packed import VarlenSpec, length_bucket, sequence_bucket
from cudnn_sdpa.attention.mask import TOP_LEFT, normalize_mask
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.engine.operation import GradientCall
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import Target


def spec_of(call: VarlenArguments, rows: tuple[int, int] | None = None) -> VarlenSpec:
    """Describes a call, its numbers rounded up; the rows of queries and of keys to `rows`, if these are given."""
    tight = call.deterministic or call.softcap is not None
    q, k, v = map(TensorLayout.of, call.qkv)
    if rows is not None:
        rows_q, rows_kv = rows
        q, k, v = (replace(x, shape=(n, *x.shape[1:])) for x, n in ((q, rows_q), (k, rows_kv), (v, rows_kv)))
    longest = min(call.max_seqlen_q, call.q.shape[0]), min(call.max_seqlen_kv, call.k.shape[0])
    is_shared = call.cu_seqlens_kv is None
    alignment = TOP_LEFT if is_shared else call.causal_alignment
    window_size = (call.window_left, call.window_right)
    return VarlenSpec(
        q=q,
        k=k,
        v=v,
        sequences=sequence_bucket(call.cu_seqlens_q.shape[0] - 1),
        max_seqlen_q=length_bucket(call.max_seqlen_q, q.shape[0], tight=tight),
        max_seqlen_kv=length_bucket(call.max_seqlen_kv, k.shape[0], tight=tight),
        mask=normalize_mask(call.is_causal, alignment, window_size, *longest, has_lengths=True),
        shared_cu_seqlens=is_shared,
        sinks=call.sinks is not None,
        dropout_p=float(call.dropout_p),
        softcap=call.softcap is not None,
        deterministic=call.deterministic,
    )


def output_layout(call: VarlenArguments) -> TensorLayout:
    """How the output of a call lies in memory: dense, its dimensions in the order of those of `q`."""
    if call.out is not None:
        return TensorLayout.of(call.out)
    q, shape = call.q, (*call.q.shape[:2], call.v.shape[2])
    return TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride()), q.dtype)


def results(call: VarlenArguments) -> tuple[Layout, Layout]:
    """Shape, stride and dtype of the output (Tq, Hq, Dv) and of the LSE (Tq, Hq)."""
    out, (tokens, heads) = output_layout(call), call.q.shape[:2]
    return (out.shape, out.stride, out.dtype), ((tokens, heads), (heads, 1), torch.float32)


def forward_key(call: VarlenArguments, target: Target, device: int | None) -> PlanKey:
    """The key of a forward call that is not empty.

    Raises:
        UnsupportedError: It is known to have no kernel.
    """
    return spec_of(with_positive_scale(call)).forward_key(output_layout(call), call.with_lse, target, device)


def backward_key(of: GradientCall, target: Target, device: int | None) -> PlanKey:
    """The key of a backward call that is not empty, with tensors that kernels can read.

    Raises:
        UnsupportedError: It is known to have no kernel.
    """
    layouts = TensorLayout.of(of.out), TensorLayout.of(of.grad_out)
    return spec_of(with_positive_scale(of.call)).backward_key(*layouts, of.call.deterministic, target, device)


def keys(call: VarlenArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a forward call."""
    if not call.is_empty:
        yield forward_key(call, target, device)


def gradient_keys(of: GradientCall, target: Target, device: int | None) -> Iterator[PlanKey]:
    """The keys of the plans of a backward call."""
    if of.call.is_empty:
        return
    if not large_backward.is_too_large(*of.call.qkv, of.out, of.grad_out):
        yield backward_key(of, target, device)
        return
    for part in large_backward.split(*of.call.as_dense().qkv):
        yield backward_key(part_of(of, part), target, device)


def part_of(of: GradientCall, part: large_backward.Part) -> GradientCall:
    """Some heads of a backward call that is too large for one plan."""
    call: VarlenArguments = of.call
    rows = {"q": call.q, "grad_out": of.grad_out, "out": of.out, "lse": of.lse}
    q, grad_out, out, lse = (memory.aligned(name, x[:, part.heads]) for name, x in rows.items())
    k, v = (large_backward.compact(x[:, part.heads_kv]) for x in (call.k, call.v))
    sinks = None if call.sinks is None else call.sinks[part.heads]
    return of._replace(grad_out=grad_out, out=out, lse=lse, call=call._replace(q=q, k=k, v=v, sinks=sinks))


def check_gradient(call: VarlenArguments, target: Target) -> None:
    """Refuses a call whose gradients are known to have no kernel, also in parts.

    Raises:
        UnsupportedError: With every reason.
    """
    if large_backward.is_too_large(*call.qkv):
        large_backward.check(call.as_dense(), mask_gradient=False)
    refused: UnsupportedError | None = spec_of(call).refusal(target, deterministic=call.deterministic)
    if refused is not None:
        raise refused


def dense_queries(call: VarlenArguments) -> VarlenArguments:
    """The call with the layout of queries as backward plans read them: dense."""
    q = dense_like(TensorLayout.of(call.q))
    return call._replace(q=torch.empty_strided(q.shape, q.stride, dtype=q.dtype, device="meta"))
