"""Double backward on the CPU: right or refused, never dropped. `tests/contract` tests it on the fake GPU."""

from __future__ import annotations

import double_backward
import pytest
import torch

from cudnn_sdpa import UnsupportedError, rms_norm


@pytest.mark.parametrize("name", [*double_backward.CALLS, *double_backward.ATTENTION])
def test_double_backward_is_right_or_refused(name):
    double_backward.check(name, times=2)


def test_fp8_attention_has_no_double_backward():
    double_backward.check_fp8()


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
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "silu_mul", "silu_mul of both", "conv2d"])
def test_compiled_functions_refuse_double_backward_like_pytorch(name):
    """Before pytorch#181606, PyTorch drops the graph of a gradient for inputs that were not saved unchanged."""
    function, _, make = double_backward.CALLS[name]
    by_pytorch = graph_of_gradient(lambda x: x.exp().sin(), double_backward.leaves((4, 128)))
    assert graph_of_gradient(function, make()) >= by_pytorch


def test_create_graph_is_allowed_for_undifferentiated_gradients():
    """A penalty on another gradient, with `create_graph=True` for all."""
    x = torch.randn(4, 16, requires_grad=True)
    y = torch.randn(4, requires_grad=True)
    grad_x, of_y = torch.autograd.grad(rms_norm(x).sum() + y.pow(3).sum(), (x, y), create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(of_y.sum(), y)[0], 6 * y.detach())
    assert grad_x.requires_grad
