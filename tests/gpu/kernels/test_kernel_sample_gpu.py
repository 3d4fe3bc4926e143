"""The kernels of samples/add_a_kernel on a GPU: values and gradients against float64, captures, compiled code."""

from __future__ import annotations

import pytest
import torch
from sample_modules import sample

from cudnn_sdpa import plan_cache

row_softmax = sample("add_a_kernel/row_softmax.py").row_softmax

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (300, 4097), (2, 3, 64)])
def test_values_and_gradients(shape, dtype, compiled):
    torch.compiler.reset()  # the cases together exceed what Dynamo compiles of one function
    function = torch.compile(row_softmax, fullgraph=True) if compiled else row_softmax
    for scale in (1.0, -1.7, 0.3):
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        exact, grad = x.detach().double().requires_grad_(), torch.randn_like(x)
        for _ in range(4):  # the fourth call and its gradient are native
            out = function(x, scale)
            (found,) = torch.autograd.grad(out, x, grad)
        wanted = torch.softmax(exact * scale, -1)
        (right,) = torch.autograd.grad(wanted, exact, grad.double())
        size = abs(scale) * grad.double().norm() / x.shape[-1] ** 0.5
        assert (out.double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()
        assert (found.double() - right).norm() <= BOUNDS[dtype] * max(right.norm(), size)


def test_strides_and_captures():
    x = torch.randn(64, 40, device="cuda").mT[::2]
    torch.testing.assert_close(row_softmax(x), torch.softmax(x, -1))
    builds, graph = plan_cache.info().builds, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = row_softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, torch.softmax(x, -1))
    assert plan_cache.info().builds == builds
