"""Shared by the tests of `Fp8Attention`: one training step, and its results against float64."""

from __future__ import annotations

import torch
from float64_reference import gradients

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Bounds of relative errors in the Frobenius norm that docs/fp8.md states, for normally distributed numbers.
OUTPUT, GRADIENT = 0.08, {E5M2: 0.22, E4M3: 0.15}
#: Different factors of the inputs, so that no two scales are equal.
SIZES = {"q": 1.7, "k": 0.6, "v": 23.0}


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def qkv(*, lengths=(40, 56), dim=32, dtype=torch.bfloat16, requires_grad=True):
    def tensor(name, heads, length):
        x = (torch.randn(2, length, heads, dim) * SIZES[name]).to(dtype).transpose(1, 2)
        return x.requires_grad_(requires_grad)

    return tensor("q", 4, lengths[0]), tensor("k", 2, lengths[1]), tensor("v", 2, lengths[1])


def error(found, exact):
    return float((found.detach().double() - exact).norm() / exact.norm())


def train(attend, *, tensors=None, grad_scale=1e-4, **options):
    """One forward and backward pass: output, gradients, and their inputs."""
    q, k, v = qkv() if tensors is None else tensors
    out = attend(q, k, v, **options)
    grad_out = torch.randn(out.shape).to(out.dtype) * grad_scale
    return out, torch.autograd.grad(out, (q, k, v), grad_out), (q, k, v), grad_out


def assert_near(found, grad_dtype=E5M2, **options):
    out, grads, (q, k, v), grad_out = found
    tensors = {"q": q, "k": k, "v": v}
    exact, _, of = gradients(tensors, grad_out, **options)
    assert error(out, exact) < OUTPUT
    for name, gradient in zip("qkv", grads, strict=True):
        assert error(gradient, of[name]) < GRADIENT[grad_dtype], name
