"""Descriptions of norms, activations and convolutions, for `explain`.

Graph functions describe their plans; this module adds the kernels around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused import activation as gates
from cudnn_sdpa.fused import conv, norm
from cudnn_sdpa.fused.activation_graphs import gelu_mul_rows, relu_squared_rows, silu_mul_rows
from cudnn_sdpa.fused.checks import EXPECTED, checked_flag
from cudnn_sdpa.fused.conv_graphs import channels_last, check_call, conv_wgrad, convolution, sizes_of
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.fused.norm_graphs import check as check_norm
from cudnn_sdpa.fused.norm_graphs import (
    checked_eps,
    default_eps,
    layer_norm_fp8_rows,
    layer_norm_rows,
    rms_norm_fp8_rows,
    rms_norm_rows,
)
from cudnn_sdpa.fused.rotary.rope import fp8_operands_of, operands_of, rope, rope_fp8
from cudnn_sdpa.fused.rotary.rope_graphs import rope_fp8_rows, rope_rows
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target


@describes(norm.rms_norm, rms_norm_rows.ways)
def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    *,
    residual: Tensor | None,
    activation: str | None,
    zero_centered: bool,
) -> Description:
    eps = checked_eps(default_eps(x) if eps is None else eps)
    shift = 1.0 if checked_flag("zero_centered", zero_centered) and weight is not None else None
    return _norm(rms_norm_rows, (x, weight, eps, shift, residual), activation, [])


def _norm(graph: GraphFunction, operands: tuple[Any, ...], activation: str | None, notes: list[str]) -> Description:
    x, *others, residual = operands
    has_sum, has_activation = norm.separate_steps(operands, activation)
    notes = ["the sum of x and residual"] * has_sum + [f"{activation} of the result"] * has_activation + notes
    if has_sum:
        x, residual = x + residual, None
    fused = None if has_activation else activation
    description = graph.describe(x, *others, residual, activation=fused)
    return _completed(description, x, _copies(x=x, residual=residual) + notes)


@describes(norm.rms_norm_fp8, rms_norm_fp8_rows.ways)
def _rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    *,
    scale: Tensor | None,
    residual: Tensor | None,
    zero_centered: bool,
) -> Description:
    eps = checked_eps(default_eps(x) if eps is None else eps)
    shift = 1.0 if checked_flag("zero_centered", zero_centered) and weight is not None else None
    description = rms_norm_fp8_rows.describe(x, weight, eps, shift=shift, residual=residual, scale=scale)
    return _completed_fp8(description, x, residual, scale)


@describes(norm.layer_norm_fp8, layer_norm_fp8_rows.ways)
def _layer_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    scale: Tensor | None,
    residual: Tensor | None,
) -> Description:
    description = layer_norm_fp8_rows.describe(x, weight, bias, checked_eps(eps), residual=residual, scale=scale)
    return _completed_fp8(description, x, residual, scale)


def _completed_fp8(description: Description, x: Tensor, residual: Tensor | None, scale: Tensor | None) -> Description:
    return _completed(description, x, _copies(x=x, residual=residual) + ["the amax of all rows"] * (scale is not None))


@describes(norm.layer_norm, layer_norm_rows.ways)
def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None,
    activation: str | None,
    zero_centered: bool,
) -> Description:
    eps = checked_eps(eps)
    check_norm(x, {"weight": weight, "bias": bias}, eps)
    shift = 1.0 if checked_flag("zero_centered", zero_centered) and weight is not None else None
    created = norm.created_operands(weight, bias)
    like = next((part for part in (weight, bias) if part is not None), x)
    weight, bias = (
        like.new_empty(x.shape[-1]) if name in created else part for name, part in (("weight", weight), ("bias", bias))
    )
    notes = [f"{name} is created" for name in created]
    return _norm(layer_norm_rows, (x, weight, bias, eps, shift, residual), activation, notes)


def _gate(graph: GraphFunction, **operands: Tensor) -> Description:
    first, *_ = operands.values()
    if graph.backward is None and (error := UnsupportedError.of(graph.arguments, tuple(operands.values()), {})):
        return Description.refused(graph, error, first.get_device() if first.is_cuda else None)
    return _completed(graph.describe(*operands.values()), first, [])


describes(gates.silu_mul, silu_mul_rows.ways)(partial(_gate, silu_mul_rows))
describes(gates.gelu_mul, gelu_mul_rows.ways)(partial(_gate, gelu_mul_rows))
describes(gates.relu_squared, relu_squared_rows.ways)(partial(_gate, relu_squared_rows))


def _convolution(
    rank: int,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    activation: str | None,
    **given: object,
) -> Description:
    sizes = sizes_of(rank, **given)
    check_call(x, weight, bias, **sizes, groups=groups, activation=activation)
    if conv.is_patch_embedding(x, weight, **sizes, groups=groups):
        reasons = ["the stride equals the filter size: the patches are gathered, and PyTorch multiplies them"]
        raise UnsupportedError("a cuDNN plan for this conv2d", reasons, "calling it")
    is_separate = conv.has_separate_activation(x, weight, bias, groups=groups, activation=activation)

    def by_measurement(target: Target) -> Description | None:
        row = conv.preference(x, weight, sizes, groups=groups, activation=activation, target=target)
        return None if row is None else replace(described(is_separate=True), choice=str(row))

    def described(*, is_separate: bool) -> Description:
        fused = None if is_separate else activation
        forward = convolution.describe(x, weight, bias, **sizes, groups=groups, activation=fused)
        return _completed_convolution(forward, x, weight, bias, separate=activation if is_separate else None)

    found = described(is_separate=is_separate)
    return found if is_separate else replace(found, on_target=by_measurement)


def _completed_convolution(
    forward: Description, x: Tensor, weight: Tensor, bias: Tensor | None, *, separate: str | None
) -> Description:
    copied = [name for name, part in (("x", x), ("weight", weight)) if channels_last(part) is not part]
    notes = [f"{name} is copied to channels last" for name in copied]
    notes += [f"{separate} of the result"] * (separate is not None)
    if forward.backward is not None:
        extra_kernels = [x for x in forward.backward.extra_kernels if x != f"{conv_wgrad.__name__}, a separate plan"]
        extra_kernels += ["the gradient of the weight, a separate plan"] * (x.requires_grad and weight.requires_grad)
        extra_kernels += ["the gradient of the bias"] * (bias is not None and bias.requires_grad)
        forward = replace(forward, backward=replace(forward.backward, extra_kernels=extra_kernels))
    return _completed(forward, x, notes)


for _rank, _function in enumerate((conv.conv1d, conv.conv2d, conv.conv3d), start=1):
    describes(_function, convolution.ways)(partial(_convolution, _rank))


def _rope(
    graph: GraphFunction, operands: Callable[..., tuple[Any, ...]], *, interleaved: bool, **given: Any
) -> Description:
    description = graph.describe(*operands(**given), interleaved=checked_flag("interleaved", interleaved))
    spread = [name for name in ("q", "k") if given[name] is not None and given[name].stride(-1) != 1]
    return _completed(description, given["q"], [f"{name} is copied with dense features" for name in spread])


describes(rope, rope_rows.ways)(partial(_rope, rope_rows, operands_of))
describes(rope_fp8, rope_fp8_rows.ways)(partial(_rope, rope_fp8_rows, fp8_operands_of))


def _copies(**tensors: Tensor | None) -> list[str]:
    return [
        f"{name} is copied into dense rows" for name, x in tensors.items() if x is not None and not x.is_contiguous()
    ]


def _completed(description: Description, x: Tensor, notes: list[str]) -> Description:
    if x.dtype is torch.float64:
        backward = description.backward
        backward = None if backward is None else replace(backward, key=_no_key)
        description = replace(description, key=_no_key, backward=backward)
    return replace(description, extra_kernels=[*description.extra_kernels, *notes])


def _no_key(*_: object) -> PlanKey:
    reasons = [f"cuDNN's kernels take {EXPECTED}, not float64: on the CPU it runs in PyTorch"]
    raise UnsupportedError("float64", reasons, "tensors converted to torch.bfloat16")
