"""The arguments of a public backward call, dense or packed: which gradients are wanted, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import AttentionGradientCall, check_is_dense, dtype_name, shape_of
from cudnn_sdpa.errors import DeviceError, DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph.symbolic_shapes import is_true


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


#: The field of each input's gradient.
FIELDS = {"q": "dq", "k": "dk", "v": "dv", "attn_mask": "dmask", "sinks": "dsinks"}


def needs_of(wanted: Sequence[str] | None, inputs: Mapping[str, object]) -> tuple[bool, ...]:
    """Which gradients are wanted: those named, or if None all that there are.

    Args:
        wanted: The names.
        inputs: The differentiable inputs by name, None where absent.

    Raises:
        OptionError: A name is none of an input that has a gradient.
    """
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
    result = SdpaGradients(**{FIELDS[name]: next(remaining) for name, need in zip(names, needs, strict=True) if need})
    if result.dsinks is None or sinks is None:
        return result
    return result._replace(dsinks=result.dsinks.to(sinks.dtype))


def check_types(of: AttentionGradientCall) -> None:
    """What the operators' schemas would refuse as well, but without naming the argument."""
    for name, tensor in zip(of._fields[:-2], of[:-2], strict=True):
        if not isinstance(tensor, Tensor):
            raise OptionError(name, type(tensor).__name__, "a torch.Tensor")
        if tensor.device.type not in ("cuda", "cpu", "meta"):
            raise DeviceError(name, str(tensor.device), "a CUDA device, or the CPU for the reference")
        check_is_dense(name, tensor)


def check(of: AttentionGradientCall) -> None:
    """What the forward pass gave, and the gradient: shapes, dtypes and devices. Fake tensors pass."""
    q, v = of.call.q, of.call.v
    shape = (*q.shape[:-1], v.shape[-1])
    for name, tensor in (("grad_out", of.grad_out), ("out", of.out)):
        if tensor.dim() != len(shape) or any(is_true(n != m) for n, m in zip(tensor.shape, shape, strict=True)):
            raise ShapeError(name, shape_of(tensor), f"shape {shape}, that of the output")
        if tensor.dtype != q.dtype:
            hint = f"Convert it with {name}.to(q.dtype)."
            raise DtypeError(name, dtype_name(tensor.dtype), f"{dtype_name(q.dtype)}, the dtype of q", hint)
    rows = shape[:-1]
    if of.lse.dim() != len(rows) or any(is_true(n != m) for n, m in zip(of.lse.shape, rows, strict=True)):
        raise ShapeError("lse", shape_of(of.lse), f"shape {rows}: one for each query and head")
    if of.lse.dtype != torch.float32:
        raise DtypeError("lse", dtype_name(of.lse.dtype), "float32, as return_lse=True gives it")
    for name, tensor in (("grad_out", of.grad_out), ("out", of.out), ("lse", of.lse)):
        if tensor.device != q.device:
            raise DeviceError(
                name, str(tensor.device), f"{q.device}, the device of q", f"Move it with {name}.to(q.device)."
            )
