"""`sdpa_backward` and `merge_states` on a GPU: gradients of a part of the keys, given the results of all."""

from __future__ import annotations

import pytest
import torch
from attention_checks import nothing_synchronizes
from float64_reference import gradients

from cudnn_sdpa import merge_states, sdpa, sdpa_backward, sdpa_varlen, sdpa_varlen_backward


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("options", [{}, {"scale": 0.05}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("at", [1, 100, 256, 511])
def test_gradients_of_parts_are_those_of_the_whole(at, options):
    q, k, v, grad_out = drawn(2, 8, 384, 128), drawn(2, 2, 512, 128), drawn(2, 2, 512, 128), drawn(2, 8, 384, 128)
    exact_out, exact_lse, wanted = gradients(
        {"q": q, "k": k, "v": v}, grad_out, **{n: x for n, x in options.items() if n == "scale"}
    )
    parts = [(k[:, :, part], v[:, :, part]) for part in (slice(0, at), slice(at, 512))]
    given = {n: x for n, x in options.items() if n != "deterministic"}
    out, lse = merge_states(*zip(*(sdpa(q, *part, return_lse=True, **given) for part in parts), strict=True))
    assert error(out, exact_out) < 1e-2
    assert (lse - exact_lse).abs().max() < 1e-3
    found = [sdpa_backward(grad_out, out, lse, q, *part, **options) for part in parts]
    assert error(sum(x.dq.double() for x in found), wanted["q"]) < 1.5e-2
    for name in "kv":
        assert error(torch.cat([getattr(x, f"d{name}") for x in found], 2), wanted[name]) < 1.5e-2


def test_one_query_and_one_key_of_many():
    q, k, v, grad_out = drawn(2, 4, 1, 64), drawn(2, 4, 3, 64), drawn(2, 4, 3, 64), drawn(2, 4, 1, 64)
    _, _, wanted = gradients({"q": q, "k": k, "v": v}, grad_out)
    out, lse = sdpa(q, k, v, return_lse=True)
    found = [sdpa_backward(grad_out, out, lse, q, k[:, :, j : j + 1], v[:, :, j : j + 1]) for j in range(3)]
    assert error(torch.cat([x.dv for x in found], 2), wanted["v"]) < 1.5e-2
    assert error(torch.cat([x.dk for x in found], 2), wanted["k"]) < 2e-2


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs SM 90")
def test_packed_parts():
    """Each sequence's keys in two parts: its first 60, and the others."""
    lengths = [200, 0, 61, 60, 391]
    of_q = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    total = sum(lengths)
    q, k, v, grad_out = drawn(total, 8, 64), drawn(total, 2, 64), drawn(total, 2, 64), drawn(total, 8, 64)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    whole = sdpa_varlen(*leaves, of_q, of_q, 391, 391)
    wanted = torch.autograd.grad(whole, leaves, grad_out)
    begins, states, parts = of_q[:-1].tolist(), [], []
    for first in (True, False):
        spans = [
            (b, b + min(n, 60)) if first else (b + min(n, 60), b + n) for b, n in zip(begins, lengths, strict=True)
        ]
        rows = torch.cat([torch.arange(*span, device="cuda") for span in spans])
        ends = torch.tensor([0, *(b - a for a, b in spans)], device="cuda").cumsum(0).int()
        parts.append((rows, (q, k[rows], v[rows], of_q, ends, 391, 331)))
        states.append(sdpa_varlen(*parts[-1][1], return_lse=True))
    out, lse = merge_states(*zip(*states, strict=True))
    assert error(out, whole.detach().double()) < 1e-2
    found = [(rows, sdpa_varlen_backward(grad_out, out, lse, *call)) for rows, call in parts]
    assert error(sum(x.dq.double() for _, x in found), wanted[0].double()) < 1.5e-2
    for name, exact in zip("kv", wanted[1:], strict=True):
        merged = torch.zeros_like(exact)
        for rows, gradient in found:
            merged[rows] = getattr(gradient, f"d{name}")
        assert error(merged, exact.double()) < 1.5e-2


def test_nothing_waits_for_the_gpu():
    q, k, v, grad_out = (drawn(1, 4, 256, 64) for _ in range(4))
    out, lse = sdpa(q, k, v, return_lse=True)
    for _ in range(2):
        wanted = sdpa_backward(grad_out, out, lse, q, k, v)
        with nothing_synchronizes():
            found = sdpa_backward(grad_out, out, lse, q, k, v)
            merged, _ = merge_states([out, out], [lse, lse])
        assert error(found.dk, wanted.dk.double()) < 1e-2
        assert error(merged, out.double()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("shape", [(2, 8, 33, 128), (5, 4, 20), (3, 72), (1, 1, 1, 8)], ids=str)
def test_merged_states_against_float64(dtype, parts, shape):
    outs, lses = [], []
    for part in range(parts):
        is_empty = torch.rand(shape[:-1], device="cuda") < 0.2
        out = torch.randn(shape, device="cuda").to(dtype).masked_fill_(is_empty.unsqueeze(-1), torch.nan)
        lse = (30 * torch.randn(shape[:-1], device="cuda")).masked_fill_(is_empty, -torch.inf)
        if part == 1 and len(shape) == 4:  # in another memory order
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        outs.append(out)
        lses.append(lse)
    exact, of_exact = merge_states([x.cpu().double() for x in outs], [x.cpu() for x in lses])
    into = torch.full((*shape[:-1], shape[-1] + 8), torch.nan, device="cuda", dtype=dtype)[..., 3:-5]
    with nothing_synchronizes():
        for given in ({}, {"out": into}):
            out, lse = merge_states(outs, lses, **given)
            assert not given or out is into
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for found in (out, merge_states(outs, lses)[0]):
        torch.testing.assert_close(found.cpu().double(), exact, rtol=tolerance, atol=5e-5)
    torch.testing.assert_close(lse.cpu(), of_exact, rtol=1e-6, atol=2e-6)
    first = merge_states(outs, lses)
    assert all(map(torch.equal, first, merge_states(outs, lses)))


@pytest.mark.parametrize("strides", [(0, 128, 1), (128, 0, 1), (64, 16, 1)], ids=str)
def test_parts_that_overlap_themselves(strides):
    outs = [torch.randn(7000, device="cuda").bfloat16().as_strided((32, 4, 128), strides), drawn(32, 4, 128)]
    lses = [torch.randn(300, device="cuda").as_strided((32, 4), [x // 16 for x in strides[:2]])]
    lses.append(torch.randn(32, 4, device="cuda"))
    for _ in range(2):  # either one is the first
        outs, lses = outs[::-1], lses[::-1]
        weights = torch.softmax(torch.stack(lses).double(), 0).unsqueeze(-1)
        merged, lse = merge_states(outs, lses)
        assert error(merged, (weights * torch.stack(outs).double()).sum(0)) < 1e-2
        torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))
