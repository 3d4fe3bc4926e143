"""`rms_norm` and `layer_norm` on the GPU: values and gradients against float64, of rows of any size."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_checks import difference, poison

from cudnn_sdpa import (
    explain,
    layer_norm,
    providers,
    rms_norm,
)

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SHAPES = [
    (64,),
    (7, 4096),
    (3, 5, 48),
    (64, 16, 128),
    (33, 5120),
    (4, 8192),
    (2, 1000),
    (2, 3, 1, 16384),
    (100_000, 64),
]


def leaf(*shape, dtype, of=None):
    x = torch.randn(*shape, device="cuda", dtype=torch.float32) if of is None else of
    return x.to(dtype).requires_grad_()


def assert_like_float64(function, reference, tensors, dtype):
    """Compares the output without and with gradients, twice each on fresh values, and all gradients."""
    for _ in range(2):
        for tensor in tensors:
            tensor.data.normal_()
            tensor.data.add_(0.5)
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        wanted = reference(*exact)
        with torch.no_grad():
            assert difference(function(*tensors), wanted) < TOLERANCE[dtype]
        out = function(*tensors)
        assert out.shape == tensors[0].shape
        assert out.dtype == dtype
        assert difference(out, wanted) < TOLERANCE[dtype]
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, tensors, grad)
        for tensor, one, other in zip(tensors, found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
            assert one.dtype == tensor.dtype
            assert one.shape == tensor.shape
            assert difference(one, other) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("grad_weight", ["same", "float32", "none", "zero-centered"])
def test_rms_norm(shape, dtype, grad_weight):
    size = shape[-1]
    x = leaf(*shape, dtype=dtype)
    centered = grad_weight == "zero-centered"

    def function(x, weight=None):
        return rms_norm(x, weight, 1e-3, zero_centered=centered)

    def reference(x, weight=None):
        return F.rms_norm(x, (size,), None if weight is None else weight + centered, 1e-3)

    weights = [] if grad_weight == "none" else [leaf(size, dtype=torch.float32 if grad_weight == "float32" else dtype)]
    assert_like_float64(function, reference, [x, *weights], dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_layer_norm(shape, dtype):
    size = shape[-1]
    tensors = [leaf(*shape, dtype=dtype), leaf(size, dtype=dtype), leaf(size, dtype=dtype)]
    assert_like_float64(
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-3),
        lambda x, weight, bias: F.layer_norm(x, (size,), weight, bias, 1e-3),
        tensors,
        dtype,
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [64, 1001, 4096, 8192, 16384])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gradients_of_few_rows(rows, size, dtype):
    """One kernel of one block has all of them; `explain` says so on Hopper, up to 8,192 numbers."""
    tensors = [leaf(rows, size, dtype=dtype), leaf(size, dtype=dtype), leaf(size, dtype=dtype)]
    for provider in ("default", "own"):
        with providers(provider):
            assert_like_float64(
                lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (size,), w, 1e-3), tensors[:2], dtype
            )
            assert_like_float64(
                lambda *given: layer_norm(*given, 1e-3),
                lambda x, weight, bias: F.layer_norm(x, (size,), weight, bias, 1e-3),
                tensors,
                dtype,
            )
    has_engine = size * dtype.itemsize % 128 == 0
    if torch.cuda.get_device_capability() == (9, 0):
        report = explain(rms_norm, *tensors[:2], 1e-3).backward
        assert ("own_norm_gradients" in report.key) == (not has_engine or (rows <= 2 and size <= 8192))


FUSED = {
    "residual": ({"residual": True}, None),
    "SiLU": ({}, "silu"),
    "residual and SiLU": ({"residual": True}, "silu"),
    "residual, zero-centered": ({"residual": True, "zero_centered": True}, None),
}


@pytest.mark.parametrize("shape", [(4, 256), (3, 7, 64), (1, 4096), (4096, 4096), (600, 8192), (33, 32768)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fused_activations_and_residuals(name, dtype, shape):
    options, activation = FUSED[name]
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for _ in range(2):
        x, residual = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
        weight = torch.randn(shape[-1], device="cuda", dtype=dtype)
        given = {**options, "activation": activation} | ({"residual": residual} if "residual" in options else {})
        poison(shape, shape, dtype=dtype)
        found = rms_norm(x, weight, 1e-3, **given)
        total = x.double() + residual.double() * ("residual" in options)
        wanted = F.rms_norm(total, shape[-1:], weight.double() + ("zero_centered" in options), 1e-3)
        out, *sums = found if "residual" in options else (found,)
        assert difference(out, F.silu(wanted) if activation else wanted) < tolerance
        assert len(sums) == ("residual" in options)
        assert all(difference(each, total) < tolerance for each in sums)
        assert [(each.shape, each.dtype) for each in (out, *sums)] == [(x.shape, dtype)] * (1 + len(sums))


@pytest.mark.parametrize("size", [1, 7, 99, 100, 1001, 4097])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows_of_sizes_that_are_no_multiple_of_16_bytes(size, dtype):
    """Dense rows, and slices of wider ones, which are copied at any offset."""
    for make in (
        lambda: torch.randn(33, size, device="cuda", dtype=dtype) + 0.5,
        lambda: torch.randn(33, size + 3, device="cuda", dtype=dtype)[:, 3:] + 0.5,
        lambda: (torch.randn(33, size + 3, device="cuda", dtype=dtype) + 0.5)[:, 3:],
    ):
        tensors = [make(), torch.randn(size, device="cuda", dtype=dtype), torch.randn(size, device="cuda", dtype=dtype)]
        tensors = [x.requires_grad_() for x in tensors]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        grad = torch.randn(33, size, device="cuda", dtype=dtype)
        for function, reference, count in (
            (lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (size,), w, 1e-3), 2),
            (lambda x, w, b: layer_norm(x, w, b, 1e-1), lambda x, w, b: F.layer_norm(x, (size,), w, b, 1e-1), 3),
        ):
            wanted = reference(*exact[:count])
            right = torch.autograd.grad(wanted, exact[:count], grad.double())
            for _ in range(2):
                out = function(*tensors[:count])
                assert difference(out, wanted) < TOLERANCE[dtype]
                found = torch.autograd.grad(out, tensors[:count], grad)
                scale = float(grad.double().norm())
                for one, other in zip(found, right, strict=True):
                    error = float((one.double() - other).norm())
                    assert error < 4 * TOLERANCE[dtype] * max(float(other.norm()), 1e-2 * scale)


@pytest.mark.parametrize("n", [1, 3, 16, 32, 48, 64, 96, 100, 1000])
@pytest.mark.parametrize(
    ("dtype", "of_weight"), [(BF16, BF16), (BF16, F32), (torch.float16, F32), (F32, F32), (BF16, None)], ids=str
)
def test_residuals_and_activations_of_all_rows(n, dtype, of_weight):
    """In the norm's kernel where there is one, beside it elsewhere; `explain` shows which. Own kernels have all."""
    x, residual = (torch.randn(2, 7, n, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    weight = None if of_weight is None else (torch.rand(n, device="cuda") + 0.3).to(of_weight).requires_grad_()
    cases = itertools.product(("cudnn", "default"), (False, True), (None, "silu"), (False, True))
    for provider, with_residual, activation, trains in cases:
        for zero_centered in (False, True):
            leaves = [leaf for leaf in (x, weight, residual if with_residual else None) if leaf is not None]
            options = {"residual": residual if with_residual else None, "activation": activation}
            with providers(provider), torch.set_grad_enabled(trains):
                found = rms_norm(x, weight, 1e-4, zero_centered=zero_centered, **options)
                answer = explain(rms_norm, x, weight, 1e-4, zero_centered=zero_centered, **options)
            exact = {id(leaf): leaf.detach().double().requires_grad_() for leaf in leaves}
            total = exact[id(x)] + exact[id(residual)] if with_residual else exact[id(x)]
            wanted = total * (total.square().mean(-1, keepdim=True) + 1e-4).rsqrt()
            wanted = wanted if weight is None else wanted * (exact[id(weight)] + zero_centered)
            wanted = F.silu(wanted) if activation else wanted
            out, *sums = found if with_residual else (found,)
            bound = 2e-2 if dtype is BF16 else 3e-3 if dtype is torch.float16 else 1e-5
            assert (out.double() - wanted).norm() <= bound * wanted.norm() + 1e-6
            for sum_ in sums:
                assert (sum_.double() - total).norm() <= bound * total.norm()
            assert answer.supported, answer.reasons
            is_own = provider == "default"
            is_fused = is_own or (n * x.element_size() % 128 == 0 and of_weight in (None, dtype))
            assert ("the sum of x and residual" in answer.extra_kernels) == (with_residual and not is_fused)
            is_alone = bool(activation) and not is_own and (trains or not is_fused)
            assert ("silu of the result" in answer.extra_kernels) == is_alone
            if trains:
                grads = [torch.randn_like(out) for _ in (out, *sums)]
                exact_out = (wanted, total)[: len(grads)]
                with providers(provider):
                    of_leaves = torch.autograd.grad((out, *sums), leaves, grads)
                exact_of = torch.autograd.grad(exact_out, list(exact.values()), [x.double() for x in grads])
                for one, other in zip(of_leaves, exact_of, strict=True):
                    assert (one.double() - other).norm() <= 3 * bound * other.norm() + 2e-2 * (n < 8) + 1e-4


@pytest.mark.parametrize("shape", [(33, 1), (3, 7, 64), (2, 4096), (5, 1001), (600, 8192), (9, 32768)], ids=str)
@pytest.mark.parametrize(("dtype", "of_weight"), [(BF16, BF16), (BF16, F32), (torch.float16, F32), (F32, F32)], ids=str)
@pytest.mark.parametrize("provider", ["default", "own", "cudnn"])
def test_layer_norms_of_sums(provider, dtype, of_weight, shape):
    """Values, and gradients of all leaves, with what may be left out; `explain` shows the separate steps."""
    options = itertools.product((False, True), (None, "silu"), (False, True), ((), ("weight",), ("weight", "bias")))
    for with_residual, activation, zero_centered, names in options:
        leaves = {"x": leaf(*shape, dtype=dtype), **{name: leaf(shape[-1], dtype=of_weight) for name in names}}
        leaves |= {"residual": leaf(*shape, dtype=dtype)} if with_residual else {}
        given = {"eps": 1e-1, "activation": activation, "zero_centered": zero_centered}
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        total = exact["x"] + exact["residual"] if with_residual else exact["x"]
        weight = exact["weight"] + zero_centered if names else None
        wanted = F.layer_norm(total, shape[-1:], weight, exact.get("bias"), 1e-1)
        wanted = F.silu(wanted) if activation else wanted
        bound = 2e-2 if dtype is BF16 else 4e-3 if dtype is torch.float16 else 2e-5
        with providers(provider):
            poison(shape, shape, dtype=dtype)
            with torch.no_grad():
                inference = layer_norm(**leaves, **given)
            found = layer_norm(**leaves, **given)
            inference, out, *sums = (inference[0], *found) if with_residual else (inference, found)
            grads = [torch.randn_like(out) for _ in (out, *sums)]
            gradients = torch.autograd.grad((out, *sums), list(leaves.values()), grads)
            answer = explain(layer_norm, **leaves, **given)
        right = torch.autograd.grad((wanted, total)[: len(grads)], list(exact.values()), [x.double() for x in grads])
        for one in (inference, out):
            assert (one.double() - wanted).norm() <= bound * wanted.norm() + 1e-6
        assert all(torch.equal(each, leaves["x"] + leaves["residual"]) for each in sums)
        for one, other in zip(gradients, right, strict=True):
            assert (one.double() - other).norm() <= 3 * bound * (other.norm() + 1e-2 * grads[0].double().norm())
        steps = {"the sum of x and residual": with_residual, "silu of the result": bool(activation)}
        assert {step for step in steps if step in answer.extra_kernels} == {
            step for step, is_there in steps.items() if is_there and provider == "cudnn"
        }


def test_gradients_of_rows_of_equal_numbers():
    """The deviation is 0, and a mean of the exact sum would be off by what rounding takes."""
    x, residual = ((torch.randn(64, 1, device="cuda") * 5).to(BF16).repeat(1, 256).requires_grad_() for _ in range(2))
    grad = torch.randn(64, 256, device="cuda").to(BF16)
    for provider in ("default", "own", "cudnn"):
        with providers(provider):
            out, total = layer_norm(x, residual=residual)
            (found,) = torch.autograd.grad(out, x, grad)
        right = (grad.double() - grad.double().mean(-1, keepdim=True)) * 1e-5**-0.5
        assert difference(found, right) < 2e-2
        assert (total.detach()[:, :1] == total.detach()).all()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_layer_norm_without_weight_and_bias_fills_nothing():
    x = torch.randn(64, 1024, device="cuda", dtype=BF16)
    layer_norm(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer_norm(x)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "normalize" in names
    assert "elementwise" not in names
