"""Fuzzing of norms, gated activations, convolutions and custom graphs: a library error, or the right values."""

from __future__ import annotations

import random
import traceback
import warnings

import numpy as np
import pytest
import torch
from custom_graphs import scaled
from fused_calls import FORMULAS, tuple_of

import cudnn_sdpa
from cudnn_sdpa import CudnnSdpaError

ROWS, OF_ROWS = torch.randn(3, 8), torch.randn(8)
IMAGE, FILTERS = torch.randn(2, 4, 5, 6), torch.randn(6, 4, 3, 2)
SIZES = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}

#: The functions, with valid arguments.
CALLS = {
    "rms_norm": (cudnn_sdpa.rms_norm, {"x": ROWS, "weight": OF_ROWS, "eps": 1e-6, "zero_centered": True}),
    "rms_norm with a residual": (
        cudnn_sdpa.rms_norm,
        {"x": ROWS, "weight": OF_ROWS, "residual": torch.randn(3, 8), "activation": "silu"},
    ),
    "layer_norm": (cudnn_sdpa.layer_norm, {"x": ROWS, "weight": OF_ROWS, "bias": torch.randn(8), "eps": 1e-5}),
    "layer_norm with a residual": (
        cudnn_sdpa.layer_norm,
        {"x": ROWS, "weight": OF_ROWS, "bias": torch.randn(8), "residual": torch.randn(3, 8), "activation": "silu"},
    ),
    "silu_mul": (cudnn_sdpa.silu_mul, {"gate": ROWS, "up": torch.randn(3, 8)}),
    "silu_mul of both": (cudnn_sdpa.silu_mul, {"gate": ROWS}),
    "gelu_mul": (cudnn_sdpa.gelu_mul, {"gate": ROWS, "up": torch.randn(3, 8)}),
    "relu_squared": (cudnn_sdpa.relu_squared, {"x": ROWS}),
    "conv1d": (
        cudnn_sdpa.conv1d,
        {"x": torch.randn(2, 4, 9), "weight": torch.randn(6, 4, 3), "bias": torch.randn(6), **SIZES},
    ),
    "conv2d": (
        cudnn_sdpa.conv2d,
        {"x": IMAGE, "weight": FILTERS, "bias": torch.randn(6), **SIZES, "activation": "silu"},
    ),
    "conv3d": (
        cudnn_sdpa.conv3d,
        {"x": torch.randn(1, 2, 4, 4, 4), "weight": torch.randn(3, 2, 3, 2, 1), "bias": None, **SIZES},
    ),
    "graph_op": (scaled, {"x": ROWS, "bias": torch.randn(8), "scale": 0.5}),
}


def made_in_inference_mode(x):
    with torch.inference_mode():
        return x.clone()


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(4)
    return x


def without_warnings(make):
    def quietly(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototype features warn
            return make(x)

    return quietly


OF_TENSORS = {
    "nested": without_warnings(lambda x: torch.nested.nested_tensor(list(x))),
    "jagged": without_warnings(lambda x: torch.nested.nested_tensor([x.flatten()[:3]], layout=torch.jagged)),
    "sparse": lambda x: x.to_sparse(),
    "rows compressed": without_warnings(lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr()),
    "elsewhere": lambda x: x.to("meta"),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "float16": lambda x: x.half(),
    "float64": lambda x: x.double(),
    "complex": lambda x: x.cfloat(),
    "integers": lambda x: x.int(),
    "booleans": lambda x: x > 0,
    "in inference mode": made_in_inference_mode,
    "freed": freed,
    "in numpy": lambda x: x.numpy(),
    "a list": lambda x: x.tolist(),
    "None": lambda _: None,
    "a number": lambda _: 2.5,
    "a shape": lambda x: tuple(x.shape),
    "one dimension more": lambda x: x[None],
    "one less": lambda x: x[0],
    "shorter": lambda x: x[..., :-1],
    "with nothing in it": lambda x: x[..., :0],
    "turned": torch._neg_view,
    "every second": lambda x: torch.cat([x, x], -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "zeros without memory": lambda x: torch._efficientzerotensor(tuple(x.shape)),
}
OF_OPTIONS = [
    *(None, True, -1, 0, 2, 3, 2**31 - 1, 2**31, 2**63, 2**64, 2**100, 10**400, 10**5000, -(10**400)),
    *(0.5, -0.5, 0.0, 1e300, 1e39),
    *(float("nan"), float("inf"), "silu", "mish", "", (1,), (1, 2), (1, 1, 1, 1), [1, 1], (1.5, 1), b"1", 1j),
    *(torch.tensor(1.0), torch.ones(3), np.float32(0.5), np.int64(1), object(), torch.Size((8,)), {"a": 1}, print),
]


def spoiled(r, given):
    """Valid arguments with one or two mutations, and their names."""
    given, names = dict(given), []
    for name in r.sample(list(given), min(len(given), r.choice((1, 1, 2)))):
        if isinstance(given[name], torch.Tensor) and r.random() < 0.85:
            kind = r.choice(list(OF_TENSORS))
            given[name] = OF_TENSORS[kind](given[name])
        else:
            given[name], kind = r.choice(list(enumerate(OF_OPTIONS)))[::-1]
        names.append(f"{name}: {kind}")
    return given, names


def in_float64(value):
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        return value.detach().resolve_neg().double()
    if isinstance(value, int) and value.bit_length() > 63:  # which PyTorch's own functions do not take
        return float(value)
    return value


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_are_refused_or_right(name, trains):
    function, given = CALLS[name]
    right = FORMULAS.get(function, lambda x, bias=None, scale=1.0: x * scale + (0 if bias is None else bias))
    r, outcomes = random.Random(f"{name}, {trains}"), {"right": 0, "refused": 0}
    calls = 200
    for _ in range(calls):
        arguments, what = spoiled(r, given)
        for key, value in arguments.items():
            is_leaf = isinstance(value, torch.Tensor) and value.is_leaf and value.is_floating_point()
            if trains and is_leaf and not value.is_inference() and value is given.get(key):
                arguments[key] = value.detach().requires_grad_()
        try:
            found = function(**arguments)
        except CudnnSdpaError as error:
            outcomes["refused"] += len(str(error)) < 1000
            continue
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            if traceback.extract_tb(error.__traceback__)[-1].name == scaled.reference.__name__:
                outcomes["refused"] += 1  # from the user's code
                continue
            raise AssertionError(f"{name} with {what} ended in {type(error).__name__}: {error}") from error
        outcomes["right"] += 1
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in arguments.values()):
            continue
        wanted = right(**{key: in_float64(value) for key, value in arguments.items()})
        for one, other in zip(tuple_of(found), tuple_of(wanted), strict=True):
            tolerance = 2e-2 if one.dtype in (torch.float16, torch.bfloat16) else 1e-4
            if "layer_norm" in name and "x: expanded" in what:  # rows of one element: 1/sqrt(eps) times the rounding
                tolerance = max(tolerance, 2e-3)
            assert one.shape == other.shape, what
            if not one.is_floating_point() or one.itemsize == 1:  # custom graphs accept these, and round
                continue
            computed = torch.float32 if name == "graph_op" and one.dtype == torch.float64 else one.dtype
            if other.numel() and other.abs().amax() > torch.finfo(computed).max:  # a large value overflows
                continue
            torch.testing.assert_close(
                one.double(), other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=str(what)
            )
    assert min(outcomes.values()) > 0, outcomes
    assert sum(outcomes.values()) == calls, "an error printed the contents of an argument"
