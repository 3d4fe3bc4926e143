"""`torch.compile` of every function: one graph, no more recompilations than PyTorch, also for data-dependent sizes."""

from __future__ import annotations

import pytest
import torch
from native_way import native_way

from cudnn_sdpa import conv2d, graph_op, sdpa, silu_mul
from tests.unit.pytorch_equivalents import EQUIVALENTS, compilations, trained

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def modes():
    return [
        pytest.param(name, trains, id=f"{name}, {'trained' if trains else 'inference'}")
        for name, pair in EQUIVALENTS.items()
        for trains in ((False, True) if pair.trains else (False,))
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "trains"), modes())
def test_growing_sizes_compile_as_often_as_pytorch(name, trains):
    pair = EQUIVALENTS[name]
    functions = [compiled(pair.ours), compiled(pair.theirs)]
    for step in range(4):
        inputs = pair.inputs(step, torch.randn)
        for function in functions:
            if trains:
                expected = trained(pair.theirs, inputs)
                torch.testing.assert_close(trained(function, inputs), expected, rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(function(*inputs), pair.theirs(*inputs), rtol=1e-4, atol=1e-5)
    ours, theirs = map(compilations, functions)
    assert ours <= theirs
    assert ours == 2  # static, then dynamic


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_a_native_module_that_is_loaded_later_compiles_nothing_again(name):
    """It may be compiled in the background for half a minute."""
    pair = EQUIVALENTS[name]
    function, inputs = compiled(pair.ours), pair.inputs(0, torch.randn)
    function(*inputs)
    with native_way():
        function(*inputs)
    assert compilations(function) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_sizes_marked_as_dynamic_compile_once(name):
    pair = EQUIVALENTS[name]
    function = compiled(pair.ours)
    for step in range(1, 4):
        inputs = pair.inputs(step, torch.randn)
        others = pair.inputs(step + 1, torch.randn)
        for tensor, other in zip(inputs, others, strict=True):
            if isinstance(tensor, torch.Tensor):
                for dim in range(tensor.dim()):
                    if tensor.shape[dim] != other.shape[dim]:
                        torch._dynamo.mark_dynamic(tensor, dim)
        longest = name in ("sdpa_varlen", "sdpa_paged_varlen")
        if longest:  # an integer argument becomes symbolic once it has changed
            inputs = (*inputs[:-1], 40)
        torch.testing.assert_close(function(*inputs), pair.ours(*inputs), rtol=1e-4, atol=1e-5)
    assert compilations(function) == 1


def rows_that_are(x, kept, dim=0):
    """The number of rows, which the compiler does not know."""
    return x.index_select(dim, kept.nonzero().squeeze(1))


KEPT = [torch.tensor(values, dtype=torch.bool) for values in ([1, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 0, 1])]


@pytest.fixture
def sizes_of_data():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.sample(3)
@pytest.mark.usefixtures("sizes_of_data")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_a_data_dependent_batch_size(name, transposed):
    pair = EQUIVALENTS[name]
    if name == "sdpa_paged":
        if torch.__version__.startswith("2.11.") and not transposed:
            pytest.skip("PyTorch 2.11 looks for the number of another tensor's rows in the result of this operator")
        inputs = pair.inputs(3, torch.randn)  # a batch of 5
    elif name == "sdpa_varlen":
        inputs = (*(torch.randn(5, 4, 64) for _ in range(3)), torch.tensor([0, 1, 2], dtype=torch.int32), 2)
    else:
        inputs = tuple(
            torch.randn(5, *x.shape[1:]) if i == 0 or name in {"sdpa", "drop-in", "silu_mul"} else x
            for i, x in enumerate(pair.inputs(0, torch.randn))
        )
    if transposed:
        inputs = tuple(
            x.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() == 4 else x
            for x in inputs
        )

    def on_some(kept, *given):
        return pair.ours(
            *(rows_that_are(x, kept) if isinstance(x, torch.Tensor) and x.shape[0] == 5 else x for x in given)
        )

    function = compiled(on_some)
    for kept in KEPT:
        out, expected = function(kept, *inputs), on_some(kept, *inputs)
        assert out.stride() == expected.stride()
        torch.testing.assert_close(out, expected)
    assert compilations(function) == 1


@pytest.mark.usefixtures("sizes_of_data")
def test_a_data_dependent_length_with_all_options():
    def attend(kept, x, sinks):
        y = rows_that_are(x, kept, dim=2)
        places = torch.arange(y.shape[2], dtype=y.dtype)
        mask = (places[:, None] - places) * 0.3
        lengths = torch.ones(2, dtype=torch.int32)
        return sdpa(y, y, y, attn_mask=mask, sinks=sinks, seq_lens_kv=lengths, window_size=(3, 0), return_lse=True)

    function = compiled(attend)
    x, sinks = torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(4)
    for kept in KEPT:
        results, expected = function(kept, x, sinks), attend(kept, x, sinks)
        assert [y.stride() for y in results] == [y.stride() for y in expected]
        torch.testing.assert_close(results, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("sizes_of_data")
def test_data_dependent_gate_sizes():
    def gate(kept, x):
        return silu_mul(*rows_that_are(x, kept).chunk(2, dim=2))

    function = compiled(gate)
    for size in (64, 96, 128):  # split into chunks, into rows, and not at all
        x = torch.randn(5, 3, 2 * size)
        for kept in KEPT:
            torch.testing.assert_close(function(kept, x), gate(kept, x))


@pytest.mark.usefixtures("sizes_of_data")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_data_dependent_number_of_patches(layout):
    weight, bias = torch.randn(6, 3, 4, 4), torch.randn(6)

    def embed(kept, x):
        return conv2d(rows_that_are(x, kept), weight, bias, stride=4)

    function, x = compiled(embed), torch.randn(5, 3, 8, 12).contiguous(memory_format=layout)
    for kept in (*KEPT, torch.zeros(5, dtype=torch.bool)):
        expected = torch.nn.functional.conv2d(rows_that_are(x, kept), weight, bias, stride=4)
        torch.testing.assert_close(function(kept, x), expected, rtol=1e-4, atol=1e-4)
    assert compilations(function) == 1


def test_sizes_marked_as_unbacked():
    function = compiled(EQUIVALENTS["sdpa"].ours)
    for batch in (3, 4, 1):
        inputs = [torch.randn(batch, 4, 7, 16) for _ in range(3)]
        for x in inputs:
            torch._dynamo.decorators.mark_unbacked(x, 0)
            # All three share one batch: without this hint, the operator checks it at run time.
        torch.testing.assert_close(function(*inputs), EQUIVALENTS["sdpa"].ours(*inputs))
    assert compilations(function) == 1


def test_an_option_of_a_custom_graph_may_be_a_size():
    @graph_op(
        outputs=lambda x, *, sizes: torch.empty(x.shape[0], sum(sizes)),
        reference=lambda x, *, sizes: x[:, :1].expand(-1, sum(sizes)) * 2,
    )
    def widened(g, x, *, sizes):
        return g.add(x, x) if sizes else x

    def from_symbols(x):
        found = torch.ops.cudnn_sdpa.graph_function(widened.token, "t", [x], [], [x.shape[1], x.shape[0]], "(_0,_1,),")
        return found[0]

    for shape in ((2, 3), (4, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(from_symbols(x), x[:, :1].expand(-1, sum(shape)) * 2)
    function = compiled(from_symbols, dynamic=True)
    for shape in ((2, 3), (4, 7), (5, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(function(x), from_symbols(x))
    assert compilations(function) == 1
