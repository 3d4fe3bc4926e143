"""The scales and largest values of one call in FP8: a table on the GPU, which the host never reads.

The easy layer has ten tensors, in this order: q, k, v, the probabilities s, the output o, and the gradients do, dp (of
the scores), dq, dk and dv. A table says for each its scale, one over it, and its largest absolute value. Each number
has 16 bytes to itself, as cuDNN's operands are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.fp8_arguments import Fp8BackwardScales, Fp8Scales

NAMES = ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")
Q, K, V, S, O, DO, DP, DQ, DK, DV = range(len(NAMES))  # noqa: E741 - the name of the output in this field

SCALE, DESCALE, AMAX = range(3)
SLOT = 4  #: floats that a number has to itself

#: The scale of the probabilities. They are 1 at most, so that nothing has to be learned about them. A power of two,
#: whose inverse is exact, and not 448: a kernel whose maximum of a row lags behind sees exponentials a little over 1.
SCALE_S = 256.0

#: The least that a largest value counts for, so that no scale and no descale is infinite or subnormal.
TINY = 2.0**-110


def new_table(device: torch.device) -> Tensor:
    """A table, (3, 10, 4) float32, of which the first of every four floats counts; largest values of 0."""
    return torch.zeros(3, len(NAMES), SLOT, dtype=torch.float32, device=device)


def number(table: Tensor, part: int, row: int) -> Tensor:
    """One number of a table as a tensor of one element."""
    return table[part, row, :1]


def forward_scales(table: Tensor) -> Fp8Scales:
    """What `sdpa_fp8` takes, as views of a table."""
    descales = [number(table, DESCALE, row) for row in (Q, K, V, S)]
    return Fp8Scales(*descales, *(number(table, SCALE, row) for row in (S, O)))


def backward_scales(forward: Tensor, backward: Tensor) -> Fp8BackwardScales:
    """What `sdpa_fp8_backward` takes, as views of the forward pass's table and of one of its own."""
    return Fp8BackwardScales(
        descale_q=number(forward, DESCALE, Q),
        descale_k=number(forward, DESCALE, K),
        descale_v=number(forward, DESCALE, V),
        descale_o=number(forward, DESCALE, O),
        descale_do=number(backward, DESCALE, DO),
        descale_s=number(forward, DESCALE, S),
        descale_dp=number(backward, DESCALE, DP),
        scale_s=number(forward, SCALE, S),
        scale_dq=number(backward, SCALE, DQ),
        scale_dk=number(backward, SCALE, DK),
        scale_dv=number(backward, SCALE, DV),
        scale_dp=number(backward, SCALE, DP),
    )


def scale_for(limit: float | Tensor, amax: Tensor) -> Tensor:
    """The scale that takes a largest value to a limit; 1 where there is nothing to go by: 0, infinity or NaN."""
    known = amax.isfinite() & (amax > 0)
    if not isinstance(limit, Tensor):  # a number by a tensor is a product with 1 / tensor, rounded twice
        limit = torch.full_like(amax, limit)
    return torch.where(known, limit / amax.clamp_min(TINY), torch.ones_like(amax))


def set_scales(table: Tensor, first: int, scales: Tensor) -> None:
    """Writes the scales of consecutive tensors, from `first` on, and one over them."""
    rows = slice(first, first + scales.numel())
    table[SCALE, rows, 0] = scales
    table[DESCALE, rows, 0] = 1 / scales
