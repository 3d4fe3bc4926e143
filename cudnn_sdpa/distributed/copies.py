"""Copies of some heads of many tokens: by kernels, or by copy engines, which leave the multiprocessors to others."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.graph import backend

#: What kernels copy at a time: with elements of two bytes they reach a third of the memory's bandwidth.
WIDEST = torch.complex128

#: The fewest bytes of a row that copy engines take. Of narrower ones kernels copy more in the same time.
LEAST_ROW = 2048


def copy(to: Tensor, x: Tensor) -> Tensor:
    """Copies a tensor to memory of its shape by a kernel, in elements of 16 bytes if both may be seen as such."""
    if all(map(_is_wide, (to, x))):
        to.view(WIDEST).copy_(x.view(WIDEST))
        return to
    return to.copy_(x)


def copy_to_peer(to: Tensor, x: Tensor) -> None:
    """Copies a tensor to contiguous memory of its shape on another GPU, by copy engines if its rows are wide.

    Args:
        to: That memory, as this GPU sees it.
        x: The tensor, whose first dimension may have any stride.
    """
    row = x[0]
    width = row.numel() * x.element_size()
    if x.is_contiguous() or width < LEAST_ROW or not row.is_contiguous():
        copy(to, x)
        return
    stream = torch.cuda.current_stream(x.device).cuda_stream
    pitch = x.stride(0) * x.element_size()
    if not backend.copy_rows(to.data_ptr(), width, x.data_ptr(), pitch, width=width, rows=x.shape[0], stream=stream):
        copy(to, x)


def _is_wide(x: Tensor) -> bool:
    number = WIDEST.itemsize // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % WIDEST.itemsize == 0 and all(step % number == 0 for step in steps)
