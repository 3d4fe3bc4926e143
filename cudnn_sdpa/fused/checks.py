"""Argument checks of fused operations, for kernels and references."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.engine.autograd_checks import refuse_inference_tensors
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor, dtype_name, refuse_address
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.graph.scalars import as_bool, check_known, is_compiling

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

EXPECTED = "float16, bfloat16 or float32"

#: Maximum number of a value's items, of an integer's bits, and of characters in a message.
_MAX_ITEMS, _MAX_BITS, _MAX_CHARACTERS = 8, 64, 60


def check_dtype(name: str, tensor: Tensor) -> None:
    """Checks that an argument is a strided tensor of a supported dtype; on the CPU also float64, for gradcheck."""
    check_strided({name: tensor})
    is_float64, is_refused = tensor.dtype is torch.float64, tensor.dtype not in _DTYPES
    if is_float64:
        is_refused = tensor.is_cuda or (tensor.is_cpu and cpu_target.checks_dtypes())
    if is_refused:
        of_cpu = cpu_target.note_on_dtypes() if is_float64 else ""
        hint = "float64 runs on the CPU only." if is_float64 and tensor.is_cuda else of_cpu
        raise DtypeError(name, dtype_name(tensor.dtype), EXPECTED, hint)


def checked_flag(name: str, flag: object) -> bool:
    """A flag, also numpy's, as a bool."""
    check_known(name, flag)
    flag = as_bool(flag)
    if not isinstance(flag, bool):
        raise OptionError(name, shown(flag), "True or False")
    return flag


def check_activation(activation: object, known: Collection[str | None]) -> None:
    if not isinstance(activation, (str, type(None))) or activation not in known:
        raise OptionError("activation", shown(activation), " or ".join(map(repr, known)))


def check_strided(operands: Mapping[str, object], hint: str = "") -> None:
    """Checks that operands are tensors with strided memory, or zeros without memory: a launch has them filled."""
    if not is_compiling():
        operands = {k: x for k, x in operands.items() if not (isinstance(x, Tensor) and x._is_zerotensor())}
    check_are_tensors(operands, hint=hint)


def check_beside(
    name: str,
    tensor: Tensor,
    of: str,
    x: Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    shape: Sequence[int] = (),
    meaning: str = "",
    hint: str = "",
) -> None:
    """Checks that an argument is a strided tensor that fits `x`, the argument `of`; `hint` is for other objects."""
    check_strided({name: tensor}, hint)
    check_tensor(name, tensor, x, of=of, dtype=dtype, shape=shape, meaning=meaning)


def check_savable(**tensors: Tensor | None) -> None:
    """Checks that autograd can save these tensors, if one of them requires a gradient."""
    if not is_compiling() and needs_gradient(*tensors.values()):
        refuse_inference_tensors(tensors)


def check_offsets(operands: Mapping[str, object], parts: Mapping[str, int]) -> None:
    """Refuses CPU tensors at offsets that a GPU's kernels could not read, and offsets of parts in bytes.

    Allocations themselves are aligned.
    """
    begins = {name: int(x.storage_offset()) * x.element_size() for name, x in operands.items() if isinstance(x, Tensor)}
    for name, begin in (begins | dict(parts)).items():
        if begin % ALIGNMENT:
            try:
                refuse_address(name, begin % ALIGNMENT)
            except LayoutError as error:
                raise cpu_target.for_gpu(error) from None


def shown(value: object) -> str:
    """A value in a message, shortened; for objects other than plain values, the type."""
    if isinstance(value, (tuple, list)):
        text = ", ".join(map(shown, value[:_MAX_ITEMS])) + (", ..." if len(value) > _MAX_ITEMS else "")
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:  # Python raises for very long ones
        return f"an int of {value.bit_length()} bits"
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value)[:_MAX_CHARACTERS] if is_plain else type(value).__name__


def widened(tensor: Tensor) -> Tensor:
    """The dtype of a reference's computation: float64 for float64, otherwise float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()
