"""`merge_states`: the attention to all keys, from the results for parts of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_sdpa.engine.autograd_checks import refuse_transforms
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.sharding import has_dtensor, refuse
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_tensor, dtype_name, shape_of
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError, UnsupportedError


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention to all keys, from the outputs and LSEs for parts of them.

    Each output is weighted by the share of its keys in the whole softmax: with L = log Σ exp(lses), the result is
    Σ exp(lse − L) · out. All is computed in float32 (float64 for such outputs) and rounded once. It serves keys that
    are spread over GPUs, split over kernels, or shared as a prefix. FlashInfer's `merge_states` is the same for
    logarithms to the base of 2; ours are natural.

    It is not differentiable, because the LSE is not: `sdpa_backward` gives the gradients of each part from the result.

    Args:
        outs: The outputs, (B, Hq, Sq, Dv) each, or (Tq, Hq, Dv) of packed sequences, of one dtype.
        lses: Their LSEs, (B, Hq, Sq) or (Tq, Hq) float32, as `return_lse=True` gives them. Minus infinity for rows that
            see no key of a part; what its output holds there does not matter.

    Returns:
        The output, in the dtype of the outputs, and the LSE in float32. Rows that see no key at all get zeros and minus
        infinity.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: A tensor requires grad.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import merge_states, sdpa
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)
        >>> parts = [sdpa(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge_states(*zip(*parts))
        >>> torch.allclose(out, sdpa(q, k, v), atol=0.02)
        True
    """
    _check(outs, lses)
    exact = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    total = functools.reduce(torch.logaddexp, [x.to(exact) for x in lses])
    base = torch.where(torch.isneginf(total), 0.0, total)  # any finite value: exp(-inf - base) is 0
    merged = torch.zeros(outs[0].shape, dtype=exact, device=outs[0].device)
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse.to(exact) - base).unsqueeze(-1)
        merged += torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, weight * out)
    result = torch.empty_like(outs[0]).copy_(merged)
    return result, total.float()


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (tuple, list)) or not given:
            got = type(given).__name__ if not isinstance(given, (tuple, list)) else "none"
            raise OptionError(name, got, "a tuple or list of at least one tensor")
        for number, tensor in enumerate(given):
            check_is_tensor(f"{name}[{number}]", tensor)
    refuse_transforms("merge_states", *outs, *lses, loops=False)
    if has_dtensor(*outs, *lses):
        refuse("merge_states", "it is a function of the parts that one rank has")
    if len(outs) != len(lses):
        raise OptionError("lses", f"{len(lses)} tensors", f"{len(outs)}, one for each output")
    first = outs[0]
    if first.dim() < 2:
        raise ShapeError("outs[0]", shape_of(first), "(B, Hq, Sq, Dv) or (Tq, Hq, Dv)")
    if not first.is_floating_point() or first.element_size() < 2:
        raise DtypeError("outs[0]", dtype_name(first.dtype), "bfloat16, float16, float32 or float64")
    for number, out in enumerate(outs):
        _check_one(f"outs[{number}]", out, first, dtype=first.dtype, shape=first.shape)
    for number, lse in enumerate(lses):
        _check_one(f"lses[{number}]", lse, first, dtype=torch.float32, shape=first.shape[:-1])


def _check_one(name: str, tensor: Tensor, first: Tensor, *, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    meaning = f"for outs[0] of shape {tuple(first.shape)}"
    check_tensor(name, tensor, first, of="outs[0]", dtype=dtype, shape=shape, meaning=meaning)
    if needs_gradient(tensor):
        raise UnsupportedError(
            "the gradient of merge_states",
            [f"{name} requires grad, and the LSE is not differentiable"],
            "torch.no_grad(), with the gradients of each part by sdpa_backward",
        )
