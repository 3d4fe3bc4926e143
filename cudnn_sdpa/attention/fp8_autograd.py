"""The two passes of `fp8_attention`: quantize, attend, convert back; and how autograd sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.autograd import refuse_batch
from cudnn_sdpa.attention.fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.fp8_arguments import Fp8Gradients
from cudnn_sdpa.attention.fp8_quantization import Wanted, defect_of, dequantize, is_readable, quantize, record_all
from cudnn_sdpa.attention.fp8_scaling import DTYPE, Fp8Scaling, limits_of
from cudnn_sdpa.attention.fp8_tables import (
    AMAX,
    DK,
    DO,
    DP,
    DQ,
    DV,
    O,
    S,
    V,
    backward_scales,
    forward_scales,
    new_table,
    scale_for,
    set_scales,
)
from cudnn_sdpa.attention.reference import without_autocast
from cudnn_sdpa.runtime.layouts import dense_stride_like
from cudnn_sdpa.runtime.second_order import refuse_second_gradient


class Call(NamedTuple):
    """A call without its queries, keys and values.

    Attributes:
        options: What `sdpa_fp8` takes by name.
        scaling: The state of its scales, if it has one.
        grad_dtype: The dtype of gradients.
        deterministic: Whether gradients must be bit-exact.
    """

    options: dict[str, Any]
    scaling: Fp8Scaling | None
    grad_dtype: torch.dtype
    deterministic: bool

    @property
    def limits(self) -> tuple[float, float]:
        """What the largest values shall become, forward and backward."""
        return limits_of(self.grad_dtype, 0 if self.scaling is None else self.scaling.margin)


class Forward(NamedTuple):
    """What a forward pass leaves: the output, and what the backward pass needs."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out_fp8: Tensor
    lse: Tensor | None
    table: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, *, half_output: bool = False, with_lse: bool = False
) -> Forward:
    """The forward pass; `half_output` is whether cuDNN writes 16 bits."""
    scaling, (limit, _) = call.scaling, call.limits
    record = given = None
    if scaling is not None:
        scaling.begin()
        record = scaling.recorder(backward=False)
        given = scaling.scales(backward=False, is_cuda=q.is_cuda)
    table = new_table(q.device)
    wanted = Wanted((0, 1, 2), DTYPE, limit, scaling is not None and scaling.inputs == "current")
    q8, k8, v8 = quantize((q, k, v), wanted, table, given, record)
    scales = forward_scales(table)
    if half_output:  # no scale but that what is not finite shows
        scales = scales._replace(scale_o=1 + defect_of(table))
    out_dtype = q.dtype if half_output else DTYPE
    found = sdpa_fp8(q8, k8, v8, scales, **call.options, out_dtype=out_dtype, return_lse=with_lse)
    amaxes = {S: found.amax_s, O: found.amax_o}
    if half_output:
        record_all(amaxes, record)
        return Forward(found.out, q8, k8, v8, found.out, found.lse, table)
    (out,) = dequantize((found.out,), (O,), q.dtype, table, amaxes, record)
    return Forward(out, q8, k8, v8, found.out, found.lse, table)


class Attention(torch.autograd.Function):
    """Attention in FP8 as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Runs the forward pass and keeps its FP8 tensors."""
        with without_autocast(q):
            found = forward(q, k, v, call, with_lse=True)
        lengths = call.options["seq_lens_q"], call.options["seq_lens_kv"]
        ctx.save_for_backward(*found[1:], *lengths)
        ctx.call, ctx.dtype = call, q.dtype
        return found.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by q, k and v."""
        refuse_batch(grad_out)
        if torch.is_grad_enabled():  # the FP8 tensors that are kept do not lead back to q, k and v
            refuse_second_gradient("fp8_attention")
        *saved, _, _ = ctx.saved_tensors
        wanted = [place for place in range(3) if ctx.needs_input_grad[place]]
        with without_autocast(grad_out):
            found = backward(grad_out.to(ctx.dtype), Forward(grad_out, *saved), ctx.call, wanted)
        gradients = dict(zip(wanted, found, strict=True))
        return (*map(gradients.get, range(3)), None)


def backward(grad_out: Tensor, of: Forward, call: Call, wanted: list[int]) -> list[Tensor]:
    """The wanted ones of the gradients by q, k and v."""
    scaling, (_, limit) = call.scaling, call.limits
    record = None if scaling is None else scaling.recorder(backward=True)
    given = None if scaling is None else scaling.scales(backward=True, is_cuda=grad_out.is_cuda)
    table = new_table(grad_out.device)
    current = scaling is not None and scaling.inputs == "current"
    if not is_readable(grad_out):
        grad_out = _dense_copy(grad_out)
    (gradient,) = quantize((grad_out,), Wanted((DO,), call.grad_dtype, limit, current), table, given, record)
    found = None
    for _ in range(0 if given is not None else 1 if call.grad_dtype == torch.float8_e5m2 else 2):
        set_scales(table, DP, scale_for(limit, _bounds(of, table, call, found)))
        found = _gradients(gradient, of, table, call)
    if found is not None:
        set_scales(table, DP, scale_for(limit, _bounds(of, table, call, found)))
    found = _gradients(gradient, of, table, call)
    amaxes = {DP: found.amax_dp, DQ: found.amax_dq, DK: found.amax_dk, DV: found.amax_dv}
    rows = [(DQ, DK, DV)[place] for place in wanted]
    return dequantize([found[place] for place in wanted], rows, grad_out.dtype, table, amaxes, record)


def _gradients(gradient: Tensor, of: Forward, table: Tensor, call: Call) -> Fp8Gradients:
    assert of.lse is not None
    scales = backward_scales(of.table, table)
    tensors = (of.q, of.k, of.v, of.out_fp8, of.lse)
    return sdpa_fp8_backward(gradient, *tensors, scales, **call.options, deterministic=call.deterministic)


def _bounds(of: Forward, table: Tensor, call: Call, found: Fp8Gradients | None) -> Tensor:
    """The largest values of dp, dq, dk and dv: those that a first pass found; before it, no more than a bound of dp.

    The gradient of a score is P (x - mean x) · scale, where |x|, a product of a row of dO and one of V, is at most
    Dv · max |dO| · max |V|, and P (1 - P) is at most 1/4. What becomes of dq, dk and dv does not matter yet.
    """
    if found is not None:
        return torch.cat([found.amax_dp, found.amax_dq, found.amax_dk, found.amax_dv])
    scale = call.options["scale"]
    factor = of.v.shape[3] * (of.q.shape[3] ** -0.5 if scale is None else scale)
    bound = factor * table[AMAX, DO, 0] * of.table[AMAX, V, 0]
    return torch.stack([bound, *(torch.ones_like(bound),) * 3])


def _dense_copy(tensor: Tensor) -> Tensor:
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
