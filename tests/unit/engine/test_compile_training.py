"""`torch.compile` of training calls."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError, fallback, scaled_dot_product_attention, sdpa

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def inputs(sq=7, skv=9, transposed=False, dtype=torch.float32):
    def tensor(heads, length):
        if transposed:
            return torch.randn(2, length, heads, 16, dtype=dtype).transpose(1, 2)
        return torch.randn(2, heads, length, 16, dtype=dtype)

    return [tensor(4, sq), tensor(2, skv), tensor(2, skv)]


FUNCTIONS = {
    "dense": sdpa,
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right"),
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
@pytest.mark.parametrize("name", ["dense", "causal", "window_size", "drop-in"])
def test_both_passes_compile_for_any_length(name):
    function = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager", dynamic=True)
    for sq, skv in [(7, 9), (12, 12), (30, 5)]:
        assert_same(function, FUNCTIONS[name], inputs(sq, skv))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_inductor_compiles_both_passes():
    from cudnn_sdpa.offline.driver import compiler

    if compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")

    def attend(q, k, v, sinks):
        return sdpa(q * 1.5, k, v, is_causal=True, sinks=sinks).transpose(1, 2).flatten(2).relu()

    assert_same(torch.compile(attend, fullgraph=True), attend, [*inputs(transposed=True), torch.randn(4)])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the error breaks the graph
def test_out_with_gradients_is_refused_in_a_compiled_graph():
    def attend(q, k, v, out):
        return sdpa(q, k, v, out=out)

    q, k, v = inputs()
    out = torch.full_like(q, torch.nan)
    with pytest.raises(UnsupportedError, match="out with a gradient"):
        torch.compile(attend, backend="aot_eager")(q.requires_grad_(), k, v, out)
    assert out.isnan().all()
