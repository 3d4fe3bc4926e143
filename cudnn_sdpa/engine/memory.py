"""Checks of addresses, which no key contains, and new tensors for gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.graph.layouts import ALIGNMENT, dense_stride_like

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

#: Bits that no aligned address has.
MISALIGNED = ALIGNMENT - 1

#: Memory usually has higher addresses. A lower address may be the offset of a tensor in storage that was freed.
LOWEST = 1 << 40


def check_address(name: str, tensor: Tensor) -> None:
    """Refuses a tensor without memory, or at an address that kernels cannot read."""
    address = tensor.data_ptr()
    if address < LOWEST:
        check_present(name, tensor)
    if address % ALIGNMENT != 0:
        refuse_address(name, address % ALIGNMENT)


def is_causal_bias(tensor: object) -> TypeGuard[CausalBias]:
    """Whether this is a `CausalBias` of PyTorch's: a tensor whose memory was never written."""
    kind = type(tensor)
    return kind.__name__ == "CausalBias" and kind.__module__.startswith("torch.")


def check_has_values(name: str, tensor: Tensor) -> None:
    """Refuses a `CausalBias` where no mask is expected."""
    if is_causal_bias(tensor):
        hint = "It may be the mask of sdpa, scaled_dot_product_attention and kernels.attention."
        raise LayoutError(name, "a CausalBias, a tensor without values", "a tensor with values", hint)


def check_present(name: str, tensor: Tensor) -> None:
    """Refuses a plain tensor without memory for its elements.

    Tensors of subclasses and of functorch's transforms hold it elsewhere.
    """
    if not (tensor.is_cuda or tensor.is_cpu) or type(tensor).__torch_dispatch__ is not _PLAIN or not tensor.numel():
        return
    if is_functorch_wrapped_tensor(tensor):
        return
    if tensor.data_ptr() == 0 or ends_behind(tensor, tensor.untyped_storage().nbytes()):
        raise LayoutError(
            name,
            "a tensor without memory",
            "one with allocated storage",
            "Its storage was freed (resize_(0), as sharding frees weights) or shrunk, or it is a ZeroTensor.",
        )


def ends_behind(tensor: Tensor, size: int) -> bool:
    """Whether the last element of a tensor that has some lies behind the first `size` bytes of its storage."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(size < (tensor.storage_offset() + last + 1) * tensor.element_size())


_PLAIN = Tensor.__torch_dispatch__  #: of classes whose instances are plain memory


def refuse_address(name: str, remainder: int, hint: str = "") -> NoReturn:
    """Raises the error for a tensor whose address is `remainder` bytes past an aligned one."""
    raise LayoutError(
        name,
        f"an address {remainder} bytes past a multiple of {ALIGNMENT}",
        f"storage aligned to {ALIGNMENT} bytes",
        hint or f"Use {name}.clone().",
    )


def multiplied(tensor: Tensor, factor: float) -> Tensor:
    """A dense copy of a tensor times a number, in its memory order.

    What `tensor * factor` makes of an expanded tensor may have a last dimension that is not dense.
    """
    return torch.mul(tensor.detach(), factor, out=like_in_memory(tensor))


def without_memory(tensor: Tensor) -> Tensor:
    """A meta tensor of the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def like_in_memory(tensor: Tensor) -> Tensor:
    """A new dense tensor for the gradient of `tensor`, in its memory order."""
    if tensor.dim() < 3 or (tensor.stride(-1) == 0 and tensor.shape[-1] != 1):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
