"""Attention over packed sequences, and its backward pass as a function: `sdpa_varlen` and `sdpa_varlen_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import SoftmaxOptions, softmax_of
from cudnn_sdpa.attention.backward_arguments import SdpaGradients, backward_call_of, gradients_of
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.sink_scores import as_sinks
from cudnn_sdpa.attention.varlen.arguments import offsets_of_keys
from cudnn_sdpa.attention.varlen.call import ReferenceVarlenCall, VarlenBackwardCall, VarlenCall
from cudnn_sdpa.engine import autograd_checks, value_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.graph.scalars import as_bool, as_int, is_compiling

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VarlenOptions(SoftmaxOptions, total=False):
    """The options of `sdpa_varlen` but `return_lse`."""

    deterministic: bool | None
    dropout_p: float
    out: Tensor | None


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
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
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
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
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
    return_lse: bool,
    **options: Unpack[VarlenOptions],
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
    causal_alignment: Alignment = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences: end to end in one tensor, without padding.

    Where sequences begin is data on the GPU: it is never read by the host and builds nothing. A plan is made for the
    number of tokens, the number of sequences and the longest length, each rounded up, so that the random packings of a
    training run share a handful of plans.

    Options that `sdpa` has too mean the same here. Pass the same tensor as `cu_seqlens_q` and `cu_seqlens_kv` for
    self-attention: it saves work and makes the two alignments one.

    Args:
        q: Queries (Tq, Hq, D), float16 or bfloat16: the sequences' tokens, one after the other. Strides of tokens and
            heads are multiples of 16 bytes; a view of packed keys and values (T, 2, H, D) needs no copy.
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
        causal_alignment: Where the diagonal is: "bottom_right", the last query of a sequence at its last key, or
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
        >>> q = k = v = torch.randn(10, 4, 16, dtype=torch.bfloat16)  # three sequences of 3, 0 and 7 tokens
        >>> offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> cudnn_sdpa.sdpa_varlen(q, k, v, offsets, offsets, 7, 7, is_causal=True).shape
        torch.Size([10, 4, 16])
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_varlen")
    given = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        dropout_p,
        softcap,
        sinks,
        return_lse,
        deterministic,
        out,
    )
    if not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    call = call_of(*given)
    result: Tensor | tuple[Tensor, Tensor] = VARLEN(call, NativeKey(_calls, given))
    return result


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool,
    causal_alignment: Alignment,
    window_size: tuple[int, int] | None,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    deterministic: bool | None,
    out: Tensor | None,
) -> VarlenCall:
    """The call that arguments of `sdpa_varlen` make; they have not been checked."""
    mask = (is_causal, causal_alignment, window_size, scale)
    return VarlenCall(
        q=q,
        k=k,
        v=v,
        sinks=None if sinks is None else as_sinks(sinks),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=offsets_of_keys(cu_seqlens_q, cu_seqlens_kv),
        rng=None,
        max_seqlen_q=as_int(max_seqlen_q),
        max_seqlen_kv=as_int(max_seqlen_kv),
        softmax=softmax_of(*mask, softcap=softcap, deterministic=deterministic, dropout_p=dropout_p),
        with_lse=return_lse if type(return_lse) is bool else as_bool(return_lse),
        out=out,
    )


_calls = NativeCalls()

VARLEN = Operation(
    name="varlen",
    function="sdpa_varlen",
    call=VarlenCall,
    reference_call=ReferenceVarlenCall,
    backward=VarlenBackwardCall,
    differentiable=("q", "k", "v", "sinks"),
)


def sdpa_varlen_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "bottom_right",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    wanted: Sequence[str] | None = None,
) -> SdpaGradients:
    """The gradients of `sdpa_varlen`, given its output and its LSE; also those of a part of the keys.

    `sdpa_backward` for packed sequences: `out` and `lse` may be those of more keys of each sequence than `k` and `v`
    hold.

    Args:
        grad_out: The gradient of the output (Tq, Hq, Dv), in q's dtype. It is copied if cuDNN cannot read its
            layout, and so are `out` and `lse`.
        out: The output (Tq, Hq, Dv), in q's dtype.
        lse: Its LSE (Tq, Hq) float32, natural logarithm, as `sdpa_varlen` returns it with `return_lse=True`.
        q: Queries (Tq, Hq, D).
        k: Keys (Tkv, Hkv, D).
        v: Values (Tkv, Hkv, Dv).
        cu_seqlens_q: As in the forward pass, (B + 1,) int32.
        cu_seqlens_kv: As in the forward pass, for these keys.
        max_seqlen_q: As in the forward pass.
        max_seqlen_kv: As in the forward pass, for these keys.
        is_causal: As in the forward pass.
        causal_alignment: As in the forward pass.
        window_size: As in the forward pass.
        scale: As in the forward pass.
        softcap: As in the forward pass.
        sinks: As in the forward pass. Where keys are in parts, give them with one part alone.
        deterministic: Whether gradients are bit-exact; None follows `torch.use_deterministic_algorithms`.
        wanted: The inputs whose gradients are computed, of "q", "k", "v" and "sinks"; None is all that there are.

    Returns:
        `SdpaGradients(dq, dk, dv, dmask, dsinks)`, each in the dtype and memory order of its input, None where not
        wanted or not there. Rows of no sequence get zeros.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import sdpa_varlen, sdpa_varlen_backward
        >>> q, k, v, grad_out = torch.randn(4, 10, 4, 16, dtype=torch.bfloat16)
        >>> offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
        >>> out, lse = sdpa_varlen(q, k, v, offsets, offsets, 7, 7, is_causal=True, return_lse=True)
        >>> found = sdpa_varlen_backward(grad_out, out, lse, q, k, v, offsets, offsets, 7, 7, is_causal=True)
        >>> found.dk.shape
        torch.Size([10, 4, 16])
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_varlen_backward")
    call = call_of(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_size=window_size,
        scale=scale,
        dropout_p=0.0,
        softcap=softcap,
        sinks=sinks,
        return_lse=True,
        deterministic=deterministic,
        out=None,
    )
    of = backward_call_of(VARLEN, call, grad_out=grad_out, out=out, lse=lse, wanted=wanted)
    return gradients_of(VARLEN.run_backward(of), VARLEN.differentiable, of.needs, sinks)
