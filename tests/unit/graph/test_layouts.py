"""Canonical strides, and the layout of outputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_sdpa.graph.layouts import (
    CUDNN_DTYPE_NAMES,
    TensorLayout,
    canonical_stride,
    contiguous_stride,
    dense_stride_like,
    has_channels_last,
    layouts_of,
)

SHAPES = [(2, 3, 5, 8), (1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (1, 1, 1, 8), (2, 1, 1, 16), (7,), (), (0, 3, 5, 8)]


def occupied(shape, stride):
    return [
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*(range(size) for size in shape))
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_contiguous_strides_are_pytorchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()
    assert TensorLayout.contiguous(shape, torch.float16) == TensorLayout.of(torch.empty(shape, dtype=torch.float16))


@pytest.mark.parametrize("shape", SHAPES)
def test_contiguous_strides_are_canonical(shape):
    stride = contiguous_stride(shape)
    assert canonical_stride(shape, stride) == stride


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("odd_stride", [0, 1, 3, 10**9])
def test_strides_of_dimensions_of_size_one_make_no_difference(dim, odd_stride):
    shape = [2, 3, 5, 8]
    shape[dim] = 1
    dense = torch.empty(shape)
    stride = list(dense.stride())
    stride[dim] = odd_stride
    odd = torch.empty(1024).as_strided(shape, stride)
    assert TensorLayout.of(odd) == TensorLayout.of(dense)
    assert hash(TensorLayout.of(odd)) == hash(TensorLayout.of(dense))


def test_a_slice_of_one_head_differs_only_in_its_batch_stride():
    packed = torch.empty(2, 5, 3, 8).transpose(1, 2)
    layout = TensorLayout.of(packed[:, 1:2])
    assert layout.shape == (2, 1, 5, 8)
    assert layout.stride[0] == 5 * 3 * 8
    assert layout.stride[2:] == (3 * 8, 1)


@pytest.mark.parametrize("change", ["shape", "stride", "dtype"])
def test_layouts_that_differ_are_different(change):
    layout = TensorLayout((2, 3, 5, 8), (120, 40, 8, 1), torch.float16)
    changed = {
        "shape": TensorLayout((2, 3, 4, 8), (120, 40, 8, 1), torch.float16),
        "stride": TensorLayout((2, 3, 5, 8), (120, 8, 24, 1), torch.float16),
        "dtype": TensorLayout((2, 3, 5, 8), (120, 40, 8, 1), torch.bfloat16),
    }[change]
    assert changed != layout
    assert {layout: "found"}.get(changed) is None


@pytest.mark.parametrize("dtype", CUDNN_DTYPE_NAMES, ids=str)
def test_a_layout_can_be_written_to_json_and_read_back(dtype):
    layout = TensorLayout((2, 3, 5, 8), (120, 8, 24, 1), dtype)
    again = TensorLayout.from_json(layout.to_json())
    assert again == layout
    assert again.dtype is dtype


def test_str_of_a_layout():
    text = str(TensorLayout((2, 3, 5, 8), (120, 8, 24, 1), torch.bfloat16))
    assert text == "bfloat16[2×3×5×8; strides 120,8,24,1]"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_outputs_follow_dense_permutations_as_empty_like_does(order):
    sizes = [2, 3, 5]
    model = torch.empty(*(sizes[i] for i in order), 8).permute(*(order.index(i) for i in range(3)), 3)
    assert dense_stride_like(model.shape, model.shape, model.stride()) == torch.empty_like(model).stride()


@pytest.mark.parametrize("shape", SHAPES[:6])
def test_outputs_follow_contiguous_models(shape):
    model = torch.empty(shape)
    assert dense_stride_like(shape, shape, model.stride()) == model.stride()


@pytest.mark.parametrize(
    ("model", "order"),
    [
        pytest.param(torch.empty(2, 3, 50, 8)[:, :, :5], (0, 1, 2), id="rows cut"),
        pytest.param(torch.empty(2, 3, 15, 8)[:, :, ::3], (0, 1, 2), id="every third row"),
        pytest.param(torch.empty(2, 30, 5, 8)[:, 7:10], (0, 1, 2), id="heads cut"),
        pytest.param(torch.empty(2, 3, 5, 32)[..., :8], (0, 1, 2), id="head dim cut"),
        pytest.param(torch.empty(2, 5, 9, 8)[:, :, 3:6].transpose(1, 2), (0, 2, 1), id="packed"),
        pytest.param(torch.empty(5, 2, 9, 8)[:, :, 3:6].permute(1, 2, 0, 3), (2, 0, 1), id="sequence first"),
        pytest.param(torch.empty(3, 2, 5, 8, dtype=torch.half).transpose(0, 1), (1, 0, 2), id="heads first"),
    ],
)
@pytest.mark.parametrize("dim", [8, 24])
def test_outputs_follow_slices_densely(model, order, dim):
    shape = (2, 3, 5, dim)
    out = (
        torch.empty(0)
        .new_empty(1)
        .as_strided((0,), (1,))
        .new_empty_strided(shape, dense_stride_like(shape, model.shape, model.stride()))
    )
    assert out.permute(*order, 3).is_contiguous()


@pytest.mark.parametrize("sizes", [(2, 3, 5, 8), (2, 1, 5, 8), (4, 3, 1, 8)])
@pytest.mark.parametrize("dim", range(3))
def test_outputs_of_expanded_models_are_dense(sizes, dim):
    source = list(sizes)
    source[dim] = 1
    model = torch.empty(source).expand(sizes)
    assert dense_stride_like(sizes, sizes, model.stride()) == contiguous_stride(sizes)


@st.composite
def strided_models(draw):
    """Shape and strides of a tensor that does not overlap itself, but may have gaps and dimensions of size 0 or 1."""
    sizes = [draw(st.integers(0, 4)) for _ in range(3)]
    head_dim = 8 * draw(st.integers(1, 3))
    stride, step = [0, 0, 0, 1], head_dim
    for dim in draw(st.permutations(range(3))):
        stride[dim] = step + 8 * draw(st.integers(0, 2))
        step = stride[dim] * max(sizes[dim], 1)
        if sizes[dim] == 1:
            stride[dim] = draw(st.integers(0, 1000))
    return (*sizes, head_dim), tuple(stride)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(model=strided_models(), dim_v=st.sampled_from([8, 16, 40]))
def test_outputs_are_dense_for_any_model(model, dim_v):
    shape, stride = model
    out_shape = (*shape[:3], dim_v)
    out_stride = dense_stride_like(out_shape, shape, stride)
    assert sorted(occupied(out_shape, out_stride)) == list(range(torch.Size(out_shape).numel()))
    assert canonical_stride(out_shape, out_stride) == out_stride
    real = [dim for dim in range(3) if shape[dim] > 1]
    for a, b in itertools.combinations(real, 2):
        if 0 not in shape:
            assert (stride[a] > stride[b]) == (out_stride[a] > out_stride[b])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(model=strided_models(), odd=st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
def test_canonical_strides_reach_the_same_memory_and_are_unique(model, odd):
    shape, stride = model
    canonical = canonical_stride(shape, stride)
    assert occupied(shape, canonical) == occupied(shape, stride)
    assert canonical_stride(shape, canonical) == canonical
    other = tuple(odd[dim] if size == 1 else stride[dim] for dim, size in enumerate(shape))
    assert canonical_stride(shape, other) == canonical


def channels_last_stride(shape):
    """Strides that PyTorch passes to cuDNN for a channels-last tensor, computed as in PyTorch."""
    stride, step = [0] * len(shape), 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def is_in_order(shape, stride):
    reached = [step for size, step in zip(shape, stride, strict=True) if size > 1]
    return reached == sorted(reached, reverse=True)


IMAGES = [shape for rank in (4, 5) for shape in itertools.product((1, 2, 3), repeat=rank)]


@pytest.mark.parametrize("rank", [4, 5])
def test_sizes_of_1_get_contiguous_or_channels_last_strides(rank):
    """For all dense tensors, with any strides of size-1 dimensions: cuDNN sees NCHW or NHWC, nothing in between."""
    for shape in (shape for shape in IMAGES if len(shape) == rank):
        for dense in (contiguous_stride(shape), channels_last_stride(shape)):
            for odd in (0, 1, 7, 10**6):
                stride = tuple(odd if size == 1 else step for size, step in zip(shape, dense, strict=True))
                fits = [contiguous_stride(shape)] * is_in_order(shape, dense)
                last = channels_last_stride(shape)
                fits += [last] * all(a == b for size, a, b in zip(shape, stride, last, strict=True) if size > 1)
                assert canonical_stride(shape, stride) == fits[0], (shape, stride)
                assert canonical_stride(shape, stride, channels_last=True) == fits[-1], (shape, stride)
                assert has_channels_last(shape, stride) is (fits == [last]), (shape, stride)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    shapes=st.lists(st.lists(st.sampled_from((1, 2, 5)), min_size=4, max_size=4), min_size=2, max_size=4),
    orders=st.lists(st.booleans(), min_size=4, max_size=4),
    channels_last=st.booleans(),
)
def test_ambiguous_operands_of_one_graph_share_a_memory_order(shapes, orders, channels_last):
    tensors = []
    for shape, is_last in zip(shapes, orders, strict=False):
        stride = channels_last_stride(shape) if is_last else contiguous_stride(shape)
        tensors.append(torch.empty(0).new_empty_strided(shape, stride))
    layouts = layouts_of(tensors, channels_last=channels_last)
    known = {has_channels_last(x.shape, x.stride()) for x in tensors}
    for x, layout in zip(tensors, layouts, strict=True):
        in_order, last = contiguous_stride(x.shape), channels_last_stride(x.shape)
        assert layout.stride in (in_order, last)
        if True in known or channels_last:
            assert layout.stride == last or not is_in_order(x.shape, last)
        else:
            assert layout.stride == in_order


@st.composite
def dense_tensors(draw):
    """Shape and strides of a dense tensor in any memory order."""
    shape = [draw(st.sampled_from((1, 1, 2, 3, 8))) for _ in range(draw(st.integers(1, 5)))]
    order = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return tuple(shape), tuple(stride)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(tensor=dense_tensors(), channels_last=st.booleans())
def test_dense_tensors_keep_their_memory_order(tensor, channels_last):
    shape, stride = tensor
    canonical = canonical_stride(shape, stride, channels_last=channels_last)
    assert occupied(shape, canonical) == occupied(shape, stride)
    places = sorted(range(len(shape)), key=lambda dim: (canonical[dim], shape[dim] > 1))
    step = 1
    for dim in places:
        assert canonical[dim] == step, (shape, stride, canonical)
        step *= shape[dim]
    assert canonical_stride(shape, canonical, channels_last=channels_last) == canonical
