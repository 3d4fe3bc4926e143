"""What calls of norms, activations and convolutions would run, for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused import activation as gates
from cudnn_sdpa.fused import conv, norm
from cudnn_sdpa.fused.activation_graphs import (
    gelu_mul_rows,
    relu_squared_rows,
    silu_mul_grad_gate,
    silu_mul_grad_up,
    silu_mul_gradients,
    silu_mul_rows,
)
from cudnn_sdpa.fused.activation_tiling import as_rows
from cudnn_sdpa.fused.checks import EXPECTED
from cudnn_sdpa.fused.conv_graphs import (
    as_2d,
    channels_last,
    conv_dgrad,
    conv_wgrad,
    convolution,
)
from cudnn_sdpa.fused.graph_op import GraphFunction
from cudnn_sdpa.fused.norm_graphs import layer_norm_gradients, layer_norm_rows, rms_norm_gradients, rms_norm_rows
from cudnn_sdpa.graph.key import PlanKey


@describes(norm.rms_norm)
def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    zero_centered: bool = False,
) -> Description:
    norm.check(x, {"weight": weight}, eps)
    norm.check_residual(x, residual)
    norm.check_choices(activation, zero_centered)
    trains = needs_gradient(x, weight, residual)
    if 0 in x.shape:
        return _empty(rms_norm_rows, x, trains)
    shift = 1.0 if zero_centered and weight is not None else None
    rows, weight_row, residual_rows = norm.rows_of(x, weight, residual)
    rows, weight_row, residual_rows = _meta(rows), _meta(weight_row), _meta(residual_rows)
    forward = rms_norm_rows.describe(
        x=rows,
        weight=weight_row,
        residual=residual_rows,
        eps=float(eps),
        shift=shift,
        with_scale=trains,
        activation=None if trains else activation,
    )
    notes = _copies(x=x, residual=residual) + [f"{activation} of the result"] * (trains and activation is not None)
    if not trains:
        return _completed(forward, x, notes)
    scale = torch.empty(rows.shape[0], 1, 1, 1, dtype=torch.float32, device="meta")
    gradients = rms_norm_gradients.describe(grad=rows, x=rows, weight=weight_row, scale=scale, shift=shift)
    return _completed(forward, x, notes, gradients)


@describes(norm.layer_norm)
def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Description:
    norm.check(x, {"weight": weight, "bias": bias}, eps)
    trains = needs_gradient(x, weight, bias)
    if 0 in x.shape:
        return _empty(layer_norm_rows, x, trains)
    created = [name for name, part in (("weight", weight), ("bias", bias)) if part is None]
    notes = _copies(x=x) + [f"{name} is created" for name in created]
    like = next((part for part in (weight, bias) if part is not None), x)
    vectors = [part if part is not None else like.new_empty(x.shape[-1]) for part in (weight, bias)]
    rows, weight_row, bias_row = norm.rows_of(x, *vectors)
    rows, weight_row, bias_row = _meta(rows), _meta(weight_row), _meta(bias_row)
    forward = layer_norm_rows.describe(rows, weight_row, bias_row, float(eps), with_statistics=trains)
    if not trains:
        return _completed(forward, x, notes)
    mean, scale = (torch.empty(rows.shape[0], 1, 1, 1, dtype=torch.float32, device="meta") for _ in range(2))
    gradients = layer_norm_gradients.describe(grad=rows, x=rows, weight=weight_row, mean=mean, scale=scale)
    return _completed(forward, x, notes, gradients)


@describes(gates.silu_mul)
def _silu_mul(gate: Tensor, up: Tensor | None = None) -> Description:
    tensors = gates.halves_of(gate) if up is None else (gate, up)
    gates.check(tensors, ("gate", "up"))
    if 0 in tensors[0].shape:
        return _empty(silu_mul_rows, gate, needs_gradient(gate, up))
    forward = silu_mul_rows.describe(*map(_meta, as_rows(tensors, ("gate", "up"))))
    if not needs_gradient(gate, up):
        return _completed(forward, gate, [])
    grad = torch.empty(tensors[0].shape, dtype=gate.dtype, device=gate.device)
    grad_row, gate_row, up_row = map(_meta, as_rows((grad, *tensors), ("grad", "gate", "up")))
    if up is None or (gate.requires_grad and up.requires_grad):
        gradients = silu_mul_gradients.describe(grad_row, gate_row, up_row, dense=up is not None)
    elif gate.requires_grad:
        gradients = silu_mul_grad_gate.describe(grad_row, gate_row, up_row)
    else:
        gradients = silu_mul_grad_up.describe(grad_row, gate_row)
    return _completed(forward, gate, [], gradients)


@describes(gates.gelu_mul)
def _gelu_mul(gate: Tensor, up: Tensor) -> Description:
    gates.check((gate, up), ("gate", "up"))
    return _without_gradient("gelu_mul", gelu_mul_rows, gate=gate, up=up)


@describes(gates.relu_squared)
def _relu_squared(x: Tensor) -> Description:
    gates.check((x,), ("x",))
    return _without_gradient("relu_squared", relu_squared_rows, x=x)


def _without_gradient(name: str, graph: GraphFunction, **tensors: Tensor) -> Description:
    first = next(iter(tensors.values()))
    if needs_gradient(*tensors.values()):
        refused = partial(_refuse, gates.no_gradient(name))
        return replace(_empty(graph, first, trains=False), key=refused, is_empty=False)
    if 0 in first.shape:
        return _empty(graph, first, trains=False)
    return _completed(graph.describe(*map(_meta, as_rows(list(tensors.values()), list(tensors)))), first, [])


def _convolution(
    rank: int,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: dict[str, object],
    groups: int,
    activation: str | None,
) -> Description:
    conv.check(rank, x=x, weight=weight, bias=bias, groups=groups)
    conv.check_activation(activation)
    sizes = conv.sizes_of(rank, **geometry)
    conv.check_extent(x, weight, **sizes)
    if rank == 2 and groups == 1 and conv.is_patch_embedding(x, weight, **sizes):
        reasons = ["the stride equals the filter size: the patches are gathered, and PyTorch multiplies them"]
        raise UnsupportedError("a cuDNN plan for this conv2d", reasons, "calling it")
    trains = needs_gradient(x, weight, bias)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    is_separate = trains or conv.has_separate_activation(tensors, groups, activation)
    views, sizes = as_2d(rank, x, weight, sizes)
    image, filters = (_meta(channels_last(part)) for part in views)
    column = None if bias is None else _meta(bias.contiguous().view(1, -1, *(1,) * (image.dim() - 2)))
    forward = convolution.describe(image, filters, column, **sizes, activation=None if is_separate else activation)
    copied = [name for name, part in zip(("x", "weight"), views, strict=True) if channels_last(part) is not part]
    notes = [f"{name} is copied to channels last" for name in copied]
    notes += [f"{activation} of the result"] * (is_separate and activation is not None)
    if not trains:
        return _completed(forward, x, notes)
    grad = convolution.outputs((image, filters, column), {**sizes, "activation": None})[0]
    extra_kernels = ["the gradient of the bias"] * (bias is not None and bias.requires_grad)
    if x.requires_grad:
        gradient = conv_dgrad.describe(grad, filters, shape=tuple(image.shape), **sizes)
        extra_kernels = ["the gradient of the weight, a separate plan"] * weight.requires_grad + extra_kernels
    elif weight.requires_grad:
        gradient = conv_wgrad.describe(grad, image, shape=tuple(filters.shape), **sizes)
    else:  # only the bias's gradient is needed, a sum in PyTorch
        return _completed(forward, x, notes)
    return _completed(forward, x, notes, replace(gradient, extra_kernels=extra_kernels))


def _convolution_of_rank(rank: int) -> Callable[..., Description]:
    def describe(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: object = 1,
        padding: object = 0,
        dilation: object = 1,
        groups: int = 1,
        activation: str | None = None,
    ) -> Description:
        return _convolution(
            rank,
            x=x,
            weight=weight,
            bias=bias,
            geometry={"stride": stride, "padding": padding, "dilation": dilation},
            groups=groups,
            activation=activation,
        )

    return describe


for _rank, _function in enumerate((conv.conv1d, conv.conv2d, conv.conv3d), start=1):
    describes(_function)(_convolution_of_rank(_rank))


@overload
def _meta(value: Tensor) -> Tensor: ...


@overload
def _meta(value: Tensor | None) -> Tensor | None: ...


def _meta(value: Tensor | None) -> Tensor | None:
    """A tensor as a meta tensor."""
    if value is None:
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _copies(**tensors: Tensor | None) -> list[str]:
    return [
        f"{name} is copied into dense rows" for name, x in tensors.items() if x is not None and not x.is_contiguous()
    ]


def _empty(graph: GraphFunction, x: Tensor, trains: bool) -> Description:
    """A call without elements, of any layout."""
    description = Description(graph, _no_key, x.get_device() if x.is_cuda else None, is_empty=True)
    return replace(description, backward=description) if trains else description


def _completed(forward: Description, x: Tensor, notes: list[str], backward: Description | None = None) -> Description:
    """A graph function's description, completed for the public function."""
    device = x.get_device() if x.is_cuda else None
    backward = None if backward is None else replace(backward, device=device)
    if x.dtype is torch.float64:
        forward = replace(forward, key=_no_key)
        backward = None if backward is None else replace(backward, key=_no_key)
    return replace(forward, device=device, is_empty=0 in x.shape, extra_kernels=notes, backward=backward)


def _refuse(error: UnsupportedError, *_: object) -> NoReturn:
    raise error


def _no_key(*_: object) -> PlanKey:
    """The key function of a call in float64, which runs on the CPU only.

    Raises:
        UnsupportedError: Always.
    """
    reasons = [f"cuDNN's kernels take {EXPECTED}, not float64: on the CPU it runs in PyTorch"]
    raise UnsupportedError("float64", reasons, "tensors converted to torch.bfloat16")
