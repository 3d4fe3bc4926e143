"""Kernels and choices that measurements decide: values of each form, and the sizes that take it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from fused_calls import in_float64, tuple_of

from cudnn_sdpa import (
    conv2d,
    cpu_checks,
    explain,
    gelu_mul,
    layer_norm,
    providers,
    record_plans,
    relu_squared,
    rms_norm,
    silu_mul,
)
from cudnn_sdpa.fused import activation_kernels, conv, norm_kernels, own
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from cudnn_sdpa.graph.layouts import TensorLayout

BF16, F32 = torch.bfloat16, torch.float32
CLOSE = {BF16: {"rtol": 2e-2, "atol": 2e-2}, F32: {"rtol": 2e-5, "atol": 2e-5}}
TWO_PROCESSORS = replace(TARGET, properties=tuple({**dict(TARGET.properties), "multiProcessorCount": 2}.items()))


def assert_by_own_kernels(function, *tensors, call=lambda f, *tensors: f(*tensors), target=TARGET, sums=False):
    """Holds results of a call and all gradients against float64; those of sums over many numbers by the largest."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    before = len(FakePlan.launched)
    with gpu_on_the_cpu(target=target), cpu_checks(None), providers("own"):
        found = tuple_of(call(function, *leaves))
        grads = [torch.randn_like(x) for x in found]
        gradients = torch.autograd.grad(found, leaves, grads)
    right = tuple_of(call(in_float64(function), *exact))
    of_right = torch.autograd.grad(right, exact, [x.double() for x in grads])
    for one, other in zip((*found, *gradients), (*right, *of_right), strict=True):
        size = other.detach().abs().max() if sums else 1.0
        torch.testing.assert_close(one.detach().double() / size, other.detach() / size, **CLOSE[tensors[0].dtype])
    assert [key.provider for key in FakePlan.launched[before:]] == ["own", "own"]


GATES = {"silu_mul": silu_mul, "gelu_mul": gelu_mul, "relu_squared": relu_squared}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("few", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 341), (2, 512), (5, 1024), (1, 4096)], ids=str)
def test_gates_of_each_form(name, few, shape, monkeypatch):
    """Rows that lie one behind the other, in narrow units and in those of 16 bytes, that fill blocks and do not."""
    if not few:
        monkeypatch.setattr(activation_kernels, "_NARROW", {"activate": (8, 0), "gradients": (4, 0)})
    for dtype in (BF16, F32):
        tensors = [torch.randn(shape).to(dtype) for _ in range(2 - (name == "relu_squared"))]
        assert_by_own_kernels(GATES[name], *tensors)


def test_a_gate_of_a_number():
    x = torch.randn(())
    with gpu_on_the_cpu(), cpu_checks(None):  # by the default, which reads the table
        found = relu_squared(x)
    torch.testing.assert_close(found.double(), F.relu(x.double()).square())


@pytest.mark.parametrize("n", [8, 136, 1024])
def test_gates_of_halves(n):
    """Rows with gaps between them; and one row, of which there are none."""
    for rows in (1, 7):
        assert_by_own_kernels(silu_mul, torch.randn(rows, 2 * n))
        parts = torch.randn(rows, 2 * n).to(BF16)
        assert_by_own_kernels(silu_mul, parts, call=lambda f, x: f(*x.chunk(2, -1)))


def test_one_gradient_of_a_gate_leaves_no_trace_of_the_other():
    gate, up, grad = (torch.randn(3, 64) for _ in range(3))
    for wanted in (0, 1):
        leaves = [x.clone().requires_grad_(i == wanted) for i, x in enumerate((gate, up))]
        exact = [x.double().requires_grad_(i == wanted) for i, x in enumerate((gate, up))]
        with gpu_on_the_cpu(), cpu_checks(None), providers("own"):
            (found,) = torch.autograd.grad(silu_mul(*leaves), leaves[wanted], grad)
        (right,) = torch.autograd.grad(F.silu(exact[0]) * exact[1], exact[wanted], grad.double())
        torch.testing.assert_close(found.double(), right, **CLOSE[F32])


def program_of(operation, shape, dtype, *, sums=False, **options):
    """The program of rows of this shape, with a weight, and with a residual if they are `sums`."""
    x, weight = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[-1:], dtype=dtype, device="meta")
    given = {"grad": x} if operation is norm_kernels.own_norm_gradients else {}
    results = [x, weight] if given else [x]
    if sums:
        given["residual"] = x
        results.append(x)
    key = own.key_of(
        operation, {**given, "x": x, "weight": weight, "scale": 1.0}, results, options, target=TARGET, device=None
    )
    return operation.program(key)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("n", [64, 100, 1001, 4096])
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_gradients_of_few_rows(rows, n, dtype):
    """Up to four rows, or as many short ones as a block has, take one kernel, the gradient of the weight included."""
    for shift, activation in itertools.product((False, True), (None, "silu")):
        x, residual = (torch.randn(rows, n).to(dtype) for _ in range(2))
        weight = torch.rand(n).to(F32 if shift else dtype) + 0.5
        options = {"eps": 1e-3, "activation": activation, "zero_centered": shift}
        of_sum = lambda f, x, r, w, options=options: f(x, w, residual=r, **options)  # noqa: E731
        assert_by_own_kernels(rms_norm, x, residual, weight, call=of_sum, sums=True)
        assert_by_own_kernels(rms_norm, x, weight, call=lambda f, x, w, o=options: f(x, w, **o), sums=True)
        if shift:
            of_layer = lambda f, x, r, w, b, options=options: f(x, w, b, residual=r, **options)  # noqa: E731
            assert_by_own_kernels(layer_norm, x, residual, weight, torch.randn(n), call=of_layer, sums=True)
    bias = torch.randn(n).to(dtype)
    assert_by_own_kernels(layer_norm, x, weight.to(dtype), bias, sums=True)
    program = program_of(norm_kernels.own_norm_gradients, (rows, n), dtype, layer=False, activation=None)
    tiles = norm_kernels.Tiles.of(TensorLayout.contiguous((rows, n), dtype), numbers=8, spreads=True)
    is_alone = rows <= max(4, tiles.rows)
    assert [call.kernel.name for call in program.calls] == ["gradients", *["sum_blocks"] * (not is_alone)]
    assert bool(program.workspace) == (not is_alone)


@pytest.mark.parametrize("n", [4096, 4104, 8192, 16384])
def test_sums_of_long_rows(n):
    """A row of more than 8 KB has the threads of a whole block."""
    x, residual = (torch.randn(5, n).to(BF16) for _ in range(2))
    weight = torch.rand(n).to(BF16) + 0.5
    of_sum = lambda f, x, r, w: f(x, w, residual=r)  # noqa: E731
    assert_by_own_kernels(rms_norm, x, residual, weight, call=of_sum, target=TWO_PROCESSORS, sums=True)
    plain, of_sum = (
        program_of(norm_kernels.own_norm, (500, n), BF16, sums=sums, layer=False, activation=None).knobs["threads"]
        for sums in (False, True)
    )
    assert of_sum == (256 if n == 4096 else 1024)
    assert plain == {4096: 256, 4104: 512, 8192: 512, 16384: 1024}[n]


# The choice.


def explained(rows, n, function=rms_norm):
    x, weight = (torch.empty(*shape, dtype=BF16, device="meta", requires_grad=True) for shape in ((rows, n), (n,)))
    return explain(function, x, weight, *[weight] * (function is layer_norm))


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_few_rows_of_gradients_are_served_by_own_kernels(function, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    for (rows, n), kernel in {
        (1, 4096): "own",
        (2, 4096): "own",
        (1, 64): "own",
        (2, 8192): "own",
        (3, 4096): "cudnn",
        (1, 16384): "cudnn",
        (4096, 4096): "cudnn",
    }.items():
        report = explained(rows, n, function).backward
        assert ("own_norm_gradients" in report.key) == (kernel == "own"), (rows, n)
        assert report.choice.startswith("own kernels: measured" if kernel == "own" else "cuDNN's engines: measured")
    with providers("cudnn"):
        assert "own" not in explained(1, 4096, function).backward.key
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "b200")
    assert "own" not in explained(1, 4096, function).backward.key


def test_calls_that_meet_a_known_bug_of_own_kernels_are_cudnns(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    bug = KnownIssue("it skips a row", "seen on an H200", "refused", concerns=lambda _: True, provider="own")
    monkeypatch.setattr(known_issues, "FUSED_ISSUES", (*known_issues.FUSED_ISSUES, bug))
    x, weight = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((8, 4096), (4096,)))
    with providers("own"):
        for found in (explain(rms_norm, x, weight), explain(silu_mul, x, x), explain(layer_norm, x, weight, weight)):
            assert (found.provider, found.supported) == ("cudnn", True)
            assert found.choice == f"cuDNN's engines: own kernels do not serve it, as {bug}"
        refused = explain(layer_norm, x, weight, weight, residual=x)  # cuDNN adds nothing before it
    assert refused.reasons == [str(bug)]


def test_the_faster_kernel_is_preferred():
    for row in own.preferences():
        assert (row.kernel == "own") == (row.own_us <= row.cudnn_us), row
    assert all(row.separate_us < row.fused_us for row in conv.preferences())


#: A row for images of 10 × 10 to 14 × 14.
ROW = conv.preferences()[0]._replace(weight=(8, 8, 3, 3), pixels=(100, 200))


def image(batch, channels, size, dtype=BF16):
    x = torch.empty(batch, channels, size, size, dtype=dtype, device="meta")
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("batch", "size", "options", "is_separate"),
    [
        (4, 96, {}, True),
        (5, 96, {}, True),
        (9, 64, {}, True),
        (1, 96, {}, False),
        (16, 96, {}, False),
        (4, 96, {"activation": "gelu"}, False),
        (4, 96, {"stride": 2}, False),
        (4, 96, {"dilation": 2}, False),
        (4, 96, {"dtype": F32}, False),
        (4, 96, {"provider": "cudnn"}, False),
        (4, 96, {"target": "b200"}, False),
    ],
    ids=str,
)
def test_a_measured_convolution_has_a_separate_activation(batch, size, options, is_separate, monkeypatch):
    options = {"padding": 1, "activation": "silu", **options}
    dtype, provider = options.pop("dtype", BF16), options.pop("provider", "default")
    monkeypatch.setenv("CUDNN_SDPA_TARGET", options.pop("target", "h200"))
    weight, bias = image(320, 320, 3, dtype), torch.empty(320, dtype=dtype, device="meta")
    with providers(provider):
        report = explain(conv2d, image(batch, 320, size, dtype), weight, bias, **options)
    assert ("silu of the result" in report.extra_kernels) == is_separate
    assert ("silu in a kernel of its own: measured " in str(report)) == is_separate
    other = explain(conv2d, image(4, 640, 48), image(640, 640, 3), padding=1, activation="silu")
    assert not other.extra_kernels


def test_plans_are_recorded_as_the_gpu_would_use_them(monkeypatch):
    monkeypatch.setattr(conv, "preferences", lambda: [ROW])
    x, weight = image(1, 8, 10), image(8, 8, 3)
    for target, activation in (("h200", None), ("b200", "silu")):
        with record_plans(target=target) as manifest:
            conv2d(x, weight, padding=1, activation="silu")
        (plan,) = manifest.plans
        assert dict(plan["options"])["activation"] == activation
    assert not conv.preference(x, weight, dict.fromkeys(("stride", "dilation"), (1, 1)), groups=1, activation="silu")


def test_a_convolution_follows_its_measurement(monkeypatch):
    monkeypatch.setattr(conv, "preferences", lambda: [ROW])
    weight, bias = (torch.randn(*shape).to(BF16) for shape in ((8, 8, 3, 3), (8,)))
    for size, provider, is_separate in ((10, "default", True), (16, "default", False), (10, "cudnn", False)):
        x = torch.randn(1, 8, size, size).to(BF16)
        for _ in range(3):  # the last ones are known calls
            with gpu_on_the_cpu(), providers(provider):
                found = conv2d(x, weight, bias, padding=1, activation="silu")
            assert dict(FakePlan.launched[-1].option_values)["activation"] == (None if is_separate else "silu")
        exact = F.silu(F.conv2d(x.double(), weight.double(), bias.double(), padding=1))
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
