"""Values and gradients of every operation against float64, however often it is called."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from fake_gpu import FakePlan

import cudnn_sdpa


def test_values(call):
    for _ in range(3):
        tensors = call.tensors()
        call.assert_out(call(tensors), tensors)


@pytest.mark.differentiates
def test_values_and_gradients(call):
    for _ in range(3):
        tensors = call.tensors(grad=True)
        out = call(tensors)
        call.assert_out(out, tensors)
        grad_out = torch.randn_like(out)
        call.assert_gradients(call.gradients(tensors, grad_out), tensors, grad_out)
        with torch.no_grad():
            call.assert_out(call(tensors), tensors)


@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
def test_queries_that_repeat(attention, scale):
    """Expanded queries have no memory order of their own, and strides of dimensions of size 1 are arbitrary."""
    made = attention.tensors()
    alone = made["q"].dim() == 4 and "seq_lens_kv" not in made
    tensors = {name: x[:1] if alone and x.shape[0] == 2 else x for name, x in made.items()}
    shape = tensors["q"].shape
    for stride in [(0,) * (len(shape) - 1) + (1,), (1, *(136 for _ in shape[2:-1]), 0, 1)][: 2 if alone else 1]:
        tensors["q"] = torch.randn(1024).to(made["q"].dtype).as_strided(shape, stride)
        exact = {**attention.options, "scale": scale}
        for _ in range(2):
            out = attention(tensors, scale=scale)
            with torch.no_grad():
                given = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
                torch.testing.assert_close(
                    out.detach().double(), attention.exact(**given, **exact), rtol=2e-2, atol=2e-2
                )


@pytest.mark.differentiates
def test_every_subset_of_gradients(call):
    for number in range(1, len(call.differentiable) + 1):
        for wanted in itertools.combinations(call.differentiable, number):
            tensors = call.tensors()
            for name in wanted:
                tensors[name].requires_grad_()
            found = call.gradients(tensors)
            assert set(found) == set(wanted)
            call.assert_gradients(found, tensors)


def test_equal_calls_build_nothing_more(example):
    example.warm_up()
    before, launched = example.plans(), len(FakePlan.launched)
    with cudnn_sdpa.no_plan_builds():
        example(example.tensors())
        once = len(FakePlan.launched) - launched
        if example.differentiable:
            example.gradients(example.tensors(grad=True))
    assert example.plans() == before
    assert once == 1


def test_nothing_is_built_where_that_is_forbidden(example):
    refused = pytest.raises(cudnn_sdpa.PlanBuildError, match="no_plan_builds")
    with cudnn_sdpa.no_plan_builds(), refused if example.is_planned else contextlib.nullcontext():
        example(example.tensors())
    tensors = example.tensors()
    example.assert_out(example(tensors), tensors)


@pytest.mark.differentiates
def test_gradients_lie_in_memory_as_their_tensors(call):
    tensors = call.tensors(grad=True)
    for name, gradient in call.gradients(tensors).items():
        assert gradient.stride() == torch.empty_like(tensors[name]).stride(), name


def test_the_result_is_of_the_same_dtype_and_device(call):
    tensors = call.tensors()
    out = call(tensors)
    assert out.dtype == tensors[call.first].dtype
    assert out.device == tensors[call.first].device


def test_the_log_sum_exp_comes_with_the_same_output(attention):
    tensors = attention.tensors(grad=True)
    out, lse = attention(tensors, return_lse=True)
    attention.assert_out(out, tensors)
    assert lse.dtype == torch.float32
    assert torch.equal(attention(tensors), out)
    if not attention.differentiable:
        return
    found = torch.autograd.grad(out.sum(), tensors["q"])[0]
    attention.assert_gradients({"q": found}, tensors)


def test_out_is_written(attention):
    """Into dense memory and between other numbers, with the log-sum-exp and without."""
    shape = attention(attention.tensors())
    for _ in range(4):
        tensors = attention.tensors()
        whole = torch.full((*shape.shape[:-1], shape.shape[-1] + 8), 7, dtype=shape.dtype)
        for out in (torch.full_like(shape, torch.nan), whole[..., :-8]):
            version = out._version
            assert attention(tensors, out=out) is out
            assert out._version > version
            attention.assert_out(out, tensors)
            again, lse = attention(tensors, return_lse=True, out=out.fill_(torch.nan))
            assert again is out
            attention.assert_out(out, tensors)
            assert torch.equal(lse, attention(tensors, return_lse=True)[1])
        assert (whole[..., -8:] == 7).all()
