"""Scenarios for the fast path of graph functions; run with a scenario's name, in a separate process."""

from __future__ import annotations

import gc
import sys
import warnings

import torch
import torch.nn.functional as F
from fake_gpu import install_for_graph_functions
from torch.autograd.graph import saved_tensors_hooks

from cudnn_sdpa import (
    conv2d,
    graph_op,
)
from cudnn_sdpa.fused.conv_graphs import channels_last

TENSOR = torch.randn(4, 128)


def affine_backward(grads, given, results):  # noqa: ARG001
    return grads[0] * given[1], None, None


@graph_op(reference=lambda x, a, b: x * a + b, backward=affine_backward)
def affine(g, x, a, b):
    return g.add(a=g.mul(a=x, b=a), b=b)


def double(g, x):
    return g.add(a=x, b=x)


def scalars_by_keyword():
    x = torch.ones(1, 2, 8)
    for _ in range(3):
        for given, named in (((2.0, 3.0), {}), ((2.0,), {"b": 3.0}), ((), {"a": 2.0, "b": 3.0}), ((2, 3), {})):
            assert (affine(x, *given, **named) == 5).all()
            leaf = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(affine(leaf, *given, **named).sum(), leaf)
            assert (found == 2).all()


def functions_of_one_builder():
    half, full = (graph_op(reference=lambda x, d=d: (x * 2).to(d))(double) for d in (torch.float16, torch.float32))
    x = torch.ones(1, 2, 8)
    for _ in range(2):
        assert half(x).dtype is torch.float16
        assert full(x).dtype is torch.float32


def garbage_collected_functions():
    def make(factor):
        def backward(grads, given, results):  # noqa: ARG001
            return (grads[0] * factor,)

        return graph_op(reference=lambda x: x * factor, backward=backward)(double)

    x = torch.ones(1, 2, 8, requires_grad=True)
    outs = []
    for factor in (2.0, 3.0, 5.0):
        function = make(factor)
        outs.append((factor, function(x)))
        del function
        gc.collect()
    for factor, out in outs:
        assert (torch.autograd.grad(out.sum(), x)[0] == factor).all()


def in_place_changes():
    x, kernel = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)
    kernel = kernel.to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(2):
        out = F.relu_(conv2d(x, kernel, padding=1))
        (found,) = torch.autograd.grad(out.sum(), kernel)
        (wanted,) = torch.autograd.grad(F.relu(F.conv2d(x, kernel, padding=1)).sum(), kernel)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def sizes_in_lists():
    x = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last)
    kernel = torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        for padding in (1, (1, 1), [1, 1]):
            torch.testing.assert_close(conv2d(x, kernel, padding=padding), F.conv2d(x, kernel, padding=1))
        for wrong in (1.0, True):
            try:
                conv2d(x, kernel, padding=wrong)
            except TypeError:
                continue
            raise AssertionError(f"{wrong} was taken")


def empty_tensors():
    leaf = torch.ones(1, 0, 8, requires_grad=True)
    assert affine(leaf, 2.0, 1.0).shape == (1, 0, 8)
    image, kernel = torch.randn(0, 4, 8, 8, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    out = conv2d(image, kernel, padding=1, activation="silu")
    assert out.shape == (0, 6, 8, 8)
    assert torch.autograd.grad(out.sum(), kernel)[0].abs().sum() == 0


def saved_tensors_of_convolutions():
    x, weight = channels_last(torch.randn(2, 6, 9, 8)), channels_last(torch.randn(4, 6, 3, 3))
    for wanted, kept in (((1, 0), [weight.shape]), ((0, 1), [x.shape]), ((1, 1), [x.shape, weight.shape])):
        for _ in range(2):
            given = [part.detach().requires_grad_(bool(wants)) for part, wants in zip((x, weight), wanted, strict=True)]
            seen = []
            with saved_tensors_hooks(lambda part: seen.append(part.shape) or part, lambda part: part):  # noqa: B023
                conv2d(*given, padding=1)
            assert seen == kept, seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    install_for_graph_functions()
    globals()[sys.argv[1]]()
