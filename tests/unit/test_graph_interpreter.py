"""The interpreter of graphs: its derivatives are those of its own operations, and impossible graphs are noticed."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import TARGET
from graph_interpreter import POINTWISE, evaluate

from cudnn_sdpa import OptionError
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout

SHAPE = (2, 3, 4, 5)
#: What some operations take besides tensors.
OPTIONS = {"leaky_relu_backward": {"negative_slope": 0.3}, "swish_backward": {"swish_beta": 1.7}}


def evaluated(builder, *, shape=SHAPE):
    """The result of a graph of one operand; `shape` is that of the output in its key."""
    definition, x = GraphDefinition(builder), torch.randn(SHAPE)
    operands = [Operand(n, TensorLayout.contiguous(s, x.dtype)) for n, s in (("x", SHAPE), ("output0", shape))]
    key = definition.key(operands[:1], operands[1:], {}, TARGET, 0)
    (found,) = evaluate(definition, key, {"x": x, "output0": torch.empty(shape)})
    return found, x.double()


@pytest.mark.parametrize("name", [name for name in POINTWISE if name.endswith("_backward")])
def test_derivatives(name):
    forward, backward = POINTWISE[name.removesuffix("_backward")][1], POINTWISE[name][1]
    x, loss = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
    for options in ({}, OPTIONS.get(name, {})):
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(forward(leaf, **options), leaf, loss)
        torch.testing.assert_close(backward(loss, x, **options), wanted)


def select(g, x):
    row, column = (g.gen_index(x, axis=axis, compute_data_type=g.types.data_type.INT32) for axis in (2, 3))
    above = g.cmp_ge(column, row, compute_data_type=g.types.data_type.BOOLEAN)
    return g.binary_select(g.abs(x), g.tensor_scalar(float("-inf"), g.types.scalar_type.RUNTIME_PARAM), above)


def test_indices_and_selections():
    found, x = evaluated(select)
    row, column = torch.arange(SHAPE[2]).view(-1, 1), torch.arange(SHAPE[3])
    torch.testing.assert_close(found, x.abs().masked_fill(column < row, -torch.inf))


def test_set_data_type_rounds():
    def rounded(g, x):
        return g.scale(x, g.tensor_scalar(3.0, g.types.scalar_type.RUNTIME_PARAM)).set_data_type(
            g.types.data_type.INT32
        )

    found, x = evaluated(rounded)
    assert torch.equal(found, (3 * x).to(torch.int32))


def test_impossible_graphs_are_noticed():
    with pytest.raises(OptionError, match="no_such_operation"):
        evaluated(lambda g, x: g.no_such_operation(x))
    with pytest.raises(OptionError, match="takes"):
        evaluated(lambda g, x: g.add(a=x))
    with pytest.raises(OptionError, match="unexpected keyword"):
        evaluated(lambda g, x: g.relu(input=x, slope=0.1))
    with pytest.raises(AssertionError, match="instead of"):
        evaluated(lambda g, x: g.relu(input=x), shape=(2, 3, 4, 1))
    with pytest.raises(AssertionError, match="no operation writes it"):
        evaluated(lambda g, x: g.tensor(name="of_none", dim=x.get_dim(), stride=[1], data_type=g.types.data_type.FLOAT))
    with pytest.raises(AssertionError, match="no operation has written"):
        evaluated(
            lambda g, x: g.add(a=x, b=g.tensor(name="of_none", dim=[1], stride=[1], data_type=g.types.data_type.FLOAT))
        )


def test_norms_have_statistics_in_training_only():
    def statistics(g, x):
        one = g.tensor_scalar(1.0, g.types.scalar_type.RUNTIME_PARAM)
        phase = g.types.norm_forward_phase.INFERENCE
        return g.rmsnorm(norm_forward_phase=phase, input=x, scale=None, epsilon=one)[1]

    with pytest.raises(OptionError, match="0 results"):
        evaluated(statistics)
