"""The computation of cuDNN's FP8 kernels in plain PyTorch, for CPU tensors and tests.

The formulas are those of the cuDNN frontend's graphs, in its headers `scaled_dot_product_flash_attention.h`,
`sdpa_fp8_bwd.h` and `matmul_fp8.h`. Where a fused kernel differs from its graph, this follows NVIDIA's own tests of it
(`test/python/sdpa/fp8_ref.py`): the forward pass rounds exp(score − maximum of the row) to FP8, before the division by
the row's sum.

NVIDIA's kernels process a row tile by tile, with the maximum so far; here a row is one tile. Blackwell's kernels may
also multiply `scale_s` by a power of two. Both change roundings, within FP8's precision.

Memory grows with Sq × Skv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.dense.reference import dense_sizes, flops_of_backward, flops_of_forward
from cudnn_sdpa.attention.fp8 import specs
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Arguments,
    Fp8BackwardArguments,
    Fp8BackwardScales,
    Fp8Gradients,
    Fp8Output,
    as_dense,
    without_pages,
)
from cudnn_sdpa.attention.paged.reference import gathered
from cudnn_sdpa.attention.reference import finite, repeated, summed, visible, without_autocast
from cudnn_sdpa.engine.launch import new_tensor


def quantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x · scale` rounded to a dtype and saturated, like `cvt.satfinite` on a GPU.

    PyTorch's own conversion saturates E4M3 but overflows to infinity in E5M2.
    """
    scaled = x * scale.to(x.dtype)
    if dtype in FP8_DTYPES:
        limits = torch.finfo(dtype)
        scaled = scaled.clamp(limits.min, limits.max)
    return scaled.to(dtype)


def attention(call: Fp8Arguments, *, exact: torch.dtype = torch.float32) -> Fp8Output:
    """The forward pass; the log-sum-exp is always there, in the precision of the computation.

    With e = exp(scores − the row's maximum), l its sum along the row, and fp8(x) rounded and saturated:

    - O = fp8(e · scale_s) V · descale_s · descale_v / l, returned as fp8(O · scale_o)
    - amax_s is the amax of the probabilities e / l, before `scale_s`; a kernel computes it from the smallest l
    - amax_o is the amax of O, before `scale_o`
    """
    if call.tables is not None and call.seq_lens_kv is not None:
        k, v = (gathered(x, table, call.seq_lens_kv) for x, table in zip((call.k, call.v), call.tables, strict=True))
        call = call._replace(k=k, v=v, page_table=None, page_table_v=None)
    dtype = call.q.dtype if call.out_dtype is None else call.out_dtype
    with without_autocast(call.q):
        masked = scores(call, call.descale_q, call.descale_k, exact)
        peak = finite(masked.amax(-1, keepdim=True)) if masked.shape[-1] else masked.new_zeros((*masked.shape[:3], 1))
        exponentials = torch.exp(masked - peak)
        total = exponentials.sum(-1, keepdim=True)
        lse = (peak + torch.log(total)).squeeze(-1)
        total = total.masked_fill(total == 0, 1.0)  # rows that see no key
        rounded = quantized(exponentials, call.scale_s, call.q.dtype).to(exact)
        product = torch.matmul(rounded, repeated(call.v, call.q, exact)) / total
        out = product * call.descale_s.to(exact).view(()) * call.descale_v.to(exact).view(())
        amax_s = amax_of(exponentials / total)
        return Fp8Output(quantized(out, call.scale_o.view(()), dtype), amax_s, amax_of(out), lse)


def gradients(call: Fp8BackwardArguments, *, exact: torch.dtype = torch.float32) -> Fp8Gradients:
    """The backward pass, in which the probabilities come from the log-sum-exp and are rounded after the division.

    With P = exp(scores − lse), D the row sums of O ∘ dO, descaled, and fp8(x) rounded and saturated:

    - dV = fp8(P · scale_s)ᵀ dO · descale_s · descale_do
    - dS = P ∘ (dO Vᵀ · descale_do · descale_v − D) · scale, and amax_dp is its amax: cuDNN's dP is here the
      gradient of the scores, with their scale
    - dQ = fp8(dS · scale_dp) K · descale_dp · descale_k
    - dK = fp8(dS · scale_dp)ᵀ Q · descale_dp · descale_q

    P is rounded to the dtype of q, dS to that of `grad_out`. Heads of a group are summed before anything is rounded;
    each result x is returned as fp8(x · its scale), with the amax of x.
    """
    scales = Fp8BackwardScales(*(getattr(call, name).to(exact).view(()) for name in Fp8BackwardScales._fields))
    with without_autocast(call.q):
        q, grad_out = call.q.to(exact), call.grad_out.to(exact)
        k, v = repeated(call.k, q, exact), repeated(call.v, q, exact)
        lse = finite(call.lse.to(exact)).unsqueeze(-1)
        weights = torch.exp(scores(call, scales.descale_q, scales.descale_k, exact) - lse)
        rounded = quantized(weights, scales.scale_s, call.q.dtype).to(exact)
        grad_v = summed(torch.matmul(rounded.transpose(-1, -2), grad_out), call.v)
        grad_v = grad_v * scales.descale_s * scales.descale_do
        mean = (grad_out * call.out.to(exact)).sum(-1, keepdim=True) * scales.descale_do * scales.descale_o
        of_weights = torch.matmul(grad_out, v.transpose(-1, -2)) * scales.descale_do * scales.descale_v
        of_scores = (of_weights - mean) * weights * as_dense(call).scale_value
        rounded = quantized(of_scores, scales.scale_dp, call.grad_out.dtype).to(exact)
        grad_q = torch.matmul(rounded, k) * scales.descale_dp * scales.descale_k
        grad_k = summed(torch.matmul(rounded.transpose(-1, -2), q), call.k) * scales.descale_dp * scales.descale_q
        dtype = call.grad_out.dtype
        return Fp8Gradients(
            dq=quantized(grad_q, scales.scale_dq, dtype),
            dk=quantized(grad_k, scales.scale_dk, dtype),
            dv=quantized(grad_v, scales.scale_dv, dtype),
            amax_dq=amax_of(grad_q),
            amax_dk=amax_of(grad_k),
            amax_dv=amax_of(grad_v),
            amax_dp=amax_of(of_scores),
        )


def scores(
    call: Fp8Arguments | Fp8BackwardArguments, descale_q: Tensor, descale_k: Tensor, exact: torch.dtype
) -> Tensor:
    """The scores as the softmax sees them, (B, Hq, Sq, Skv), −inf where a query does not see a key."""
    dense = as_dense(call)
    product = torch.matmul(call.q.to(exact), repeated(call.k, call.q, exact).transpose(-1, -2)) * dense.scale_value
    product = product * descale_q.to(exact).view(()) * descale_k.to(exact).view(())
    return product.masked_fill(~visible(dense), -torch.inf)


def amax_of(x: Tensor) -> Tensor:
    """The amax, (1,) float32; 0 for an empty tensor."""
    return x.abs().amax().float().view(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)


# What the operations give: tensors in the memory order of their inputs.


def results(call: Fp8Arguments) -> tuple[Tensor, ...]:
    found = attention(call)
    assert found.lse is not None
    out = new_tensor(specs.results(call)[0], call.q.device).copy_(found.out)
    return out, found.amax_s, found.amax_o, found.lse.float()


def results_of_backward(call: Fp8BackwardArguments) -> tuple[Tensor, ...]:
    *found, amax_dq, amax_dk, amax_dv, amax_dp = gradients(call)
    layouts = specs.results_of_backward(call)
    dq, dk, dv = (new_tensor(layout, x.device).copy_(x) for layout, x in zip(layouts, found, strict=False))
    return dq, dk, dv, amax_dq, amax_dk, amax_dv, amax_dp


def flops(call: Fp8Arguments) -> tuple[int, int]:
    """Floating-point operations, on pages as if all tables were full: lengths are not read."""
    dense = without_pages(call)
    return flops_of_forward(*dense_sizes(dense.q, dense.k, dense.v)), 0


def flops_of_backward_call(call: Fp8BackwardArguments) -> tuple[int, int]:
    return flops_of_backward(*dense_sizes(call.q, call.k, call.v)), 0
