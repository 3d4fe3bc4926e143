"""`sdpa` on CPU tensors against float64, and against PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa import sdpa


def random_qkv(
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (13, 17),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads[0], lengths[0], dims[0], dtype=torch.float64)
    k = torch.randn(batch, heads[1], lengths[1], dims[0], dtype=torch.float64)
    v = torch.randn(batch, heads[1], lengths[1], dims[1], dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_keys_past_the_length_have_no_influence_even_if_they_are_nan():
    q, k, v = random_qkv(batch=1, lengths=(4, 10))
    lengths = torch.tensor([6], dtype=torch.int32)
    expected = sdpa(q, k[:, :, :6], v[:, :, :6])
    k[:, :, 6:] = torch.nan
    torch.testing.assert_close(sdpa(q, k, v, seq_lens_kv=lengths), expected)


def test_a_sink_of_minus_infinity_has_no_effect():
    q, k, v = (x.requires_grad_() for x in random_qkv(dtype=torch.float64))
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    mask = torch.rand(13, 17) < 0.5
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
    q, k, v = (x.requires_grad_() for x in random_qkv(heads=(6, 3)))
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
    q, k, v = random_qkv()
    lengths = torch.tensor([7, 11], dtype=torch.int32)
    before = [tensor.clone() for tensor in (q, k, v, lengths)]
    sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=lengths, return_lse=True)
    for tensor, copy in zip((q, k, v, lengths), before, strict=True):
        assert torch.equal(tensor, copy)
