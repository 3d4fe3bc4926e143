"""Attention over packed sequences: `sdpa_varlen`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention import arguments, memory
from cudnn_sdpa.attention.arguments import ForwardArguments, Result, as_float, as_int, as_sinks, kind_of
from cudnn_sdpa.attention.varlen import arguments as varlen_arguments
from cudnn_sdpa.attention.varlen import autograd, fast_path, torch_ops
from cudnn_sdpa.attention.varlen.arguments import ReferenceVarlenArguments, VarlenArguments
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import cast_tensor, is_deterministic
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, needs_gradient
from cudnn_sdpa.engine.fallback import check_or_decline, or_else
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.graph.symbolic_shapes import is_compiling


@overload
def sdpa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def sdpa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def sdpa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences that lie end to end, without padding.

    Where sequences begin is data on the GPU: it is never read by the host and builds nothing. A plan is made for the
    number of tokens, the number of sequences and the longest length, each rounded up, so that the random packings of a
    training run share a handful of plans.

    Options that `sdpa` has too mean the same here. Pass the same tensor as `cu_seqlens_q` and `cu_seqlens_kv` for
    self-attention: it saves work and makes the two alignments one.

    Args:
        q: Queries (Tq, Hq, D), float16 or bfloat16: the sequences' tokens, one after the other. Steps between tokens
            and heads are multiples of 16 bytes; a view of packed keys and values (T, 2, H, D) needs no copy.
        k: Keys (Tkv, Hkv, D).
        v: Values (Tkv, Hkv, Dv).
        cu_seqlens_q: Where the sequences of queries begin, and at last where they end, (B + 1,) int32: 0, l₁, l₁ + l₂,
            …, Tq. Checked on the CPU; kept within the tensor on the GPU, and not checked there unless the environment
            variable `CUDNN_SDPA_DEBUG` is 1, which reads it. Rows past the last offset get zeros, as their gradients
            do.
        cu_seqlens_kv: The same of keys. Lengths may be 0.
        max_seqlen_q: Length of the longest sequence of queries, or more. No tensor, which would have to be read back.
        max_seqlen_kv: The same of keys.
        is_causal: Hide later keys from each query.
        causal_alignment: Where the diagonal lies: "bottom_right", the last query of a sequence at its last key, or
            "top_left".
        window_size: (left, right) bounds around the diagonal; -1 is no bound.
        scale: Factor of the scores, at most 65,536 in size; None is 1/sqrt(D).
        dropout_p: Share of the weights that is dropped.
        softcap: Limit of the scores.
        sinks: One score for each query head, (Hq,), without a value. float32; half precision is converted.
        return_lse: Also return the log-sum-exp of the scores.
        deterministic: Whether gradients are bit-exact; None follows `torch.use_deterministic_algorithms`.
        out: Where to write the result. For inference.

    Returns:
        The output (Tq, Hq, Dv) in q's dtype and memory order. With `return_lse` also the log-sum-exp (Tq, Hq) float32.
        Queries of a sequence without keys get zeros and minus infinity, or their sink.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = k = v = torch.randn(10, 4, 16)  # three sequences of 3, 0 and 7 tokens
        >>> offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> cudnn_sdpa.sdpa_varlen(q, k, v, offsets, offsets, 7, 7, is_causal=True).shape
        torch.Size([10, 4, 16])
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_varlen")
    left, right = arguments.window_bounds(window_size)
    scale = None if scale is None else as_float(scale)
    dropout_p = dropout_p if type(dropout_p) is float else as_float(dropout_p)
    softcap = None if softcap is None else as_float(softcap)
    call = VarlenArguments(
        *(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, None, as_int(max_seqlen_q), as_int(max_seqlen_kv)),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap),
        *(cu_seqlens_q is cu_seqlens_kv, False, return_lse, out),
    )
    return run(call, deterministic)


def run(call: VarlenArguments, deterministic: bool | None) -> Result:
    """Runs a call whose arguments have not been checked yet, by the shortest way that is right for it."""
    if call.sinks is not None and (sinks := as_sinks(call.sinks)) is not call.sinks:
        call = call._replace(sinks=sinks)
    if not is_compiling():
        known = fast_path.find(call, deterministic)
        if known is not None:
            return known(call)
    given = ForwardArguments(call.q, call.k, call.v, sinks=call.sinks, out=call.out, with_lse=call.with_lse)
    arguments.check_types(given)
    q = call.q
    call = call._replace(q=cast_tensor(q, q), k=cast_tensor(call.k, q), v=cast_tensor(call.v, q))
    call = call._replace(deterministic=is_deterministic(deterministic))
    if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
        call = autograd_checks.resolved(call)
        varlen_arguments.check_options(call)
    autograd_checks.check("sdpa_varlen", call.out, q=call.q, k=call.k, v=call.v, sinks=call.sinks)
    if call.dropout_p:
        call = call._replace(rng=new_seed(q))
    return or_else(lambda: _run(call), lambda: _run_on_pytorch(call), lambda: kind_of(call))


def check(call: VarlenArguments) -> None:
    """All checks of tensors and options that need no look at addresses and values."""
    varlen_arguments.check_options(call)
    varlen_arguments.check(call._replace(dropout_p=0.0))


def _run(call: VarlenArguments) -> Result:
    """Runs a call through autograd or PyTorch's dispatcher."""
    if not is_compiling():
        beyond = ReferenceVarlenArguments._make(call)
        check_or_decline("sdpa_varlen", lambda: check(call), lambda: check(beyond))
    tensors = (*call[:6], call.out)
    if needs_gradient(*tensors):
        if is_compiling():
            return _differentiable(call)
        try:
            return _differentiable(call)
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(call)
            raise
    if not is_compiling() and call.q.is_cuda and can_bypass_dispatcher(*tensors):
        return torch_ops.forward_cuda(call)
    operator, inputs = torch.ops.cudnn_sdpa, call[:18]
    if call.out is not None:
        lse = operator.varlen_forward_out(*inputs, call.out)
        return (call.out, lse) if call.with_lse else call.out
    if call.with_lse:
        result: Result = operator.varlen_forward_lse(*inputs)
        return result
    out: Tensor = operator.varlen_forward(*inputs)
    return out


def _run_on_pytorch(call: VarlenArguments) -> Result:
    """Runs a checked call on the reference."""
    if call.out is not None:
        memory.check_memory(call.q, call.k, call.v, call.out)
    inputs = (*call[:4], ReferenceVarlenArguments._make(call)._replace(out=None, with_lse=True))
    out, lse = autograd.ReferenceVarlen.apply(*inputs)  # type: ignore[no-untyped-call]
    out = out if call.out is None else call.out.copy_(out)
    return (out, lse) if call.with_lse else out


def _differentiable(call: VarlenArguments) -> Result:
    if not is_compiling():
        torch_ops.check_gradient(call)
    if is_compiling() or not can_bypass_dispatcher(*call[:6]):
        out, lse = torch.ops.cudnn_sdpa.varlen_forward_lse(*call[:18])
        lse = lse.detach() if is_compiling() else lse
    else:
        out, lse = autograd.VarlenAttention.apply(*call[:4], call._replace(with_lse=True))  # type: ignore[no-untyped-call]
    return (out, lse) if call.with_lse else out
