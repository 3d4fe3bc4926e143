"""`torch.compile` of training calls."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError, fallback, scaled_dot_product_attention, sdpa
from tests.unit.pytorch_equivalents import compilations

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def inputs(sq=7, skv=9, batch=2, *, transposed=False):
    sizes = (4, sq, 16), (2, skv, 16), (2, skv, 24)
    if transposed:
        return [torch.randn(batch, length, heads, dim).transpose(1, 2) for heads, length, dim in sizes]
    return [torch.randn(batch, *size) for size in sizes]


FUNCTIONS = {
    "dense": sdpa,
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right"),
    "lse": lambda q, k, v: sdpa(q * 1.5, k, v, return_lse=True)[0],
    "in a module": lambda q, k, v: (sdpa(q, k, v).transpose(1, 2).flatten(2) + 0.5).relu(),
    "window_size": lambda q, k, v: sdpa(q, k, v, window_size=(3, 1), scale=0.4),
    "drop-in": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
}


def trained(function, tensors):
    """The result of a function and its gradients for all tensors."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))


def assert_same(function, other, tensors):
    for a, b in zip(trained(function, tensors), trained(other, tensors), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_a_fallback_around_a_compiled_call_has_no_effect():
    function = torch.compile(FUNCTIONS["causal"], fullgraph=True, backend="aot_eager")
    with fallback("torch"):
        assert_same(function, FUNCTIONS["causal"], inputs())


@pytest.mark.sample(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_passes_compile_once_for_any_sizes(name, transposed):
    function = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, sq, skv in [(3, 7, 9), (6, 12, 12), (5, 30, 5)]:
        assert_same(function, FUNCTIONS[name], inputs(sq, skv, batch, transposed=transposed))
    assert compilations(function) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_inductor_compiles_both_passes():
    from cudnn_sdpa.offline.driver import compiler

    if compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")

    def attend(q, k, v, sinks):
        return sdpa(q * 1.5, k, v, is_causal=True, sinks=sinks).transpose(1, 2).flatten(2).relu()

    assert_same(torch.compile(attend, fullgraph=True), attend, [*inputs(transposed=True), torch.randn(4)])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the error breaks the graph
@pytest.mark.slow
def test_out_with_gradients_is_refused_in_a_compiled_graph():
    def attend(q, k, v, out):
        return sdpa(q, k, v, out=out)

    q, k, v = inputs()
    out = torch.full((2, 4, 7, 24), torch.nan)
    with pytest.raises(UnsupportedError, match="out with a gradient"):
        torch.compile(attend, backend="aot_eager")(q.requires_grad_(), k, v, out)
    assert out.isnan().all()
