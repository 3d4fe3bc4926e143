"""`scaled_dot_product_attention` against PyTorch's: masks, gradients and dropout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_sdpa import UnsupportedError, scaled_dot_product_attention

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BATCHES = {"rank 2": (), "rank 3": (4,), "rank 4": (2, 4), "rank 5": (3, 2, 4), "rank 6": (2, 1, 3, 4)}


def qkv(batch=(2, 4), batch_kv=None, sq=7, skv=9):
    of_keys = batch if batch_kv is None else batch_kv
    return torch.randn(*batch, sq, 16), torch.randn(*of_keys, skv, 16), torch.randn(*of_keys, skv, 24)


def both(tensors, mask=None, **options):
    """Output and gradients, ours and PyTorch's; by the mask too if it is differentiable."""
    results = []
    grad_out = None
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
        own = mask
        if mask is not None and mask.is_floating_point():
            own = mask.detach().clone().requires_grad_()
        out = function(*leaves, attn_mask=own, **options)
        grad_out = torch.randn_like(out) if grad_out is None else grad_out
        wanted = leaves if own is mask else [*leaves, own]
        results.append((out.detach(), *torch.autograd.grad(out, wanted, grad_out)))
    return results


def assert_same(tensors, mask=None, **options):
    ours, theirs = both(tensors, mask, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **TOLERANCE)


MASKS = [
    *((), (1,), (9,), (7, 9), (1, 9), (7, 1), (4, 7, 9), (1, 7, 9), (4, 1, 9), (2, 4, 7, 9), (1, 4, 7, 9)),
    *((2, 1, 7, 9), (2, 4, 1, 9), (2, 1, 1, 9), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("shape", [shape for shape in MASKS if len(shape) >= 2], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "-inf"])
def test_masks_of_every_shape(shape, kind):
    hidden = torch.rand(shape) < 0.3
    hidden[..., :1] = False  # PyTorch treats fully masked rows differently
    mask = {"bool": ~hidden, "float": torch.randn(shape), "-inf": torch.randn(shape).masked_fill(hidden, -math.inf)}
    assert_same(qkv(), mask[kind])


@pytest.mark.parametrize("shape", [shape for shape in MASKS if len(shape) < 2], ids=str)
def test_masks_with_fewer_dimensions_than_pytorch_takes_are_broadcast(shape):
    tensors, mask = qkv(), torch.randn(shape)
    ours = scaled_dot_product_attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*tensors, attn_mask=mask.expand(7, 9)), **TOLERANCE)


@pytest.mark.parametrize("rank", BATCHES)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("full", [False, True])
def test_masks_with_every_rank(rank, kind, full):
    batch = BATCHES[rank]
    shape = (*(batch if full else ()), 7, 9)
    mask = torch.randn(shape) if kind == "float" else torch.rand(shape) < 0.8
    if kind == "bool":
        mask[..., 0] = True
    assert_same(qkv(batch), mask)


@pytest.mark.parametrize("shape", [(3, 1, 1, 7, 9), (1, 2, 4, 7, 9), (2, 4, 7, 9), (4, 1, 9), (3, 2, 1, 1, 9)], ids=str)
def test_masks_broadcast_along_several_batch_dimensions(shape):
    assert_same(qkv((3, 2, 4)), torch.randn(shape))


def test_fully_masked_rows_are_zeros_as_in_pytorch():
    mask = torch.rand(7, 9) < 0.8
    mask[:, 0], mask[3] = True, False
    query, key, value = qkv()
    ours = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=mask), **TOLERANCE)
    assert (ours[:, :, 3] == 0).all()


@pytest.mark.parametrize(
    ("q", "kv"),
    [
        *(((3, 4), (1, 4)), ((3, 4), (3, 1)), ((1, 4), (3, 4)), ((1, 1), (3, 4))),
        *(((2, 1, 4), (1, 3, 4)), ((2, 3, 4), (1, 3, 1))),
    ],
    ids=str,
)
def test_gradients_of_broadcast_inputs(q, kv):
    assert_same(qkv(q, kv))


def test_is_causal_with_a_mask_is_refused_as_in_pytorch():
    tensors, mask = qkv(), torch.randn(7, 9)
    with pytest.raises(TypeError, match="is_causal: got True in addition to attn_mask"):
        scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    with pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)


def test_dropout_matches_pytorch_in_mean_and_if_zero():
    tensors = qkv(sq=9)
    assert_same(tensors, dropout_p=0.0)
    torch.manual_seed(11)
    several = torch.stack([scaled_dot_product_attention(*tensors, dropout_p=0.3) for _ in range(400)])
    expected = F.scaled_dot_product_attention(*tensors)
    error = (several.mean(0) - expected) / (several.std(0) / 20)
    assert error.std() < 1.2
    assert several.std(0).min() > 0


def test_dropout_has_gradients_and_follows_the_seed():
    tensors = [x.requires_grad_() for x in qkv()]
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = scaled_dot_product_attention(*tensors, dropout_p=0.4)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for same, again, other in zip(*results, strict=True):
        assert torch.equal(same, again)
        assert not torch.equal(same, other)


def test_double_backward_suggests_an_alternative():
    query, key, value = (x.requires_grad_() for x in qkv())
    (first,) = torch.autograd.grad(scaled_dot_product_attention(query, key, value).sum(), [query], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"SDPBackend\.MATH"):
        first.sum().backward()
