"""The backward pass of attention over packed sequences as a function: `sdpa_varlen_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import softmax_of
from cudnn_sdpa.attention.backward_arguments import SdpaGradients, gradients_of, needs_of
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN, call_of
from cudnn_sdpa.engine import autograd_checks


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
    of = backward_call_of(
        grad_out,
        out,
        lse,
        wanted,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        softmax=softmax_of(is_causal, causal_alignment, window_size, scale, softcap, deterministic),
        sinks=sinks,
    )
    return gradients_of(VARLEN.explicit_gradients(of), VARLEN.differentiable, of.needs, sinks)


def backward_call_of(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[str] | None,
    **arguments: Any,
) -> VarlenBackwardCall:
    """The call that arguments of `sdpa_varlen_backward` make; they have not been checked."""
    call = call_of(**arguments)
    needs = needs_of(wanted, {name: getattr(call, name) for name in VARLEN.differentiable})
    return VarlenBackwardCall(grad_out=grad_out, out=out, lse=lse, call=call, needs=needs)
