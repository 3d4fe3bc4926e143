"""Checks of the tensors beside query, key and value: lengths, masks, sinks, and the state of dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention.memory import check_present
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.runtime.eager import is_compiling, may_be_read
from cudnn_sdpa.runtime.symbols import is_true


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as messages call it."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: Tensor) -> str:
    """A tensor's shape as messages show it."""
    return f"shape {tuple(tensor.shape)}"


def check_is_dense(name: str, tensor: Tensor) -> None:
    """A tensor with memory of its own whose strides can be asked for: not nested, not sparse, not freed."""
    if tensor.is_nested:
        raise LayoutError(name, "a nested tensor", "a dense tensor")
    if tensor.layout != torch.strided:
        raise LayoutError(name, str(tensor.layout), "a dense tensor", f"Use {name}.to_dense().")
    if not is_compiling() and may_be_read():
        check_present(name, tensor)


def check_lengths(name: str, lengths: Tensor | None, q: Tensor, of: str = "q") -> None:
    """A tensor of sequence lengths: one int32 for each batch entry, dense, where q is; `of` is what that is called."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise OptionError(name, type(lengths).__name__, "a torch.Tensor or None")
    check_is_dense(name, lengths)
    if lengths.dtype != torch.int32:
        raise DtypeError(name, dtype_name(lengths.dtype), "int32", f"Convert with {name}.to(torch.int32).")
    if lengths.dim() != 1 or is_true(lengths.shape[0] != q.shape[0]):
        raise ShapeError(name, shape_of(lengths), f"shape ({q.shape[0]},): one length for each batch entry")
    if lengths.device != q.device:
        raise DeviceError(name, str(lengths.device), f"{q.device}, the device of {of}")
    if is_true(lengths.shape[0] > 1) and lengths.stride(0) != 1:
        raise LayoutError(name, f"stride {lengths.stride(0)}", "a dense tensor", f"Use {name}.contiguous().")


def check_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """`attn_mask`: boolean or added to the scores, broadcastable to (B, Hq, Sq, Skv)."""
    if mask is None:
        return
    full = (*q.shape[:3], k.shape[2])
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        expected = f"bool, {dtype_name(q.dtype)} as q has, or float32"
        raise DtypeError("attn_mask", dtype_name(mask.dtype), expected, "Convert it with attn_mask.to(q.dtype).")
    if mask.device != q.device:
        raise DeviceError("attn_mask", str(mask.device), f"{q.device}, the device of q")
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 4 or any(is_true(size != of_full) and not is_true(size == 1) for size, of_full in sizes):
        raise ShapeError("attn_mask", shape_of(mask), f"a shape that broadcasts to (B, Hq, Sq, Skv) = {full}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Attention sinks: one float32 score for each query head."""
    if sinks is None:
        return
    if sinks.dtype != torch.float32:
        raise DtypeError("sinks", dtype_name(sinks.dtype), "float32", "Convert with sinks.float().")
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[1]:
        raise ShapeError("sinks", shape_of(sinks), f"shape ({q.shape[1]},): one score for each head of q")
    if sinks.device != q.device:
        raise DeviceError("sinks", str(sinks.device), f"{q.device}, the device of q")
    if sinks.shape[0] > 1 and sinks.stride(0) != 1:
        raise LayoutError("sinks", f"stride {sinks.stride(0)}", "a dense tensor", "Use sinks.contiguous().")


def check_rng(rng: Tensor | None, dropout_p: float, q: Tensor) -> None:
    """The state that dropout starts from: seed and offset, drawn by the public functions."""
    if rng is None:
        if dropout_p > 0:
            raise OptionError("rng", "None", "seed and offset as a tensor of two int64, for dropout")
        return
    if rng.dtype != torch.int64:
        raise DtypeError("rng", dtype_name(rng.dtype), "int64")
    if rng.shape != (2,) or rng.stride(0) != 1:
        raise ShapeError("rng", shape_of(rng), "a dense tensor of shape (2,)")
    if rng.device != q.device:
        raise DeviceError("rng", str(rng.device), f"{q.device}, the device of q")


def as_sinks(sinks: Any) -> Any:
    """Sinks in float32, as the kernels read them; what is no tensor in half precision as it is."""
    half = isinstance(sinks, Tensor) and sinks.dtype in (torch.float16, torch.bfloat16)
    return sinks.float() if half else sinks
