"""Graph functions with custom gradients: in PyTorch, and by another graph function."""

from __future__ import annotations

import torch

from cudnn_sdpa import graph_op


def of_scaled_gate(grads, operands, results):  # noqa: ARG001
    x, y = operands
    return grads[0] * y * (1 - torch.tanh(x).square()), grads[0] * torch.tanh(x)


@graph_op(reference=lambda x, y: torch.tanh(x) * y, backward=of_scaled_gate)
def scaled_gate(g, x, y):
    return g.mul(a=g.tanh(input=x), b=y)


@graph_op(reference=lambda grad, x: 2 * grad * x)
def of_squares(g, grad, x):
    """The gradient of `squares`; it has no gradient itself."""
    y = g.mul(a=grad, b=x)
    return g.add(a=y, b=y)


def squares_backward(grads, operands, results):  # noqa: ARG001
    return (of_squares(grads[0], operands[0]),)


@graph_op(reference=lambda x: x.square(), backward=squares_backward)
def squares(g, x):
    return g.mul(a=x, b=x)
