"""Memory for the results of attention in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.fp8_arguments import Fp8Backward, Fp8Forward, Fp8Gradients, Fp8Output
from cudnn_sdpa.runtime.layouts import TensorLayout, dense_stride_like


def as_layout(layout: TensorLayout) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """What `allocate` takes."""
    return layout.shape, layout.stride, layout.dtype


def no_largest(device: torch.device) -> Tensor:
    """What a kernel raises to the largest value of each of its blocks, so that it has to start at 0."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def nothing(of: Fp8Forward) -> Fp8Output:
    """The results where there is no query or no key."""
    out = new_output(of).zero_()
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device) if of.call.with_lse else None
    return Fp8Output(out, no_largest(out.device), no_largest(out.device), lse)


def no_gradients(of: Fp8Backward) -> Fp8Gradients:
    """The same of a backward pass."""
    gradients = [new_gradient(x, of.grad_out.dtype).zero_() for x in of.call[:3]]
    return Fp8Gradients(*gradients, *(no_largest(of.call.q.device) for _ in range(4)))


def new_output(of: Fp8Forward) -> Tensor:
    """An output: dense, its dimensions in memory in the order of q."""
    q = of.call.q
    shape = (*q.shape[:3], of.call.v.shape[3])
    return torch.empty_strided(
        shape, dense_stride_like(shape, q.shape, q.stride()), dtype=of.out_dtype, device=q.device
    )


def new_gradient(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of a tensor: dense, in its memory order."""
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
