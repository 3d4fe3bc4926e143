"""The reference of `sdpa` on CPU tensors: rows without keys, lengths, scales, linear biases, and what must not matter.

`generators` has random calls against float64.
"""

from __future__ import annotations

import pytest
import torch
from gradient_checks import assert_right

from cudnn_sdpa import sdpa

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


@pytest.mark.parametrize("scale", [0.37, -0.6, 0.0, 3])
def test_scales(scale):
    assert_right({**inputs(), "sinks": torch.randn(4)}, scale=scale, is_causal=True)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 11), (11, 5)])
def test_alibi(heads, lengths):
    tensors = inputs(heads=(heads, 1), lengths=lengths)
    found = assert_right(tensors, is_causal=True, alibi=True)
    if lengths[0] == lengths[1]:
        assert not torch.allclose(found["lse"], assert_right(tensors, is_causal=True)["lse"], atol=1e-3)


def test_keys_past_the_length_have_no_influence_even_if_they_are_nan():
    q, k, v = inputs(batch=1, lengths=(4, 10)).values()
    lengths = int32(6)
    expected = sdpa(q, k[:, :, :6], v[:, :, :6])
    k[:, :, 6:] = torch.nan
    torch.testing.assert_close(sdpa(q, k, v, seq_lens_kv=lengths), expected)


def test_a_sink_of_minus_infinity_has_no_effect():
    q, k, v = (x.requires_grad_() for x in inputs().values())
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    mask = torch.rand(7, 11) < 0.5
    mask[3], mask[4:, 0] = False, True
    results = []
    for options in ({}, {"sinks": sinks}):
        out, lse = sdpa(q, k, v, attn_mask=mask, return_lse=True, **options)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v, *options.values()))))
    for without, with_sinks in zip(*results, strict=False):
        torch.testing.assert_close(with_sinks, without)
    out, lse, *_, grad_sinks = results[1]
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))
    assert lse[:, :, 3].isneginf().all()
    assert torch.equal(grad_sinks, torch.zeros(4))


def test_the_default_device_does_not_matter():
    q, k, v = (x.requires_grad_() for x in inputs(heads=(6, 3), dtype=torch.float32).values())
    options = {"is_causal": True, "alibi": True, "sinks": torch.randn(6), "return_lse": True}
    results = []
    for device in (None, "meta"):
        with torch.device(device or "cpu"):
            torch.manual_seed(3)
            out, lse = sdpa(q, k, v, **options)
            dropped = sdpa(q, k, v, dropout_p=0.5)
            results.append((out, lse, dropped, *torch.autograd.grad(out.sum() + dropped.sum(), (q, k, v))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_inputs_are_not_modified():
    q, k, v = inputs().values()
    lengths = int32(7, 11)
    before = [tensor.clone() for tensor in (q, k, v, lengths)]
    sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=lengths, return_lse=True)
    for tensor, copy in zip((q, k, v, lengths), before, strict=True):
        assert torch.equal(tensor, copy)
