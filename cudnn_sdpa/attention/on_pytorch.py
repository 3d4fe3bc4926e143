"""Dense calls that cuDNN declines, on PyTorch's own attention or on the reference."""

from __future__ import annotations

from typing import Any

import torch

from cudnn_sdpa.attention import autograd, memory
from cudnn_sdpa.attention.arguments import ForwardArguments, ReferenceArguments
from cudnn_sdpa.attention.calls import Result
from cudnn_sdpa.attention.operators import new_output
from cudnn_sdpa.attention.options import TOP_LEFT, UNBOUNDED
from cudnn_sdpa.runtime.eager import needs_gradient


def run(call: ForwardArguments) -> Result:
    """Runs a checked call on PyTorch's own attention if that has its options, otherwise on the reference."""
    if call.out is not None:
        memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)
    if _is_pytorchs(call):
        out = _scaled_dot_product_attention(call)
        return out if call.out is None else call.out.copy_(out)
    inputs = (*call[:5], ReferenceArguments._make(call)._replace(out=None, with_lse=True))
    out, lse = autograd.ReferenceAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    out = out if call.out is None else call.out.copy_(out)
    return (out, lse) if call.with_lse else out


def _is_pytorchs(call: ForwardArguments) -> bool:
    """Whether PyTorch's own attention has all options of a call."""
    others = (call.sinks, call.seq_lens_q, call.seq_lens_kv, call.softcap)
    bounded = (call.window_left, call.window_right) != (UNBOUNDED, UNBOUNDED) or call.alibi
    causal = call.is_causal and (call.attn_mask is not None or call.causal_alignment != TOP_LEFT)
    # Its gradients are deterministic if PyTorch as a whole is set so, which a single call cannot do.
    deterministic = call.deterministic and needs_gradient(*call.tensors)
    # One of its kernels on the GPU takes no mask of float32 beside half precision.
    mixed = call.attn_mask is not None and call.attn_mask.dtype not in (torch.bool, call.q.dtype)
    return others == (None,) * 4 and not (bounded or causal or call.with_lse or deterministic or mixed)


def _scaled_dot_product_attention(call: ForwardArguments) -> torch.Tensor:
    """PyTorch's own attention, its output in the memory order of q."""
    q, mask, group = call.q, call.attn_mask, call.q.shape[1] // call.k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (call.k, call.v))
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(q.shape[2], k.shape[2])
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "is_causal": call.is_causal, "scale": call.scale}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options)
    ordered = new_output(q, call.v)
    return out if out.stride() == ordered.stride() else ordered.copy_(out)
