"""`kernels.attention` on a GPU: values and gradients against float64, captures, and peak memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_sdpa import kernels

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SIZES = ((1, 1), (1, 130), (7, 65), (64, 64), (130, 7), (513, 300), (1024, 1024))


def made(*shape, dtype):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def check(tensors, **options):
    """Compares output and gradients with the reference in float64.

    Where a query sees one key, its gradient is 0, the difference of terms of about scale · D.
    """
    given = [x for x in tensors if x is not None]
    leaves = [x for x in given if x.requires_grad]
    exact = [x.detach().double().requires_grad_() if x.requires_grad else x for x in given]
    mode = options.pop("mode", "fused")
    out = kernels.attention(*given[:3], mode, *given[3:], **options)
    right = kernels.reference_attention(*exact, **options)
    grad_out = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, leaves, grad_out)]
    wanted = [right, *torch.autograd.grad(right, [x for x in exact if x.requires_grad], grad_out.double())]
    batch, heads, _, dim = out.shape
    terms = options.get("scale", dim**-0.5) * dim * (batch * heads) ** 0.5
    for x, y, least in zip(found, wanted, [1.0] + [terms] * len(leaves), strict=True):
        assert (x.double() - y).norm() <= BOUNDS[out.dtype] * y.norm().clamp_min(least)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("mode", ["fused", "tiled", "naive"])
@pytest.mark.parametrize(("sq", "skv"), SIZES)
def test_values_and_gradients(sq, skv, mode, dtype):
    for dim, is_causal, mask in itertools.product((33, 64, 128), (False, True), ("none", "boolean", "float")):
        q = made(2, 4, sq, dim, dtype=dtype)
        k, v = (made(2, 2, skv, dim, dtype=dtype) for _ in range(2))
        masks = {
            "none": None,
            "boolean": torch.rand(2, 1, sq, skv, device="cuda") > 0.3,
            "float": made(4, 1, skv, dtype=dtype),
        }
        check([q, k, v, masks[mask]], mode=mode, is_causal=is_causal, scale=0.2)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("mode", "dim"), [("tiled", 129), ("naive", 200), ("tiled", 256)])
def test_gradients_beyond_the_fused_form(mode, dim, dtype):
    for sq, skv, is_causal in ((1, 130, False), (130, 65, True), (513, 300, False)):
        q = made(2, 4, sq, dim, dtype=dtype)
        k, v = (made(2, 2, skv, dim, dtype=dtype) for _ in range(2))
        for mask in (None, made(4, 1, skv, dtype=dtype)):
            check([q, k, v, mask], mode=mode, is_causal=is_causal)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_captured_call_is_replayed(dtype):
    q, k, v = (made(1, 2, 300, 64, dtype=dtype).detach() for _ in range(3))
    kernels.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(q, k, v)
    q.normal_()
    graph.replay()
    assert torch.equal(out, kernels.attention(q, k, v))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_gradients_are_the_same_from_run_to_run(dtype):
    q, k, v = (made(2, 4, 700, 64, dtype=dtype) for _ in range(3))
    runs = [torch.autograd.grad(kernels.attention(q, k, v, is_causal=True).sum(), (q, k, v)) for _ in range(3)]
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_memory_of_the_fused_form(dtype):
    """At most 1.1 times the inputs and outputs, with what the backward pass needs."""
    q, k, v = (made(4, 8, 4096, 64, dtype=dtype) for _ in range(3))
    kernels.attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = kernels.attention(q, k, v)
    made_here = torch.cuda.max_memory_allocated() - before
    size = out.numel() * out.element_size()
    assert 3 * size + made_here <= 1.1 * 4 * size
