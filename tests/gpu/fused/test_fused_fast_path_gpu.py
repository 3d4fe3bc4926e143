"""The fast path of graph functions on a GPU: cached calls are not mixed up."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from cudnn_sdpa import conv2d, layer_norm, rms_norm, silu_mul

BF16 = torch.bfloat16


def difference(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    assert found.isfinite().all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("form", ["halves", "both"])
def test_gate_gradients_of_offloaded_tensors(form):
    x = torch.randn(64, 512, device="cuda", dtype=BF16)

    def gradient(hooks):
        both = x.clone().requires_grad_()
        with hooks:
            out = silu_mul(both) if form == "both" else silu_mul(*both.chunk(2, -1))
        return torch.autograd.grad(out.sum(), both)[0]

    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (wanted,) = torch.autograd.grad((F.silu(gate) * up).sum(), exact)
    for _ in range(2):
        for hooks in (
            contextlib.nullcontext(),
            saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t),
            save_on_cpu(),
            contextlib.nullcontext(),
        ):
            assert difference(gradient(hooks), wanted) < 2e-2


def test_norm_gradients_of_offloaded_tensors():
    for function, reference in (
        (rms_norm, lambda x, w: F.rms_norm(x, (256,), w, 1e-6)),
        (lambda x, w: layer_norm(x, w, w), lambda x, w: F.layer_norm(x, (256,), w, w)),
    ):
        x, weight = (torch.randn(s, device="cuda", dtype=BF16).requires_grad_() for s in ((64, 256), (256,)))
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        wanted = torch.autograd.grad(reference(*exact).square().sum(), exact)
        for hooks in (contextlib.nullcontext(), save_on_cpu(), contextlib.nullcontext()):
            with hooks:
                out = function(x, weight)
            found = torch.autograd.grad(out.float().square().sum(), (x, weight))
            for one, other in zip(found, wanted, strict=True):
                assert difference(one, other) < 2e-2


def test_results_may_be_modified_in_place():
    x = torch.randn(2, 16, 8, 8, device="cuda", dtype=BF16).to(memory_format=torch.channels_last)
    kernel = (torch.randn(16, 16, 3, 3, device="cuda") * 0.1).bfloat16().to(memory_format=torch.channels_last)
    kernel.requires_grad_()
    for _ in range(2):
        (found,) = torch.autograd.grad(F.relu_(conv2d(x, kernel, padding=1)).sum(), kernel)
        wanted = F.relu(F.conv2d(x.double(), kernel.double(), padding=1)).sum()
        assert difference(found, torch.autograd.grad(wanted, kernel)[0]) < 4e-2


def test_strided_biases_and_empty_batches():
    x = torch.randn(2, 16, 8, 8, device="cuda", dtype=BF16).to(memory_format=torch.channels_last)
    kernel = (torch.randn(16, 16, 3, 3, device="cuda") * 0.1).bfloat16().to(memory_format=torch.channels_last)
    wide = torch.randn(32, device="cuda", dtype=BF16)
    for bias in (wide[::2], wide[:1].expand(16), wide[:16]):
        for _ in range(2):
            wanted = F.conv2d(x.double(), kernel.double(), bias.double(), padding=1)
            assert difference(conv2d(x, kernel, bias, padding=1), wanted) < 1e-2
    assert conv2d(x[:0], kernel, wide[:16], padding=1, activation="silu").shape == (0, 16, 8, 8)
