"""Gated activations, one kernel per direction: `silu_mul`, `gelu_mul` and `relu_squared`."""

from __future__ import annotations

from torch import Tensor

from cudnn_sdpa.engine.native.calls import MISSED
from cudnn_sdpa.fused.activation_graphs import gelu_mul_rows, relu_squared_rows, silu_mul_rows
from cudnn_sdpa.graph.scalars import is_compiling


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SiLU(gate) · up, the gated activation of SwiGLU, in one kernel; both gradients take one kernel, too.

    Args:
        gate: (..., n), float16, bfloat16 or float32, or float64 if `cpu_checks` accepts any dtype. The last dimension
            is dense; the halves of one projection, `x.chunk(2, dim=-1)`, are read in place.
        up: Of the same shape and dtype. If it is None, `gate` holds both, (..., 2n), gate first; the gradient is then
            one tensor, too, and autograd need not concatenate halves.

    Returns:
        A contiguous tensor (..., n) of the same dtype.

    Raises:
        ArgumentError: The tensors do not match, or have a layout that would need a copy.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> gate_up = torch.randn(2, 5, 32)
        >>> out = cudnn_sdpa.silu_mul(*gate_up.chunk(2, dim=-1))
        >>> torch.equal(out, cudnn_sdpa.silu_mul(gate_up)), out.shape
        (True, torch.Size([2, 5, 16]))

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """
    if not is_compiling():
        find = silu_mul_rows.calls.find
        if find is not None and up is not None:
            known = find(gate, up)
            if known is not MISSED:
                return known  # type: ignore[no-any-return]
    out: Tensor = silu_mul_rows.run((gate,) if up is None else (gate, up), {})
    return out


def gelu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """GELU(gate) · up, the gated activation of GeGLU, in one kernel; exact GELU, with erf. Differentiable.

    Args:
        gate: As for `silu_mul`.
        up: As for `silu_mul`.

    Returns:
        A contiguous tensor (..., n) of the same dtype.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: An argument requires grad under `providers("cudnn")`, which has no gradient for it.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.gelu_mul(torch.randn(2, 5, 16), torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """
    out: Tensor = gelu_mul_rows.run((gate,) if up is None else (gate, up), {})
    return out


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)², the activation of Primer, in one kernel. Differentiable.

    Args:
        x: (..., n), float16, bfloat16 or float32, or float64 if `cpu_checks` accepts any dtype; the last dimension is
            dense.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: x requires grad under `providers("cudnn")`, which has no gradient for it.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> cudnn_sdpa.relu_squared(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])

    From "Primer: Searching for Efficient Transformers for Language Modeling" (So et al., 2021).
    """
    out: Tensor = relu_squared_rows.run((x,), {})
    return out
