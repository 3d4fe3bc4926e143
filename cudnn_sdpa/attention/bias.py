"""`attn_mask` as the bias that cuDNN adds to the scores: its layout, its conversion and its gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardT
from cudnn_sdpa.attention.lengths import LengthsKernel, RowLimitsKernel
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.engine.launch import Address, LaunchExtras, OwnKernel
from cudnn_sdpa.engine.tensor_checks import is_causal_bias, like_in_memory
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_SOURCE = Path(__file__).with_name("bias.cu")
kernel, _argument = Kernel(_SOURCE, "make_bias"), Struct(_SOURCE, "Mask")
kernels_with = {
    LengthsKernel: Kernel(_SOURCE, "make_bias_and_lengths"),
    RowLimitsKernel: Kernel(_SOURCE, "make_bias_and_limits"),
}

_THREADS = 256
_WORD = 16  #: bytes that a thread writes at a time
_MINUS_INFINITY = {torch.float16: 0xFC00, torch.bfloat16: 0xFF80}


def bias_view(mask: Tensor, masked_rows: int = 0) -> Tensor:
    """The rows of `mask` that the plan reads: a view of rank 4 whose expanded dimensions have size 1."""
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask[:, :, masked_rows:] if masked_rows and mask.shape[2] != 1 else mask


def bias_layout(mask: Tensor, q: Tensor, skv: int, masked_rows: int = 0) -> TensorLayout:
    """The layout of the bias that `BiasKernel` gives for the same arguments."""
    view = bias_view(mask, masked_rows)
    if reads_directly(view, skv):
        return TensorLayout.of(view)
    return TensorLayout.contiguous((*view.shape[:3], skv), q.dtype if view.dtype == torch.bool else view.dtype)


def reads_directly(view: Tensor, skv: int) -> bool:
    """Whether cuDNN can read a mask of rank 4 without a copy, if its address is aligned."""
    shape, stride = view.shape, view.stride()
    if view.dtype == torch.bool or shape[3] != skv or (stride[3] != 1 and skv > 1):
        return False
    alignment = ALIGNMENT // view.element_size()
    return all(shape[dim] == 1 or stride[dim] % alignment == 0 for dim in range(3))


class BiasKernel(OwnKernel):
    """Converts masks that look alike to the bias that cuDNN adds to the scores.

    A boolean mask becomes 0 where a key takes part, and elsewhere minus infinity. Fully masked rows are dropped:
    a slice of the converted bias might not be aligned. Of a mask that cuDNN could read at another address all memory is
    copied, which keeps its layout.
    """

    __slots__ = ("reads_mask_at",)

    def __init__(self, mask: Tensor, q: Tensor, skv: int, masked_rows: int = 0) -> None:
        """Binds it to the layout of `mask`; the arguments are those of `bias_layout`."""
        view = bias_view(mask, masked_rows)
        shape, size, layout = (*view.shape[:3], skv), view.element_size(), bias_layout(mask, q, skv, masked_rows)
        device, begin = q.get_device(), int(view.storage_offset() - mask.storage_offset()) * size
        is_readable = view.dtype == layout.dtype and (reads_directly(view, skv) or view.expand(shape).is_contiguous())
        #: Where in the mask the plan can read the bias, if that is aligned; None if it must be converted.
        self.reads_mask_at = Address("attn_mask", begin) if is_readable else None
        stride = (*view.stride()[:3], view.stride(3) if view.shape[3] == skv else 0)
        if is_readable:
            span = 1 + sum((n - 1) * elements for n, elements in zip(shape, stride, strict=True)) if view.numel() else 0
            shape, stride = (1, 1, 1, span), (0, 0, 0, 1)
        elements = math.prod(shape)
        strides = zip(("batch", "head", "row", "column"), (elements * size for elements in stride), strict=True)
        sizes = zip(("heads", "rows", "columns"), shape[1:], strict=True)
        masked = _MINUS_INFINITY.get(layout.dtype, 0)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        in_block = _THREADS * _WORD // layout.dtype.itemsize
        super().__init__(
            kernel,
            name="converted_mask",
            buffer_layout=((elements,), (1,), layout.dtype),
            blocks=max(1, min(-(-elements // in_block), 8 * processors)),
            threads=_THREADS,
            argument=_argument,
            values={**dict(strides), **dict(sizes), "elements": elements, "size": size, "masked": masked},
            addresses={"base": Address("attn_mask", begin), "bias": Address("converted_mask")},
            device=device,
        )

    def extras(self, *, reads_mask: bool) -> LaunchExtras:
        """Launch extras of a plan that reads the mask, or this kernel's copy of it."""
        mask, at = ("attn_mask",), self.reads_mask_at
        if reads_mask and at is not None:
            return LaunchExtras(operands=mask, unaligned_ok=mask, aligned=(at,), addresses={"bias": at})
        return LaunchExtras(operands=mask, unaligned_ok=mask, kernels=(self,), addresses={"bias": Address(self.name)})

    def extras_with(self, made: LengthsKernel | RowLimitsKernel, lengths: Sequence[str]) -> LaunchExtras:
        """Launch extras of a plan that reads this kernel's copy, and what `made` makes of `lengths`: by one launch.

        The latter lies behind the copy.
        """
        both, more = copy.copy(self), made.extras(lengths) + self.extras(reads_mask=False)
        (elements,), _, dtype = self.buffer_layout
        (integers,), _, _ = made.buffer_layout
        begin = -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT

        def moved(x: Address) -> Address:
            return Address(self.name, begin + x.offset) if x.of == made.name else x

        behind = {len(self.fields) + place: moved(x) for place, x in made.addresses.items()}
        both.kernel = kernels_with[type(made)].on(self._device)
        both.buffer_layout = (((begin + 4 * integers) // dtype.itemsize,), (1,), dtype)
        both.blocks = max(self.blocks, made.blocks)
        both.fields, both.addresses = self.fields + made.fields, {**self.addresses, **behind}
        return replace(more, kernels=(both,), addresses={name: moved(x) for name, x in more.addresses.items()})


def repeated_row(layout: TensorLayout, rows: int) -> TensorLayout:
    """The layout of a bias with one row for all queries, expanded to `rows` rows."""
    batch, heads, sq, skv = layout.shape
    if sq != 1 or rows == 1:
        return layout
    stride = (*layout.stride[:2], 0, layout.stride[3])
    return TensorLayout((batch, heads, rows, skv), stride, layout.dtype)


def mask_gradient(grad_bias: Tensor, mask: Tensor, masked_rows: int) -> Tensor:
    """The gradient of the caller's mask, in its dtype and memory order: summed where the mask was broadcast."""
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    broadcast = [dim for dim in range(4) if shape[dim] == 1 and grad_bias.shape[dim] != 1]
    if broadcast:
        grad_bias = grad_bias.sum(broadcast, keepdim=True, dtype=torch.float32)
    if masked_rows and shape[2] != 1:
        grad_bias = torch.nn.functional.pad(grad_bias, (0, 0, masked_rows, 0))
    gradient = grad_bias.reshape(mask.shape)
    if gradient.dtype == mask.dtype and gradient.stride() == mask.stride():
        return gradient
    return new_gradient("attn_mask", mask).copy_(gradient)


def new_gradient(name: str, tensor: Tensor) -> Tensor:
    """A new tensor for the gradient of an input of `sdpa`: a mask's in its memory order, whatever that is."""
    return torch.empty_like(tensor) if name == "attn_mask" else like_in_memory(tensor)


def without_causal_bias(call: ForwardT) -> ForwardT:
    """The call with `is_causal` in place of PyTorch's `CausalBias`, a tensor without values.

    Raises:
        ArgumentError: It is for other lengths, or the call also has a causal mask or a window.
    """
    if not is_causal_bias(call.attn_mask):
        return call
    softmax = call.softmax
    if softmax.is_causal or softmax.has_window:
        refuse_two_masks("attn_mask", "is_causal" if softmax.is_causal else "window_size")
    alignment = alignment_of_causal_bias("attn_mask", call.attn_mask, call.q, call.k)
    return call._replace(attn_mask=None, softmax=softmax._replace(is_causal=True, causal_alignment=alignment))


def refuse_two_masks(mask: str, option: str) -> NoReturn:
    """Raises the error for a causal mask or a window together with a `CausalBias`."""
    raise OptionError(option, f"one in addition to a CausalBias as {mask}", "one of the two")


def alignment_of_causal_bias(name: str, mask: CausalBias, q: Tensor, k: Tensor) -> str:
    """The alignment of the causal mask that PyTorch's `CausalBias` stands for, given as the argument `name`.

    Raises:
        ShapeError: It is for other lengths.
    """
    lengths = mask.seq_len_q, mask.seq_len_kv
    if all(isinstance(x, Tensor) and not x.is_nested and x.dim() > 1 for x in (q, k)):  # or it is refused later
        wanted = q.shape[-2], k.shape[-2]
        if lengths != wanted:
            raise ShapeError(name, f"a CausalBias for lengths {lengths}", f"one for {wanted}, those of q and k")
    return TOP_LEFT if mask.variant.name == "UPPER_LEFT" else BOTTOM_RIGHT
