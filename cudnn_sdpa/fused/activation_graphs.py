"""Graphs of gated activations, forward and backward, with their checks and references.

Tensors are (..., n), and views of them as matrices where a plan reads and writes them. Where `up` is None, `gate` holds
both in its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.engine import sharding
from cudnn_sdpa.engine.autograd_checks import no_second_gradient
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.errors import ShapeError, UnsupportedError
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.activation_kernels import GELU, RELU_SQUARED, SILU, own_activation, own_activation_gradients
from cudnn_sdpa.fused.activation_tiling import backward_views, check_rows, forward_views, halves, split
from cudnn_sdpa.fused.checks import check_beside, check_dtype, widened
from cudnn_sdpa.fused.graph_op import GraphCall, Views, graph_op
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.scalars import is_true
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.kernel_plan import KernelOp
from cudnn_sdpa.plans.providers import CUDNN, OWN


def check(*tensors: Tensor, names: Sequence[str] = ("gate", "up")) -> None:
    """Checks that the arguments are tensors of one shape and dtype, without gaps that would need a copy."""
    first, *others = tensors
    check_dtype(names[0], first)
    for name, other in zip(names[1:], others, strict=True):
        check_beside(name, other, names[0], first, shape=first.shape, meaning=f"that of {names[0]}")
    check_rows(tensors, names)


def check_halves(gate: Tensor, up: Tensor | None) -> None:
    if up is not None:
        check(gate, up)
        return
    check_dtype("gate", gate)
    if gate.dim() == 0 or gate.shape[-1] % 2:
        expected = "an even last dimension, gate and up, if up is None"
        raise ShapeError("gate", f"shape {tuple(gate.shape)}", expected)
    check(*split(gate))


def _refuse_gradient(name: str, *tensors: Tensor | None) -> None:
    """Where only providers are in force that have none."""
    if needs_gradient(*tensors) and not own.may_serve():
        reasons = ["an argument requires grad, and cuDNN has no backward pass for it here"]
        raise UnsupportedError(f"the gradient of {name}", reasons, 'torch.no_grad(), or providers("cudnn", "own")')


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return split(gate) if up is None else (gate, up)


def _readable(gate: Tensor, up: Tensor | None = None) -> list[Tensor | None]:
    """Copies rows of one element that have gaps: cuDNN reads no others."""
    halves = _halves(gate, up)
    return [x.contiguous() for x in halves] if _is_column(halves[0]) else [gate, up]


def _is_column(x: Tensor) -> bool:
    return x.dim() > 0 and is_true(x.shape[-1] == 1)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor | None], Tensor]:
    def reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, up = _halves(gate, up)
        return (activation(widened(gate)) * widened(up)).to(gate.dtype).contiguous()

    return reference


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU, and its slope."""
    sigmoid = torch.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU, and its slope."""
    share = 0.5 * (1 + torch.erf(x * 0.5**0.5))
    density = torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    return x * share, share + torch.where(density == 0, 0.0, x * density)


def _gradients_of(
    parts: Callable[[Tensor], tuple[Tensor, Tensor]],
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    of_up: bool = True,
) -> Tensor | tuple[Tensor, ...]:
    one, other = _halves(gate, up)
    activated, slope = parts(widened(one))
    dy = widened(grad)
    grads = dy * widened(other) * slope, dy * activated
    grad_gate, grad_up = (part.to(gate.dtype).contiguous() for part in grads)
    return torch.cat([grad_gate, grad_up], -1) if up is None else (grad_gate, grad_up) if of_up else grad_gate


def _check_saved(_grad: Tensor, *tensors: Tensor | None, **_: bool) -> None:
    """Checks saved tensors, to which hooks may have given other layouts."""
    if None not in tensors:
        check_rows([x for x in tensors if x is not None], ("gate", "up")[: len(tensors)])


def _readable_gradients(grad: Tensor, gate: Tensor, up: Tensor | None = None, **_: bool) -> list[Tensor | None]:
    """Dense operands: where one tensor holds both, its gradient has the strides of a dense `gate`."""
    return [grad.contiguous(), gate.contiguous() if up is None else gate, up]


def _ways(arguments: Mapping[str, object]) -> Sequence[sharding.ShardingStrategy]:
    """Shards any dimension of all operands; where one holds both halves, any but the last."""
    holds_both = arguments.get("up") is None
    return sharding.along({name: int(holds_both) for name in ("gate", "up", "grad") if name in arguments})(arguments)


@graph_op(
    reference=lambda grad, gate, up=None, **options: _gradients_of(_silu, grad, gate, up, **options),
    backward=no_second_gradient("silu_mul"),
    keeps_results=False,
    check=_check_saved,
    readable=_readable_gradients,
    views=backward_views,
    shard=_ways,
)
def silu_mul_gradients(
    g: GraphBuilder, grad: Symbol, gate: Symbol, up: Symbol | None = None, *, of_up: bool = True
) -> Symbol | tuple[Symbol, Symbol]:
    """Gradients of gate and up, one tensor where one holds both; of gate alone unless `of_up`."""
    # The slope of SiLU by σ and y = x σ: σ + (y - y σ). cuDNN's `swish_backward` is as fast, but gives 0 instead of 1
    # from some x between 10⁶ and 10⁸ on (9.19, H100).
    sigmoid = g.sigmoid(input=gate)
    silu = g.mul(a=gate, b=sigmoid)
    slope = g.add(a=sigmoid, b=g.sub(a=silu, b=g.mul(a=silu, b=sigmoid)))
    grad_gate = g.mul(a=g.mul(a=grad, b=up), b=slope)
    return (grad_gate, g.mul(a=silu, b=grad)) if of_up else grad_gate


@graph_op(
    reference=lambda grad, gate: _gated(F.silu)(gate, grad),
    backward=no_second_gradient("silu_mul"),
    keeps_results=False,
    check=_check_saved,
    readable=lambda grad, gate: [grad.contiguous(), gate],
    views=backward_views,
    shard={"grad": 0, "gate": 0},
)
def silu_mul_grad_up(g: GraphBuilder, grad: Symbol, gate: Symbol) -> Symbol:
    """The gradient of up only, contiguous."""
    return g.mul(a=g.swish(input=gate), b=grad)


def _silu_mul_backward(
    grads: Sequence[Tensor], operands: Sequence[Tensor | None], _: object, *, needs: tuple[bool, ...]
) -> GraphCall:
    (grad,), (needs_grad_gate, needs_grad_up) = grads, needs
    gate, up = operands
    if up is None or (needs_grad_gate and needs_grad_up):
        return silu_mul_gradients.call(grad, gate, up)
    if needs_grad_gate:
        return silu_mul_gradients.call(grad, gate, up, of_up=False)
    return silu_mul_grad_up.call(grad, gate).of("up")


@graph_op(
    reference=_gated(F.silu),
    backward=_silu_mul_backward,
    keeps_results=False,
    check=check_halves,
    readable=_readable,
    views=forward_views,
    shard=_ways,
)
def silu_mul_rows(g: GraphBuilder, gate: Symbol, up: Symbol | None = None) -> Symbol:
    """SiLU(gate) · up."""
    return g.mul(a=g.swish(input=gate), b=up)


@graph_op(
    reference=lambda grad, gate, up=None: _gradients_of(_gelu, grad, gate, up),
    backward=no_second_gradient("gelu_mul"),
    keeps_results=False,
    check=_check_saved,
    readable=_readable_gradients,
    views=backward_views,
    shard=_ways,
)
def gelu_mul_gradients(g: GraphBuilder, grad: Symbol, gate: Symbol, up: Symbol | None = None) -> NoReturn:
    """Gradients of gate and up, one tensor where one holds both; by own kernels alone."""
    raise NotImplementedError("cuDNN has no graph of these gradients")


def _check_gelu(gate: Tensor, up: Tensor | None) -> None:
    check_halves(gate, up)
    _refuse_gradient("gelu_mul", gate, up)


@graph_op(
    reference=_gated(F.gelu),
    backward=lambda grads, operands, _: gelu_mul_gradients.call(grads[0], *operands),
    keeps_results=False,
    check=_check_gelu,
    readable=_readable,
    views=forward_views,
    shard=_ways,
)
def gelu_mul_rows(g: GraphBuilder, gate: Symbol, up: Symbol | None = None) -> Symbol:
    """GELU(gate) · up, with erf."""
    return g.mul(a=g.gelu(input=gate), b=up)


def _relu_squared_reference(x: Tensor) -> Tensor:
    return F.relu(widened(x)).square().to(x.dtype).contiguous()


@graph_op(
    reference=lambda grad, x: (widened(grad) * 2 * F.relu(widened(x))).to(x.dtype).contiguous(),
    backward=no_second_gradient("relu_squared"),
    keeps_results=False,
    check=lambda _, x: check_rows([x], ["x"]),
    readable=lambda grad, x: [grad.contiguous(), x],
    views=backward_views,
    shard={"grad": 0, "x": 0},
)
def relu_squared_gradient(g: GraphBuilder, grad: Symbol, x: Symbol) -> NoReturn:
    """The gradient of x; by own kernels alone."""
    raise NotImplementedError("cuDNN has no graph of this gradient")


def _check_relu(x: Tensor) -> None:
    check(x, names=("x",))
    _refuse_gradient("relu_squared", x)


@graph_op(
    reference=_relu_squared_reference,
    backward=lambda grads, operands, _: relu_squared_gradient.call(grads[0], *operands),
    keeps_results=False,
    check=_check_relu,
    readable=lambda x: [x.contiguous() if _is_column(x) else x],
    views=forward_views,
    shard={"x": 0},
)
def relu_squared_rows(g: GraphBuilder, x: Symbol) -> Symbol:
    """max(x, 0)²."""
    y = g.relu(input=x)
    return g.mul(a=y, b=y)


def _by_own_kernels(
    operation: KernelOp, kind: int, names: Sequence[str], given: Views, *, target: Target, device: int | None
) -> tuple[Views, PlanKey | None, str]:
    """The key of an activation's plan by own kernels, or of its gradients', and why; None where cuDNN serves."""
    values, results, static = given
    is_backward = operation is own_activation_gradients
    has_engine = kind == SILU or not is_backward
    kernel, why = own.choice("gate", target, results[0].shape, is_backward=is_backward, has_engine=has_engine)
    if not has_engine:
        kernel, why = OWN, "own kernels: cuDNN has no graph of these gradients"
    if kernel == CUDNN or results[0].dtype not in own.DTYPES:
        return given, None, why if kernel == CUDNN else ""
    views = (values, results) if "x" in names else halves(values, results, gradients=is_backward)
    named = dict(zip(names, views[0], strict=True))
    key, why = own.unless_known_wrong(
        own.key_of(operation, named, views[1], {"kind": kind}, target=target, device=device), why, has_engine=has_engine
    )
    return (given if key is None else (*views, static)), key, why


for _function, _operation, _kind in (
    (silu_mul_rows, own_activation, SILU),
    (gelu_mul_rows, own_activation, GELU),
    (relu_squared_rows, own_activation, RELU_SQUARED),
    (silu_mul_grad_up, own_activation, SILU),
    (silu_mul_gradients, own_activation_gradients, SILU),
    (gelu_mul_gradients, own_activation_gradients, GELU),
    (relu_squared_gradient, own_activation_gradients, RELU_SQUARED),
):
    _function.own = partial(_by_own_kernels, _operation, _kind)
