"""Gates, norms and convolutions of more than 2³¹ elements: values at both ends and around the limit, and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cudnn_sdpa
from cudnn_sdpa import explain

pytestmark = pytest.mark.whole_gpu

HALF = torch.bfloat16
LAST = 524_289


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


def drawn(*shape, **options):
    return torch.empty(shape, dtype=HALF, device="cuda", **options).normal_()


def assert_close(found, wanted):
    off = (found.double() - wanted.double()).abs()
    assert bool((off <= 2**-6 * wanted.double().abs() + 4e-3).all()), float(off.max())


def places(rows):
    """Rows at both ends, and in the middle, where halves of them begin beyond 2³¹ elements."""
    return [slice(0, 40), slice(rows // 2 - 20, rows // 2 + 20), slice(rows - 40, rows)]


@pytest.mark.parametrize("form", ["halves", "both", "dense"])
def test_silu_mul(form):
    rows, n = 37450, 28672
    both = drawn(1, rows, 2 * n)
    if form == "dense":
        rows *= 2
        gate, up = both.view(rows, n), drawn(rows, n)
    else:
        gate, up = both.chunk(2, -1)
    leaves = [gate.detach(), up] if form == "dense" else [both]
    leaves = [x.requires_grad_() for x in leaves]
    given = leaves[0].chunk(2, -1) if form == "halves" else leaves
    out = cudnn_sdpa.silu_mul(*given)
    grad = drawn(*out.shape)
    out.backward(grad)
    of_gate, of_up = [x.grad for x in leaves] if form == "dense" else both.grad.chunk(2, -1)
    for part in places(rows):
        x, y, dy, found, dx, du = (
            z.detach().view(-1, n) if z.is_contiguous() else z.detach()[0]
            for z in (gate, up, grad, out, of_gate, of_up)
        )
        exact, factor = x[part].double().requires_grad_(), y[part].double().requires_grad_()
        wanted = F.silu(exact) * factor
        wanted.backward(dy[part].double())
        assert_close(found[part], wanted.detach())
        assert_close(dx[part], exact.grad)
        assert_close(du[part], factor.grad)


def exact_rms(x, weight, _bias):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def exact_layer(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm, residual", "layer_norm"])
def test_norms(name):
    n = 4096
    x, weight, bias = drawn(LAST, n), drawn(n), drawn(n)
    leaves = [x, weight, bias] if name == "layer_norm" else [x, weight]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if name == "layer_norm":
        out, total = cudnn_sdpa.layer_norm(x, weight, bias, 1e-5), x
    elif "residual" in name:
        out, total = cudnn_sdpa.rms_norm(x, weight, 1e-5, residual=drawn(LAST, n))
    else:
        out, total = cudnn_sdpa.rms_norm(x, weight, 1e-5), x
    grad = drawn(LAST, n)
    out.backward(grad)
    sums = [torch.zeros(n, dtype=torch.float64, device="cuda") for _ in leaves[1:]]
    for begin in range(0, LAST, 1 << 16):
        part = slice(begin, min(begin + (1 << 16), LAST))
        exact, w, b = (z.detach().float().requires_grad_() for z in (total[part], weight, bias))
        wanted = (exact_layer if name == "layer_norm" else exact_rms)(exact, w, b)
        wanted.backward(grad[part].float())
        assert_close(out.detach()[part], wanted.detach())
        assert_close(x.grad[part], exact.grad)
        for total_of, leaf in zip(sums, (w, b), strict=False):
            total_of.add_(leaf.grad)
    for leaf, wanted in zip(leaves[1:], sums, strict=True):
        assert float((leaf.grad.double() - wanted).norm() / wanted.norm()) < 5e-3


def test_conv2d():
    x = drawn(130, 64, 512, 512, memory_format=torch.channels_last).requires_grad_()
    weight = (drawn(8, 64, 3, 3) / 24).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = cudnn_sdpa.conv2d(x, weight, padding=1)
    grad = torch.empty_like(out).normal_()
    out.backward(grad)
    total = torch.zeros(weight.shape, dtype=torch.float64, device="cuda")
    for begin in range(0, 130, 10):
        part = slice(begin, begin + 10)
        of_x, of_weight = x.detach()[part].clone().requires_grad_(), weight.detach().clone().requires_grad_()
        wanted = F.conv2d(of_x, of_weight, padding=1)
        wanted.backward(grad[part])
        total += of_weight.grad
        assert_close(out.detach()[part], wanted.detach())
        assert_close(x.grad[part], of_x.grad)
    assert float((weight.grad.double() - total).norm() / total.norm()) < 1e-2


def test_explain_shows_the_parts():
    gate = torch.empty(1, 37450, 57344, dtype=HALF, device="cuda").chunk(2, -1)
    found = explain(cudnn_sdpa.silu_mul, *gate)
    assert found.supported, found.reasons
    assert found.extra_kernels == ["the same in 1 other parts of dimension 1"]
    of_meta = explain(cudnn_sdpa.silu_mul, *[x.to("meta") for x in gate])
    assert of_meta.supported == found.supported
