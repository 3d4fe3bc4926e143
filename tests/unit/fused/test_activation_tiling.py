"""The shapes in which activations pass tensors to cuDNN: which shape, equal results, and no recompilation."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import TARGET
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from cudnn_sdpa import LayoutError, gelu_mul, providers, relu_squared, silu_mul
from cudnn_sdpa.fused import activation_graphs as graphs
from cudnn_sdpa.fused import activation_tiling
from cudnn_sdpa.fused.activation_tiling import backward_views, check_rows, forward_views
from cudnn_sdpa.fused.graph_op import as_tuple

#: Shape, and the cuDNN shape of its dense tensors in a forward pass and in a backward pass.
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

#: The same for chunks of rows of twice the length.
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


def formed(pair, *, gradients=False):
    return (backward_views if gradients else forward_views)(pair, [], {})[0]


@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_the_cudnn_shape_of_dense_tensors(shape):
    pair = [on_meta(*shape), on_meta(*shape)]
    for gradients, form in enumerate(DENSE[shape]):
        rows = formed(pair, gradients=bool(gradients))
        assert [tuple(x.shape) for x in rows] == [form, form]
        assert all(x.is_contiguous() for x in rows)


@pytest.mark.parametrize("shape", HALVES, ids=str)
def test_the_cudnn_shape_of_chunks(shape):
    rows, size = shape
    pair = on_meta(rows, 2 * size).chunk(2, dim=-1)
    for gradients, form in enumerate(HALVES[shape]):
        for x in formed(pair, gradients=bool(gradients)):
            assert tuple(x.shape) == form
            assert x.stride()[1:] == ((form[2], 1) if form[0] > 1 else (2 * size, 1))
            assert form[0] == 1 or x.stride(0) == 2 * size


@pytest.mark.parametrize("gradients", [False, True])
def test_a_broadcast_row_has_a_batched_shape(gradients):
    row, dense = on_meta(1, 1024).expand(512, 1024), on_meta(512, 1024)
    for pair in ([row, dense], [dense, row], [row, row]):
        assert [tuple(x.shape) for x in formed(pair, gradients=gradients)] == [(512, 1, 1024)] * 2


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("many", [0, 1 << 40])
@pytest.mark.parametrize("shape", [(2, 1024), (3, 1536), (2, 4096), (3, 64), (5, 33), (2, 3, 2048)], ids=str)
def test_results_do_not_depend_on_the_cudnn_shape(shape, many, dense, monkeypatch):
    """Results computed in the views, and written there, are the function's results."""
    monkeypatch.setattr(activation_tiling, "_LARGE", many)
    both = torch.randn(*shape[:-1], 2 * shape[-1])
    gate, up = (half.clone() if dense else half for half in both.chunk(2, dim=-1))
    grad = torch.randn(shape)
    for function, given, options in (
        (graphs.silu_mul_rows, (gate, up), {}),
        (graphs.silu_mul_rows, (both, None), {}),
        (graphs.gelu_mul_rows, (gate, up), {}),
        (graphs.relu_squared_rows, (gate,), {}),
        (graphs.silu_mul_gradients, (grad, gate, up), {}),
        (graphs.silu_mul_gradients, (grad, both, None), {}),
        (graphs.silu_mul_gradients, (grad, gate, up), {"of_up": False}),
        (graphs.silu_mul_grad_up, (grad, gate), {}),
    ):
        wanted = as_tuple(function.reference(*given, **options))
        results = [torch.full_like(x, torch.nan) for x in wanted]
        operands, views, _ = function.views(given, results, {})
        for view, result in zip(views, as_tuple(function.reference(*operands, **options)), strict=True):
            view.copy_(result)
        for result, right in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, right)
        with providers("cudnn"):
            key = function.describe(*given, **options).key(TARGET, 0)
        assert [each.layout.shape for each in key.inputs] == [tuple(x.shape) for x in operands]
        assert [each.layout.stride for each in key.outputs] == [x.stride() for x in views]


def can_be_rows(x):
    try:
        x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return True


STRIDES = [(a, b, c) for a in (0, 1, 3, 24, 72) for b in (0, 1, 3, 8, 12, 24) for c in (1, 6)]


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 3, 4, 6), (2, 1, 4, 6), (2, 3, 1, 6), (3, 1, 1, 1), (2, 2, 2, 1)])
def test_exactly_viewable_rows_are_read_in_place(shape):
    seen = set()
    for steps in STRIDES:
        x = torch.randn(400).as_strided(shape, (*steps, 1))
        seen.add(can_be_rows(x))
        if can_be_rows(x):
            check_rows([x], ["x"])
        else:
            with pytest.raises(LayoutError, match="rows at one stride"):
                check_rows([x], ["x"])
    assert seen == ({True} if sum(size > 1 for size in shape) == 1 else {False, True})


@pytest.mark.parametrize(
    ("function", "count", "shape", "stride", "dynamic"),
    [
        (relu_squared, 1, (7, 7, 100), (100, 700, 1), False),
        (gelu_mul, 2, (2, 5, 100), (104, 208, 1), True),
        (silu_mul, 2, (4, 50), (100, 2), True),
    ],
)
def test_compiled_functions_refuse_the_same_layouts(function, count, shape, stride, dynamic):
    given = [torch.randn(9000).as_strided(shape, stride) for _ in range(count)]
    with pytest.raises(LayoutError) as refused:
        function(*given)
    # Dynamo quotes the error's arguments, its message, or in PyTorch 2.9 only its name.
    quoted = rf"""LayoutError\((\(\)|['"]{refused.value.argument}\W)"""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=quoted):
        compiled(function, dynamic=dynamic)(*given)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


FORMS = {
    "both": lambda x: (x,),
    "halves": lambda x: x.chunk(2, dim=-1),
    "dense": lambda x: [half.clone() for half in x.chunk(2, dim=-1)],
}


def times_compiled(form, shapes, dims):
    def call(x):
        return silu_mul(*form(x * 2))

    function = compiled(call)
    for shape in shapes:
        x = torch.randn(shape, requires_grad=True)
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
        results = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (function, call)]
        torch.testing.assert_close(*results)
    return len(_debug_get_cache_entry_list(function._torchdynamo_orig_callable.__code__))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1024, 1536, 96])
@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_number_of_rows_compiles_once(form, size):
    shapes = [(rows, 2 * size) for rows in (3, 20, 7, 64, 1000)]
    assert times_compiled(FORMS[form], shapes, [0]) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_number_of_rows_adds_no_guard_on_the_maximum(form):
    assert times_compiled(FORMS[form], [(1000, 128), (70000, 128), (30, 128)], [0]) == 1


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [[1], [0, 1]], ids=str)
def test_an_unknown_row_length_compiles_once(form, dims):
    shapes = [(6, 2 * size) for size in (96, 128, 1024, 1536, 2048, 4096, 33, 5632)]
    assert times_compiled(FORMS[form], shapes, dims) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [96, 128, 1024, 4096])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_exported_gates_accept_any_number_of_rows(form, strict, size):
    class Gate(torch.nn.Module):
        def forward(self, x):
            return silu_mul(*FORMS[form](x))

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Gate(), (torch.randn(6, 2 * size),), dynamic_shapes=({0: rows},), strict=strict)
    for count in (2, 70000 if size == 96 else 300):
        x = torch.randn(count, 2 * size)
        torch.testing.assert_close(program.module()(x), silu_mul(x))
