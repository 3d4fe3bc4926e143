"""Copies of some heads of many tokens: by kernels, or by copy engines, which leave the multiprocessors to others."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.graph import backend

#: What kernels copy at a time: with elements of two bytes they reach a third of the memory's bandwidth.
WIDEST = torch.complex128

#: The fewest bytes of a row that copy engines take. Of narrower ones kernels copy more in the same time.
MIN_ROW = 2048

#: Bytes from one row to the next that they cannot take.
PITCH_LIMIT = 1 << 31


def copy(to: Tensor, x: Tensor) -> Tensor:
    """Copies a tensor to memory of its shape by a kernel, in elements of 16 bytes if both may be seen as such."""
    if all(map(_is_wide, (to, x))):
        to.view(WIDEST).copy_(x.view(WIDEST))
        return to
    return to.copy_(x)


def copy_to_peer(to: Tensor, x: Tensor) -> None:
    """Copies two chunks of tokens to contiguous memory on another GPU, by copy engines if their rows are wide.

    Args:
        to: That memory, (2, tokens, …), as this GPU sees it.
        x: The tensor, of the same shape.
    """
    if x.stride(0) == x.shape[1] * x.stride(1):  # one after the other: all rows at once
        _copy_rows(to.flatten(0, 1), x.flatten(0, 1))
    else:
        for chunk_to, chunk in zip(to, x, strict=True):
            _copy_rows(chunk_to, chunk)


def _copy_rows(to: Tensor, x: Tensor) -> None:
    row = x[0]
    width, pitch = row.numel() * x.element_size(), x.stride(0) * x.element_size()
    if x.is_contiguous() or width < MIN_ROW or not width <= pitch < PITCH_LIMIT or not row.is_contiguous():
        copy(to, x)
        return
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if not backend.copy_rows(to.data_ptr(), width, x.data_ptr(), pitch, width=width, rows=x.shape[0], stream=stream):
        copy(to, x)


def _is_wide(x: Tensor) -> bool:
    number = WIDEST.itemsize // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % WIDEST.itemsize == 0 and all(step % number == 0 for step in steps)
