"""`torch.compile` of training calls, and opcheck of the operators' gradients."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import UnsupportedError, fallback, scaled_dot_product_attention, sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.sdpa import SDPA

ops = torch.ops.cudnn_sdpa


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(sq=7, skv=9, transposed=False, dtype=torch.float32):
    def tensor(heads, length):
        if transposed:
            return torch.randn(2, length, heads, 16, dtype=dtype).transpose(1, 2)
        return torch.randn(2, heads, length, 16, dtype=dtype)

    return [tensor(4, sq), tensor(2, skv), tensor(2, skv)]


LENS = torch.tensor([5, 9], dtype=torch.int32)
FUNCTIONS = {
    "dense": sdpa,
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right"),
    "window_size": lambda q, k, v: sdpa(q, k, v, window_size=(3, 1), scale=0.4),
    "softcap": lambda q, k, v: sdpa(q * 2, k, v, softcap=1.5),
    "linear biases": lambda q, k, v: sdpa(q, k, v, is_causal=True, alibi=True),
    "lengths": lambda q, k, v: sdpa(q, k, v, seq_lens_kv=LENS),
    "with lse": lambda q, k, v: sdpa(q, k, v, return_lse=True)[0] * 2,
    "deterministic": lambda q, k, v: sdpa(q, k, v, deterministic=True),
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


def test_dropout_in_a_compiled_graph_uses_one_mask_in_both_passes():
    unit = torch.eye(16).expand(2, 2, 16, 16)

    def attend(q, k):
        return sdpa(q, k, unit, dropout_p=0.5)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, _ = inputs(16, 16)
    v = unit.clone().requires_grad_()
    weights = function(q, k)
    assert 0.3 < (weights == 0).double().mean() < 0.7
    assert not torch.equal(weights, function(q, k))
    by_value = torch.compile(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    out = by_value(q, k, v)
    (found,) = torch.autograd.grad(out.diagonal(dim1=2, dim2=3).sum(), [v])
    kept = (out.detach().diagonal(dim1=2, dim2=3) > 0).unflatten(1, (2, 2)).any(2)
    assert torch.equal(found.diagonal(dim1=2, dim2=3) > 0, kept)


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


def operands(*tensors, **options):
    return tuple(SDPA.inputs_of(from_fields(ForwardArguments, *tensors, **options)))


def test_the_backward_operator_is_not_differentiable():
    call = operands(*inputs())
    out, lse = ops.sdpa_forward_lse(*call)
    grad_out = torch.randn_like(out).requires_grad_()
    gradients = ops.sdpa_backward(grad_out, out, lse, *call, [True, True, True, False, False])
    with pytest.raises(UnsupportedError, match="double backward"):
        gradients[0].sum().backward()
