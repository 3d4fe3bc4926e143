"""Scenarios for the fast path of graph functions; run with a scenario's name, in a separate process."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings

import double_backward
import torch
import torch.nn.functional as F
from fake_gpu import FakePlan, install_for_graph_functions
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import (
    DeviceError,
    LayoutError,
    UnsupportedError,
    conv1d,
    conv2d,
    conv3d,
    gelu_mul,
    graph_op,
    layer_norm,
    rms_norm,
    silu_mul,
)
from cudnn_sdpa.fused.conv_graphs import channels_last, convolution

TENSOR = torch.randn(4, 128)


def affine_backward(grads, given, results):  # noqa: ARG001
    return grads[0] * given[1], None, None


@graph_op(reference=lambda x, a, b: x * a + b, backward=affine_backward)
def affine(g, x, a, b):
    return g.add(a=g.mul(a=x, b=a), b=b)


@graph_op(reference=lambda x, y: x + y, backward=lambda grads, given, results: (grads[0], grads[0]))  # noqa: ARG005
def plus(g, x, y):
    return g.add(a=x, b=y)


def product_backward(grads, given, results):  # noqa: ARG001
    return product(grads[0], given[1]), product(grads[0], given[0])


@graph_op(reference=lambda x, y: x * y, backward=product_backward)
def product(g, x, y):
    return g.mul(a=x, b=y)


def double(g, x):
    return g.add(a=x, b=x)


def scalars_by_keyword():
    x = torch.ones(1, 2, 8)
    for _ in range(3):
        for given, named in (((2.0, 3.0), {}), ((2.0,), {"b": 3.0}), ((), {"a": 2.0, "b": 3.0}), ((2, 3), {})):
            assert (affine(x, *given, **named) == 5).all()
            leaf = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(affine(leaf, *given, **named).sum(), leaf)
            assert (found == 2).all()


def gradients_under_hooks():
    def gradient(hooks):
        both = TENSOR.clone().requires_grad_()
        halves = both.chunk(2, -1)
        with saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x) if hooks else contextlib.nullcontext():
            out = silu_mul(*halves)
        return torch.autograd.grad(out.sum(), both)[0]

    both = TENSOR.clone().requires_grad_()
    gate, up = both.chunk(2, -1)
    (wanted,) = torch.autograd.grad((F.silu(gate) * up).sum(), both)
    for hooks in (False, True, False, True, False):
        torch.testing.assert_close(gradient(hooks), wanted)
    x, weight = TENSOR.clone().requires_grad_(), torch.rand(128).requires_grad_()
    for hooks in (False, True, False):
        turned = saved_tensors_hooks(lambda x: x.clone(), lambda x: x.t().contiguous().t() if x.dim() == 2 else x)
        with turned if hooks else contextlib.nullcontext():
            out = rms_norm(x, weight)
        found = torch.autograd.grad(out.sum(), (x, weight))
        wanted = torch.autograd.grad(F.rms_norm(x, (128,), weight, 1e-6).sum(), (x, weight))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def functions_of_one_builder():
    half, full = (graph_op(reference=lambda x, d=d: (x * 2).to(d))(double) for d in (torch.float16, torch.float32))
    x = torch.ones(1, 2, 8)
    for _ in range(2):
        assert half(x).dtype is torch.float16
        assert full(x).dtype is torch.float32


def garbage_collected_functions():
    def make(factor):
        def backward(grads, given, results):  # noqa: ARG001
            return (grads[0] * factor,)

        return graph_op(reference=lambda x: x * factor, backward=backward)(double)

    x = torch.ones(1, 2, 8, requires_grad=True)
    outs = []
    for factor in (2.0, 3.0, 5.0):
        function = make(factor)
        outs.append((factor, function(x)))
        del function
        gc.collect()
    for factor, out in outs:
        assert (torch.autograd.grad(out.sum(), x)[0] == factor).all()


def checkpoints():
    x, weight, kernel = TENSOR.clone().requires_grad_(), torch.rand(128), torch.randn(4, 4, 3, 3)
    image = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    steps = {
        "norm": (lambda x: rms_norm(x, weight), x),
        "layer": (lambda x: layer_norm(x, weight, weight), x),
        "gate": (silu_mul, x),
        "own": (lambda x: affine(x.view(1, 4, 128), 2.0, 1.0), x),
        "conv": (lambda x: conv2d(x, kernel, padding=[1, 1]), image),
    }
    for _ in range(2):
        for step, leaf in steps.values():
            (found,) = torch.autograd.grad(checkpoint(step, leaf, use_reentrant=False).square().sum(), leaf)
            torch.testing.assert_close(found, torch.autograd.grad(step(leaf).square().sum(), leaf)[0])


def misaligned_gradients():
    weight = torch.rand(101)
    for _ in range(2):
        parts = [torch.randn(rows, 101, requires_grad=True) for rows in (1, 3)]
        out = torch.cat([rms_norm(part, weight) for part in parts] + [silu_mul(part, part) for part in parts])
        grad = torch.randn(out.numel() + 3)[3:].view(out.shape)
        found = torch.autograd.grad(out, parts, grad)
        wanted = torch.cat([F.rms_norm(p, (101,), weight, 1e-6) for p in parts] + [F.silu(p) * p for p in parts])
        for one, other in zip(found, torch.autograd.grad(wanted, parts, grad), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def in_place_changes():
    x, kernel = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)
    kernel = kernel.to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(2):
        out = F.relu_(conv2d(x, kernel, padding=1))
        (found,) = torch.autograd.grad(out.sum(), kernel)
        (wanted,) = torch.autograd.grad(F.relu(F.conv2d(x, kernel, padding=1)).sum(), kernel)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def forward_mode():
    x, weight = TENSOR.clone(), torch.rand(128)
    for function in (lambda x: rms_norm(x, weight), silu_mul, lambda x: affine(x.view(1, 4, 128), 2.0, 1.0)):
        for _ in range(2):
            function(x)
            try:
                torch.func.jvp(function, (x,), (torch.ones_like(x),))
            except UnsupportedError as error:
                assert "forward-mode" in str(error)  # noqa: PT017 - no pytest in this process
            else:
                raise AssertionError("a tangent was lost")


def sizes_in_lists():
    x = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last)
    kernel = torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        for padding in (1, (1, 1), [1, 1]):
            torch.testing.assert_close(conv2d(x, kernel, padding=padding), F.conv2d(x, kernel, padding=1))
        for wrong in (1.0, True):
            try:
                conv2d(x, kernel, padding=wrong)
            except TypeError:
                continue
            raise AssertionError(f"{wrong} was taken")


def empty_tensors():
    leaf = torch.ones(1, 0, 8, requires_grad=True)
    assert affine(leaf, 2.0, 1.0).shape == (1, 0, 8)
    image, kernel = torch.randn(0, 4, 8, 8, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    out = conv2d(image, kernel, padding=1, activation="silu")
    assert out.shape == (0, 6, 8, 8)
    assert torch.autograd.grad(out.sum(), kernel)[0].abs().sum() == 0


def determinism():
    x, weight = TENSOR.clone().requires_grad_(), torch.rand(128)
    image, kernel = (channels_last(torch.randn(shape)) for shape in ((1, 4, 8, 8), (4, 4, 3, 3)))
    kernel.requires_grad_()
    steps = [
        lambda: rms_norm(x, weight),
        lambda: layer_norm(x, weight, weight),
        lambda: silu_mul(x),
        lambda: silu_mul(x, x),
        lambda: affine(x.view(1, 4, 128), 2.0, 1.0),
        lambda: conv2d(image, kernel, padding=1),
    ]
    launched = FakePlan.launched
    for step in steps:
        for forward, backward in ((False, False), (True, True), (False, True), (True, False), (False, False)) * 2:
            launched.clear()
            torch.use_deterministic_algorithms(forward)
            out = step()
            assert {key.deterministic for key in launched} == {forward}, launched
            launched.clear()
            torch.use_deterministic_algorithms(backward)
            out.sum().backward()
            assert {key.deterministic for key in launched} <= {backward}, launched
    assert launched  # the last step's gradient runs on cuDNN


def needed_gradients():
    image, kernel = (channels_last(torch.randn(shape)) for shape in ((2, 4, 8, 8), (6, 4, 3, 3)))
    bias, other = torch.randn(6), torch.randn(4, 128)
    cases = [
        (lambda x, w, b: conv2d(x, w, b, padding=1), (image, kernel, bias), ["conv_dgrad"], 0),
        (lambda x, w, b: conv2d(x, w, b, padding=1), (image, kernel, bias), ["conv_wgrad"], 1),
        (lambda x, w, b: conv2d(x, w, b, padding=1), (image, kernel, bias), [], 2),
        (silu_mul, (TENSOR, other), ["silu_mul_grad_gate"], 0),
        (silu_mul, (TENSOR, other), ["silu_mul_grad_up"], 1),
        (silu_mul, (TENSOR[:, :64], other[:, 64:]), ["silu_mul_grad_gate"], 0),
        (rms_norm, (TENSOR, other[0]), ["rms_norm_gradients"], 1),
        (layer_norm, (TENSOR, other[0], other[1]), ["layer_norm_gradients"], 2),
    ]
    for function, tensors, names, place in cases:
        given = [x.detach().requires_grad_(number == place) for number, x in enumerate(tensors)]
        for _ in range(3):
            out = function(*given)
            grad = torch.randn_like(out)
            FakePlan.launched.clear()
            (found,) = torch.autograd.grad(out, given[place], grad)
            assert [key.name for key in FakePlan.launched] == names, FakePlan.launched
            with torch.autograd.profiler.profile():  # under the profiler the fast path is off
                (again,) = torch.autograd.grad(function(*given), given[place], grad)
            torch.testing.assert_close(found, again)


def gradients_of_gradients():
    for name in double_backward.CALLS:
        double_backward.check(name, times=3)


def calls_with_gradients():
    """Functions and their leaves, for grad_outs of any form."""
    weight, other, bias = torch.rand(128), torch.rand(4, 128), torch.rand(128)
    kernel, image = (channels_last(torch.randn(shape)) for shape in ((4, 4, 3, 3), (2, 4, 8, 8)))
    return {
        "rms_norm": (lambda x: rms_norm(x, weight), TENSOR),
        "layer_norm": (lambda x: layer_norm(x, weight, bias), TENSOR),
        "silu_mul": (lambda x: silu_mul(x, other), TENSOR),
        "silu_mul of both": (silu_mul, TENSOR),
        "conv2d": (lambda x: conv2d(x, kernel, padding=1), image),
        "affine": (lambda x: affine(x, 2.0, 3.0), TENSOR[None]),
    }


def negated_and_zero_tensor_gradients():
    """Views with the negative bit, and zero tensors without memory."""
    for name, (function, leaf) in calls_with_gradients().items():
        for _ in range(3):
            x = leaf.clone(memory_format=torch.preserve_format).requires_grad_()
            out = function(x)
            grad = torch.randn_like(out)
            (wanted,) = torch.autograd.grad(out, x, grad, retain_graph=True)
            (turned,) = torch.autograd.grad(out, x, torch._neg_view(grad), retain_graph=True)
            torch.testing.assert_close(turned, -wanted, msg=name)
            nothing = torch._efficientzerotensor(tuple(out.shape))
            FakePlan.launched.clear()
            (found,) = torch.autograd.grad(out, x, nothing, retain_graph=True)
            assert not found.any(), name
            strides = [operand.layout.stride for key in FakePlan.launched for operand in key.inputs]
            assert not any(0 in stride for stride in strides), "cuDNN was given one number for all"
            (found,) = torch.autograd.grad(torch.complex(grad, out).conj().imag.sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(-function(x).sum(), x)[0], msg=name)


def negated_and_zero_tensor_operands():
    for name, (function, leaf) in calls_with_gradients().items():
        wanted = function(-leaf)
        for _ in range(2):
            torch.testing.assert_close(function(torch._neg_view(leaf)), wanted, msg=name)
            zeros = torch._efficientzerotensor(tuple(leaf.shape))
            torch.testing.assert_close(function(zeros), function(torch.zeros_like(leaf)), msg=name)


def wrong_calls(spoil):
    """Calls with one mutated operand, by name; `plus` is a custom graph."""
    rows, weight, both = torch.randn(4, 128), torch.rand(128), torch.randn(4, 128)
    image, kernel, bias = (torch.randn(shape) for shape in ((2, 8, 8, 8), (8, 8, 3, 3), (8,)))
    image, kernel = channels_last(image), channels_last(kernel)
    calls = {
        "rms_norm": (rms_norm, (rows, weight)),
        "rms_norm, zero-centered": (lambda *x: rms_norm(*x, zero_centered=True), (rows, weight)),
        "residual": (lambda x, w, r: rms_norm(x, w, residual=r), (rows, weight, both)),
        "layer_norm": (layer_norm, (rows, weight, weight.clone())),
        "silu_mul": (silu_mul, (rows, both)),
        "gelu_mul": (gelu_mul, (rows, both)),
        "conv1d": (conv1d, (torch.randn(2, 12, 8).transpose(1, 2), torch.randn(8, 3, 8).transpose(1, 2), bias)),
        "conv2d": (conv2d, (image, kernel, bias)),
        "conv3d": (conv3d, tuple(channels_last(torch.randn(s)) for s in ((2, 4, 5, 5, 5), (4, 4, 3, 3, 3)))),
        "graph_op": (plus, (rows[None], both[None])),
    }
    for name, (function, given) in calls.items():
        for place in range(len(given)):
            spoiled = [spoil(x) if number == place else x for number, x in enumerate(given)]
            yield f"{name}, operand {place}", function, given, spoiled


def tensors_on_other_devices():
    """Refused cold, warm, and with gradients: otherwise a launch would get a host address."""
    for trains in (False, True):
        for name, function, right, wrong in wrong_calls(lambda x: x.to("meta")):
            if trains and function is gelu_mul:
                continue
            trained = [x.detach().requires_grad_(trains) for x in wrong]
            for _ in range(3):
                FakePlan.launched.clear()
                try:
                    function(*trained)
                except DeviceError as error:
                    assert "expected" in str(error), name  # noqa: PT017 - no pytest in this process
                else:
                    raise AssertionError(f"{name} took a tensor that is elsewhere")
                assert not FakePlan.launched, name
                function(*right)


def saved_tensors_on_other_devices():
    """Hooks may return saved tensors on another device."""
    weight = torch.rand(128)
    away = saved_tensors_hooks(lambda x: x, lambda x: x.to("meta") if x.shape == TENSOR.shape else x)
    for function in (lambda x: rms_norm(x, weight), lambda x: layer_norm(x, weight, weight), silu_mul):
        for _ in range(2):
            x = TENSOR.clone().requires_grad_()
            function(x).sum().backward()
            with away:
                out = function(x)
            FakePlan.launched.clear()
            try:
                out.sum().backward()
            except DeviceError:
                assert not FakePlan.launched
            else:
                raise AssertionError("a tensor that is elsewhere was taken")


def freed_memory():
    """Freed storage, as FSDP leaves unused weights: address 0."""

    def freed(x):
        x = x.clone(memory_format=torch.preserve_format)
        x.untyped_storage().resize_(0)
        return x

    for name, function, right, wrong in wrong_calls(freed):
        for _ in range(3):
            FakePlan.launched.clear()
            try:
                function(*wrong)
            except LayoutError as error:
                assert "without memory" in str(error), name  # noqa: PT017 - no pytest in this process
            else:
                raise AssertionError(f"{name} took a tensor without memory")
            assert not FakePlan.launched, name
            function(*right)


def saved_tensors_without_memory():
    """Storage freed between the forward and the backward pass; of convolutions, the other gradient may be launched."""
    rows, other, weight = torch.randn(4, 128), torch.randn(4, 128), torch.rand(128)
    image, kernel = channels_last(torch.randn(2, 8, 8, 8)), channels_last(torch.randn(8, 8, 3, 3))
    cases = {
        "rms_norm": (rms_norm, (rows, weight), (0, 1)),
        "layer_norm": (layer_norm, (rows, weight, torch.rand(128)), (0, 1)),
        "silu_mul": (silu_mul, (rows, other), (0, 1)),
        "silu_mul of both": (silu_mul, (rows,), (0,)),
        "conv2d": (conv2d, (image, kernel), (0, 1)),
        "graph_op": (product, (rows[None], other[None]), (0, 1)),
    }
    for name, (function, tensors, places) in cases.items():
        for place in [place for place in (*places, "grad_out") for _ in range(3)]:
            for is_freed in (False, True):
                given = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
                out = function(*given)
                grad_out = torch.randn_like(out)
                if is_freed:
                    (grad_out if place == "grad_out" else given[place]).untyped_storage().resize_(0)
                try:
                    torch.autograd.grad(out, given, grad_out)
                except LayoutError as error:
                    assert is_freed, name
                    assert "without memory" in str(error), name  # noqa: PT017 - no pytest in this process
                else:
                    assert not is_freed, f"the gradient of {name} took a tensor without memory: {place}"


def convolutions():
    cases = {
        1: (conv1d, F.conv1d, torch.randn(2, 12, 6).transpose(1, 2), torch.randn(4, 3, 6).transpose(1, 2)),
        2: (conv2d, F.conv2d, torch.randn(2, 6, 9, 8), torch.randn(4, 6, 3, 3)),
        3: (conv3d, F.conv3d, torch.randn(2, 6, 5, 6, 4), torch.randn(4, 6, 3, 3, 3)),
    }
    for rank, (function, of_torch, *tensors) in cases.items():
        x, weight = (part if rank == 1 else channels_last(part) for part in tensors)
        for bias, activation, sizes in (
            (None, None, {"padding": 1}),
            (torch.randn(4), "silu", {"padding": 1, "stride": 2}),
            (torch.randn(4), "relu", {"dilation": 2, "padding": (2,) * rank}),
        ):
            act = F.silu if activation == "silu" else F.relu if activation else (lambda y: y)
            for wanted in ((0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
                if bias is None and wanted == (0, 0, 1):
                    continue
                for _ in range(3):
                    given = [part.detach() for part in (x, weight, bias) if part is not None]
                    given = [part.requires_grad_(bool(wants)) for part, wants in zip(given, wanted, strict=False)]
                    out, right = function(*given, **sizes, activation=activation), act(of_torch(*given, **sizes))
                    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
                    leaves = [part for part in given if part.requires_grad]
                    assert out.requires_grad is bool(leaves)
                    if leaves:
                        grad = torch.randn_like(right)
                        found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
                        for one, other in zip(found, torch.autograd.grad(right, leaves, grad), strict=True):
                            assert one.shape == other.shape
                            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
                        if activation is None:
                            assert type(out.grad_fn).__name__ == "DifferentiableBackward"
        assert len(convolution.table)


def saved_tensors_of_convolutions():
    x, weight = channels_last(torch.randn(2, 6, 9, 8)), channels_last(torch.randn(4, 6, 3, 3))
    for wanted, kept in (((1, 0), [weight.shape]), ((0, 1), [x.shape]), ((1, 1), [x.shape, weight.shape])):
        for _ in range(2):
            given = [part.detach().requires_grad_(bool(wants)) for part, wants in zip((x, weight), wanted, strict=True)]
            seen = []
            with saved_tensors_hooks(lambda part: seen.append(part.shape) or part, lambda part: part):  # noqa: B023
                conv2d(*given, padding=1)
            assert seen == kept, seen


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    install_for_graph_functions()
    globals()[sys.argv[1]]()
