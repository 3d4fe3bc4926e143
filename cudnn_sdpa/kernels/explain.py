"""What `explain` shows of `kernels.attention`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cudnn_sdpa.attention.dense.explain import device_of
from cudnn_sdpa.engine.autocast import cast_tensor
from cudnn_sdpa.engine.call import without_data
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.graph.scalars import as_bool, as_float
from cudnn_sdpa.kernels import reference
from cudnn_sdpa.kernels.arguments import FUSED, Gradient, KernelArguments, Mode, without_causal_bias
from cudnn_sdpa.kernels.attention import ATTENTION, attention
from cudnn_sdpa.kernels.call import KernelAttentionCall
from cudnn_sdpa.kernels.plans import Spec, attention_backward, attention_forward


@describes(attention)
def describe_attention(is_causal: bool, scale: float | None, **given: Any) -> Description:
    call = KernelAttentionCall(**given, is_causal=as_bool(is_causal), scale=as_float(scale))
    checked = ATTENTION.checked(without_causal_bias(call), _as_cast)
    if checked.refused is not None:
        return Description.refused(attention_forward, checked.refused, device_of(call.q))
    call, trains = checked.cast, checked.trains
    needs = tuple(x is not None and x.requires_grad for x in call.differentiable)
    spec = Spec.of(without_data(call._replace(with_statistics=trains)))
    notes = [] if spec.mode == FUSED else ["all scores are kept in float32, in the workspace"]
    notes += [] if spec.vectors or spec.mode != FUSED else ["operands are read element by element"]
    backward = _backward(call, needs) if trains else None
    return Description(
        operation=attention_forward,
        key=spec.key,
        device=device_of(call.q),
        is_empty=spec.is_empty,
        extra_kernels=notes,
        backward=backward,
        verify=lambda differentiate: _errors(call, needs if differentiate else (False,) * len(needs)),
    )


def _as_cast(call: KernelAttentionCall) -> KernelAttentionCall:
    return call._replace(**{name: cast_tensor(getattr(call, name), call.q) for name in ("q", "k", "v", "mask")})


def _backward(call: KernelAttentionCall, needs: tuple[bool, ...]) -> Description:
    (shape, stride, dtype), (rows, _, _) = call.outputs()
    out = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    statistics = torch.empty(rows, dtype=torch.float32, device="meta")
    of = Gradient(grad_out=out, out=out, statistics=statistics, call=without_data(call), needs=needs)
    spec = Spec.of_gradient(of)
    notes = [] if spec.mode == FUSED else ["all weights and their gradients are kept in float32, in the workspace"]
    notes += ["the gradient of the output is copied if it is expanded, as that of a sum is"] if spec.vectors else []
    return Description(
        operation=attention_backward,
        key=spec.key,
        device=device_of(call.q),
        is_empty=spec.is_empty,
        extra_kernels=notes,
    )


def _errors(call: KernelArguments, needs: tuple[bool, ...]) -> dict[str, float]:
    """Relative errors of the output, and of the needed gradients, against the reference in float64."""
    q, k, v, mask = (None if x is None else x.detach() for x in call.differentiable)
    assert q is not None
    assert k is not None
    assert v is not None
    exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    ours, right = [q, k, v, mask], [q.double(), k.double(), v.double()]
    wanted = [place for place, need in enumerate(needs) if need]
    leaves = [[x for place in wanted if (x := given[place]) is not None] for given in (ours, [*right, exact_mask])]
    for leaf in (*leaves[0], *leaves[1]):
        leaf.requires_grad_()
    found = attention(q, k, v, mode=cast("Mode", call.mode), mask=mask, is_causal=call.is_causal, scale=call.scale)
    exact = reference.reference_attention(
        q=right[0], k=right[1], v=right[2], mask=exact_mask, is_causal=call.is_causal, scale=call.scale
    )
    errors = {"out": _relative(found, exact)}
    if wanted:
        grad_out = torch.randn_like(found)
        gradients = torch.autograd.grad(found, leaves[0], grad_out)
        of_exact = torch.autograd.grad(exact, leaves[1], grad_out.double())
        pairs = zip(wanted, gradients, of_exact, strict=True)
        errors |= {f"grad {_NAMES[place]}": _relative(x, y) for place, x, y in pairs}
    return errors


_NAMES = ("q", "k", "v", "mask")


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp_min(1e-30))
