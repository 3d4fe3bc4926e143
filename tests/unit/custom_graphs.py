"""Custom graphs for tests of `graph_op`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cudnn_sdpa.fused.graph_op import graph_op


def scaled_reference(x, bias=None, scale=1.0, *, power=1, name="plain"):  # noqa: ARG001
    y = x.float() ** power * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def scaled_backward(grads, operands, outputs, *, power, name):  # noqa: ARG001
    x, bias, scale = operands
    of_bias = None if bias is None else grads[0].sum_to_size(bias.shape)
    return grads[0] * scale * power * x ** (power - 1), of_bias, None


@graph_op(reference=scaled_reference, backward=scaled_backward)
def scaled(g, x, bias=None, scale=None, *, power: int = 1, name: str = "plain"):  # noqa: ARG001
    """x to a power, times a number, plus a bias."""
    y = x
    for _ in range(int(power) - 1):
        y = g.mul(a=y, b=x)
    y = g.mul(a=y, b=scale)
    return y if bias is None else g.add(a=y, b=bias)


def halves_reference(x):
    return F.relu(x), (x.float() * x.float()).half()


@graph_op(reference=halves_reference)
def halves(g, x):
    return g.relu(input=x), g.mul(a=x, b=x)


@graph_op(outputs=torch.empty_like)
def nowhere(g, x):
    return g.relu(input=x)


@graph_op(reference=F.relu)
def wrong(g, x):
    """Its builder calls an unknown cuDNN operation."""
    return g.conv_fprop(image=x, weight=x, padding=[1], stride=[1], dilation=[1])


def leaky_backward(grads, operands, results, *, slope):  # noqa: ARG001
    return (torch.where(operands[0] > 0, grads[0], grads[0] * slope),)


@graph_op(reference=lambda x, *, slope: torch.where(x > 0, x, x * slope), backward=leaky_backward)
def leaky(g, x, *, slope: float):
    return g.leaky_relu(input=x, negative_slope=slope)
