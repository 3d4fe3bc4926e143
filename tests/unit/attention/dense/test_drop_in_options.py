"""`scaled_dot_product_attention`: masks over several batch dimensions, dropout; `generators` has other values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cudnn_sdpa import UnsupportedError, scaled_dot_product_attention

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def qkv(*batch):
    return [torch.randn(*batch, *rows, requires_grad=True) for rows in ((7, 16), (9, 16), (9, 24))]


@pytest.mark.parametrize("shape", [(3, 1, 1, 7, 9), (1, 2, 4, 7, 9), (2, 4, 7, 9), (4, 1, 9), (3, 2, 1, 1, 9)], ids=str)
def test_masks_broadcast_along_several_batch_dimensions(shape):
    leaves = [*qkv(3, 2, 4), torch.randn(shape, requires_grad=True)]
    ours, theirs = scaled_dot_product_attention(*leaves), F.scaled_dot_product_attention(*leaves)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    grad_out = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(out, leaves, grad_out) for out in (ours, theirs))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_dropout_has_gradients_and_follows_the_seed():
    tensors = qkv(2, 4)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = scaled_dot_product_attention(*tensors, dropout_p=0.4)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    for same, again, other in zip(*results, strict=True):
        assert torch.equal(same, again)
        assert not torch.equal(same, other)


def test_double_backward_suggests_an_alternative():
    query, key, value = qkv(2, 4)
    (first,) = torch.autograd.grad(scaled_dot_product_attention(query, key, value).sum(), [query], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"SDPBackend\.MATH"):
        first.sum().backward()
