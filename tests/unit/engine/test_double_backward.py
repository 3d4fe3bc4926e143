"""Double backward on the CPU: right or refused, never dropped. `tests/contract` does the same on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from contract import test_hazards
from contract.operations import OPERATIONS
from custom_backward import squares

from cudnn_sdpa import UnsupportedError, cpu_checks, fallback, rms_norm, sdpa

DIFFERENTIABLE = [name for name, call in OPERATIONS.items() if call.differentiable and not call.is_random]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_gradients_are_right_or_refused(name):
    with cpu_checks(None):
        for _ in range(2):
            test_hazards.test_second_gradients_are_right_or_refused(OPERATIONS[name])


def test_fallbacks_and_backward_functions_without_gradients_have_none():
    q, x = torch.randn(1, 2, 5, 12, requires_grad=True), torch.randn(1, 4, 128, requires_grad=True)
    with fallback("torch"):  # no kernel has this head dim
        out = sdpa(q, q, q, softcap=3.0)
    (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        found.sum().backward()
    with pytest.raises(UnsupportedError, match="gradient"):
        torch.autograd.grad(squares(x).sum(), x, create_graph=True)


def test_gradients_that_depend_on_grad_out_alone_are_refused():
    """The double-backward trick for forward-mode derivatives."""
    x, weight = torch.randn(4, 16), torch.randn(16, requires_grad=True)
    upstream = torch.randn(4, 16, requires_grad=True)
    (found,) = torch.autograd.grad(rms_norm(x, weight), weight, upstream, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"a gradient of rms_norm's gradient \(double backward\)"):
        found.sum().backward()


def graph_of_gradient(function, given):
    """Whether the gradient of a compiled function has a graph, which then raises."""
    torch._dynamo.reset()
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(*given)
    (found, *_) = torch.autograd.grad(out, given, torch.randn_like(out), create_graph=True)
    if found.requires_grad:
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            found.sum().backward()
    return found.requires_grad


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu_mul", "conv2d"])
def test_compiled_functions_refuse_double_backward_like_pytorch(name):
    """Before pytorch#181606, PyTorch drops the graph of a gradient for inputs that were not saved unchanged."""
    call, tensors = OPERATIONS[name], OPERATIONS[name].tensors(grad=True)
    by_pytorch = graph_of_gradient(lambda x: x.exp().sin(), [torch.randn(4, 128, requires_grad=True)])
    ours = graph_of_gradient(lambda *x: call(dict(zip(tensors, x, strict=True))), list(tensors.values()))
    assert ours >= by_pytorch


def test_create_graph_is_allowed_for_undifferentiated_gradients():
    """A penalty on another gradient, with `create_graph=True` for all."""
    x = torch.randn(4, 16, requires_grad=True)
    y = torch.randn(4, requires_grad=True)
    grad_x, of_y = torch.autograd.grad(rms_norm(x).sum() + y.pow(3).sum(), (x, y), create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(of_y.sum(), y)[0], 6 * y.detach())
    assert grad_x.requires_grad
