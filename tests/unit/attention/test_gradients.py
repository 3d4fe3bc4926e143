"""Gradients of `sdpa` on CPU tensors against autograd through an independent float64 implementation."""

from __future__ import annotations

import math

import pytest
import torch
from gradient_checks import assert_right

LENGTHS = [(7, 7), (5, 11), (11, 5), (1, 9), (9, 1), (1, 1)]
BOTTOM = {"causal_alignment": "bottom_right"}


def inputs(batch=2, heads=(4, 2), lengths=(7, 11), dims=(16, 8), dtype=torch.float64):
    shapes = {"q": (heads[0], lengths[0], dims[0]), "k": (heads[1], lengths[1], dims[0])}
    shapes["v"] = (heads[1], lengths[1], dims[1])
    return {name: torch.randn(batch, *shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, **BOTTOM}], ids=["", "top", "bottom"])
def test_causal_masks(lengths, dtype, mask):
    found = assert_right(inputs(lengths=lengths, dtype=dtype), **mask)
    assert found["v"].abs().max() > 0.01


@pytest.mark.sample(42)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window_size", [(3, 2), (0, 0), (2, -1), (-1, 1), (-1, -1), (0, 4), (30, 30)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(lengths, window_size, alignment, is_causal):
    assert_right(inputs(lengths=lengths), window_size=window_size, causal_alignment=alignment, is_causal=is_causal)


SHAPES = [
    *((2, 4, 7, 11), (1, 4, 7, 11), (2, 1, 7, 11), (2, 4, 1, 11), (2, 4, 7, 1), (1, 1, 1, 1), (1, 4, 1, 11)),
    *((4, 7, 11), (1, 7, 11), (4, 1, 1), (7, 11), (1, 11), (7, 1), (11,), (1,), ()),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_added_masks_of_every_broadcast_shape(shape, dtype):
    found = assert_right({**inputs(), "attn_mask": torch.randn(shape, dtype=dtype) * 2}, is_causal=True)
    if shape and shape[-1] == 11:
        assert found["attn_mask"].abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boolean_masks_of_every_broadcast_shape(shape):
    mask = torch.rand(shape) < 0.7
    found = assert_right({**inputs(), "attn_mask": mask})
    assert "attn_mask" not in found


def test_an_expanded_mask_gets_a_gradient_for_each_of_its_elements():
    mask = torch.randn(1, 4, 1, 11, dtype=torch.float64)
    tensors = inputs()
    torch.manual_seed(5)
    repeated = assert_right({**tensors, "attn_mask": mask.expand(2, 4, 7, 11)})["attn_mask"]
    torch.manual_seed(5)
    single = assert_right({**tensors, "attn_mask": mask})["attn_mask"]
    torch.testing.assert_close(repeated.sum((0, 2), keepdim=True), single, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_fully_masked_by_attn_mask(kind, sinks):
    mask = torch.ones(7, 11, dtype=torch.bool)
    mask[2] = mask[6] = False
    if kind == "float":
        mask = torch.zeros(7, 11, dtype=torch.float64).masked_fill(~mask, -math.inf)
    tensors = {**inputs(), "attn_mask": mask, **({"sinks": torch.randn(4)} if sinks else {})}
    found = assert_right(tensors)
    for row in (2, 6):
        assert (found["out"][:, :, row] == 0).all()
        assert (found["q"][:, :, row] == 0).all()
        expected = tensors["sinks"].expand(2, 4) if sinks else torch.full((2, 4), -math.inf)
        torch.testing.assert_close(found["lse"][:, :, row], expected)
        if kind == "float":
            assert (found["attn_mask"][row] == 0).all()
    assert not any(x.isnan().any() for x in found.values())


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


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("softcap", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window_size": (2, 0), **BOTTOM}], ids=str)
def test_softcap(softcap, mask):
    assert_right(inputs(), softcap=softcap, scale=1.5, **mask)
    assert_right({**inputs(), "attn_mask": torch.randn(7, 11, dtype=torch.float64)}, softcap=softcap, **mask)


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, **BOTTOM}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sinks(mask, lengths):
    sinks = torch.tensor([-1.7, 0.3, 2.2, 6.0])
    found = assert_right({**inputs(lengths=lengths), "sinks": sinks}, **mask)
    assert found["sinks"].dtype == torch.float32
    assert found["sinks"].abs().min() > 0


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}], ids=str)
def test_dropout(dropout_p, mask):
    assert_right(inputs(lengths=(13, 17)), dropout_p=dropout_p, **mask)
    assert_right({**inputs(), "sinks": torch.randn(4) * 2}, dropout_p=dropout_p, **mask)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 2), (8, 1), (7, 7)])
def test_grouped_heads(heads):
    assert_right(inputs(heads=heads), is_causal=True)


@pytest.mark.parametrize("scale", [0.37, 2.25, -0.6, 0.0, 3])
def test_scales(scale):
    assert_right(inputs(), scale=scale)
    assert_right({**inputs(), "sinks": torch.randn(4)}, scale=scale, is_causal=True)


@pytest.mark.usefixtures("reference_alone")
def test_all_options_together():
    tensors = {
        **inputs(batch=3, lengths=(9, 13)),
        "attn_mask": torch.randn(3, 1, 9, 13, dtype=torch.float64).masked_fill(
            torch.rand(3, 1, 9, 13) < 0.2, -math.inf
        ),
        "sinks": torch.randn(4) * 2,
        "seq_lens_q": int32(9, 4, 7),
        "seq_lens_kv": int32(13, 6, 0),
    }
    assert_right(tensors, window_size=(4, 2), causal_alignment="bottom_right", softcap=1.7, dropout_p=0.3, scale=0.8)


@pytest.mark.parametrize(("sq", "skv"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_keys_give_zeros(sq, skv, sinks):
    tensors = {**inputs(lengths=(sq, skv)), **({"sinks": torch.randn(4)} if sinks else {})}
    found = assert_right(tensors, is_causal=True)
    for name in tensors:
        assert (found[name] == 0).all()
