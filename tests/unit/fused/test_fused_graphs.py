"""The graphs of all built-in fused operations, and own kernels, forward and backward, compute what float64 does.

Plans of cuDNN evaluate what the builders of their keys build, in float64, so results are as exact as their dtype.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from fused_calls import in_float64, tuple_of

import cudnn_sdpa
from cudnn_sdpa import cpu_checks, providers
from cudnn_sdpa.fused import activation_graphs, conv_graphs, norm_graphs
from cudnn_sdpa.fused.graph_op import GraphFunction

EPS = 0.3
FACTOR = {"weight": (32,)}


#: The function, the shapes of its tensors, its options, and the graphs of its results and gradients.
CASES: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, Any], set[str]]] = {}

for _weight, _residual, _centered in itertools.product((True, False), repeat=3):
    _shapes = {"x": (3, 5, 32), **(FACTOR if _weight else {}), **({"residual": (3, 5, 32)} if _residual else {})}
    _options = {"eps": EPS, "zero_centered": _centered}
    _name = ", ".join(["rms_norm", *_shapes, *["zero-centered"] * _centered])
    CASES[_name] = cudnn_sdpa.rms_norm, _shapes, _options, {"rms_norm_rows", "rms_norm_gradients"}
    CASES[f"{_name}, silu"] = cudnn_sdpa.rms_norm, _shapes, {**_options, "activation": "silu"}, {"rms_norm_rows"}

_NORM = {"x": (3, 5, 32), **FACTOR, "bias": (32,), "residual": (3, 5, 32)}
for _given, _residual, _centered, _activation in itertools.product(
    ((), ("weight",), ("bias",), ("weight", "bias")), ((), ("residual",)), (False, True), (None, "silu")
):
    _names = [*_given, *_residual]
    CASES[", ".join(["layer_norm", *_names, *["zero-centered"] * _centered, *["silu"] * bool(_activation)])] = (
        cudnn_sdpa.layer_norm,
        {name: _NORM[name] for name in ("x", *_names)},
        {"eps": EPS, "zero_centered": _centered, "activation": _activation},
        {"layer_norm_rows", "layer_norm_gradients"},
    )

_ROWS = {"gate": (4, 48), "up": (4, 48)}
_OF_SILU = {"silu_mul_rows", "silu_mul_gradients"}
CASES |= {
    "silu_mul": (cudnn_sdpa.silu_mul, _ROWS, {}, _OF_SILU),
    "silu_mul, one tensor": (cudnn_sdpa.silu_mul, {"gate": (4, 96)}, {}, _OF_SILU),
    "gelu_mul": (cudnn_sdpa.gelu_mul, _ROWS, {}, {"gelu_mul_rows"}),
    "relu_squared": (cudnn_sdpa.relu_squared, {"x": (4, 48)}, {}, {"relu_squared_rows"}),
}

_SIZES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"stride": 2, "padding": 3, "dilation": 1, "groups": 1},
        {"stride": 1, "padding": 0, "dilation": 2, "groups": 2},
    ],
    2: [
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2), "groups": 1},
        {"stride": 1, "padding": 1, "dilation": (2, 1), "groups": 4},
    ],
    3: [{"stride": (1, 2, 1), "padding": (2, 0, 1), "dilation": (1, 1, 2), "groups": 2}],
}
for _rank, _all in _SIZES.items():
    _added = [(False, None), *((True, activation) for activation in conv_graphs.ACTIVATIONS)]
    for _sizes, (_bias, _activation) in itertools.product(_all, _added):
        _shapes = {"x": (2, 4, *(7, 6, 5)[:_rank]), "weight": (8, 4 // _sizes["groups"], *(3, 2, 2)[:_rank])}
        _shapes |= {"bias": (8,)} if _bias else {}
        _name = f"conv{_rank}d, {', '.join(map(str, _sizes.values()))}, {'bias, ' * _bias}{_activation}"
        _graphs = {"convolution", "conv_dgrad", "conv_wgrad"} if _activation is None else {"convolution"}
        _options = {**_sizes, "activation": _activation}
        CASES[_name] = getattr(cudnn_sdpa, f"conv{_rank}d"), _shapes, _options, _graphs

DIFFERENTIABLE = {name for name, case in CASES.items() if len(case[-1]) > 1}


def run(name: str, wanted: tuple[str, ...] = (), provider: str = "cudnn") -> set[str]:
    """Makes a call on random tensors and holds results and gradients against float64; the names of its graphs."""
    function, shapes, options, _ = CASES[name]
    tensors = {argument: torch.randn(shape) + 0.1 for argument, shape in shapes.items()}
    leaves = {argument: x.double().requires_grad_(argument in wanted) for argument, x in tensors.items()}
    before = len(FakePlan.launched)
    with gpu_on_the_cpu(), cpu_checks(None), providers(provider):
        out = tuple_of(function(**{n: x.requires_grad_(n in wanted) for n, x in tensors.items()}, **options))
        grads = [torch.randn_like(x) for x in out]
        found = torch.autograd.grad(out, [tensors[n] for n in wanted], grads) if wanted else ()
    of_float64 = tuple_of(in_float64(function)(**leaves, **options))
    grads = [x.double() for x in grads]
    gradients = torch.autograd.grad(of_float64, [leaves[n] for n in wanted], grads) if wanted else ()
    for one, other in zip((*out, *found), (*of_float64, *gradients), strict=True):
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=1e-5, atol=1e-5)
    assert {key.provider for key in FakePlan.launched[before:]} == {None if provider == "cudnn" else provider}
    return {key.name for key in FakePlan.launched[before:]}


@pytest.mark.parametrize("name", CASES)
def test_results_are_right(name):
    graphs = CASES[name][-1]
    assert run(name) == {graph for graph in graphs if "grad" not in graph}


OWN = [name for name in CASES if not name.startswith("conv")]


@pytest.mark.parametrize("name", OWN)
def test_results_of_own_kernels_are_right(name):
    graphs = run(name, provider="own")
    assert graphs == {"own_norm" if "norm" in name else "own_activation"}


@pytest.mark.parametrize("name", OWN)
def test_gradients_of_own_kernels_are_right(name):
    graphs = run(name, tuple(CASES[name][1]), provider="own")
    own = "own_norm" if "norm" in name else "own_activation"
    assert graphs == {own, f"{own}_gradients"}


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_gradients_are_right(name):
    assert run(name, tuple(CASES[name][1])) == CASES[name][-1]


@pytest.mark.parametrize(
    ("wanted", "graph"), [("gate", "silu_mul_gradients"), ("up", "silu_mul_grad_up")], ids=["gate", "up"]
)
def test_one_gradient_of_two_is_right(wanted, graph):
    assert run("silu_mul", (wanted,)) == {"silu_mul_rows", graph}
    assert len(FakePlan.launched[-1].outputs) == 1


def test_no_built_in_graph_is_left_out():
    graphs = {
        value.__name__
        for module in (activation_graphs, conv_graphs, norm_graphs)
        for value in vars(module).values()
        if isinstance(value, GraphFunction)
    }
    of_own_kernels = {"gelu_mul_gradients", "relu_squared_gradient", "rms_norm_fp8_rows", "layer_norm_fp8_rows"}
    assert graphs == set().union(*(case[-1] for case in CASES.values()), {"silu_mul_grad_up"}, of_own_kernels)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("provider", ["default", "own"])
def test_own_kernels_read_no_created_weight_and_bias(provider, trains):
    """A gradient of the bias alone takes a weight, and cuDNN's engines both."""
    x, bias = torch.randn(3, 64).requires_grad_(trains), torch.randn(64)
    for given, created in (((), ()), ((torch.rand(64),), ()), ((None, bias), ("weight",))):
        before = len(FakePlan.launched)
        with gpu_on_the_cpu(), cpu_checks(None), providers(provider):
            out = cudnn_sdpa.layer_norm(x, *given)
            if trains:
                out.sum().backward()
        forward, *_ = FakePlan.launched[before:]
        names = {name for name, tensor in zip(("weight", "bias"), given, strict=False) if tensor is not None}
        assert {each.name for each in forward.inputs} & {"weight", "bias"} == names | set(created)
        assert forward.name == "own_norm"


@pytest.mark.parametrize("other", ["cudnn", "fa4"])
def test_a_backward_pass_is_that_of_its_forward_pass(other):
    """SiLU within the kernel, and the gradient of the sum, have own kernels alone."""
    x, residual, weight = (torch.randn(shape).requires_grad_() for shape in ((3, 64), (3, 64), (64,)))
    leaves = [each.detach().double().requires_grad_() for each in (x, weight, residual)]
    with gpu_on_the_cpu(), cpu_checks(None):
        with providers("default"):
            found = cudnn_sdpa.rms_norm(x, weight, EPS, residual=residual, activation="silu")
        with providers(other):
            gradients = torch.autograd.grad(found, (x, weight, residual), [torch.ones_like(x)] * 2)
    expected = in_float64(cudnn_sdpa.rms_norm)(leaves[0], leaves[1], EPS, residual=leaves[2], activation="silu")
    right = torch.autograd.grad(expected, leaves, [torch.ones_like(leaves[0])] * 2)
    for one, of_float64 in zip(gradients, right, strict=True):
        torch.testing.assert_close(one.double(), of_float64, rtol=1e-5, atol=1e-5)


def test_a_trained_activation_is_no_engine_of_cudnns():
    x = torch.empty(3, 64, device="meta")
    with providers("cudnn", "own"):
        for trains, served in ((True, "own"), (False, None)):
            described = norm_graphs.rms_norm_rows.describe(x.requires_grad_(trains), None, EPS, activation="silu")
            assert described.key(TARGET, 0).provider == served


@pytest.mark.parametrize("name", ["gelu_mul", "relu_squared"])
def test_gradients_of_gates_at_any_size(name):
    sizes = torch.tensor([0.0, 1e-30, 0.1, 1.0, 3.0, 5.4, 13.0, 20.0, 1e6, 1e19, 1e38, torch.inf, torch.nan])
    x = torch.cat([sizes, -sizes, torch.zeros(6)]).view(1, -1).requires_grad_()
    by = torch.linspace(0.5, 2.0, x.numel()).view(x.shape)
    given = (x, by) if name == "gelu_mul" else (x,)
    exact = x.detach().double().requires_grad_()
    for on_gpu in (True, False):
        with gpu_on_the_cpu() if on_gpu else contextlib.nullcontext(), cpu_checks(None), providers("own"):
            (found,) = torch.autograd.grad(getattr(cudnn_sdpa, name)(*given).sum(), x)
        if name == "relu_squared":
            right = torch.where(exact < 0, 0.0, 2 * exact)
        else:
            share, density = torch.special.ndtr(exact), torch.exp(-(exact**2) / 2) / (2 * torch.pi) ** 0.5
            right = by * (share + torch.where(exact.abs() < 1e9, exact * density, density))
        torch.testing.assert_close(found.double(), right.detach(), rtol=1e-5, atol=3e-7, equal_nan=True)


def test_relu_of_minus_infinity_and_nan():
    x = torch.tensor([[-torch.inf, -3.0, torch.inf, torch.nan, 2.0, -0.0, 1.0, -1.0]])
    with gpu_on_the_cpu(), cpu_checks(None), providers("own"):
        found = cudnn_sdpa.relu_squared(x)
    torch.testing.assert_close(found, torch.relu(x).square(), equal_nan=True)
