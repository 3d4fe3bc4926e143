"""Attention in MXFP8, FP8 numbers in blocks of 32 with a scale each: its arithmetic in PyTorch, and keys of its plans.

Only data-center Blackwell has kernels for it, and none has been run by this project: what is here was planned for a
B200 without one, and is not public yet. The backward pass is in `mxfp8_backward`. The format is that of the "OCP
Microscaling Formats (MX) Specification", version 1.0, sections 5.2 and 6.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_sdpa.attention import fp8_passes, mxfp8_graphs, reference
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.case import FORWARD, Case
from cudnn_sdpa.attention.fp8_arguments import FP8_DTYPES, HEAD_DIM_STEP
from cudnn_sdpa.attention.support import Rule, refusal
from cudnn_sdpa.errors import DtypeError, ShapeError
from cudnn_sdpa.runtime.key import Operand, PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.runtime.target import Target

BLOCK = 32
TILE = (128, 4)  #: rows and columns of the tiles that scales lie in
FIRST_CUDNN = 92100

_E8M0_BIAS = 127
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}

_WAY_OUT = "sdpa_fp8, which has one scale for each tensor"
NEEDS = (
    Rule(
        lambda case: not case.is_data_center_blackwell,
        "on SM {sm} there is no attention in MXFP8: it needs SM 100",
        _WAY_OUT,
    ),
    Rule(
        lambda case: case.cudnn < FIRST_CUDNN,
        "attention in MXFP8 needs cuDNN 9.21, and this is {version}",
        f"a newer cuDNN, or {_WAY_OUT}",
    ),
    Rule(
        lambda case: case.bias or case.sinks or case.dropout or case.softcap or case.alibi,
        "attention in MXFP8 has no attn_mask, sinks, dropout, softcap and alibi here",
        "sdpa, with q, k and v in torch.bfloat16",
    ),
)
RULES = (
    *NEEDS,
    Rule(
        lambda case: case.largest_head_dim > 192,
        "head dims {head_dim} and {head_dim_v} are not known to be right in MXFP8 (cudnn-frontend#981)",
        "head dims of up to 192",
        wrong=True,
    ),
)


class Blocks(NamedTuple):
    """A tensor in MXFP8.

    Attributes:
        values: The numbers in FP8.
        exponents: The scale of each block is 2 to the power of this number less 127; uint8. Blocks lie along the last
            dimension, or along the last but one of values `v`.
    """

    values: Tensor
    exponents: Tensor


def quantized(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, along: int = -1) -> Blocks:
    """A tensor in MXFP8: each scale is the largest power of two that the largest number of its block asks for.

    Args:
        x: Any floating tensor (B, H, S, D).
        dtype: The format of the numbers.
        along: The dimension that blocks lie along: -1 for queries and keys, -2 for values. It is filled up with zeros.
            The backward pass wants other ones too: see `mxfp8_backward`.
    """
    if dtype not in FP8_DTYPES:
        raise DtypeError("dtype", str(dtype), "torch.float8_e4m3fn or torch.float8_e5m2")
    rows = x.float().movedim(along, -1)
    size = rows.shape[-1]
    padded = F.pad(rows, (0, -size % BLOCK))
    blocks = padded.view(*rows.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    power = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT[dtype]
    power = torch.where(largest == 0, -_E8M0_BIAS, power).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    limit = torch.finfo(dtype).max
    values = torch.ldexp(blocks, -power.unsqueeze(-1)).clamp(-limit, limit).to(dtype)
    values = values.flatten(-2).view(torch.uint8)[..., :size].movedim(-1, along).contiguous().view(dtype)
    return Blocks(values, (power + _E8M0_BIAS).to(torch.uint8).movedim(-1, along).contiguous())


def dequantized(x: Blocks, exact: torch.dtype = torch.float32, *, along: int = -1) -> Tensor:
    """What a tensor in MXFP8 stands for."""
    size = x.values.shape[along]
    powers = (x.exponents.int() - _E8M0_BIAS).repeat_interleave(BLOCK, along).narrow(along, 0, size)
    return torch.ldexp(x.values.to(exact), powers)


def in_tiles(exponents: Tensor) -> Tensor:
    """Scales (..., rows, blocks of a row) in the memory order of cuDNN's F8_128x4, filled up to whole tiles.

    A tile of 128 rows and 4 columns takes 512 bytes one after the other; in it, row r and column c are at byte
    16 (r mod 32) + 4 (r div 32) + c. It is the order of block scales in NVIDIA's documentation of cuBLAS. For values,
    whose blocks lie along keys, rows are head dims: give `exponents.mT`.
    """
    rows, columns = TILE
    padded = F.pad(exponents, (0, -exponents.shape[-1] % columns, 0, -exponents.shape[-2] % rows))
    *batch, height, width = padded.shape
    tiles = padded.view(*batch, height // rows, rows // 32, 32, width // columns, columns)
    # (..., tile of rows, r div 32, r mod 32, tile of columns, c)
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5).contiguous()


def attention(q: Blocks, k: Blocks, v: Blocks, call: ForwardArguments) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the numbers that the blocks stand for, in float64, with the options of `call`.

    Probabilities are not rounded: in which format a kernel keeps them has not been seen. NVIDIA's own reference rounds
    exp(score − maximum so far) · 16 to FP8.
    """
    exact = (dequantized(q, torch.float64), dequantized(k, torch.float64), dequantized(v, torch.float64, along=-2))
    of = call._replace(q=exact[0], k=exact[1], v=exact[2])
    return reference.attention(of)


def forward_key(
    call: ForwardArguments, target: Target, device: int | None, out_dtype: torch.dtype = torch.bfloat16
) -> PlanKey:
    """The key of the plan of a call on FP8 tensors; scales are in tiles.

    Raises:
        DtypeError: Tensors are not FP8.
        ShapeError: A head dim is no multiple of 16.
        UnsupportedError: There is none.
    """
    check(call)
    problem = fp8_passes.problem_of(call)
    case: Case = problem.case(FORWARD, target)
    refused = refusal(case, "attention in MXFP8", RULES)
    if refused is not None:
        raise refused
    scale, *lengths = problem.operands(decode=False, sinks=False, full_lengths=problem.needs_lengths)
    q, k, v = problem.visible(problem.q), problem.k, problem.v
    scales = {
        "descale_q": scales_of(q),
        "descale_k": scales_of(k),
        "descale_v": scales_of(v, along=-2),
    }
    inputs = [Operand("q", q), Operand("k", k), Operand("v", v), scale]
    inputs += [*(Operand(name, layout) for name, layout in scales.items()), *lengths]
    shape = (*q.shape[:3], v.shape[3])
    out = TensorLayout(shape, dense_stride_like(shape, q.shape, q.stride), out_dtype)
    outputs = [Operand("out", out), *fp8_passes.numbers(["amax_o"])]
    if call.with_lse:
        outputs.append(Operand("lse", TensorLayout.contiguous((*shape[:3], 1), torch.float32)))
    options = {"band": problem.mask.band, "with_lse": call.with_lse}
    return mxfp8_graphs.sdpa_mxfp8_forward.key(inputs, outputs, options, target, device)


def check(call: ForwardArguments) -> None:
    """Whether the tensors are FP8, and their head dims what kernels take.

    Raises:
        DtypeError: Tensors are not FP8.
        ShapeError: A head dim is no multiple of 16.
    """
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.dtype not in FP8_DTYPES:
            raise DtypeError(name, str(x.dtype), "float8_e4m3fn or float8_e5m2")
        if x.shape[-1] % HEAD_DIM_STEP:
            raise ShapeError(name, f"head dim {x.shape[-1]}", f"a multiple of {HEAD_DIM_STEP}")


def scales_of(x: TensorLayout, *, along: int = -1) -> TensorLayout:
    """The layout of a tensor's scales, whose blocks lie along a dimension, filled up to whole tiles."""
    batch, heads, rows, dim = x.shape
    of_rows, of_columns = TILE
    if along == -1:
        shape = (batch, heads, _up(rows, of_rows), _up(-(-dim // BLOCK), of_columns))
    else:
        shape = (batch, heads, _up(-(-rows // BLOCK), of_columns), _up(dim, of_rows))
    return TensorLayout.contiguous(shape, torch.float8_e8m0fnu)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
