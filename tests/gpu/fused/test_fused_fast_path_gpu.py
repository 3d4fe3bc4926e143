"""The fast path of graph functions on a GPU: cached calls are not mixed up."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from custom_gpu_graphs import add_rows
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import ShapeError, UnsupportedError, conv2d, graph_op, layer_norm, plan_cache, rms_norm, silu_mul

BF16 = torch.bfloat16


def difference(found, wanted):
    found, wanted = found.detach(), wanted.detach()
    assert found.isfinite().all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def test_scalars_and_tensors_by_keyword():
    x, bias = torch.randn(1, 48, 64, device="cuda"), torch.randn(1, 1, 64, device="cuda")
    for _ in range(3):
        for given, named in (
            ((bias, 2.0), {}),
            ((bias,), {"scale": 2.0}),
            ((), {"scale": 2.0, "bias": bias}),
            ((bias, 2), {}),
        ):
            torch.testing.assert_close(add_rows(x, *given, **named), x * 2 + bias)
        torch.testing.assert_close(add_rows(x, scale=0.5), x * 0.5)


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


def test_checkpoints_and_evicted_plans():
    weight = torch.rand(256, device="cuda", dtype=BF16)
    kernel = (torch.randn(16, 16, 3, 3, device="cuda") * 0.1).bfloat16()
    steps = {
        "norm": (lambda x: rms_norm(x, weight), (64, 256)),
        "layer": (lambda x: layer_norm(x, weight, weight), (64, 256)),
        "gate": (silu_mul, (64, 256)),
        "own": (lambda x: add_rows(x, None, 2.0), (1, 64, 256)),
        "conv": (lambda x: conv2d(x, kernel, padding=[1, 1]), (1, 16, 8, 8)),
    }
    for step, shape in steps.values():
        leaf = torch.randn(shape, device="cuda", dtype=BF16).requires_grad_()
        for clears in (False, True, False):
            out = checkpoint(step, leaf, use_reentrant=False).float().square().sum()
            if clears:
                plan_cache.clear()
            (found,) = torch.autograd.grad(out, leaf)
            (wanted,) = torch.autograd.grad(step(leaf).float().square().sum(), leaf)
            assert difference(found, wanted) < 2e-2


def test_misaligned_gradients():
    weight = torch.rand(101, device="cuda", dtype=BF16)
    parts = [torch.randn(rows, 101, device="cuda", dtype=BF16).requires_grad_() for rows in (1, 3)]
    exact = [part.detach().double().requires_grad_() for part in parts]
    for _ in range(2):
        out = torch.cat([rms_norm(p, weight) for p in parts] + [silu_mul(p, p) for p in parts])
        grad = torch.randn(out.numel() + 3, device="cuda", dtype=BF16)[3:].view(out.shape)
        found = torch.autograd.grad(out, parts, grad)
        of_exact = [F.rms_norm(p, (101,), weight.double(), 1e-6) for p in exact] + [F.silu(p) * p for p in exact]
        for one, other in zip(found, torch.autograd.grad(torch.cat(of_exact), exact, grad.double()), strict=True):
            assert difference(one, other) < 2e-2


def test_results_may_be_modified_in_place():
    x = torch.randn(2, 16, 8, 8, device="cuda", dtype=BF16).to(memory_format=torch.channels_last)
    kernel = (torch.randn(16, 16, 3, 3, device="cuda") * 0.1).bfloat16().to(memory_format=torch.channels_last)
    kernel.requires_grad_()
    for _ in range(2):
        (found,) = torch.autograd.grad(F.relu_(conv2d(x, kernel, padding=1)).sum(), kernel)
        wanted = F.relu(F.conv2d(x.double(), kernel.double(), padding=1)).sum()
        assert difference(found, torch.autograd.grad(wanted, kernel)[0]) < 4e-2


def test_forward_mode_is_refused():
    x, weight = torch.randn(8, 64, device="cuda"), torch.rand(64, device="cuda")
    for function in (lambda x: rms_norm(x, weight), silu_mul, lambda x: add_rows(x.view(1, 8, 64), None, 2.0)):
        for _ in range(2):
            function(x)
            with pytest.raises(UnsupportedError, match="forward-mode"):
                torch.func.jvp(function, (x,), (torch.ones_like(x),))


def test_strided_biases_and_empty_batches():
    x = torch.randn(2, 16, 8, 8, device="cuda", dtype=BF16).to(memory_format=torch.channels_last)
    kernel = (torch.randn(16, 16, 3, 3, device="cuda") * 0.1).bfloat16().to(memory_format=torch.channels_last)
    wide = torch.randn(32, device="cuda", dtype=BF16)
    for bias in (wide[::2], wide[:1].expand(16), wide[:16]):
        for _ in range(2):
            wanted = F.conv2d(x.double(), kernel.double(), bias.double(), padding=1)
            assert difference(conv2d(x, kernel, bias, padding=1), wanted) < 1e-2
    assert conv2d(x[:0], kernel, wide[:16], padding=1, activation="silu").shape == (0, 16, 8, 8)


def test_autocast_casts_convolutions_as_pytorch_does():
    x, kernel = torch.randn(2, 16, 32, 32, device="cuda"), torch.randn(32, 16, 16, 16, device="cuda") * 0.02
    small = kernel[:, :, :3, :3].contiguous()
    with torch.autocast("cuda", dtype=BF16):
        for weight, sizes in ((kernel, {"stride": 16}), (small, {"padding": 1})):
            found = conv2d(x, weight, **sizes)
            assert found.dtype is BF16
            assert difference(found, F.conv2d(x.double(), weight.double(), **sizes)) < 2e-2


@graph_op(outputs=lambda x, *, rows: x.new_empty(1, rows, x.shape[2]))
def of_rows(g, x, *, rows):
    """max(x, 0), whose number of rows the caller declares."""
    del rows
    return g.relu(input=x)


@pytest.mark.parametrize("rows", [1, 24, 96])
def test_wrong_result_declarations_are_refused(rows):
    x = torch.randn(1, 48, 64, device="cuda")
    for _ in range(2):
        with pytest.raises(ShapeError, match=rf"result 0 of of_rows: got shape \(1, {rows}, 64\); expected .*48, 64"):
            of_rows(x, rows=rows)
        assert torch.equal(of_rows(x, rows=48), F.relu(x))
