"""Evicted plans of fused operations are freed, also while autograd's graph of a call is alive: on a fake GPU."""

from __future__ import annotations

import gc
import weakref

import custom_graphs
import pytest
import torch
from fake_gpu import gpu_on_the_cpu

from cudnn_sdpa import conv1d, layer_norm, plan_cache, rms_norm, silu_mul


def rows(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


CALLS = {
    "rms_norm without weight": (rms_norm, [(2, 9, 64)]),
    "rms_norm, zero-centered": (lambda x, weight: rms_norm(x, weight, zero_centered=True), [(2, 9, 64), (64,)]),
    "rms_norm with residual": (
        lambda x, weight, residual: sum(rms_norm(x, weight, residual=residual)),
        [(2, 9, 64), (64,), (2, 9, 64)],
    ),
    "layer_norm without bias": (layer_norm, [(2, 9, 64), (64,)]),
    "silu_mul of halves": (silu_mul, [(2, 9, 64)]),
    "silu_mul of one that requires grad": (lambda gate: silu_mul(gate, gate.detach()), [(2, 9, 64)]),
    "conv1d": (
        lambda x, weight: conv1d(x.transpose(1, 2), weight.transpose(1, 2), padding=1),
        [(2, 9, 16), (8, 3, 16)],
    ),
    "a custom graph": (lambda x: custom_graphs.leaky(x, slope=0.2), [(1, 9, 64)]),
}


class Witness:
    """An attribute of a plan, which is freed with it."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLS)
def test_graphs_of_autograd_keep_no_evicted_plan(name):
    function, shapes = CALLS[name]
    tensors = [rows(*shape) for shape in shapes]
    with gpu_on_the_cpu():
        for _ in range(3):
            wanted = torch.autograd.grad(function(*tensors).sum(), tensors)
        out, witnesses = function(*tensors), []
        for plan in plan_cache.plans():
            plan.witness = Witness()
            witnesses.append(weakref.ref(plan.witness))
        del plan
        assert len(witnesses) >= (1 if name == "a custom graph" else 2)
        gc.collect()
        gc.disable()
        try:
            plan_cache.clear()
            assert not any(witness() for witness in witnesses)
        finally:
            gc.enable()
        found = torch.autograd.grad(out.sum(), tensors)
    for gradient, expected in zip(found, wanted, strict=True):
        assert torch.equal(gradient, expected)


def test_calls_with_equal_gradient_operands_do_not_share_gradients():
    """Zero-centered weights, and other shapes of the same rows."""
    weight = rows(64)

    def gradients(x, **options):
        return torch.autograd.grad(rms_norm(x, weight, **options).square().sum(), (x, weight))

    calls = [(rows(2, 9, 64), {}), (rows(2, 9, 64), {"zero_centered": True}), (rows(18, 64), {})]
    expected = [gradients(x, **options) for x, options in calls]  # the reference
    with gpu_on_the_cpu():
        for _ in range(3):
            for (x, options), wanted in zip(calls, expected, strict=True):
                found = gradients(x, **options)
                assert [gradient.shape for gradient in found] == [x.shape, weight.shape]
                torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
