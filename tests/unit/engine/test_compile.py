"""`torch.compile` and `torch.export`: one graph, no needless recompilation, right values."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cudnn_sdpa import sdpa, sdpa_varlen
from tests.unit.pytorch_equivalents import compilations

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def qkv():
    return [torch.randn(3, heads, length, 16) for heads, length in ((4, 7), (2, 9), (2, 9))]


def compiled(function, *, dynamic=None):
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def test_lengths_are_data():
    function = compiled(lambda q, k, v, lens: sdpa(q, k, v, seq_lens_q=lens, seq_lens_kv=lens + 1))
    for values in ([3, 5, 7], [0, 7, 1], [7, 7, 7]):
        q, k, v = qkv()
        lens = torch.tensor(values, dtype=torch.int32)
        torch.testing.assert_close(function(q, k, v, lens), sdpa(q, k, v, seq_lens_q=lens, seq_lens_kv=lens + 1))
    assert compilations(function) == 1


@pytest.mark.slow
def test_a_changing_scale_compiles_no_more_often_than_pytorch():
    function = compiled(lambda q, k, v, scale: sdpa(q, k, v, scale=scale))
    pytorch = compiled(
        lambda q, k, v, scale: functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    )
    for scale in (0.2, 0.3, 0.45, 0.7, 1.3):
        inputs = qkv()
        pytorch(*inputs, scale)
        torch.testing.assert_close(function(*inputs, scale), sdpa(*inputs, scale=scale))
    assert compilations(function) <= compilations(pytorch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_out_is_written_in_the_compiled_graph(return_lse, dynamic):
    def attend(q, k, v, out):
        result = sdpa(q + 0.25, k, v, is_causal=True, return_lse=return_lse, out=out)
        return result[1] if return_lse else result * 2

    function = compiled(attend, dynamic=dynamic)
    q, k, v = qkv()
    out, expected_out = torch.full((2, 3, 4, 7, 16), torch.nan)
    torch.testing.assert_close(function(q, k, v, out), attend(q, k, v, expected_out))
    torch.testing.assert_close(out, expected_out)
    assert not out.isnan().any()
    assert compilations(function) == 1


def test_out_may_be_a_slice_of_a_graph_input():
    def attend(q, k, v, buffer):
        sdpa(q, k, v, out=buffer[1])
        return buffer.sum(dim=0)

    function = compiled(attend)
    q, k, v = qkv()
    buffer = torch.randn(5, 3, 4, 7, 16)
    expected_buffer = buffer.clone()
    torch.testing.assert_close(function(q, k, v, buffer), attend(q, k, v, expected_buffer))
    torch.testing.assert_close(buffer, expected_buffer)


def test_wrong_arguments_are_named_in_compiled_code():
    function = compiled(lambda q, k, v: sdpa(q, k, v, scale=0.7))
    q, k, v = qkv()
    with pytest.raises(Exception, match=r"v: got sequence length 5; expected 9"):
        function(q, k, v[:, :, :5])


@pytest.mark.parametrize("window_size", [3, (1,), "ab", (1.0, 0)], ids=repr)
def test_a_wrong_window_is_named_in_compiled_code(window_size):
    function = compiled(lambda q, k, v: sdpa(q, k, v, window_size=window_size))
    says_which = torch.__version__ >= torch.torch_version.TorchVersion("2.11")  # older: "an exception"
    with pytest.raises(Exception, match=r"OptionError\(['\"]window" if says_which else "exception|unpack|call_setattr"):
        function(*qkv())


def test_a_window_that_changes_compiles_twice():
    function = compiled(lambda q, k, v, left: sdpa(q, k, v, window_size=(left, 0)))
    for left in (1, 2, 3, 5, 8):
        inputs = qkv()
        torch.testing.assert_close(function(*inputs, left), sdpa(*inputs, window_size=(left, 0)))
    assert compilations(function) == 2  # static, then dynamic


def test_wrong_packed_offsets_are_named_in_compiled_code():
    function = compiled(lambda q, offsets, longest: sdpa_varlen(q, q, q, offsets, offsets, longest, longest))
    q, offsets = torch.randn(10, 4, 16), torch.tensor([0, 3, 10])
    with pytest.raises(Exception, match="cu_seqlens_q: got int64; expected int32"):
        function(q, offsets, 7)
    offsets = offsets.int()
    for longest in (7, 8, 10):
        expected = sdpa_varlen(q, q, q, offsets, offsets, longest, longest)
        torch.testing.assert_close(function(q, offsets, longest), expected)
