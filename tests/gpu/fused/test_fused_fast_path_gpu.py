"""Gradients of gates and norms whose saved tensors were elsewhere between the passes."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from attention_checks import difference
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from cudnn_sdpa import layer_norm, rms_norm, silu_mul

BF16 = torch.bfloat16


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
