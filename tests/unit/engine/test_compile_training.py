"""`torch.compile` of training calls, and opcheck of the operators' gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

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


def mask(sq=7, skv=9):
    return torch.randn(2, 1, sq, skv)


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


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_both_passes_compile_to_one_graph(name, transposed):
    function = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_same(function, FUNCTIONS[name], inputs(transposed=transposed))


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


def test_masks_and_sinks_are_differentiated_in_a_compiled_graph():
    def attend(q, k, v, attn_mask, sinks):
        return sdpa(q, k, v, attn_mask=attn_mask, sinks=sinks)

    function = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same(function, attend, [*inputs(), mask(), torch.randn(4)])


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


OPTIONS = {
    "dense": {},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_size": {"window_left": 3, "window_right": 1, "scale": 0.4},
    "mask": {"attn_mask": mask()},
    "boolean mask": {"attn_mask": mask() > -0.5},
    "row mask": {"attn_mask": torch.randn(1, 9)},
    "sinks": {"sinks": torch.randn(4)},
    "lengths": {"seq_lens_q": torch.tensor([0, 5], dtype=torch.int32), "seq_lens_kv": LENS},
    "softcap": {"softcap": 1.5, "deterministic": True},
    "linear biases": {"alibi": True, "is_causal": True},
    "dropout": {"dropout_p": 0.4, "rng": torch.tensor([3, 5])},
    "everything": {
        "attn_mask": mask(),
        "sinks": torch.randn(4),
        "seq_lens_kv": LENS,
        "softcap": 2.5,
        "dropout_p": 0.4,
        "rng": torch.tensor([3, 5]),
        "window_left": 4,
    },
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operands(*tensors, **options):
    return tuple(SDPA.inputs_of(from_fields(ForwardArguments, *tensors, **options)))


def differentiable(call):
    return [
        x.clone().requires_grad_() if isinstance(x, torch.Tensor) and i < 5 and x.is_floating_point() else x
        for i, x in enumerate(call)
    ]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_forward_operator_passes_opcheck_with_gradients(case, transposed):
    call = differentiable(operands(*inputs(transposed=transposed), **OPTIONS[case]))
    # The check of dynamic shapes also requests the gradient of the LSE, which does not exist.
    results = torch.library.opcheck(ops.sdpa_forward_lse.default, call, test_utils=CHECKS[:3])
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("needs", [(True,) * 5, (True, False, False, False, True), (False, True, True, True, False)])
def test_the_backward_operator_passes_opcheck(case, needs):
    call = operands(*inputs(), **OPTIONS[case])
    out, lse = ops.sdpa_forward_lse(*call)
    given = (torch.randn_like(out), out, lse, *call, list(needs))
    results = torch.library.opcheck(ops.sdpa_backward.default, given, test_utils=CHECKS)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", OPTIONS)
def test_fake_gradients_match_real_metadata(case):
    call = operands(*inputs(transposed=True), **OPTIONS[case])
    out, lse = ops.sdpa_forward_lse(*call)
    given = (torch.randn_like(out), out, lse, *call)
    real = ops.sdpa_backward(*given, [True] * 5)
    with FakeTensorMode() as mode:
        fake = ops.sdpa_backward(
            *[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given], [True] * 5
        )
    assert [describe(x) for x in fake] == [describe(x) for x in real]
    assert len(real) == 3 + ("attn_mask" in OPTIONS[case]) + ("sinks" in OPTIONS[case])


def describe(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def test_the_backward_operator_is_not_differentiable():
    call = operands(*inputs())
    out, lse = ops.sdpa_forward_lse(*call)
    grad_out = torch.randn_like(out).requires_grad_()
    gradients = ops.sdpa_backward(grad_out, out, lse, *call, [True, True, True, False, False])
    with pytest.raises(UnsupportedError, match="double backward"):
        gradients[0].sum().backward()
