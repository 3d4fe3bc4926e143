"""Operands that must not be launched: on another device, freed, negated views, or zero tensors."""

from __future__ import annotations

import pytest
import torch
from custom_gpu_graphs import add_rows

from cudnn_sdpa import DeviceError, LayoutError, UnsupportedError, conv2d, gelu_mul, layer_norm, rms_norm, silu_mul


def rows(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def images(*shape):
    return rows(*shape).contiguous(memory_format=torch.channels_last)


CALLS = {
    "rms_norm": (rms_norm, lambda: [rows(4, 128), rows(128)]),
    "rms_norm with a residual": (
        lambda x, w, r: sum(rms_norm(x, w, residual=r)),
        lambda: [rows(4, 128), rows(128), rows(4, 128)],
    ),
    "layer_norm": (layer_norm, lambda: [rows(4, 128), rows(128), rows(128)]),
    "silu_mul": (silu_mul, lambda: [rows(4, 128), rows(4, 128)]),
    "silu_mul of both": (silu_mul, lambda: [rows(4, 256)]),
    "gelu_mul": (gelu_mul, lambda: [rows(4, 128), rows(4, 128)]),
    "conv2d": (
        lambda x, w, b: conv2d(x, w, b, padding=1),
        lambda: [images(2, 8, 9, 7), images(16, 8, 3, 1) * 0.2, rows(16)],
    ),
    "graph_op": (lambda x, b: add_rows(x, b, 2.0), lambda: [rows(1, 48, 64), rows(1, 1, 64)]),
}
TRAINED = [name for name in CALLS if name != "gelu_mul"]


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("trains", [False, True])
def test_an_operand_on_another_device_is_refused_cold_and_warm(name, trains):
    function, make = CALLS[name]
    if trains and name == "gelu_mul":
        pytest.skip("for inference")
    right = make()
    for place in range(1 if len(right) == 1 else 0, len(right)):
        for _ in range(3):
            wrong = [x.cpu() if number == place else x for number, x in enumerate(right)]
            with pytest.raises(DeviceError):
                function(*(x.detach().requires_grad_(trains) for x in wrong))
            function(*right)
            torch.cuda.synchronize()


@pytest.mark.parametrize("name", CALLS)
def test_a_freed_operand_is_refused_cold_and_warm(name):
    function, make = CALLS[name]
    right = make()
    for place in range(len(right)):
        for _ in range(3):
            with pytest.raises(LayoutError, match="without memory"):
                function(*(freed(x) if number == place else x for number, x in enumerate(right)))
            function(*right)
            torch.cuda.synchronize()


@pytest.mark.parametrize("name", TRAINED)
def test_negated_and_zero_tensor_gradients(name):
    function, make = CALLS[name]
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in make()]
        out = function(*leaves)
        grad = torch.randn_like(out)
        right = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        turned = torch.autograd.grad(out, leaves, torch._neg_view(grad), retain_graph=True)
        zeros = torch._efficientzerotensor(tuple(out.shape), dtype=out.dtype, device=out.device)
        nothing = torch.autograd.grad(out, leaves, zeros)
        for one, other, none in zip(right, turned, nothing, strict=True):
            assert one.float().norm() > 0
            torch.testing.assert_close(other, -one, rtol=1e-2, atol=1e-2)
            assert not none.any()


@pytest.mark.parametrize("name", TRAINED)
def test_negated_and_zero_tensor_operands(name):
    function, make = CALLS[name]
    given = make()
    for _ in range(2):
        turned = function(*(torch._neg_view(-x) for x in given))
        torch.testing.assert_close(turned, function(*given), rtol=1e-2, atol=1e-2)
        zeros = [torch._efficientzerotensor(tuple(x.shape), dtype=x.dtype, device="cuda") for x in given]
        torch.testing.assert_close(function(*zeros), function(*map(torch.zeros_like, given)))


@pytest.mark.parametrize("name", TRAINED)
def test_double_backward_is_right_or_refused(name):
    function, make = CALLS[name]
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in make()]
        out = function(*leaves)
        grad_out = torch.randn_like(out).requires_grad_()
        found = torch.autograd.grad(out, leaves, grad_out, create_graph=True)
        total = sum(x.float().square().sum() for x in found)
        if name in ("conv2d", "graph_op"):
            seconds = torch.autograd.grad(total, [grad_out, *leaves], allow_unused=True)
            assert seconds[0] is not None  # the graph_op is linear: its gradients depend on grad_out alone
            assert all(x.isfinite().all() for x in seconds if x is not None)
            continue
        with pytest.raises(UnsupportedError, match="double backward"):
            torch.autograd.grad(total, leaves)


def test_double_backward_of_a_convolution_matches_float64():
    function, make = CALLS["conv2d"]
    leaves = [x.detach().requires_grad_() for x in make()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    seconds = []
    grad = None
    for call, given in ((function, leaves), (lambda x, w, b: torch.nn.functional.conv2d(x, w, b, padding=1), exact)):
        out = call(*given)
        grad = torch.randn_like(out) if grad is None else grad
        grad_x, grad_weight, _ = torch.autograd.grad(out, given, grad.to(out.dtype), create_graph=True)
        seconds.append(torch.autograd.grad(grad_x.square().sum() + grad_weight.square().sum(), given[:2]))
    for one, other in zip(*seconds, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 3e-2
