"""Evicted plans of fused operations are freed, also while autograd's graph of a call is alive: on a fake GPU."""

from __future__ import annotations

import torch
from fake_gpu import gpu_on_the_cpu

from cudnn_sdpa import rms_norm


def rows(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


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
