"""The backward pass of dense attention as a function: `sdpa_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import softmax_of
from cudnn_sdpa.attention.backward_arguments import SdpaGradients, gradients_of, needs_of
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall
from cudnn_sdpa.attention.dense.sdpa import SDPA, call_of
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.engine import autograd_checks


def sdpa_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
    wanted: Sequence[str] | None = None,
) -> SdpaGradients:
    """The gradients of `sdpa`, given its output and its LSE; also those of a part of the keys.

    `out` and `lse` may be those of more keys than `k` and `v` hold, as where keys travel between GPUs or a prefix is
    shared: the gradients of k and v are then those of this part, and the gradients of q of all parts add up to its
    gradient. `merge_states` makes `out` and `lse` of the results of the parts. Autograd calls `sdpa`'s backward pass by
    itself; this is for a backward pass of your own.

    With P = exp(scores − lse), dP = grad_out vᵀ and D = rowsum(grad_out ∘ out), it is dv = Pᵀ grad_out and
    dS = P ∘ (dP − D), from which dq and dk follow ("FlashAttention-2", Dao, 2023, section 2.3.2).

    Options are those of the forward call. There is no `dropout_p`: `sdpa` does not return its random numbers. Autograd
    does not follow the call, and autocast casts nothing: tensors are as the forward pass had them.

    Args:
        grad_out: The gradient of the output (B, Hq, Sq, Dv), in q's dtype. It is copied if cuDNN cannot read its
            layout, and so are `out` and `lse`.
        out: The output (B, Hq, Sq, Dv), in q's dtype.
        lse: Its LSE (B, Hq, Sq) float32, natural logarithm, as `sdpa` returns it with `return_lse=True`.
        q: Queries (B, Hq, Sq, D).
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        is_causal: As in the forward pass.
        causal_alignment: As in the forward pass.
        window_size: As in the forward pass.
        scale: As in the forward pass.
        attn_mask: As in the forward pass, for these keys.
        softcap: As in the forward pass.
        alibi: As in the forward pass.
        sinks: As in the forward pass, (Hq,). Where keys are in parts, give them with one part alone, so that their
            gradient counts once; the LSE contains them for all.
        seq_lens_q: As in the forward pass.
        seq_lens_kv: As in the forward pass, for these keys.
        deterministic: Whether gradients are bit-exact; None follows `torch.use_deterministic_algorithms`.
        wanted: The inputs whose gradients are computed, of "q", "k", "v", "attn_mask" (if it is float) and "sinks";
            None is all that there are.

    Returns:
        `SdpaGradients(dq, dk, dv, dmask, dsinks)`, each in the dtype and memory order of its input, None where not
        wanted or not there.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        Attention to two halves of the keys, and its gradients:

        >>> import torch
        >>> from cudnn_sdpa import merge_states, sdpa, sdpa_backward
        >>> q, k, v, grad_out = torch.randn(4, 1, 2, 8, 16, dtype=torch.bfloat16)
        >>> halves = list(zip(k.chunk(2, 2), v.chunk(2, 2)))
        >>> outs, lses = zip(*(sdpa(q, *half, return_lse=True) for half in halves))
        >>> out, lse = merge_states(outs, lses)
        >>> first, second = (sdpa_backward(grad_out, out, lse, q, *half) for half in halves)
        >>> whole = sdpa_backward(grad_out, out, lse, q, k, v)
        >>> torch.allclose(first.dq + second.dq, whole.dq, atol=0.05)
        True
        >>> torch.allclose(torch.cat([first.dk, second.dk], 2), whole.dk, atol=0.05)
        True
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_backward")
    of = backward_call_of(
        grad_out,
        out,
        lse,
        wanted,
        q=q,
        k=k,
        v=v,
        softmax=softmax_of(is_causal, causal_alignment, window_size, scale, softcap, deterministic, alibi=alibi),
        attn_mask=attn_mask,
        sinks=sinks,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
    )
    return gradients_of(SDPA.explicit_gradients(of), SDPA.differentiable, of.needs, sinks)


def backward_call_of(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[str] | None,
    **arguments: Any,
) -> SdpaBackwardCall:
    """The call that arguments of `sdpa_backward` make; they have not been checked."""
    call = call_of(**arguments)
    needs = needs_of(wanted, {name: getattr(call, name) for name in SDPA.differentiable})
    return SdpaBackwardCall(grad_out=grad_out, out=out, lse=lse, call=call, needs=needs)
