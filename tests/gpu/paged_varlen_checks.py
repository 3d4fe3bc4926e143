"""Shared by the GPU tests of `sdpa_paged_varlen`: batches with NaN in every slot of no one, and float64 values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attention_checks import poison
from float64_reference import attend_packed_on_pages
from paged_batches import batch_on_pages
from torch import Tensor

from cudnn_sdpa import sdpa_paged_varlen

BF16, HALF, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2

#: Largest relative error in the norm, of all tokens and of the worst one.
OF_ALL, OF_ONE = {BF16: 6e-3, HALF: 1e-3}, {BF16: 2e-2, HALF: 4e-3}

#: New tokens and keys of sequences: some have none of either, or fewer keys than new tokens.
DECODES = [1, 1, 1, 2, 0, 1, 1], [1300, 1, 64, 65, 50, 0, 129]
MIXED = [1, 37, 4, 0, 1, 150, 3], [900, 300, 64, 9, 129, 151, 2]


def drawn(batch: tuple[Sequence[int], Sequence[int]], *, sinks: bool = False, **given: Any) -> dict[str, Any]:
    """The arguments of a call; tokens before the first sequence and behind the last belong to none."""
    settings = {"heads": 8, "dims": (128, 128), "page": 16, "dtype": BF16, "device": "cuda", "before": 1, "behind": 2}
    made = batch_on_pages(*batch, **settings | given)
    return made | ({"sinks": 2 * torch.randn(made["q"].shape[1], device=made["q"].device)} if sinks else {})


def exact(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    others = ("max_seqlen_q", "out", "batch_invariant")
    return attend_packed_on_pages(**{name: x for name, x in given.items() if name not in others})


def within_canaries(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Memory full of NaN, and the part of it that takes the output of a call."""
    (tokens, heads, _), dim = given["q"].shape, given["v_pages"].shape[-1]
    whole = torch.full((tokens + 2, heads + 1, dim + 16), math.nan, dtype=given["q"].dtype, device="cuda")
    return whole, whole[1:-1, :heads, 8:-8]


def assert_close(given: dict[str, Any], out: Tensor, lse: Tensor | None) -> None:
    wanted, of_lse = exact(given)
    assert out.isfinite().all()
    off, size = (out.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert float(off.norm()) <= OF_ALL[out.dtype] * float(size.norm()) + 1e-6
    assert bool((off <= OF_ONE[out.dtype] * size + 1e-5).all()), float((off / (size + 1e-5)).max())
    assert not out[wanted.abs().sum(-1) == 0].any()
    if lse is not None:
        torch.testing.assert_close(lse.double(), of_lse, rtol=1e-4, atol=2e-3)


def assert_right(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Results in memory that held NaN, and the same bits in a part of a tensor, whose rest stays as it is."""
    shape = (*given["q"].shape[:2], given["v_pages"].shape[-1])
    poison(shape, dtype=given["q"].dtype)
    poison(shape[:2], dtype=torch.float32)
    out, lse = sdpa_paged_varlen(**given, return_lse=True)
    assert_close(given, out, lse)
    whole, part = within_canaries(given)
    found, of_lse = sdpa_paged_varlen(**given, out=part, return_lse=True)
    assert found is part
    assert torch.equal(found, out)
    assert torch.equal(of_lse, lse)
    part.fill_(math.nan)
    assert whole.isnan().all()
    return out, lse
