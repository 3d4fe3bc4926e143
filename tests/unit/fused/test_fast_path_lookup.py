"""Which calls of graph functions the fast path takes for the same, on the fake GPU; hazards are in `tests/contract`."""

from __future__ import annotations

import gc

import pytest
import torch
from custom_graphs import scaled
from fake_gpu import FakePlan, gpu_on_the_cpu
from torch.autograd.graph import saved_tensors_hooks

from cudnn_sdpa import OptionError, conv2d, graph_op, plan_cache
from cudnn_sdpa.fused.conv_graphs import channels_last


def tensors():
    return torch.randn(1, 4, 8), torch.randn(1, 1, 8)


@pytest.fixture
def gpu():
    with gpu_on_the_cpu():
        yield


def times_built(calls):
    """How many plans calls build that are made one after the other, twice."""
    before = plan_cache.info().builds
    for _ in range(2):
        for call in calls:
            call()
    return plan_cache.info().builds - before


@pytest.mark.parametrize(
    "change",
    [lambda x: x[..., :4].contiguous(), lambda x: x.mT.contiguous(), lambda x: x.mT.contiguous().mT, torch.Tensor.half],
    ids=["size", "shape", "strides", "dtype"],
)
@pytest.mark.usefixtures("gpu")
def test_other_tensors_are_other_calls(change):
    given = tensors()
    other = [change(x) for x in given]
    for _ in range(3):
        for x, bias in (given, other):
            torch.testing.assert_close(scaled(x, bias, 0.5), scaled.reference(x, bias, 0.5))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"power": 1}, {"power": 2}),
        ({"power": 1}, {"power": True}),
        ({"power": 0.0}, {"power": -0.0}),
        ({"power": 1}, {"power": 1, "name": "other"}),
        ({"name": "1"}, {"name": "2"}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_other_options_are_other_calls(one, other):
    x, bias = tensors()
    calls = [lambda options=options: scaled(x, bias, 0.5, **options) for options in (one, other)]
    assert times_built(calls) == 2
    keys = {str(sorted(map(repr, key.options))) for key in FakePlan.launched[-4:]}
    assert len(keys) == 2


@pytest.mark.usefixtures("gpu")
def test_numbers_are_data():
    x, bias = tensors()
    before = plan_cache.info().builds
    for scale in (0.5, 0.7, 3, 0.5, -0.0, 2**40):
        torch.testing.assert_close(scaled(x, bias, scale), scaled.reference(x, bias, scale))
    assert plan_cache.info().builds == before + 1
    for wrong in (True, "2", 2**128):
        with pytest.raises(OptionError, match=r"scale|float32"):
            scaled(x, bias, wrong)


@pytest.mark.usefixtures("gpu")
def test_large_integers_are_refused_with_gradients_too():
    x, bias = (t.requires_grad_() for t in tensors())
    for _ in range(3):
        scaled(x, bias, 3)
    with pytest.raises(OptionError, match="float32"):
        scaled(x, bias, 2**128)


@pytest.mark.usefixtures("gpu")
def test_operands_in_other_positions_are_other_calls():
    x, bias = tensors()
    calls = [(x, bias, 1.0), (x, None, 1.0), (x, bias, 1), (x, bias.expand_as(x).contiguous(), 1.0), (bias, bias, 1.0)]
    for _ in range(3):
        for operands in calls:
            torch.testing.assert_close(scaled(*operands), scaled.reference(*operands))


@pytest.mark.usefixtures("gpu")
def test_one_tensor_as_two_operands_is_another_call():
    x, other = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    for _ in range(3):
        torch.testing.assert_close(scaled(x, x, 2.0), 3 * x)
        torch.testing.assert_close(scaled(x, other, 2.0), 2 * x + other)


def affine_backward(grads, given, results):  # noqa: ARG001
    return grads[0] * given[1], None, None


@graph_op(reference=lambda x, a, b: x * a + b, backward=affine_backward)
def affine(g, x, a, b):
    return g.add(a=g.mul(a=x, b=a), b=b)


def double(g, x):
    return g.add(a=x, b=x)


@pytest.mark.usefixtures("gpu")
def test_numbers_may_be_given_by_name():
    x = torch.ones(1, 2, 8)
    for _ in range(3):
        for given, named in (((2.0, 3.0), {}), ((2.0,), {"b": 3.0}), ((), {"a": 2.0, "b": 3.0}), ((2, 3), {})):
            assert (affine(x, *given, **named) == 5).all()
            leaf = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(affine(leaf, *given, **named).sum(), leaf)
            assert (found == 2).all()


@pytest.mark.usefixtures("gpu")
def test_functions_of_one_builder_are_not_mixed_up():
    half, full = (graph_op(reference=lambda x, d=d: (x * 2).to(d))(double) for d in (torch.float16, torch.float32))
    x = torch.ones(1, 2, 8)
    for _ in range(2):
        assert half(x).dtype is torch.float16
        assert full(x).dtype is torch.float32


@pytest.mark.usefixtures("gpu")
def test_gradients_of_functions_that_are_gone():
    def make(factor):
        def backward(grads, given, results):  # noqa: ARG001
            return (grads[0] * factor,)

        return graph_op(reference=lambda x: x * factor, backward=backward)(double)

    x = torch.ones(1, 2, 8, requires_grad=True)
    outs = []
    for factor in (2.0, 3.0, 5.0):
        outs.append((factor, make(factor)(x)))
        gc.collect()
    for factor, out in outs:
        assert (torch.autograd.grad(out.sum(), x)[0] == factor).all()


@pytest.mark.usefixtures("gpu")
def test_convolutions_save_what_their_gradients_need():
    x, weight = channels_last(torch.randn(2, 6, 9, 8)), channels_last(torch.randn(4, 6, 3, 3))
    for wanted, kept in (((1, 0), [weight.shape]), ((0, 1), [x.shape]), ((1, 1), [x.shape, weight.shape])):
        for _ in range(2):
            given = [part.detach().requires_grad_(bool(wants)) for part, wants in zip((x, weight), wanted, strict=True)]
            seen = []
            with saved_tensors_hooks(lambda part: seen.append(part.shape) or part, lambda part: part):  # noqa: B023
                conv2d(*given, padding=1)
            assert seen == kept, seen
