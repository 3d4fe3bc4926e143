"""Rotations of heads and their gradients as graph functions, with their checks and references.

Heads are (B, H, S, D) or, packed, (T, H, D); cosines and sines (S, n), (1, S, n) or (B, S, n), or (T, n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from cudnn_sdpa.engine import sharding
from cudnn_sdpa.engine.autograd_checks import refuse_second_gradient
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, shape_of
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.checks import check_beside, check_dtype, check_savable, widened
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import GraphCall, Views, graph_op
from cudnn_sdpa.fused.norm_graphs import checked_eps, in_e4m3
from cudnn_sdpa.fused.rotary.rope_kernels import MAX_DIM, own_rope, own_rope_fp8, own_rope_gradients
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.graph.scalars import is_true
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.kernel_plan import KernelOp

_WHY = "own kernels: cuDNN has no rotation"


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The first features of heads rotated, twice as many as cosines, which broadcast to the heads."""
    rotary_dim = 2 * cos.shape[-1]
    rotary, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    result = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return result if rotary_dim == heads.shape[-1] else torch.cat((result, rest), dim=-1)


def _for_heads(angles: Tensor, heads: Tensor) -> Tensor:
    """Cosines or sines with a dimension of size 1 where the heads are."""
    return angles.unsqueeze(-2 if heads.dim() == 3 else -3)


def _check_angles(q: Tensor, cos: object, sin: object) -> None:
    """Of the rotations of heads; the first is what the second must be like."""
    check_is_tensor("cos", cos)
    check_is_tensor("sin", sin)
    assert isinstance(cos, Tensor)
    packed = q.dim() == 3
    tokens, dim = q.shape[0 if packed else 2], q.shape[-1]
    expected = "(T, rotary_dim / 2)" if packed else "(S, rotary_dim / 2) or (B, S, rotary_dim / 2)"
    meaning = f"{expected} for q of shape {tuple(q.shape)}, with rotary_dim of 2 to {dim}"
    is_right = cos.dim() == 2 or (not packed and cos.dim() == 3 and cos.shape[0] in (1, q.shape[0]))
    if not is_right or cos.shape[-2] != tokens or not 0 < 2 * cos.shape[-1] <= dim:
        raise ShapeError("cos", shape_of(cos), meaning)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    check_beside("cos", cos, "q", q, dtype=(torch.float32, exact), shape=cos.shape)
    check_beside("sin", sin, "cos", cos, dtype=cos.dtype, shape=cos.shape, meaning="that of cos")  # type: ignore[arg-type]


def _check(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: object = None,
    shift: object = None,
    *,
    interleaved: bool,
) -> None:
    del shift, interleaved
    check_dtype("q", q)
    if q.dim() not in (3, 4) or q.shape[-1] % 2 or not 0 < q.shape[-1] <= MAX_DIM:
        expected = f"(B, Hq, S, D) or (T, Hq, D), with an even head dim D of up to {MAX_DIM}"
        raise ShapeError("q", f"shape {tuple(q.shape)}", expected)
    if k is not None:
        check_is_tensor("k", k)
        like = [k.shape[1] if index == 1 and k.dim() == q.dim() else size for index, size in enumerate(q.shape)]
        check_beside("k", k, "q", q, shape=like, meaning="that of q, with any number of heads")
    _check_angles(q, cos, sin)
    if k is None and k_weight is not None:
        raise OptionError("k_weight", "a weight", "None where k is None")
    weights = {name: x for name, x in (("q_weight", q_weight), ("k_weight", k_weight)) if x is not None}
    for name, weight in weights.items():
        check_beside(name, weight, "q", q, dtype=(q.dtype, torch.float32), shape=q.shape[-1:], meaning="the head dim")
    if len(weights) == 2:
        check_beside("k_weight", k_weight, "q_weight", q_weight, dtype=q_weight.dtype, shape=q.shape[-1:])  # type: ignore[arg-type,union-attr]
    if weights:
        checked_eps(eps)
    check_savable(q=q, k=k, **weights)


def _readable(first: Tensor, cos: Tensor, sin: Tensor, *others: Value, **_: object) -> list[Value]:
    """Heads with dense features; angles and weights that are contiguous."""

    def readable(x: Value) -> Value:
        if not isinstance(x, Tensor) or (x.dim() > 2 and is_true(x.stride(-1) == 1)):
            return x
        return x.contiguous()

    return [readable(first), cos.contiguous(), sin.contiguous(), *map(readable, others)]


def as_heads(values: Sequence[Value], results: Sequence[Tensor], options: Options) -> Views:
    """Heads as (B, H, S, D), and angles as (B, S, n), or with 1 for B."""
    (q, cos, sin, *others) = values
    assert isinstance(q, Tensor)
    is_packed = q.dim() == 3

    def heads(x: Value) -> Value:
        return x.transpose(0, 1).unsqueeze(0) if is_packed and isinstance(x, Tensor) and x.dim() == 3 else x

    angles = [x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == 2 else x for x in (cos, sin)]
    written = [x for x in map(heads, results) if isinstance(x, Tensor)]
    return [heads(q), *angles, *map(heads, others)], written, options


def _dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    stride = dense_stride_like(x.shape, x.shape, x.stride())
    return torch.empty_strided(x.shape, stride, dtype=dtype or x.dtype, device=x.device)


def _outputs(q: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, *_: Value, **__: object) -> list[Tensor]:
    del cos, sin
    return [_dense_like(x) for x in (q, k) if x is not None]


def _factor(weight: Tensor, shift: float | None) -> Tensor:
    return widened(weight) + (shift or 0.0)


def _exact(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    shift: float | None = None,
    *,
    interleaved: bool,
) -> list[Tensor]:
    """The results before they are rounded."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            continue
        wide = widened(x)
        if weight is not None:
            wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * _factor(weight, shift)
        found.append(rotated(wide, _for_heads(cos, x), _for_heads(sin, x), interleaved=interleaved))
    return found


def _reference(q: Tensor, *operands: Any, interleaved: bool) -> tuple[Tensor, ...]:
    return tuple([x.to(q.dtype) for x in _exact(q, *operands, interleaved=interleaved)])


def _gradients_reference(
    grad_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    grad_k: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    shift: float | None = None,
    *,
    interleaved: bool,
) -> tuple[Tensor, ...]:
    found, of_weights = [], []
    for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight)):
        if grad is None:
            continue
        wide = rotated(widened(grad), _for_heads(cos, grad), -_for_heads(sin, grad), interleaved=interleaved)
        if weight is not None:
            assert x is not None
            scale = (widened(x).square().mean(-1, keepdim=True) + eps).rsqrt()
            normalized, factor = widened(x) * scale, _factor(weight, shift)
            of_weights.append((wide * normalized).sum_to_size(weight.shape).to(weight.dtype))
            wide = wide * factor
            wide = scale * (wide - normalized * (wide * normalized).mean(-1, keepdim=True))
        found.append(wide.to(grad.dtype))
    return (*found, *of_weights)


def _gradient_outputs(
    grad_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    grad_k: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    *others: Value,
    **_: object,
) -> list[Tensor]:
    del cos, sin
    like = [x if grad is not None and x is not None else grad for grad, x in ((grad_q, q), (grad_k, k))]
    weights = [x for x in others if isinstance(x, Tensor)]
    return [*(_dense_like(x) for x in like if x is not None), *map(torch.empty_like, weights)]


def _ways(arguments: Mapping[str, object]) -> Sequence[sharding.ShardingStrategy]:
    """Shards the batch, tokens or heads; weights are replicated, and their gradients sums."""
    names = [name for name in ("q", "k", "grad_q", "grad_k") if isinstance(arguments.get(name), Tensor)]
    first = arguments[names[0]]
    assert isinstance(first, Tensor)
    is_backward, is_packed = "grad_q" in names, first.dim() == 3
    weights = [x for x in ("q_weight", "k_weight") if is_backward and arguments.get(x) is not None]
    count = sum(name.startswith("grad_") for name in names) if is_backward else len(names)
    dimensions = {"tokens": 0, "heads": 1} if is_packed else {"the batch": 0, "tokens": 2, "heads": 1}
    heads = [x for name in names if isinstance(x := arguments[name], Tensor)]
    if len({x.shape[1] for x in heads}) > 1 and not sharding.has_dtensor(*heads):
        del dimensions["heads"]  # `rope` gives queries and keys that ranks share calls of their own
    of_angles = {"the batch": -3, "tokens": -2}
    return [
        sharding.ShardingStrategy(
            name,
            dict.fromkeys(names, dim) | (dict.fromkeys(("cos", "sin"), of_angles[name]) if name in of_angles else {}),
            (*(dim,) * count, *(sharding.SUM,) * len(weights)),
        )
        for name, dim in dimensions.items()
    ]


def _second_backward(
    grads: Sequence[Tensor], operands: tuple[Tensor, ...], _: object, *, interleaved: bool
) -> GraphCall:
    """Of rotations alone, which are linear."""
    _, cos, sin, grad_k, *normed = operands
    if any(x is not None for x in normed):
        refuse_second_gradient("rope with a norm")
    of_q, of_k = (*grads, None)[:2]
    names = ["grad_q"] if grad_k is None else ["grad_q", "grad_k"]
    return rope_rows.call(of_q, cos, sin, of_k, interleaved=interleaved).of(*names)


@graph_op(
    reference=_gradients_reference,
    outputs=_gradient_outputs,
    backward=_second_backward,
    keeps_results=False,
    reads=lambda operands, _: [index in (1, 2) for index in range(len(operands))],
    readable=_readable,
    views=as_heads,
    shard=_ways,
)
def rope_gradients(
    g: GraphBuilder,
    grad_q: Symbol,
    cos: Symbol,
    sin: Symbol,
    grad_k: Symbol | None = None,
    q: Symbol | None = None,
    k: Symbol | None = None,
    q_weight: Symbol | None = None,
    k_weight: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    *,
    interleaved: bool,
) -> NoReturn:
    """Gradients of q and k, and of the weights of those that are normalized."""
    raise NotImplementedError("cuDNN has no graph of rotations")


def _backward(
    grads: Sequence[Tensor],
    operands: tuple[Value, ...],
    _: Sequence[Tensor],
    *,
    interleaved: bool,
) -> GraphCall:
    q, cos, sin, k, q_weight, k_weight, eps, shift = operands
    grad_q, grad_k = (*grads, None)[:2]
    named = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight}
    is_normed = q_weight is not None or k_weight is not None
    more = {**named, "eps": eps, "shift": shift} if is_normed else {}
    call = rope_gradients.call(grad_q, cos, sin, grad_k=grad_k, interleaved=interleaved, **more)
    return call.of(*(name for name, x in named.items() if x is not None))


def _reads(operands: Sequence[Value], _: object) -> list[bool]:
    is_normed = any(x is not None for x in operands[4:6])
    return [is_normed, True, True, is_normed, *(True,) * (len(operands) - 4)]


@graph_op(
    reference=_reference,
    outputs=_outputs,
    backward=_backward,
    keeps_results=False,
    check=_check,
    readable=_readable,
    views=as_heads,
    reads=_reads,
    shard=_ways,
)
def rope_rows(
    g: GraphBuilder,
    q: Symbol,
    cos: Symbol,
    sin: Symbol,
    k: Symbol | None = None,
    q_weight: Symbol | None = None,
    k_weight: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    *,
    interleaved: bool,
) -> NoReturn:
    """Rotated queries and keys, normalized before where they have a weight."""
    raise NotImplementedError("cuDNN has no graph of rotations")


def _check_fp8(q: Tensor, *operands: Any, interleaved: bool) -> None:
    *others, q_scale, k_scale = operands
    _check(q, *others, interleaved=interleaved)
    has_keys = others[2] is not None
    if not has_keys and k_scale is not None:
        raise OptionError("k_scale", "a scale", "None where k is None")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale))[: 1 + has_keys]:
        check_beside(name, scale, "q", q, dtype=torch.float32)
        if scale.numel() != 1:
            raise ShapeError(name, shape_of(scale), "one number, () or (1,)")


def _fp8_reference(q: Tensor, *operands: Any, interleaved: bool) -> tuple[Tensor, ...]:
    *exact_operands, q_scale, k_scale = operands
    exact = _exact(q, *exact_operands, interleaved=interleaved)
    quantized = [in_e4m3(x, scale) for x, scale in zip(exact, (q_scale, k_scale), strict=False)]
    amaxes = [x.abs().amax() if x.numel() else x.new_zeros(()) for x in exact]
    return (*quantized, *(x.float().view(1) for x in amaxes))


def _fp8_outputs(q: Tensor, cos: Tensor, sin: Tensor, k: Tensor | None = None, *_: Value, **__: object) -> list[Tensor]:
    del cos, sin
    heads = [x for x in (q, k) if x is not None]
    amaxes = [torch.empty(1, dtype=torch.float32, device=q.device) for _ in heads]
    return [*(_dense_like(x, torch.float8_e4m3fn) for x in heads), *amaxes]


def _fp8_ways(arguments: Mapping[str, object]) -> Sequence[sharding.ShardingStrategy]:
    heads = [name for name in ("q", "k") if isinstance(arguments.get(name), Tensor)]
    return [
        way._replace(results=(way.result(0),) * len(heads) + (sharding.MAX,) * len(heads)) for way in _ways(arguments)
    ]


@graph_op(
    reference=_fp8_reference,
    outputs=_fp8_outputs,
    check=_check_fp8,
    readable=_readable,
    views=as_heads,
    shard=_fp8_ways,
)
def rope_fp8_rows(
    g: GraphBuilder,
    q: Symbol,
    cos: Symbol,
    sin: Symbol,
    k: Symbol | None = None,
    q_weight: Symbol | None = None,
    k_weight: Symbol | None = None,
    eps: Symbol | None = None,
    shift: Symbol | None = None,
    q_scale: Symbol | None = None,
    k_scale: Symbol | None = None,
    *,
    interleaved: bool,
) -> NoReturn:
    """Rotated queries and keys in E4M3 with given scales, and the amax of each."""
    raise NotImplementedError("cuDNN has no graph of rotations")


def _by_own_kernels(
    operation: KernelOp, names: Sequence[str], given: Views, *, target: Target, device: int | None
) -> tuple[Views, PlanKey, str]:
    viewed = as_heads(*given)
    values, results, options = viewed
    named = dict(zip(names, values, strict=True))
    layout = TensorLayout.of
    return viewed, own.key_of(operation, named, results, options, target=target, device=device, layout=layout), _WHY


rope_rows.own = partial(_by_own_kernels, own_rope)
rope_fp8_rows.own = partial(_by_own_kernels, own_rope_fp8)
rope_gradients.own = partial(_by_own_kernels, own_rope_gradients)
