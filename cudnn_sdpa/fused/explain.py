"""What calls of norms, activations and convolutions would run, for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

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
        return _nothing(rms_norm_rows, x, trains)
    shift = 1.0 if zero_centered and weight is not None else None
    rows, weight_row, residual_rows = (_meta(part) for part in norm.rows_of(x, weight, residual))
    fused = None if trains else activation
    static: dict[str, Any] = {"with_scale": trains, "activation": fused}
    found = rms_norm_rows.describe(rows, weight_row, residual_rows, float(eps), shift, **static)
    notes = _copies(x=x, residual=residual) + [f"{activation} of the result"] * (trains and activation is not None)
    if not trains:
        return _completed(found, x, notes)
    scale = torch.empty(rows.shape[0], 1, 1, 1, dtype=torch.float32, device="meta")
    gradients = rms_norm_gradients.describe(rows, rows, weight_row, scale, shift)
    return _completed(found, x, notes, gradients)


@describes(norm.layer_norm)
def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Description:
    norm.check(x, {"weight": weight, "bias": bias}, eps)
    trains = needs_gradient(x, weight, bias)
    if 0 in x.shape:
        return _nothing(layer_norm_rows, x, trains)
    notes = _copies(x=x) + [f"{name} is made" for name, part in (("weight", weight), ("bias", bias)) if part is None]
    like = next((part for part in (weight, bias) if part is not None), x)
    given = [part if part is not None else like.new_empty(x.shape[-1]) for part in (weight, bias)]
    rows, weight_row, bias_row = (_meta(part) for part in norm.rows_of(x, *given))
    found = layer_norm_rows.describe(rows, weight_row, bias_row, float(eps), with_statistics=trains)
    if not trains:
        return _completed(found, x, notes)
    statistics = (torch.empty(rows.shape[0], 1, 1, 1, dtype=torch.float32, device="meta") for _ in range(2))
    return _completed(found, x, notes, layer_norm_gradients.describe(rows, rows, weight_row, *statistics))


@describes(gates.silu_mul)
def _silu_mul(gate: Tensor, up: Tensor | None = None) -> Description:
    tensors = gates.halves_of(gate) if up is None else (gate, up)
    gates.check(tensors, ("gate", "up"))
    if 0 in tensors[0].shape:
        return _nothing(silu_mul_rows, gate, needs_gradient(gate, up))
    found = silu_mul_rows.describe(*map(_meta, as_rows(tensors, ("gate", "up"))))
    if not needs_gradient(gate, up):
        return _completed(found, gate, [])
    grad = torch.empty(tensors[0].shape, dtype=gate.dtype, device=gate.device)
    rows = [*map(_meta, as_rows((grad, *tensors), ("grad", "gate", "up")))]
    if up is None or (gate.requires_grad and up.requires_grad):
        return _completed(found, gate, [], silu_mul_gradients.describe(*rows, dense=up is not None))
    of_one = silu_mul_grad_gate.describe(*rows) if gate.requires_grad else silu_mul_grad_up.describe(*rows[:2])
    return _completed(found, gate, [], of_one)


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
        return replace(
            _nothing(graph, first, trains=False), key=partial(_refuse, gates.no_gradient(name)), is_empty=False
        )
    if 0 in first.shape:
        return _nothing(graph, first, trains=False)
    return _completed(graph.describe(*map(_meta, as_rows(list(tensors.values()), list(tensors)))), first, [])


def _convolution(
    rank: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of_user: tuple[Any, Any, Any],
    groups: int,
    activation: str | None,
) -> Description:
    conv.check(rank, x, weight, bias, groups)
    conv.check_activation(activation)
    sizes = conv.sizes_of(rank, *of_user)
    conv.check_extent(x, weight, **sizes)
    if rank == 2 and groups == 1 and conv.cuts_patches(x, weight, **sizes):
        reasons = ["the stride equals the filter size: the patches are gathered, and PyTorch multiplies them"]
        raise UnsupportedError("a cuDNN plan for this conv2d", reasons, "calling it")
    trains = needs_gradient(x, weight, bias)
    present = (x, weight) if bias is None else (x, weight, bias)
    apart = trains or conv.is_apart(present, groups, activation)
    given, sizes = as_2d(rank, x, weight, sizes)
    operands = [_meta(channels_last(part)) for part in given]
    column = None if bias is None else _meta(bias.contiguous().view(1, -1, *(1,) * (operands[0].dim() - 2)))
    found = convolution.describe(*operands, column, **sizes, activation=None if apart else activation)
    copied = [name for name, part in zip(("x", "weight"), given, strict=True) if channels_last(part) is not part]
    notes = [f"{name} is copied to channels last" for name in copied]
    notes += [f"{activation} of the result"] * (apart and activation is not None)
    if not trains:
        return _completed(found, x, notes)
    grad = convolution.outputs((*operands, column), {**sizes, "activation": None})[0]
    of_bias = ["the gradient of the bias"] * (bias is not None and bias.requires_grad)
    if x.requires_grad:
        gradient = conv_dgrad.describe(grad, operands[1], shape=tuple(operands[0].shape), **sizes)
        more = ["the gradient of the weight, a separate plan"] * weight.requires_grad + of_bias
    elif weight.requires_grad:
        gradient = conv_wgrad.describe(grad, operands[0], shape=tuple(operands[1].shape), **sizes)
        more = of_bias
    else:  # that is a sum of PyTorch's
        return _completed(found, x, notes)
    return _completed(found, x, notes, replace(gradient, extra_kernels=more))


def _of_rank(rank: int) -> Callable[..., Description]:
    def describe(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        activation: str | None = None,
    ) -> Description:
        return _convolution(rank, x, weight, bias, (stride, padding, dilation), groups, activation)

    return describe


for _rank, _function in enumerate((conv.conv1d, conv.conv2d, conv.conv3d), start=1):
    describes(_function)(_of_rank(_rank))


def _meta(part: Any) -> Any:
    """A tensor without its memory."""
    if not isinstance(part, Tensor):
        return part
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")


def _copies(**tensors: Tensor | None) -> list[str]:
    return [
        f"{name} is copied into dense rows" for name, x in tensors.items() if x is not None and not x.is_contiguous()
    ]


def _nothing(graph: GraphFunction, x: Tensor, trains: bool) -> Description:
    """A call of no numbers, which may lie in memory as they like."""
    found = Description(graph, _no_key, x.get_device() if x.is_cuda else None, is_empty=True)
    return replace(found, backward=found) if trains else found


def _completed(found: Description, x: Tensor, notes: list[str], backward: Description | None = None) -> Description:
    """A graph function's description with what the public function adds."""
    device = x.get_device() if x.is_cuda else None
    gradients = None if backward is None else replace(backward, device=device)
    if x.dtype is torch.float64:
        found, gradients = replace(found, key=_no_key), None if gradients is None else replace(gradients, key=_no_key)
    return replace(found, device=device, is_empty=0 in x.shape, extra_kernels=notes, backward=gradients)


def _refuse(error: UnsupportedError, *_: object) -> NoReturn:
    raise error


def _no_key(*_: Any) -> PlanKey:
    """Stands in for the key of a call in float64, which runs on the CPU alone: cuDNN need not be asked.

    Raises:
        UnsupportedError: Always.
    """
    reasons = [f"cuDNN's kernels take {EXPECTED}, not float64: on the CPU it runs in PyTorch"]
    raise UnsupportedError("float64", reasons, "tensors converted to torch.bfloat16")
