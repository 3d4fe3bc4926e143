"""Convolution operands are channels last for cuDNN, for any sizes of 1 and any input layout."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_sdpa import UnsupportedError, conv1d, conv2d, conv3d
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.graph.target import Target, load_properties

H200 = Target.from_properties(load_properties("h200"))
OF_RANK = {1: conv1d, 2: conv2d, 3: conv3d}


def channels_last_stride(shape):
    """Strides as PyTorch passes them to cuDNN for channels-last tensors."""
    stride, step = [0] * len(shape), 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


@st.composite
def right_calls(draw):
    """Tensors and options of a valid convolution in which any size may be 1, in either memory order."""
    rank = draw(st.integers(1, 3))
    groups, channels, filters = (draw(st.sampled_from((1, 1, 2, 8))) for _ in range(3))
    sizes = [draw(st.sampled_from((1, 1, 2, 3))) for _ in range(rank)]
    padding = [draw(st.integers(0, 1)) for _ in range(rank)]
    dilation = [draw(st.integers(1, 2)) for _ in range(rank)]
    extents = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    lengths = [
        max(1, e - 2 * zeros) + draw(st.sampled_from((0, 0, 1, 4))) for e, zeros in zip(extents, padding, strict=True)
    ]
    x = _tensor(draw, draw(st.integers(1, 2)), groups * channels, *lengths)
    weight = _tensor(draw, groups * filters, channels, *sizes)
    bias = torch.empty(groups * filters, device="meta") if draw(st.booleans()) else None
    options = {"padding": tuple(padding), "dilation": tuple(dilation), "groups": groups}
    return rank, (x, weight, bias), {**options, "activation": draw(st.sampled_from((None, "relu")))}


def _tensor(draw, *shape):
    stride = list(channels_last_stride(shape) if draw(st.booleans()) else torch.empty(shape, device="meta").stride())
    for dim, size in enumerate(shape):
        if size == 1:
            stride[dim] = draw(st.sampled_from((stride[dim], 1, 7, 1000)))
    return torch.empty_strided(shape, stride, device="meta")


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(call=right_calls(), wanted=st.sampled_from(((), (0,), (1,), (0, 1))))
def test_all_operands_are_channels_last(call, wanted):
    rank, tensors, options = call
    given_tensors = [None if x is None else x.requires_grad_(place in wanted) for place, x in enumerate(tensors)]
    try:
        described = describer_of(OF_RANK[rank])(*given_tensors, **options)
    except UnsupportedError:  # patches, which are a matrix product in PyTorch
        return
    for one in (described, *[described.backward] * bool(wanted)):
        key = one.key(H200, None)
        for operand in (*key.inputs, *key.outputs):
            assert operand.layout.stride == channels_last_stride(operand.layout.shape), (str(key), operand.name)


def test_a_misread_filter():
    """(8, 8, 3, 1) with strides (24, 1, 8, 1): cuDNN returned garbage for it."""
    x, weight = torch.empty(3, 8, 7, 12, device="meta"), torch.empty(8, 8, 3, 1, device="meta")
    key = describer_of(conv2d)(x, weight, stride=(1, 2)).key(H200, None)
    assert [operand.layout.stride for operand in key.inputs] == [(672, 1, 96, 8), (24, 1, 8, 8)]
