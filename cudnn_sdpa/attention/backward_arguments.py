"""The arguments of a public backward call, dense or packed: which gradients are wanted, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import AttentionGradientCall
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor
from cudnn_sdpa.errors import OptionError

if TYPE_CHECKING:
    from cudnn_sdpa.engine.operation import Operation
    from cudnn_sdpa.engine.operation.call import CallT


class SdpaGradients(NamedTuple):
    """The results of `sdpa_backward` and `sdpa_varlen_backward`: None for what is not wanted.

    Attributes:
        dq: The gradient of the queries, in their dtype and memory order.
        dk: The gradient of the keys.
        dv: The gradient of the values.
        dmask: The gradient of a float `attn_mask`, in its shape.
        dsinks: The gradient of the sinks, (Hq,).
    """

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dmask: Tensor | None = None
    dsinks: Tensor | None = None


def backward_call_of(
    operation: Operation[CallT],
    call: CallT,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: Sequence[str] | None,
) -> Any:
    """The backward call of an operation that arguments of its public function make; they have not been checked."""
    assert operation.backward is not None
    needs = _needs_of(wanted, {name: getattr(call, name) for name in operation.differentiable})
    return operation.backward(grad_out=grad_out, out=out, lse=lse, call=call, needs=needs)


def _needs_of(wanted: Sequence[str] | None, inputs: Mapping[str, object]) -> tuple[bool, ...]:
    can = {name: x is not None and (name != "attn_mask" or _is_additive(x)) for name, x in inputs.items()}
    if wanted is None:
        return tuple(can.values())
    expected = "None for all gradients, or a tuple of some of " + ", ".join(
        repr(n) for n, there in can.items() if there
    )
    if not isinstance(wanted, (tuple, list)) or not wanted:
        raise OptionError("wanted", repr(wanted), expected)
    for name in wanted:
        if not isinstance(name, str) or not can.get(name, False):
            raise OptionError("wanted", repr(name), expected)
    return tuple(name in wanted for name in can)


def _is_additive(mask: object) -> bool:
    # Checks of the call refuse masks that are neither boolean nor of floating-point numbers, and say so.
    return not isinstance(mask, Tensor) or mask.dtype != torch.bool


def gradients_of(
    found: Sequence[Tensor], names: Sequence[str], needs: Sequence[bool], sinks: Tensor | None
) -> SdpaGradients:
    """The gradients by name, given those that were needed; that of the sinks in their dtype."""
    remaining = iter(found)
    needed = [name for name, need in zip(names, needs, strict=True) if need]
    result = SdpaGradients(**{f"d{name.removeprefix('attn_')}": next(remaining) for name in needed})
    if result.dsinks is None or sinks is None:
        return result
    return result._replace(dsinks=result.dsinks.to(sinks.dtype))


def check_types(of: AttentionGradientCall) -> None:
    """Refuses types that the operators' schemas would refuse without naming the argument."""
    check_are_tensors({"grad_out": of.grad_out, "out": of.out, "lse": of.lse})


def check(of: AttentionGradientCall) -> None:
    """Checks shapes, dtypes and devices of the output, the LSE and the gradient; fake tensors, too."""
    q, shape = of.call.q, (*of.call.q.shape[:-1], of.call.v.shape[-1])
    for name, tensor in (("grad_out", of.grad_out), ("out", of.out)):
        check_tensor(name, tensor, q, shape=shape, meaning="that of the output")
    rows, meaning = shape[:-1], "one for each query and head, as return_lse=True gives it"
    check_tensor("lse", of.lse, q, dtype=torch.float32, shape=rows, meaning=meaning)
