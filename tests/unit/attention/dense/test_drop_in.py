"""`scaled_dot_product_attention` as a drop-in replacement of PyTorch's."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from cudnn_sdpa import LayoutError, OptionError, ShapeError, UnsupportedError, scaled_dot_product_attention
from cudnn_sdpa.attention.dense.sdpa import SDPA

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def both(*args, **options):
    return scaled_dot_product_attention(*args, **options), F.scaled_dot_product_attention(*args, **options)


def test_parameters_are_pytorchs_in_its_order_and_with_its_defaults():
    ours = inspect.signature(scaled_dot_product_attention).parameters
    assert list(ours) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ]
    assert [parameter.default for parameter in ours.values()][3:] == [None, 0.0, False, None, False]


def test_arguments_may_be_positional_where_pytorchs_may():
    query, key, value = torch.randn(3, 2, 4, 6, 16)
    ours, theirs = both(query, key, value, None, 0.0, True)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(
    ("key_shape", "value_shape"),
    [
        ((1, 4), (1, 4)),
        ((1, 4), (3, 4)),
        ((3, 1), (3, 1)),
        ((3, 4), (3, 1)),
        ((1, 1), (1, 1)),
        ((1, 1), (3, 4)),
    ],
)
def test_a_batch_or_head_of_one_is_broadcast_as_in_pytorch(key_shape, value_shape):
    query = torch.randn(3, 4, 7, 16)
    ours, theirs = both(query, torch.randn(*key_shape, 9, 16), torch.randn(*value_shape, 9, 16))
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_rank_3_gives_rank_3_in_the_order_of_the_query():
    query = torch.randn(7, 4, 16).transpose(0, 1)
    out = scaled_dot_product_attention(query, query, query)
    assert out.shape == (4, 7, 16)
    assert out.transpose(0, 1).is_contiguous()


def test_heads_must_be_equal_without_enable_gqa_as_in_pytorch():
    query, key = torch.randn(2, 6, 8, 16), torch.randn(2, 3, 8, 16)
    with pytest.raises(ShapeError, match=r"key: got 3 heads; expected 1 or 6.*enable_gqa"):
        scaled_dot_product_attention(query, key, key)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, key, key)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("wrong", [None, 1.5, [[0.0]]])
def test_a_non_tensor_is_named(name, wrong):
    tensors = {key: torch.randn(2, 4, 8, 16) for key in ("query", "key", "value")}
    with pytest.raises(OptionError) as caught:
        scaled_dot_product_attention(**{**tensors, name: wrong})
    assert str(caught.value).startswith(f"{name}: got {type(wrong).__name__}; expected a torch.Tensor")


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("shape", [(8, 16), (16,), (1, 2, 4, 8, 16), (4, 8, 16)])
def test_wrong_or_mixed_ranks_are_named(name, shape):
    tensors = {key: torch.randn(2, 4, 8, 16) for key in ("query", "key", "value")}
    tensors[name] = torch.randn(shape)
    with pytest.raises(ShapeError, match=r"rank 2 or more, the same for query, key and value") as caught:
        scaled_dot_product_attention(**tensors)
    if len(shape) != 3:
        assert str(tuple(shape)) in str(caught.value)


def test_heads_that_would_need_groups_are_refused_without_the_flag():
    query, key, value = torch.randn(2, 4, 7, 16), torch.randn(2, 1, 9, 16), torch.randn(2, 2, 9, 16)
    with pytest.raises(ShapeError, match=r"^value: got 2 heads; expected 1 or 4"):
        scaled_dot_product_attention(query, key, value)


def test_batches_that_do_not_fit_are_named():
    query, key = torch.randn(2, 4, 7, 16), torch.randn(3, 4, 9, 16)
    with pytest.raises(ShapeError, match=r"^key: got shapes \(3, 4, 9, 16\)"):
        scaled_dot_product_attention(query, key, key)


@pytest.mark.parametrize("shape", [(), (2,), (2, 4), (4, 8, 16)], ids=str)
@pytest.mark.parametrize("names", [("key",), ("value",), ("key", "value")], ids="+".join)
def test_lower_rank_keys_and_values_are_named_with_a_query_of_rank_4(names, shape):
    tensors = {name: torch.randn(2, 4, 8, 16) for name in ("query", "key", "value")}
    with pytest.raises(ShapeError, match="rank 2 or more, the same for query, key and value") as caught:
        scaled_dot_product_attention(**tensors | {name: torch.randn(shape) for name in names})
    assert caught.value.argument == names[0]
    assert str(shape) in str(caught.value.got)


@pytest.mark.parametrize(
    "shape",
    [(3, 1, 8, 8), (2, 2, 3, 8, 8), (2, 2, 4, 8, 7), (3, 1, 4, 8, 8)],
)
def test_a_mask_that_does_not_fit_several_batch_dimensions_is_named(shape):
    query = torch.randn(2, 2, 4, 8, 16)
    with pytest.raises(ShapeError, match=r"^attn_mask: got shape .* broadcasts to \(…, Hq, L, S\) = \(2, 2, 4, 8, 8\)"):
        scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(shape))


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_a_sparse_tensor_is_named(name):
    tensors = {key: torch.randn(2, 2, 4, 8, 16) for key in ("query", "key", "value")}
    tensors["attn_mask"] = torch.randn(2, 1, 4, 8, 8)
    tensors[name] = tensors[name].to_sparse()
    with pytest.raises(LayoutError, match=f"^{name}: got torch.sparse_coo"):
        scaled_dot_product_attention(**tensors)


def test_reasons_use_the_names_of_this_functions_arguments(monkeypatch):
    def declined(_):
        raise UnsupportedError("sdpa of q", ["q has more elements than k"], "v padded, q.to(k.dtype)")

    monkeypatch.setattr(SDPA, "_run", declined)
    query = torch.randn(2, 4, 8, 16)
    with pytest.raises(UnsupportedError) as caught:
        scaled_dot_product_attention(query, query, query)
    error = caught.value
    assert error.what == "sdpa of query"
    assert error.reasons == ["query has more elements than key"]
    assert error.suggestion == "value padded, query.to(key.dtype)"
    assert error.__cause__ is None


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("rank", [3, 5])
def test_freed_storage_of_other_ranks_is_named(name, rank):
    """There is no view of it that `sdpa` could be given."""
    lead = (2,) * (rank - 3)
    tensors = {each: torch.randn(*lead, 4, 6, 16) for each in ("query", "key", "value")}
    tensors["attn_mask"] = torch.randn(*lead, 4, 6, 6)
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=f"^{name}: got a tensor without memory"):
        scaled_dot_product_attention(**tensors)
