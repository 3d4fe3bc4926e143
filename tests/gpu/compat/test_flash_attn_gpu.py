"""`compat.flash_attn`, `compat.flash_attn_interface` and `compat.xformers` on a GPU beside attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from float64_reference import attend

from cudnn_sdpa.compat import flash_attn as fa2
from cudnn_sdpa.compat import flash_attn_interface as fa3
from cudnn_sdpa.compat import xformers as xops

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("fa", [fa2, fa3], ids=["2", "3"])
OPTIONS = {
    "none": ({}, {}),
    "causal, scale": ({"causal": True, "softmax_scale": 0.2}, {"is_causal": True, "scale": 0.2}),
    "window": ({"causal": True, "window_size": (40, 0)}, {"is_causal": True, "window_size": (40, 0)}),
    "soft cap": ({"causal": True, "softcap": 5.0}, {"is_causal": True, "softcap": 5.0}),
}
ALL = pytest.mark.parametrize("case", OPTIONS)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def close(found, exact, tolerance=2e-2):
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def exact_of(q, k, v, **options):
    out, lse = attend(*(x.double().transpose(1, 2) for x in (q, k, v)), causal_alignment="bottom_right", **options)
    return out.transpose(1, 2), lse


@BOTH
@ALL
def test_dense_and_its_gradients(fa, case):
    given, options = OPTIONS[case]
    q, k, v = (random(2, n, h, 64).requires_grad_() for n, h in ((96, 8), (160, 2), (160, 2)))
    out, lse, *_ = fa.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    exact, of_lse = exact_of(q, k, v, **options)
    close(out, exact)
    close(lse, of_lse, 1e-2)
    grad = random(*out.shape)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip(found, torch.autograd.grad(exact, (q, k, v), grad.double()), strict=True):
        error = (x.double() - y.double()).norm() / y.double().norm()
        assert float(error) < 2e-2


@BOTH
@ALL
def test_packed_and_its_gradients(fa, case):
    given, options = OPTIONS[case]
    q, k, v = (random(n, h, 64).requires_grad_() for n, h in ((180, 8), (290, 2), (290, 2)))
    ends_q, ends_k = [0, 60, 60, 180], [0, 90, 130, 290]
    offsets = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends_q, ends_k))
    out, lse, *_ = fa.flash_attn_varlen_func(q, k, v, *offsets, 120, 160, **given, return_attn_probs=True)
    parts = []
    for b in (0, 2):
        of_q, of_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        parts.append(exact_of(q[None, of_q], k[None, of_k], v[None, of_k], **options))
    exact = torch.cat([out[0] for out, _ in parts])
    close(out, exact)
    close(lse, torch.cat([lse[0] for _, lse in parts], 1), 1e-2)
    grad = random(*out.shape)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip(found, torch.autograd.grad(exact, (q, k, v), grad.double()), strict=True):
        assert float((x.double() - y.double()).norm() / y.double().norm()) < 2e-2


def test_slopes_and_padded_head_dims():
    q, k, v, slopes = random(2, 96, 4, 60), random(2, 128, 4, 60), random(2, 128, 4, 60), torch.rand(2, 4).cuda()
    distance = (torch.arange(96).unsqueeze(1) + 128 - 96 - torch.arange(128)).abs().cuda()
    bias = -slopes.double()[:, :, None, None] * distance
    out = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    close(out, exact_of(q, k, v, is_causal=True, attn_mask=bias)[0])


def test_dropout_keeps_the_mean():
    q = torch.zeros(4, 512, 8, 64, device="cuda", dtype=torch.bfloat16)
    out = fa2.flash_attn_func(q, q, torch.ones_like(q), 0.25).float()
    assert abs(float(out.mean()) - 1) < 0.01
    assert 0.3 < float(out.std()) / math.sqrt(0.25 / 0.75 / 512) < 3


@BOTH
@ALL
@pytest.mark.parametrize("pages", [0, 16, 256])
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_cache(fa, case, pages, queries, num_splits):
    given, options = OPTIONS[case]
    lengths, room = [130, 0, 300], 512
    cache, new = random(2, 3, room, 2, 64), random(2, 3, queries, 2, 64)
    keys = cache.clone()
    for b, n in enumerate(lengths):
        cache[:, b, n:] = math.nan
        keys[:, b, n : n + queries] = new[:, b]
    if pages:
        table = torch.randperm(3 * room // pages, device="cuda").view(3, -1)
        stored = torch.empty(2, table.numel(), pages, 2, 64, device="cuda", dtype=torch.bfloat16)
        stored[:, table] = cache.unflatten(2, (-1, pages))
        cache, given = stored, {**given, "block_table" if fa is fa2 else "page_table": table.int()}
    q, before = random(3, queries, 8, 64), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    given = {**given, "cache_seqlens": before, "num_splits": num_splits}
    fa.flash_attn_with_kvcache(q, *cache, *new, **given, return_softmax_lse=True)  # makes the plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse, *_ = fa.flash_attn_with_kvcache(q, *cache, *new, **given, return_softmax_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for b, n in enumerate(lengths):
        total = n + queries
        exact, of_lse = exact_of(q[b : b + 1], keys[:1, b, :total], keys[1:, b, :total], **options)
        close(out[b], exact[0])
        close(lse[b], of_lse[0], 1e-2)
    after = cache[:, table].flatten(2, 3) if pages else cache
    for b, n in enumerate(lengths):
        assert torch.equal(after[:, b, n : n + queries], new[:, b])


@pytest.mark.parametrize("kind", ["block diagonal", "padded keys", "bottom right"])
def test_biases_of_xformers(kind):
    q, kv = random(1, 180, 4, 64), random(2, 1, 180, 4, 64)
    if kind == "bottom right":
        out = xops.memory_efficient_attention(q[:, :50], *kv, xops.LowerTriangularFromBottomRightMask())
        close(out, exact_of(q[:, :50], *kv, is_causal=True)[0])
        return
    lengths = [60, 120] if kind == "block diagonal" else [60, 90]
    if kind == "block diagonal":
        bias, starts = xops.BlockDiagonalMask.from_seqlens([60, 120]).make_causal_from_bottomright(), [0, 60]
    else:
        bias = xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([60, 90], 90, lengths)
        starts, q = [0, 90], q[:, :150]
    out = xops.memory_efficient_attention(q, *kv, bias)
    for n, x, of_q, start in zip(lengths, out[0].split(lengths), q[0].split(lengths), starts, strict=True):
        k, v = kv[:, :, start : start + n]
        close(x, exact_of(of_q[None], k, v, is_causal=True)[0][0])
