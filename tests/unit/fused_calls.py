"""The built-in fused functions in float64, and their results and gradients held against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import float64_reference as exact
import torch
from torch import Tensor

import cudnn_sdpa

#: The relative and the absolute error of gradients, which are sums of rounded values: for the largest of about 1.
CLOSE = {torch.float32: (2e-4, 2e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-6, **options: Any) -> Any:
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    found = exact.rms_norm(x, weight, eps, **options)
    return found[0] if options.get("residual") is None else found


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, **options: Any
) -> Any:
    found = exact.layer_norm(x, weight, bias, float(eps), **options)
    return found[0] if options.get("residual") is None else found


def gated(activation: str) -> Callable[..., Tensor]:
    def compute(gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return exact.ACTIVATIONS[activation](gate) * up

    return compute


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    sizes = [list(each) if isinstance(each, (tuple, list)) else int(each) for each in (stride, padding, dilation)]
    return exact.ACTIVATIONS[activation](exact.convolution(x, weight, bias, *sizes, groups))


FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = {
    cudnn_sdpa.rms_norm: rms_norm,
    cudnn_sdpa.layer_norm: layer_norm,
    cudnn_sdpa.silu_mul: gated("silu"),
    cudnn_sdpa.gelu_mul: gated("gelu"),
    cudnn_sdpa.relu_squared: lambda x: exact.relu(x).square(),
    **dict.fromkeys((cudnn_sdpa.conv1d, cudnn_sdpa.conv2d, cudnn_sdpa.conv3d), convolution),
}


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as it is called, on its tensors in float64."""

    def wide(x: object) -> object:
        return x.double() if isinstance(x, Tensor) else x

    return lambda *args, **options: FORMULAS[function](*map(wide, args), **{k: wide(x) for k, x in options.items()})


def tuple_of(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def with_grad(arguments: Sequence[Any], requires_grad: bool) -> list[Any]:
    """The arguments; with `requires_grad`, tensors that can require a gradient do."""
    return [
        x.detach().requires_grad_() if requires_grad and isinstance(x, Tensor) and not _is_whole(x) else x
        for x in arguments
    ]


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def assert_gradients(
    call: Callable[..., Any],
    expected: Callable[..., Any],
    leaves: Sequence[Tensor],
    used: Sequence[int] | None = None,
    close: Mapping[torch.dtype, tuple[float, float]] = CLOSE,
) -> None:
    """Compares results, and gradients of some of them for all leaves, for random gradients of theirs, with float64."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    results, right = tuple_of(call(*leaves)), tuple_of(expected(*doubles))
    used = range(len(results)) if used is None else used
    upstream = [torch.randn(results[i].shape).to(results[i].dtype) for i in used]
    found = torch.autograd.grad([results[i] for i in used], leaves, upstream)
    wanted = torch.autograd.grad([right[i] for i in used], doubles, [x.double() for x in upstream])
    for leaf, one in zip(leaves, found, strict=True):
        assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype)
    rtol, atol = max(close[x.dtype] for x in leaves)  # saved tensors have the smallest of the dtypes
    for one, other in zip((*results, *found), (x.detach() for x in (*right, *wanted)), strict=True):
        largest = 1 + float(other.abs().amax()) if close is CLOSE else 1.0
        torch.testing.assert_close(one.detach().double(), other, rtol=rtol, atol=atol * largest)
