"""Dense attention in plain PyTorch: on the CPU, where cuDNN has no kernel, and under `fallback("torch")`."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall, Needs, results
from cudnn_sdpa.attention.bias import new_gradient
from cudnn_sdpa.attention.mask import TOP_LEFT, as_kernels_see
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.engine.dispatch_state import needs_gradient, views_of_leaves
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


#: The arguments of `sdpa` that `kernels.attention` has. It is always deterministic.
_OF_KERNELS = frozenset(("q", "k", "v", "attn_mask", "is_causal", "causal_alignment", "scale", "deterministic"))

#: The largest head dim of its fused form.
_MAX_FUSED_DIM = 128

#: The dtypes that it takes on a GPU.
_DTYPES_OF_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


def mode_of_own_kernels(call: ForwardArguments) -> str | None:
    """The form of `kernels.attention` that has all options of a call; None if it lacks one, or the dtype.

    Head dims above those of the fused form take the tiled one, whose memory grows with Sq × Skv.
    """
    q, k, v, softmax = call.q, call.k, call.v, call.softmax
    aligned = not softmax.is_causal or softmax.causal_alignment == TOP_LEFT or q.shape[2] == k.shape[2]
    takes_dtype = q.dtype in _DTYPES_OF_KERNELS or not (q.is_cuda or cpu_target.checks_dtypes())
    if not (call.has_only(_OF_KERNELS) and aligned and takes_dtype) or v.shape[3] != q.shape[3]:
        return None
    return "fused" if q.shape[3] <= _MAX_FUSED_DIM else "tiled"


def by_own_kernels(call: ForwardArguments) -> Tensor | None:
    """The output of the operator of `kernels.attention`."""
    mode = mode_of_own_kernels(call)
    if mode is None:
        return None
    q, k, v, mask, softmax = call.q, call.k, call.v, call.attn_mask, call.softmax
    operators = torch.ops.cudnn_sdpa
    if not needs_gradient(q, k, v, mask):
        out: Tensor = operators.kernels_attention_forward(q, k, v, mask, mode, softmax.is_causal, softmax.scale)
        return out
    _views = views_of_leaves(q, k, v, mask)  # while the operator applies a function of autograd's
    out, _ = operators.kernels_attention_forward_statistics(q, k, v, mask, mode, softmax.is_causal, softmax.scale)
    return out


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
