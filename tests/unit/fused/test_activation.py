"""`silu_mul`, `gelu_mul` and `relu_squared` on the CPU: values and gradients, layouts, arguments, torch.compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fused_calls import assert_gradients, in_float64, with_grad

from cudnn_sdpa import (
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    gelu_mul,
    relu_squared,
    silu_mul,
)
from cudnn_sdpa.fused.activation_graphs import silu_mul_grad_up, silu_mul_gradients

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CLOSE = {torch.float32: (2e-5, 1e-5), torch.bfloat16: (1e-2, 1e-3), torch.float16: (2e-3, 1e-4)}


ALL = {function.__name__: function for function in (silu_mul, gelu_mul, relu_squared)}
silu_in_float64 = in_float64(silu_mul)


def values(*shape, dtype=torch.float32):
    return (2 * torch.randn(shape)).to(dtype)


def halves(*shape):
    return lambda dtype: values(*shape, dtype=dtype).chunk(2, dim=-1)


def two(make):
    return lambda dtype: (make(dtype), make(dtype))


#: Strided tensors that are read in place.
STRIDED = {
    "halves of one row": halves(1, 26),
    "halves": halves(2, 5, 32),
    "halves, split": halves(3, 4, 512),
    "halves of four dimensions": halves(2, 3, 4, 64),
    "quarters": lambda dtype: values(6, 64, dtype=dtype).chunk(4, dim=-1)[1:3],
    "sliced": two(lambda dtype: values(4, 40, dtype=dtype)[1:, 8:24]),
    "every second row": two(lambda dtype: values(6, 256, dtype=dtype)[::2, :128]),
    "one row for all": two(lambda dtype: values(1, 24, dtype=dtype).expand(5, 24)),
    "halves of one number": halves(5, 2),
    "one number of many": two(lambda dtype: values(5, 3, dtype=dtype)[:, 1:2]),
    "one dense, one a half": lambda dtype: (values(5, 16, dtype=dtype), values(5, 32, dtype=dtype)[:, 16:]),
    "one a half, one dense": lambda dtype: (values(5, 32, dtype=dtype)[:, 16:], values(5, 16, dtype=dtype)),
}


def case(name, *shape, dtype=torch.float32):
    return [values(*shape, dtype=dtype) for _ in range(1 if name == "relu_squared" else 2)]


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("name", ALL)
def test_values_of_tensors_that_are_not_dense(name, layout, dtype, assert_rounded):
    function = ALL[name]
    gate, up = STRIDED[layout](dtype)
    tensors = (up,) if name == "relu_squared" else (gate, up)
    out = function(*tensors)
    assert (out.shape, out.dtype, out.is_contiguous()) == (up.shape, dtype, True)
    assert_rounded(out, in_float64(function)(*tensors))


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (26,), (1, 64), (5, 34), (3, 512), (2, 3, 4, 256)], ids=str)
def test_gate_and_up_in_one_tensor(shape, dtype, assert_rounded):
    both = values(*shape, dtype=dtype)
    out = silu_mul(both)
    assert (out.shape, out.is_contiguous()) == ((*shape[:-1], shape[-1] // 2), True)
    assert torch.equal(out, silu_mul(*both.chunk(2, dim=-1)))
    assert_rounded(out, silu_in_float64(both))


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("name", ALL)
def test_extreme_numbers(name):
    function = ALL[name]
    x = torch.tensor([-torch.inf, -1e4, -30.0, -0.0, 0.0, 30.0, 1e4])[1:]
    tensors = [x] if name == "relu_squared" else [x, torch.ones_like(x)]
    torch.testing.assert_close(function(*tensors), in_float64(function)(*tensors).float())
    nan = torch.tensor([torch.nan, 1.0])
    assert function(*[nan] * len(tensors)).isnan().tolist() == [True, False]


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(13,), (1, 64), (5, 34), (2, 3, 256)], ids=str)
def test_gradients_of_silu_mul(shape, dtype):
    both = [values(*shape, dtype=dtype)]
    assert_gradients(silu_mul, silu_in_float64, case("silu_mul", *shape, dtype=dtype), close=CLOSE)
    if shape[-1] % 2 == 0:
        assert_gradients(silu_mul, silu_in_float64, both, close=CLOSE)
        assert_gradients(lambda both: silu_mul(*both.chunk(2, dim=-1)), silu_in_float64, both, close=CLOSE)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_empty_tensors(name, shape):
    out = ALL[name](*case(name, *shape))
    assert (out.shape, out.is_contiguous()) == (shape, True)


X = torch.ones(3, 8)
WRONG = {
    "no tensor": ((None, X), OptionError, "gate: got NoneType; expected a torch.Tensor"),
    "dtype": ((X.cfloat(), X.cfloat()), DtypeError, "gate: got complex64; expected float16"),
    "whole numbers": ((X.int(), X.int()), DtypeError, "gate: got int32"),
    "up no tensor": ((X, 1.0), OptionError, "up: got float; expected a torch.Tensor"),
    "two dtypes": ((X, X.half()), DtypeError, "up: got float16; expected float32, the dtype of gate"),
    "two shapes": ((X, X[:, :4]), ShapeError, r"up: got shape \(3, 4\); expected shape \(3, 8\): that of gate"),
    "no broadcast": ((X, X[:1]), ShapeError, r"up: got shape \(1, 8\)"),
    "elsewhere": ((X, X.to("meta")), DeviceError, "up: got meta; expected cpu"),
    "gate not dense": ((X.t(), torch.ones(8, 3)), LayoutError, r"gate: got strides \(1, 8\).*Use gate.contiguous"),
    "up not dense": ((torch.ones(8, 3), X.t()), LayoutError, r"up: got strides \(1, 8\); expected a dense last dim"),
    "every second": ((X[:, ::2], X[:, ::2]), LayoutError, r"gate: got strides \(8, 2\); expected a dense last dim"),
    "rows at two distances": (
        (torch.ones(4, 6, 8)[:, :3], torch.ones(4, 3, 8)),
        LayoutError,
        r"gate: got shape \(4, 3, 8\), strides \(48, 8, 1\); expected rows at one stride.*Use gate.contiguous",
    ),
    "up's rows at two distances": (
        (torch.ones(4, 3, 8), torch.ones(3, 4, 8).transpose(0, 1)),
        LayoutError,
        "up: got shape .*rows at one stride",
    ),
}
WRONG_BOTH = {
    "no tensor": (None, OptionError, "gate: got NoneType; expected a torch.Tensor"),
    "no dimension": (torch.tensor(1.0), ShapeError, r"gate: got shape \(\); expected an even last dimension"),
    "odd": (torch.ones(3, 7), ShapeError, r"gate: got shape \(3, 7\); expected an even last dimension"),
    "dtype": (X.cfloat(), DtypeError, "gate: got complex64"),
    "not dense": (torch.ones(8, 3).t(), LayoutError, r"gate: got strides \(1, 3\)"),
    "rows at two distances": (torch.ones(4, 6, 8)[:, :3], LayoutError, "gate: got .*rows at one stride"),
}
WRONG_SQUARED = {
    "no tensor": (None, OptionError, "x: got NoneType; expected a torch.Tensor"),
    "dtype": (X.cfloat(), DtypeError, "x: got complex64"),
    "not dense": (X.t(), LayoutError, r"x: got strides \(1, 8\).*Use x.contiguous"),
    "rows at two distances": (torch.ones(4, 6, 8)[:, :3], LayoutError, "x: got .*rows at one stride.*Use x.contig"),
}


@pytest.mark.parametrize("function", [silu_mul, gelu_mul], ids=lambda function: function.__name__)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradients"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name, requires_grad, function):
    tensors, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        function(*with_grad(tensors, requires_grad))


@pytest.mark.parametrize("name", WRONG_BOTH)
def test_a_wrong_joint_tensor_is_refused(name):
    both, error, match = WRONG_BOTH[name]
    with pytest.raises(error, match=match):
        silu_mul(both)


@pytest.mark.parametrize("name", WRONG_SQUARED)
def test_wrong_arguments_of_relu_squared_are_refused(name):
    x, error, match = WRONG_SQUARED[name]
    with pytest.raises(error, match=match):
        relu_squared(x)


def swish_backward(loss, input):  # noqa: A002
    slope = torch.sigmoid(input) * (1 + input * torch.sigmoid(-input))
    return torch.where(input < 1e7, loss * slope, 0.0)


#: cuDNN's pointwise operations on tensors; `swish_backward` as cuDNN 9.19 has it on an H100.
ON_TENSORS = SimpleNamespace(
    sigmoid=torch.sigmoid,
    swish=F.silu,
    swish_backward=swish_backward,
    add=lambda a, b: a + b,
    sub=lambda a, b: a - b,
    mul=lambda a, b: a * b,
)


@pytest.mark.parametrize(
    ("graph", "options", "of"),
    [
        (silu_mul_gradients, {}, slice(None)),
        (silu_mul_gradients, {"of_up": False}, slice(1)),
        (silu_mul_grad_up, {}, slice(1, None)),
    ],
    ids=["both", "gate", "up"],
)
def test_graphs_of_gradients_are_right_for_gates_of_any_size(graph, options, of):
    sizes = torch.tensor([0.0, 1e-30, 0.1, 1.0, 5.0, 15.0, 50.0, 88.0, 105.0, 1e6, 1e8, 1e10, 1e19, 1e30, 3.3e38])
    gate = torch.cat([sizes, -sizes])
    up, grad = torch.full_like(gate, 0.75), torch.full_like(gate, -0.5)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    (F.silu(exact[0]) * exact[1]).backward(grad.double())
    given = {"grad": grad, "gate": gate, "up": up}
    found = graph._builder(ON_TENSORS, **{name: given[name] for name in graph.operands}, **options)
    wanted = [x.grad for x in exact][of]
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-6, atol=1e-35)
