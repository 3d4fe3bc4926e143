"""Workarounds for cuDNN's FP8 kernels at the ends of sequences, on the GPU around their launch.

Seen on an H200 with cuDNN 9.19:

- The forward pass also computes the queries past a length, up to the end of their tile of 64, and its amax values
  include them.
- The backward pass writes wrong gradients of the last queries if their number is not a multiple of 16. It is right on
  tensors that are padded with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.dense.launch import has_readable_layout
from cudnn_sdpa.attention.fp8.arguments import TABLES, Fp8Arguments, Fp8BackwardArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.tensor_checks import LOWEST, check_present
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like

#: The rows that the backward kernels write at a time.
ROWS_AT_ONCE = 16

_WITHOUT_SIGN = 0x7F


def lengths(call: Fp8Arguments | Fp8BackwardArguments, skv: int) -> dict[str, Tensor]:
    of_q, of_kv = call.seq_lens_q, call.seq_lens_kv
    tensor_checks.check_lengths_present(of_q, of_kv)
    sq = call.q.shape[2]
    found = {"seq_len_q": torch.full_like(of_kv, sq) if of_q is None else of_q.clamp(0, sq)}  # type: ignore[arg-type]
    return found if of_kv is None else {**found, "seq_len_kv": of_kv.clamp(0, skv)}


def readable_tables(call: Fp8Arguments) -> dict[str, Tensor]:
    """The tables as cuDNN reads them: dense, and every id that of an existing page."""
    if call.tables is None:
        return {}
    for name, table in zip(TABLES, call.tables, strict=True):
        if table.data_ptr() < LOWEST:
            check_present(name, table)
    last = call.k.shape[0] - 1
    first = call.tables[0].clamp(0, last).contiguous()
    second = first if call.tables[1] is call.tables[0] else call.tables[1].clamp(0, last).contiguous()
    return {"table_k": first, "table_v": second}


def mask_absent_rows(call: Fp8Arguments, out: Tensor, lse: Tensor | None) -> None:
    """Fills rows past the lengths and fully masked rows with zeros, and their LSE with minus infinity."""
    rows = torch.arange(out.shape[2], device=out.device).view(1, 1, -1)
    absent = torch.zeros_like(rows, dtype=torch.bool)
    if call.seq_lens_q is not None:
        absent = rows >= call.seq_lens_q.view(-1, 1, 1)
    if call.seq_lens_kv is not None:
        absent = absent | (call.seq_lens_kv <= 0).view(-1, 1, 1)
    (out.view(torch.uint8) if out.dtype in FP8_DTYPES else out).masked_fill_(absent.unsqueeze(-1), 0)
    if lse is not None:
        lse.masked_fill_(absent, -torch.inf)


def amax_of(out: Tensor, scale_o: Tensor, kernel_amax: Tensor) -> Tensor:
    """The amax of an output before its scale, (1,) float32, in the output's precision.

    Args:
        out: The output.
        scale_o: Its scale.
        kernel_amax: The kernel's amax, which includes rows past the lengths; the result if the output is saturated.
    """
    if out.dtype in FP8_DTYPES:
        # Without their signs the bits of FP8 numbers are in the order of the numbers, NaN the highest.
        largest = out.view(torch.uint8).bitwise_and(_WITHOUT_SIGN).amax().view(out.dtype).float()
    else:
        largest = out.abs().amax().float()
    is_saturated = largest >= torch.finfo(out.dtype).max
    return torch.where(is_saturated, kernel_amax, largest / scale_o.view(1))


def padded_rows(rows: int) -> int:
    """The number of queries of a backward plan for Hopper: padded to a multiple of 16."""
    return -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE


def padded_layout(layout: TensorLayout, rows: int) -> TensorLayout:
    batch, heads, _, dim = layout.shape
    return TensorLayout.contiguous((batch, heads, rows, dim), layout.dtype)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """A copy of queries or values per query, (B, H, Sq, D) or (B, H, Sq), padded to `rows` rows with zeros."""
    more = (0, rows - x.shape[2])
    if x.dim() == 3:
        return F.pad(x, more)
    return F.pad(x.view(torch.uint8), (0, 0, *more)).view(x.dtype)


def readable_layout(call: Fp8BackwardArguments) -> TensorLayout:
    """The layout of the output's gradient as cuDNN reads it: if it is copied, in the memory order of `out`."""
    if has_readable_layout(call.grad_out):
        return TensorLayout.of(call.grad_out)
    shape = tuple(call.out.shape)
    return TensorLayout(shape, dense_stride_like(shape, shape, call.out.stride()), call.grad_out.dtype)


def copied(name: str, x: Tensor, layout: TensorLayout) -> Tensor:
    check_present(name, x)  # PyTorch's kernel would read a null pointer
    return torch.empty_strided(layout.shape, layout.stride, dtype=x.dtype, device=x.device).copy_(x)
