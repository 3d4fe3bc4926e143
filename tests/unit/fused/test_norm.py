"""`rms_norm` and `layer_norm` on the CPU: values and gradients against float64, arguments, torch.compile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import gpu_on_the_cpu
from fused_calls import assert_gradients, in_float64, tuple_of, with_grad

import cudnn_sdpa
from cudnn_sdpa import DeviceError, DtypeError, OptionError, ShapeError, layer_norm, rms_norm

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(8,), (13,), (1, 64), (5, 1), (5, 33), (2, 3, 16), (3, 1, 7), (2, 3, 4, 24), (1, 1, 1, 5)]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


FUNCTIONS = {"ours": rms_norm, "right": in_float64(rms_norm)}
rms_in_float64, layer_in_float64 = in_float64(rms_norm), in_float64(layer_norm)
LAYERS = layer_norm, layer_in_float64


def values(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 1.5 + 0.4).to(dtype)


LAYOUTS = {
    "transposed": lambda dtype: values(5, 16, dtype=dtype).t(),
    "swapped": lambda dtype: values(4, 3, 16, dtype=dtype).transpose(0, 1),
    "sliced": lambda dtype: values(4, 6, 40, dtype=dtype)[1:, ::2, 8:24],
    "expanded": lambda dtype: values(1, 3, 16, dtype=dtype).expand(4, 3, 16),
    "of one number": lambda dtype: values(3, 1, dtype=dtype).expand(3, 16),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_matches_float64(shape, dtype, assert_rounded):
    x, weight = values(*shape, dtype=dtype), values(shape[-1], dtype=dtype)
    for given in (None, weight, weight.float()):
        out = rms_norm(x, given)
        assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)
        assert_rounded(out, rms_in_float64(x, given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_matches_float64(shape, dtype, assert_rounded):
    x, weight, bias = values(*shape, dtype=dtype), values(shape[-1], dtype=dtype), values(shape[-1], dtype=dtype)
    both = [(None, None), (weight, None), (None, bias), (weight, bias), (weight.float(), bias.float())]
    for given in [*both, (weight.float(), None), (None, bias.float())]:
        out = layer_norm(x, *given)
        assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)
        assert_rounded(out, layer_in_float64(x, *given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_x_may_have_any_layout(layout, dtype, assert_rounded):
    x = LAYOUTS[layout](dtype)
    before, weight = x.clone(), values(x.shape[-1], dtype=dtype)
    for out in (rms_norm(x, weight), layer_norm(x, weight, weight)):
        assert out.is_contiguous()
    assert_rounded(rms_norm(x, weight), rms_in_float64(x, weight))
    if layout != "of one number":  # their deviation is rounding error
        assert_rounded(layer_norm(x, weight, weight), layer_in_float64(x, weight, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_no_eps_is_that_of_pytorch(dtype, compiles, assert_rounded):
    """For squares as small as an eps, each eps gives other values. PyTorch's is not that of x's dtype."""
    x, weight = (torch.randn(7, 64) * 1e-3).to(dtype), torch.rand(64).to(dtype)
    function = torch.compile(rms_norm, fullgraph=True, backend="eager") if compiles else rms_norm
    with cudnn_sdpa.cpu_checks(None):
        out, usual = function(x, weight, None), function(x, weight)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, F.rms_norm(x, (64,), weight), **close)
    assert_rounded(out, rms_in_float64(x, weight, torch.finfo(torch.promote_types(dtype, torch.float32)).eps))
    assert float((usual - out).abs().max()) > 0.2


@pytest.mark.parametrize("eps", [0, 0.0, 1, 0.25, 1e6, 2**64, 2**100])
def test_eps(eps, assert_rounded):
    x, weight = values(5, 24), values(24)
    assert_rounded(rms_norm(x, weight, eps) * 1e3, rms_in_float64(x, weight, eps) * 1e3)
    assert_rounded(layer_norm(x, weight, weight, eps), layer_in_float64(x, weight, weight, eps))


def test_rows_of_zeros_stay_zeros():
    x = torch.zeros(3, 16, requires_grad=True)
    for norm in (rms_norm, layer_norm):
        out = norm(x)
        assert (out == 0).all()
        (grad_x,) = torch.autograd.grad(out.sum(), x)
        assert grad_x.isfinite().all()


def test_large_values_do_not_overflow():
    x = torch.full((2, 16), 6e4, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x), torch.ones_like(x))
    assert (layer_norm(x) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centered"])
@pytest.mark.parametrize("size", [64, 24], ids=["", "in several kernels"])
def test_activation_of_rms_norm(size, dtype, with_residual, zero_centered, assert_rounded):
    x, weight = values(5, size, dtype=dtype), values(size, dtype=dtype)
    options = {"activation": "silu", "zero_centered": zero_centered}
    options["residual"] = values(5, size, dtype=dtype) if with_residual else None
    expected = tuple_of(rms_in_float64(x, weight, **options))
    for result, right in zip(tuple_of(rms_norm(x, weight, **options)), expected, strict=True):
        if size == 64:
            assert_rounded(result, right)
        else:  # each kernel rounds
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(result.double(), right, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centered"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_layer_norm_of_a_sum(activation, dtype, with_residual, zero_centered, assert_rounded):
    """It normalizes the sum that it returns."""
    x, weight, bias = values(5, 24, dtype=dtype), values(24), values(24)
    options = {"activation": activation, "zero_centered": zero_centered}
    for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
        if with_residual:
            residual = values(5, 24, dtype=dtype)
            out, total = layer_norm(x, *given, residual=residual, **options)
            assert torch.equal(total, x + residual)
        else:
            out, total = layer_norm(x, *given, **options), x
        assert_rounded(out, layer_in_float64(total, *given, **options))


@pytest.mark.parametrize("provider", ["default", "own", "cudnn"])
@pytest.mark.parametrize("n", [1, 3, 64])
def test_gradients_of_a_layer_norm_of_a_sum_are_those_of_the_rounded_sum(n, provider):
    """Rows of equal numbers: the mean of the exact sum would be off by as much as one over the deviation enlarges."""
    x, residual, grad = (each.bfloat16() for each in (torch.randn(7, 1) * 5, torch.randn(7, 1), torch.randn(7, n)))
    x, residual = (each.expand(7, n).contiguous().requires_grad_() for each in (x, residual))
    with gpu_on_the_cpu(), cudnn_sdpa.cpu_checks(None), cudnn_sdpa.providers(provider):
        out, total = layer_norm(x, residual=residual)
        (found,) = torch.autograd.grad(out, x, grad)
    exact = total.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(layer_in_float64(exact), exact, grad.double())
    torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=1e-2 * 300)


OPTIONS = [{}, {"zero_centered": True}, {"activation": "silu"}, {"eps": 0.5}, {"eps": 0}]


@pytest.mark.parametrize("shape", [(13,), (1, 64), (5, 33), (2, 3, 4, 24)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_rms_norm(shape, options):
    x, weight, residual = values(*shape), values(shape[-1]), values(*shape)
    for leaves in ([x], [x, weight], [x, weight, residual]):
        calls = [lambda x, w=None, r=None, f=f: f(x, w, **options, residual=r) for f in FUNCTIONS.values()]
        assert_gradients(*calls, leaves)


@pytest.mark.parametrize("used", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_gradients_through_one_result_or_both(norm, used, activation):
    x, weight, residual = values(5, 24), values(24), values(5, 24)
    leaves = [x, weight, residual] if 0 in used else [x, residual]  # the sum does not depend on the weight
    call, right = (
        lambda x, *rest, f=f: f(x, rest[0] if len(rest) > 1 else None, residual=rest[-1], activation=activation)
        for f in (norm, in_float64(norm))
    )
    assert_gradients(call, right, leaves, used)


@pytest.mark.parametrize("shape", [(13,), (1, 64), (5, 33), (2, 3, 4, 24)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_gradients_of_layer_norm(shape, count, options):
    leaves, residual = [values(*shape), values(shape[-1]), values(shape[-1])][:count], values(*shape)
    assert_gradients(*(partial(f, **options) for f in LAYERS), leaves)
    assert_gradients(*(lambda r, *given, f=f: f(*given, **options, residual=r) for f in LAYERS), [residual, *leaves])
    if count == 2:
        calls = (lambda x, bias, f=f: f(x, None, bias, **{"eps": 0.3, **options}) for f in LAYERS)
        assert_gradients(*calls, leaves)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (3, 0), (0,)], ids=str)
def test_empty_tensors(shape):
    x, weight = torch.empty(shape), torch.empty(shape[-1])
    assert rms_norm(x, weight).shape == shape
    assert layer_norm(x, weight, weight).shape == shape
    for norm in (rms_norm, layer_norm):
        for result in norm(x, weight, residual=x, activation="silu"):
            assert result.shape == shape
            assert result is not x
    with pytest.raises(ShapeError, match="weight: got shape"):
        rms_norm(x, torch.empty(shape[-1] + 1))


X, W = torch.ones(3, 8), torch.ones(8)
WRONG = {
    "no tensor": ((None,), {}, OptionError, "x: got NoneType; expected a torch.Tensor"),
    "list": (([1.0, 2.0],), {}, OptionError, "x: got list"),
    "dtype": ((X.cfloat(),), {}, DtypeError, "x: got complex64"),
    "whole numbers": ((X.int(),), {}, DtypeError, "x: got int32"),
    "no dimension": ((torch.tensor(1.0),), {}, ShapeError, "x: got no dimension; expected one"),
    "weight no tensor": ((X, 2.0), {}, OptionError, "weight: got float; expected a torch.Tensor"),
    "weight's shape": ((X, W[:7]), {}, ShapeError, r"weight: got shape \(7,\); expected shape \(8,\)"),
    "weight's rank": ((X, W[None]), {}, ShapeError, r"weight: got shape \(1, 8\)"),
    "weight's dtype": ((X, W.half()), {}, DtypeError, "weight: got float16; expected float32"),
    "weight's other dtype": ((X.half(), W.bfloat16()), {}, DtypeError, "weight: got bfloat16"),
    "weight elsewhere": ((X, W.to("meta")), {}, DeviceError, "weight: got meta"),
    "eps below 0": ((X, W), {"eps": -1e-6}, OptionError, "eps: got -1e-06; expected a number of at least 0"),
    "eps nan": ((X, W), {"eps": float("nan")}, OptionError, "eps: got nan"),
    "eps inf": ((X, W), {"eps": float("inf")}, OptionError, "eps: got inf"),
    "eps bool": ((X, W), {"eps": True}, OptionError, "eps: got True"),
    "eps text": ((X, W), {"eps": "1"}, OptionError, "eps: got '1'"),
    "residual's shape": ((X, W), {"residual": X[:2]}, ShapeError, r"residual: got shape \(2, 8\); expected shape \(3"),
    "residual's dtype": ((X, W), {"residual": X.half()}, DtypeError, "residual: got float16; expected fl"),
    "residual elsewhere": ((X, W), {"residual": X.to("meta")}, DeviceError, "residual: got meta"),
    "residual no tensor": ((X, W), {"residual": 1.0}, OptionError, "residual: got float"),
    "activation": ((X, W), {"activation": "relu"}, OptionError, "activation: got 'relu'; expected None or 'silu'"),
    "activation's type": ((X, W), {"activation": 1}, OptionError, "activation: got 1"),
    "activations": ((X, W), {"activation": ["silu"]}, OptionError, r"activation: got \['silu'\]"),
    "zero_centered": ((X, W), {"zero_centered": 1}, OptionError, "zero_centered: got 1; expected"),
}
WRONG_RMS = {
    **WRONG,
    "eps tensor": ((X, W, torch.tensor(1e-6)), {}, OptionError, "eps: got Tensor; .* no normalized_shape here"),
}
WRONG_LAYER = {
    **WRONG,
    "eps tensor": ((X, W, W, torch.tensor(1e-6)), {}, OptionError, "eps: got Tensor; .* no normalized_shape here"),
    "bias no tensor": ((X, W, 0.0), {}, OptionError, "bias: got float; expected a torch.Tensor"),
    "bias' shape": ((X, W, W[:7]), {}, ShapeError, r"bias: got shape \(7,\); expected shape \(8,\)"),
    "bias' dtype": ((X, None, W.half()), {}, DtypeError, "got float16"),
    "two dtypes": ((X.half(), W, W.half()), {}, DtypeError, "bias: got float16; expected float32, the d"),
    "bias elsewhere": ((X, W, W.to("meta")), {}, DeviceError, "bias: got meta"),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize(
    ("norm", "name"), [*((rms_norm, x) for x in WRONG_RMS), *((layer_norm, x) for x in WRONG_LAYER)]
)
def test_wrong_arguments_are_refused(norm, name, requires_grad):
    arguments, options, error, match = (WRONG_RMS if norm is rms_norm else WRONG_LAYER)[name]
    with pytest.raises(error, match=match):
        norm(*with_grad(arguments, requires_grad), **options)


def test_options_are_keyword_only():
    for call in (lambda: rms_norm(X, W, 1e-6, X), lambda: layer_norm(X, W, W, 1e-6, X)):
        with pytest.raises(TypeError, match="positional"):
            call()


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_results_without_elements_are_dense(norm):
    x = torch.empty_strided((0, 32), (1, 0))
    assert norm(x).stride() == torch.empty(0, 32).stride()
    assert norm(x, torch.ones(32)).stride() == torch.empty(0, 32).stride()


def test_a_compiled_backward_pass_of_one_row_reads_an_expanded_gradient():
    """The bias' gradient is then the result's, whose elements share one address."""
    x, weight, bias = (values(17).requires_grad_() for _ in range(3))
    out = torch.compile(layer_norm, backend="aot_eager")(x, weight, bias)
    expected = F.layer_norm(x, (17,), weight, bias)
    for grad in (torch._efficientzerotensor(17), torch.randn(()).expand(17)):
        found = torch.autograd.grad(out, [x, weight, bias], grad, retain_graph=True)
        right = torch.autograd.grad(expected, [x, weight, bias], grad.clone(), retain_graph=True)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_a_compiled_backward_pass_reads_gradients_at_any_address():
    x, weight = torch.randn(4, 32, requires_grad=True), torch.ones(32)
    grad_out = torch.randn(4 * 32 + 1)[1:].view(4, 32)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (32,), weight, 1e-6), x, grad_out)
    with gpu_on_the_cpu(), cudnn_sdpa.cpu_checks(None):
        out = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)(x, weight, 1e-6)
        (found,) = torch.autograd.grad(out, x, grad_out)
    torch.testing.assert_close(found, expected)
