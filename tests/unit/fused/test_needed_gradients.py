"""Backward passes compute the needed gradients only: called directly, by the operator, and compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cudnn_sdpa import graph_op
from cudnn_sdpa.fused.graph_op import Saved

asked: list[tuple[bool, ...]] = []


def backward(grads, operands, results, *, needs):  # noqa: ARG001
    asked.append(needs)
    x, factor, bias, number = operands
    found = (grads[0] * factor * number, grads[0] * x * number, None if bias is None else grads[0] * 1, None)
    return tuple(gradient if is_needed else None for gradient, is_needed in zip(found, needs, strict=True))


def reference(x, factor, bias=None, number=1.0):
    y = x * factor * number
    return y if bias is None else y + bias


def build(g, x, factor, bias=None, number=None):
    y = g.mul(a=g.mul(a=x, b=factor), b=number)
    return y if bias is None else g.add(a=y, b=bias)


affine = graph_op(reference=reference, backward=backward)(build)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sample(8)
@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_needs_are_passed_to_the_backward_function(compiles, wanted, with_bias):
    tensors = [torch.randn(2, 3, 8).requires_grad_(bool(wants)) for wants in wanted]
    tensors[2] = tensors[2] if with_bias else None
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    if not leaves:
        return
    call = lambda *given: affine(*given, 0.5)  # noqa: E731
    asked.clear()
    out = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call)(*tensors)
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert set(asked) == {(*(x is not None and x.requires_grad for x in tensors), False)}
    expected = torch.autograd.grad(reference(*tensors, 0.5).square().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def both_gradients(grads, operands, results):  # noqa: ARG001
    return grads[0] * operands[1], grads[0] * operands[0]


@graph_op(reference=lambda x, factor: x * factor, backward=both_gradients)
def product(g, x, factor):
    return g.mul(a=x, b=factor)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients_that_a_backward_function_gives_without_need_are_dropped(needs):
    """It has no parameter `needs`. Autograd, and who else asks, gets None in their places."""
    x, factor = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    saved = Saved(product, {}, (x, factor), needs)
    context = SimpleNamespace(saved_tensors=(x, factor), numbers=(), like=[])
    found = saved.gradients(context, (torch.ones_like(x),), needs)
    assert [gradient is not None for gradient in found] == list(needs)
    for gradient, exact in zip(found, (factor, x), strict=True):
        assert gradient is None or torch.equal(gradient, exact)
