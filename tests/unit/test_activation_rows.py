"""How activations show their tensors to cuDNN: which form, the same numbers, and nothing that compiles twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from cudnn_sdpa import LayoutError, activation_rows, gelu_mul, relu_squared, silu_mul
from cudnn_sdpa.activation_rows import as_rows

NAMES = ("gate", "up")

#: Shape, and the form of dense tensors of it in a forward pass and in a backward pass.
DENSE = {
    (4096, 14336): ((57344, 32, 32), (57344, 32, 32)),
    (2048, 4864): ((1, 77824, 128), (9728, 32, 32)),
    (64, 14336): ((1, 7168, 128), (896, 32, 32)),
    (8191, 8192): ((65528, 32, 32), (65528, 32, 32)),
    (8192, 8192): ((1, 1048576, 64), (1, 1048576, 64)),
    (16384, 8192): ((1, 2097152, 64), (1, 2097152, 64)),
    (3, 64): ((1, 3, 64), (1, 3, 64)),
    (2, 5, 128): ((1, 10, 128), (1, 20, 64)),
    (64, 3): ((1, 3, 64), (1, 3, 64)),
    (5, 33): ((1, 5, 33), (1, 5, 33)),
    (13,): ((1, 1, 13), (1, 1, 13)),
    (): ((1, 1, 1), (1, 1, 1)),
}

#: The same for halves of rows of twice the length.
HALVES = {
    (4096, 14336): ((4096, 112, 128), (4096, 32, 448)),
    (16384, 8192): ((16384, 128, 64), (16384, 128, 64)),
    (12288, 4096): ((12288, 64, 64), (12288, 64, 64)),
    (8192, 11008): ((8192, 86, 128), (8192, 86, 128)),
    (8192, 5632): ((8192, 44, 128), (8192, 32, 176)),
    (20480, 2560): ((20480, 40, 64), (20480, 32, 80)),
    (24576, 2048): ((1, 24576, 2048), (24576, 32, 64)),
    (32768, 1536): ((1, 32768, 1536), (32768, 32, 48)),
    (32768, 1024): ((32768, 32, 32), (32768, 32, 32)),
    (49152, 768): ((1, 49152, 768), (1, 49152, 768)),
    (2048, 18432): ((2048, 72, 256), (2048, 32, 576)),
    (2048, 4864): ((1, 2048, 4864), (1, 2048, 4864)),
    (64, 14336): ((1, 64, 14336), (64, 32, 448)),
    (70000, 1024): ((1, 70000, 1024), (1, 70000, 1024)),
    (5, 33): ((1, 5, 33), (1, 5, 33)),
}


def on_meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_the_form_of_dense_tensors(shape):
    pair = [on_meta(*shape), on_meta(*shape)]
    for gradients, form in enumerate(DENSE[shape]):
        rows = as_rows(pair, NAMES, gradients=bool(gradients))
        assert [tuple(x.shape) for x in rows] == [form, form]
        assert all(x.is_contiguous() for x in rows)


@pytest.mark.parametrize("shape", HALVES, ids=str)
def test_the_form_of_halves(shape):
    rows, size = shape
    pair = on_meta(rows, 2 * size).chunk(2, dim=-1)
    for gradients, form in enumerate(HALVES[shape]):
        for x in as_rows(pair, NAMES, gradients=bool(gradients)):
            assert tuple(x.shape) == form
            expected = (2 * size, form[2], 1) if form[0] > 1 else (2 * size * rows, 2 * size, 1)
            assert x.stride()[1:] == expected[1:]
            assert form[0] == 1 or x.stride(0) == expected[0]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("many", [0, 1 << 40])
@pytest.mark.parametrize("shape", [(2, 1024), (3, 64), (4, 1536), (2, 4096), (5, 33), (2, 3, 2048)], ids=str)
def test_a_form_is_a_view_of_the_same_numbers_in_order(shape, many, gradients, monkeypatch):
    monkeypatch.setattr(activation_rows, "_MANY", many)
    both = torch.arange(2.0 * torch.Size(shape).numel()).view(*shape[:-1], 2 * shape[-1])
    for pair in (both.chunk(2, dim=-1), [half.clone() for half in both.chunk(2, dim=-1)]):
        for x, rows in zip(pair, as_rows(pair, NAMES, gradients=gradients), strict=True):
            assert rows.dim() == 3
            assert rows.data_ptr() == x.data_ptr()
            assert torch.equal(rows.flatten(), x.flatten())


@pytest.mark.parametrize("gradients", [False, True])
def test_what_would_have_to_be_copied_is_refused(gradients):
    with pytest.raises(LayoutError, match="up: got strides"):
        as_rows([torch.randn(4, 6), torch.randn(6, 4).t()], NAMES, gradients=gradients)
    with pytest.raises(LayoutError, match="gate: got shape"):
        as_rows([torch.randn(4, 3, 8).transpose(0, 1), torch.randn(3, 4, 8)], NAMES, gradients=gradients)


@pytest.mark.parametrize("many", [0, 1 << 40])
@pytest.mark.parametrize("shape", [(2, 1024), (3, 1536), (2, 4096), (3, 64), (5, 33)], ids=str)
def test_values_and_gradients_in_every_form(shape, many, monkeypatch):
    monkeypatch.setattr(activation_rows, "_MANY", many)
    both = torch.randn(*shape[:-1], 2 * shape[-1], requires_grad=True)
    exact = both.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    wanted, grad = F.silu(gate) * up, torch.randn(shape)
    (of_both,) = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
    for form in (lambda x: (x,), lambda x: x.chunk(2, dim=-1), lambda x: [half.clone() for half in x.chunk(2, dim=-1)]):
        for function in (lambda x, form=form: silu_mul(*form(x)), compiled(lambda x, form=form: silu_mul(*form(x)))):
            out = function(both)
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
            (found,) = torch.autograd.grad(out, both, grad)
            torch.testing.assert_close(found.double(), of_both, rtol=1e-5, atol=1e-5)
    x = both.detach()
    for pair in (x.chunk(2, dim=-1), [half.clone() for half in x.chunk(2, dim=-1)]):
        torch.testing.assert_close(gelu_mul(*pair).double(), F.gelu(gate) * up, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(relu_squared(pair[0]).double(), F.relu(gate).square(), rtol=1e-5, atol=1e-5)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("size", [1024, 1536, 96])
def test_a_compiler_that_knows_no_sizes_compiles_once(size, monkeypatch):
    monkeypatch.setattr(activation_rows, "_MANY", 8 * 1024)
    for form in (lambda x: (x,), lambda x: x.chunk(2, dim=-1), lambda x: [half.clone() for half in x.chunk(2, dim=-1)]):

        def call(x, form=form):
            return silu_mul(*form(x * 2))

        function = compiled(call)
        for rows in (3, 20, 7, 64, 1000):
            x = torch.randn(rows, 2 * size, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 0)
            results = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (function, call)]
            torch.testing.assert_close(*results)
        assert len(_debug_get_cache_entry_list(function._torchdynamo_orig_callable.__code__)) == 1


def test_a_compiler_that_knows_the_sizes_takes_the_quickest_form():
    views = []

    def backend(graph, _):
        views.extend(tuple(node.args[1:]) for node in graph.graph.nodes if node.target == "view")
        return graph

    torch._dynamo.reset()
    x = torch.randn(4, 1024)
    torch.compile(lambda x: silu_mul(x, x), backend=backend, fullgraph=True, dynamic=False)(x)
    assert ((1, -1, 128),) in views
