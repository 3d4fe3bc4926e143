"""`kernels.attention` in plain PyTorch: what runs on the CPU, and what tests compare with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ReferenceArguments, from_fields
from cudnn_sdpa.attention.bias import new_gradient
from cudnn_sdpa.attention.dense.reference import dense_sizes, flops_of_backward, flops_of_forward
from cudnn_sdpa.attention.reference import Weights, product, repeated, scores, without_autocast
from cudnn_sdpa.attention.reference import gradients as gradients_of_attention
from cudnn_sdpa.engine.dispatch_state import cast_fields
from cudnn_sdpa.engine.launch import new_tensor
from cudnn_sdpa.kernels.arguments import (
    NAIVE,
    Gradient,
    KernelArguments,
    check_operands,
    check_types,
    without_causal_bias,
)
from cudnn_sdpa.kernels.plans import results


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention by PyTorch's own functions, on any device: scores, softmax and output one after the other.

    It has the meaning of `attention`, also under autocast, and none of its kernels; autograd differentiates it. Half
    precision is computed in float32. Memory grows with Sq × Skv.

    Args:
        q: Queries (B, Hq, Sq, D), in any floating-point dtype of 16 bits or more.
        k: Keys (B, Hkv, Skv, D); Hq is a multiple of Hkv.
        v: Values (B, Hkv, Skv, D).
        mask: Broadcastable to (B, Hq, Sq, Skv): boolean, True for keys that take part, or additive.
        is_causal: Whether query i sees only the keys up to key i.
        scale: Factor of the scores; None is 1/sqrt(D).

    Returns:
        The output (B, Hq, Sq, D), in q's dtype. Fully masked rows are zeros.

    Raises:
        ArgumentError: An argument is wrong; the message says which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import kernels
        >>> q = torch.randn(2, 4, 10, 33)
        >>> torch.allclose(kernels.reference_attention(q, q, q), kernels.attention(q, q, q), atol=1e-5)
        True
    """
    given = KernelArguments(q, k, v, mask, mode=NAIVE, is_causal=is_causal, scale=scale)
    if mask is not None and type(mask) is not Tensor:
        given = without_causal_bias(given)
    check_types(given)
    call = given._replace(**cast_fields(given, "q", "k", "v", "mask"))
    check_operands(call)
    with without_autocast(q):
        return _softmax_and_output(call)[2].to(call.q.dtype)


def _arguments(call: KernelArguments) -> ReferenceArguments:
    options = {"is_causal": call.is_causal, "scale": call.scale}
    return from_fields(ReferenceArguments, call.q, call.k, call.v, call.mask, **options)


def _softmax_and_output(call: KernelArguments) -> tuple[Tensor, Weights, Tensor]:
    found = scores(_arguments(call)).masked
    softmax = Weights.of(found, None)
    return found, softmax, product(softmax.weights, repeated(call.v, call.q, found.dtype))


def attention(call: KernelArguments) -> tuple[Tensor, Tensor]:
    with without_autocast(call.q):
        found, softmax, out = _softmax_and_output(call)
        highest = torch.cat([found, found.new_full((*found.shape[:3], 1), -math.inf)], -1).amax(-1)
        highest = torch.where(torch.isneginf(highest), 0.0, highest)
        inverse = torch.where(torch.isneginf(softmax.lse), 0.0, torch.exp(highest - softmax.lse))
        statistics = torch.stack([highest / math.log(2), inverse], -1)
    layout, layout_of_statistics = results(call)
    made = new_tensor(layout, out.device).copy_(out)
    return made, new_tensor(layout_of_statistics, out.device).copy_(statistics)


def gradients(of: Gradient) -> list[Tensor]:
    call = of.call
    *exact, _ = gradients_of_attention(of.grad_out, of.out, _arguments(call))
    found = []
    for name, tensor, gradient, need in zip(
        ("q", "k", "v", "attn_mask"), call.differentiable, exact, of.needs, strict=True
    ):
        if need and tensor is not None and gradient is not None:
            shape = (1,) * (gradient.dim() - tensor.dim()) + tuple(tensor.shape)  # only a mask's gradient is larger
            found.append(new_gradient(name, tensor).copy_(gradient.sum_to_size(shape).reshape(tensor.shape)))
    return found


def flops(call: KernelArguments) -> tuple[int, int]:
    """Floating-point operations of both passes; the second kernel of the backward pass computes the scores again."""
    number, dim, _ = dense_sizes(call.q, call.k, call.v)
    return flops_of_forward(number, dim, dim), flops_of_backward(number, dim, dim) + flops_of_forward(number, dim, dim)
