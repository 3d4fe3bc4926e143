"""The kernels of samples/add_a_kernel, run thread by thread on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import EmulatedKernel, gpu_on_the_cpu
from sample_modules import sample

from cudnn_sdpa import DtypeError, LayoutError, OptionError, ShapeError, plan_cache, record_plans

row_softmax = sample("add_a_kernel/row_softmax.py").row_softmax

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(params=[0, 1])
def order(request):
    """Whether the first or the last thread of a block runs first."""
    EmulatedKernel.order = request.param
    yield
    EmulatedKernel.order = 0


def check(x, scale):
    exact = x.detach().double().requires_grad_()
    wanted, grad = torch.softmax(exact * scale, -1), torch.randn(x.shape).to(x.dtype)
    out = row_softmax(x, scale)
    (found,) = torch.autograd.grad(out, x, grad)
    (right,) = torch.autograd.grad(wanted, exact, grad.double())
    assert (out.dtype, out.shape, found.dtype) == (x.dtype, x.shape, x.dtype)
    size = abs(scale) * grad.double().norm() / x.shape[-1] ** 0.5  # a row of one number has a gradient of zero
    assert (out.double() - wanted).norm() <= BOUNDS[x.dtype] * wanted.norm()
    assert (found.double() - right).norm() <= BOUNDS[x.dtype] * max(right.norm(), size)


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (3, 2, 33), (64,), (9, 200)])
def test_values_and_gradients(shape, dtype, order):  # noqa: ARG001
    torch.manual_seed(len(shape) * shape[-1])
    with gpu_on_the_cpu():
        for scale in (1.0, -1.7, 0.0, 3):
            check((2 * torch.randn(shape)).to(dtype).requires_grad_(), scale)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_any_strides_are_read_as_they_are(dtype):
    columns, apart = torch.randn(40, 7).to(dtype).mT, torch.randn(6, 66).to(dtype)[1::2, 1::3]
    expanded, heads = torch.randn(1, 9).to(dtype).expand(4, 9), torch.randn(3, 5, 8).to(dtype).transpose(0, 1)
    with gpu_on_the_cpu():
        for x in (columns, apart, expanded, heads):
            check(x.detach().requires_grad_(), 0.8)


def test_infinite_scores_are_as_in_pytorch():
    x = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf] * 3, [torch.inf, 0.0, 1.0], [torch.nan, 0.0, 1.0]])
    with gpu_on_the_cpu():
        torch.testing.assert_close(row_softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_nothing_to_compute_needs_no_plan():
    with gpu_on_the_cpu():
        for shape in ((0, 4), (3, 0), (2, 0, 5)):
            x = torch.randn(shape, requires_grad=True)
            (grad,) = torch.autograd.grad(row_softmax(x).sum(), x)
            assert grad.shape == x.shape
        assert plan_cache.info().builds == 0


def test_one_plan_serves_all_scales():
    with gpu_on_the_cpu():
        x = torch.randn(4, 8)
        for scale in (0.1, 0.2, 3.0):
            torch.testing.assert_close(row_softmax(x, scale), torch.softmax(x * scale, -1))
        assert plan_cache.info().builds == 1
        row_softmax(torch.randn(5, 8))
        assert plan_cache.info().builds == 2


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (1.0, OptionError),
        (torch.tensor(1.0), ShapeError),
        (torch.ones(2, 2, dtype=torch.int32), DtypeError),
        (torch.eye(3).to_sparse(), LayoutError),
    ],
)
def test_wrong_arguments_are_named(x, error):
    with pytest.raises(error, match="x"):
        row_softmax(x)


def test_it_is_one_operator_in_compiled_code_and_its_plans_are_recorded():
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(row_softmax, fullgraph=True, backend="aot_eager")
    out, grad = compiled(x, 0.5), torch.randn(4, 6)
    torch.testing.assert_close(out, torch.softmax(x * 0.5, -1))
    right = torch.autograd.grad(torch.softmax(x * 0.5, -1), x, grad)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad), right)
    with record_plans("h200") as manifest:
        given = torch.empty(4, 6, device="meta", requires_grad=True)
        torch.autograd.grad(row_softmax(given), given, torch.empty(4, 6, device="meta"))
    assert len(manifest) == 2
