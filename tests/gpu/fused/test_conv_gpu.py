"""Convolutions on the GPU: sizes of 1, determinism, second gradients, and custom graphs. `generators` has others."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_checks import difference
from custom_gpu_graphs import add_rows, conv_bias_silu, two_results

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, autotune, conv2d, conv3d, explain, no_plan_builds, plan_cache

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}  # float32 may run on TF32


#: Filters and images with sizes of 1: cuDNN also infers the memory order from these dimensions' strides.
ONES = {
    "3x1, steps": ((3, 8, 7, 12), (8, 8, 3, 1), {"stride": (1, 2)}),
    "2x1": ((3, 16, 9, 12), (8, 16, 2, 1), {"dilation": 2}),
    "1x3": ((3, 8, 7, 12), (8, 8, 1, 3), {"padding": (0, 1)}),
    "3x1 of a column": ((3, 8, 7, 1), (16, 8, 3, 1), {"padding": (1, 0)}),
    "1x3 of a row": ((3, 8, 1, 7), (16, 8, 1, 3), {}),
    "of points": ((5, 8, 1, 1), (16, 8, 1, 1), {}),
    "of one channel": ((3, 1, 7, 12), (8, 1, 3, 1), {}),
    "of a column of one channel": ((3, 1, 12, 1), (8, 1, 3, 1), {}),
    "one filter": ((3, 8, 7, 12), (1, 8, 3, 1), {}),
    "one number": ((1, 1, 9, 1), (1, 1, 3, 1), {}),
    "groups": ((3, 16, 7, 12), (32, 8, 3, 1), {"groups": 2}),
    "each channel": ((3, 48, 7, 12), (48, 1, 3, 1), {"groups": 48}),
    "3x3x1": ((2, 8, 5, 6, 7), (8, 8, 3, 3, 1), {}),
    "3x1x1": ((2, 8, 5, 6, 7), (8, 8, 3, 1, 1), {"padding": (1, 0, 0)}),
    "1x1x3": ((2, 8, 1, 1, 7), (8, 8, 1, 1, 3), {}),
}


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_last", [(False, False), (True, True), (True, False)])
def test_sizes_of_1(name, dtype, is_last):
    grad_x, grad_weight, sizes = ONES[name]
    function, of_torch = (conv2d, F.conv2d) if len(grad_x) == 4 else (conv3d, F.conv3d)
    last = torch.channels_last if len(grad_x) == 4 else torch.channels_last_3d
    forms = [last if is_it else torch.contiguous_format for is_it in is_last]
    scales = 1, math.prod(grad_weight[1:]) ** -0.5
    x, weight = (
        (torch.randn(shape, device="cuda") * scale).to(dtype).contiguous(memory_format=form).requires_grad_()
        for shape, scale, form in zip((grad_x, grad_weight), scales, forms, strict=True)
    )
    bias = torch.randn(grad_weight[0], device="cuda", dtype=dtype).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    wanted = of_torch(*exact, **sizes)
    grad = torch.randn_like(wanted).to(dtype)
    gradients = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
    for _ in range(2):
        with torch.no_grad():
            assert difference(function(x, weight, bias, **sizes), wanted) < TOLERANCE[dtype]
            assert difference(function(x, weight, bias, **sizes, activation="relu"), F.relu(wanted)) < TOLERANCE[dtype]
        out = function(x, weight, bias, **sizes)
        assert difference(out, wanted) < TOLERANCE[dtype]
        for one, other in zip(torch.autograd.grad(out, (x, weight, bias), grad), gradients, strict=True):
            assert difference(one, other) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("provider", ["default", "cudnn"])
def test_a_measured_activation_is_a_kernel_of_its_own(provider):
    x, weight, bias = channels_last(4, 320, 96, 96), channels_last(320, 320, 3, 3) * 0.02, torch.randn(320).bfloat16()
    weight, bias = weight.contiguous(memory_format=torch.channels_last), bias.cuda()
    wanted = F.silu(F.conv2d(x.float(), weight.float(), bias.float(), padding=1))
    with cudnn_sdpa.providers(provider):
        for _ in range(3):
            found = conv2d(x, weight, bias, padding=1, activation="silu")
            assert difference(found, wanted.double()) < 1e-2
        is_separate = provider == "default" and torch.cuda.get_device_capability() == (9, 0)
        report = explain(conv2d, x, weight, bias, padding=1, activation="silu")
    assert ("silu of the result" in report.extra_kernels) == is_separate
    assert ("measured" in report.choice) == is_separate
    assert report.cached


def test_sizes_of_1_in_a_custom_graph():
    weight = channels_last(16, 32, 3, 1) * 0.1
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(1, 16, 1, 1, device="cuda", dtype=torch.bfloat16)
    for grad_x in ((2, 32, 16, 16), (2, 32, 16, 1)):
        x = channels_last(*grad_x)
        wanted = F.silu(F.conv2d(x.double(), weight.double(), bias.flatten().double(), padding=1))
        for _ in range(2):
            assert difference(conv_bias_silu(x, weight, bias), wanted) < 1e-2


def channels_last(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def test_a_custom_graph():
    x, weight, bias = channels_last(2, 32, 16, 16), channels_last(64, 32, 3, 3) * 0.06, channels_last(1, 64, 1, 1)
    weight = weight.contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        wanted = F.silu(F.conv2d(x.double(), weight.double(), bias.flatten().double(), padding=1))
        assert difference(conv_bias_silu(x, weight, bias), wanted) < 1e-2
        x.normal_()
    explanation = explain(conv_bias_silu, x, weight, bias)
    assert explanation.supported
    assert explanation.cached
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_plan_builds():
        out = conv_bias_silu(x, weight, bias)
    x.normal_()
    graph.replay()
    assert difference(out, F.silu(F.conv2d(x.double(), weight.double(), bias.flatten().double(), padding=1))) < 1e-2


def test_operands_that_cudnn_misreads_are_refused():
    x = torch.randn(2, 24, 64, device="cuda")
    for shape in ((1, 1, 64), (1, 24, 1), (2, 1, 1)):
        with pytest.raises(UnsupportedError, match="misread"):
            add_rows(x, torch.randn(shape, device="cuda"), 2.0)
    for shape in ((1, 24, 64), (2, 1, 64), (2, 24, 1), (1, 1, 1)):
        bias = torch.randn(shape, device="cuda")
        torch.testing.assert_close(add_rows(x, bias, 2.0), x * 2 + bias)


def test_float32_is_refused_where_tf32_is_forbidden():
    x, weight = channels_last(1, 8, 9, 9).float(), channels_last(8, 8, 3, 3).float()
    before = torch.backends.cudnn.allow_tf32
    conv2d(x, weight)
    torch.backends.cudnn.allow_tf32 = False
    try:
        with pytest.raises(UnsupportedError, match="TF32"):
            conv2d(x, weight)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_autotune_of_custom_graphs():
    x, weight, bias = channels_last(8, 64, 32, 32), channels_last(64, 64, 3, 3), channels_last(1, 64, 1, 1)
    plan_cache.clear()
    with autotune() as report:
        out = conv_bias_silu(x, weight * 0.04, bias)
    assert len(report.entries) == 1
    assert not report.entries[0].reason
    assert out.isfinite().all()


def test_warmup():
    x = torch.randn(2, 20, 128, device="cuda", dtype=torch.bfloat16)
    with cudnn_sdpa.record_plans() as manifest:
        wanted = cudnn_sdpa.silu_mul(x)
        two_results(x)
    plan_cache.clear()
    report = cudnn_sdpa.warmup(manifest, workers=1)
    assert report.failed == {}
    with no_plan_builds():
        torch.testing.assert_close(cudnn_sdpa.silu_mul(x), wanted)
        two_results(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [3, 64])
def test_deterministic_gradients_are_bit_exact(deterministic_algorithms, dtype, channels):
    x, weight = (
        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        for shape in ((16, channels, 64, 64), (32, channels, 3, 3))
    )
    grad = torch.randn(16, 32, 64, 64, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    before = torch.autograd.grad(conv2d(x, weight, padding=1), (x, weight), grad)
    with deterministic_algorithms():
        first = torch.autograd.grad(conv2d(x, weight, padding=1), (x, weight), grad)
        for _ in range(20):
            again = torch.autograd.grad(conv2d(x, weight, padding=1), (x, weight), grad)
            assert all(map(torch.equal, first, again))
    for one, other in zip(first, before, strict=True):
        assert difference(one, other.double()) < 1e-2
    keys = [plan.key for plan in plan_cache._plans.values() if plan.key.name in ("conv_dgrad", "conv_wgrad")]
    assert sorted(key.deterministic for key in keys) == [False, False, True, True]


def test_a_frozen_weight_saves_no_input():
    x, weight = channels_last(64, 64, 64, 64).requires_grad_(), channels_last(64, 64, 3, 3).mul_(0.04)
    seen = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda part: seen.append(part.shape) or part, lambda part: part):
            conv2d(x, weight, padding=1)
    assert seen == [weight.shape] * 2


def test_double_backward_matches_float64():
    sizes = ((2, 8, 9, 7), (16, 8, 3, 1), (16,))
    x, weight, bias = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in sizes)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight * 0.2))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    seconds, grad = [], None
    for function, given in ((conv2d, leaves), (F.conv2d, exact)):
        out = function(*given, padding=1)
        grad = torch.randn_like(out) if grad is None else grad
        grad_x, grad_weight, _ = torch.autograd.grad(out, given, grad.to(out.dtype), create_graph=True)
        seconds.append(torch.autograd.grad(grad_x.square().sum() + grad_weight.square().sum(), given[:2]))
    for one, other in zip(*seconds, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 3e-2
