"""Gradients of `sdpa` on CPU tensors against autograd through an independent float64 implementation."""

from __future__ import annotations

import pytest
import torch
from gradient_checks import assert_right

BOTTOM = {"causal_alignment": "bottom_right"}


def inputs(batch=2, heads=(4, 2), lengths=(7, 11), dims=(16, 8), dtype=torch.float64):
    shapes = {"q": (heads[0], lengths[0], dims[0]), "k": (heads[1], lengths[1], dims[0])}
    shapes["v"] = (heads[1], lengths[1], dims[1])
    return {name: torch.randn(batch, *shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "blinding",
    [
        {"is_causal": True, **BOTTOM},
        {"window_size": (-1, 1), **BOTTOM},
        {"window_size": (1, -1)},
        {"seq_lens_kv": int32(0, 3)},
        {"seq_lens_q": int32(0, 4)},
        {"attn_mask": torch.zeros(9, 4, dtype=torch.bool)},
    ],
    ids=["causal", "window_size", "left bound", "no keys", "no queries", "mask"],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_give_zeros_and_no_nan(blinding, sinks):
    tensors = {**inputs(lengths=(9, 4)), **({"sinks": torch.randn(4) * 2} if sinks else {})}
    found = assert_right(
        {**tensors, **{n: x for n, x in blinding.items() if torch.is_tensor(x)}},
        **{name: x for name, x in blinding.items() if not torch.is_tensor(x)},
    )
    masked_rows = (found["out"] == 0).all(-1)
    assert masked_rows.any()
    assert (found["q"][masked_rows] == 0).all()
    if sinks:
        alone = tensors["sinks"].view(1, 4, 1).expand_as(found["lse"])[masked_rows]
        torch.testing.assert_close(found["lse"][masked_rows], alone)
    else:
        assert found["lse"][masked_rows].isneginf().all()
    assert not any(x.isnan().any() for x in found.values())


@pytest.mark.parametrize("given", ["q", "kv", "both"])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True, **BOTTOM}, {"window_size": (2, 1), **BOTTOM}], ids=str)
def test_sequence_lengths(given, mask):
    lengths = {}
    if given != "kv":
        lengths["seq_lens_q"] = int32(7, 0, 1, 4)
    if given != "q":
        lengths["seq_lens_kv"] = int32(3, 11, 0, 5)
    tensors = inputs(batch=4)
    found = assert_right({**tensors, **lengths}, **mask)
    if given != "kv":
        for b, n in enumerate(lengths["seq_lens_q"]):
            assert (found["q"][b, :, n:] == 0).all()
    if given != "q":
        for b, n in enumerate(lengths["seq_lens_kv"]):
            assert (found["k"][b, :, n:] == 0).all()
            assert (found["v"][b, :, n:] == 0).all()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 11), (11, 5)])
def test_alibi(heads, lengths):
    tensors = inputs(heads=(heads, 1), lengths=lengths)
    found = assert_right(tensors, is_causal=True, alibi=True)
    if lengths[0] == lengths[1]:
        assert not torch.allclose(found["lse"], assert_right(tensors, is_causal=True)["lse"], atol=1e-3)
