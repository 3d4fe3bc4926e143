"""Graphs with errors in their builders."""

from __future__ import annotations

import torch

from cudnn_sdpa import graph_op


@graph_op(reference=torch.relu)
def misses(g, x):
    y = g.relu(input=x)
    return g.no_such_operation(input=y)


@graph_op(reference=torch.relu)
def mistakes(g, x):
    return g.add(a=x, b="one")


@graph_op(outputs=lambda x, weight: x.new_empty(1, weight.shape[0], 4, 4))
def mismatches(g, x, weight):
    y = g.conv_fprop(image=x, weight=weight, padding=[0, 0], stride=[1, 1], dilation=[1, 1])
    return g.relu(input=y)
