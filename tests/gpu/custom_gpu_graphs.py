"""Custom graphs for tests of `graph_op` on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cudnn_sdpa import graph_op


def conv_reference(x, weight, bias):
    y = F.silu(F.conv2d(x, weight, bias.flatten(), padding=1))
    return y.contiguous(memory_format=torch.channels_last)


@graph_op(reference=conv_reference)
def conv_bias_silu(g, x, weight, bias):
    """SiLU(x * weight + bias), channels last."""
    y = g.conv_fprop(image=x, weight=weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    return g.swish(input=g.bias(input=y, bias=bias))


def add_reference(x, bias=None, scale=1.0):
    return x * scale if bias is None else x * scale + bias


def add_backward(grads, operands, outputs):  # noqa: ARG001
    _, bias, scale = operands
    return grads[0] * scale, None if bias is None else grads[0].sum_to_size(bias.shape), None


@graph_op(reference=add_reference, backward=add_backward)
def add_rows(g, x, bias=None, scale=None):
    """x times a scalar, plus a bias."""
    y = g.mul(a=x, b=scale)
    return y if bias is None else g.add(a=y, b=bias)


@graph_op(reference=lambda x: (F.relu(x), x.float().square()))
def two_results(g, x):
    return g.relu(input=x), g.mul(a=x, b=x)
