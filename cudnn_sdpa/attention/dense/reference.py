"""Dense attention in plain PyTorch: on the CPU, where cuDNN has no kernel, and under `fallback("torch")`."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall, Needs, results
from cudnn_sdpa.attention.bias import new_gradient
from cudnn_sdpa.attention.mask import TOP_LEFT, as_kernels_see
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.launch import Result, new_tensor


def attention(call: ForwardArguments) -> tuple[Tensor, Tensor]:
    """The output and the LSE, as the call returns them."""
    new = [new_tensor(layout, call.q.device) for layout in results(call._replace(out=None))]
    out, lse = (made.copy_(found) for made, found in zip(new, reference.attention(call), strict=True))
    return out, lse


def run(call: ForwardArguments) -> Result:
    """A forward call on a GPU for which cuDNN has no kernel."""
    out, lse = attention(call)
    out = out if call.out is None else call.out.copy_(out)
    return (out, lse) if call.with_lse else out


def gradients(of: GradientCall) -> list[Tensor]:
    call = of.call
    exact = reference.gradients(of.grad_out, of.out, call, of.lse)
    found = []
    for name, tensor, gradient, need in zip(Needs._fields, call.differentiable, exact, of.needs, strict=True):
        if need and tensor is not None and gradient is not None:
            shape = (1,) * (gradient.dim() - tensor.dim()) + tuple(tensor.shape)  # only a mask's gradient is larger
            found.append(new_gradient(name, tensor).copy_(gradient.sum_to_size(shape).reshape(tensor.shape)))
    return found


def by_pytorch(call: ForwardArguments) -> Tensor | None:
    """The output of PyTorch's own attention; None if that lacks an option."""
    if not _pytorch_supports(call):
        return None
    softmax = call.softmax
    q, mask, group = call.q, call.attn_mask, call.q.shape[1] // call.k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (call.k, call.v))
    if mask is not None and mask.dtype != torch.bool:
        mask = as_kernels_see(mask)
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(q.shape[2], k.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=softmax.dropout_p, is_causal=softmax.is_causal, scale=softmax.scale
    )
    layout, _ = results(call._replace(out=None))
    return out if out.stride() == layout[1] else new_tensor(layout, q.device).copy_(out)


#: The arguments that PyTorch's own attention has; other options are declined unless they are left at their defaults.
_PYTORCHS = frozenset(
    ("q", "k", "v", "attn_mask", "rng", "is_causal", "causal_alignment", "scale", "dropout_p", "deterministic", "out")
)


def _pytorch_supports(call: ForwardArguments) -> bool:
    if not call.has_only(_PYTORCHS):
        return False
    softmax = call.softmax
    causal = softmax.is_causal and (call.attn_mask is not None or softmax.causal_alignment != TOP_LEFT)
    # Only PyTorch's global setting makes its gradients deterministic.
    deterministic = softmax.deterministic and needs_gradient(*call.differentiable)
    # One of its GPU kernels takes no float32 mask with half-precision inputs.
    mixed = call.attn_mask is not None and call.attn_mask.dtype not in (torch.bool, call.q.dtype)
    return not (causal or deterministic or mixed)


# Floating-point operations, for `torch.utils.flop_counter.FlopCounterMode`.


def flops_of_forward(scores: int, head_dim: int, head_dim_v: int) -> int:
    return 2 * scores * (head_dim + head_dim_v)


def flops_of_backward(scores: int, head_dim: int, head_dim_v: int) -> int:
    """FLOPs of the recomputed scores, and of the gradients of the weights, v, q and k."""
    return 2 * scores * (3 * head_dim + 2 * head_dim_v)


def dense_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    batch, heads, sq, head_dim = q.shape
    return batch * heads * sq * k.shape[2], head_dim, v.shape[3]


def flops(call: ForwardArguments) -> tuple[int, int]:
    sizes = dense_sizes(call.q, call.k, call.v)
    return flops_of_forward(*sizes), flops_of_backward(*sizes)
