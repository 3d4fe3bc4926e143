"""Descriptions of calls of `kernels.attention` for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.dense.explain import device_of
from cudnn_sdpa.attention.verify import Results, compare
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.engine.launch import new_tensor
from cudnn_sdpa.engine.tensor_checks import without_data
from cudnn_sdpa.graph.scalars import as_bool, as_float
from cudnn_sdpa.kernels import reference
from cudnn_sdpa.kernels.arguments import FUSED, Gradient, KernelArguments, without_causal_bias
from cudnn_sdpa.kernels.attention import ATTENTION, attention
from cudnn_sdpa.kernels.call import KernelAttentionCall
from cudnn_sdpa.kernels.plans import Spec, attention_backward, attention_forward


@describes(attention)
def describe_attention(is_causal: bool, scale: float | None, **given: Any) -> Description:
    call = KernelAttentionCall(**given, is_causal=as_bool(is_causal), scale=as_float(scale))
    checked = ATTENTION.checked(without_causal_bias(call), ATTENTION.cast)
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


def _backward(call: KernelAttentionCall, needs: tuple[bool, ...]) -> Description:
    out, statistics = (new_tensor(layout, "meta") for layout in call.outputs())
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
    given = dict(zip(_NAMES, (None if x is None else x.detach() for x in call.differentiable), strict=True))
    in_double = {name: x if x is None or x.dtype == torch.bool else x.double() for name, x in given.items()}
    wanted = [name for name, need in zip(_NAMES, needs, strict=True) if need]
    options: Any = {"is_causal": call.is_causal, "scale": call.scale}
    grad_out = torch.randn_like(call.q) if wanted else call.q

    def results(run: Callable[..., Tensor], inputs: dict[str, Tensor | None], **more: str) -> Results:
        leaves = [x.requires_grad_() for name in wanted if (x := inputs[name]) is not None]
        out = run(**inputs, **options, **more)
        gradients = torch.autograd.grad(out, leaves, grad_out.to(out.dtype)) if wanted else ()
        return Results(out, None, dict(zip(wanted, gradients, strict=True)))

    exact = results(reference.reference_attention, in_double)
    return compare(results(attention, given, mode=call.mode), exact._replace(out=exact.out.detach()))


_NAMES = ("q", "k", "v", "mask")
