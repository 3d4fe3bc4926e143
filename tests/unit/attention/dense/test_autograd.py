"""Autograd of `sdpa`: random numbers, tensors without memory, fallbacks. `generators` has values and memory orders."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, sdpa
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall


@pytest.mark.parametrize("stride", [0, 1, 1000])
def test_gradients_of_head_dim_1_have_the_memory_order_of_their_inputs(stride):
    """The stride of a dimension of size 1 means nothing, also if it is 0."""
    x = torch.randn(2, 5, 3, 1).transpose(1, 2).as_strided((2, 3, 5, 1), (15, 1, 3, stride)).requires_grad_()
    with cudnn_sdpa.cpu_checks(None):
        out = sdpa(x, x.detach(), x.detach())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.stride()[:3] == out.stride()[:3] == (15, 1, 3)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.85])
def test_dropout_rate_and_seed(dropout_p):
    q, k = torch.randn(4, 8, 40, 16), torch.randn(4, 8, 40, 16)
    unit = torch.eye(40).expand(4, 8, 40, 40)
    torch.manual_seed(5)
    weights = sdpa(q, k, unit, dropout_p=dropout_p)
    second = sdpa(q, k, unit, dropout_p=dropout_p)
    torch.manual_seed(5)
    again = sdpa(q, k, unit, dropout_p=dropout_p)
    assert torch.equal(weights, again)
    assert not torch.equal(weights, second)
    dropped = (weights == 0).double()
    sigma = (dropout_p * (1 - dropout_p) / dropped.numel()) ** 0.5
    assert abs(dropped.mean() - dropout_p) < 5 * sigma
    without = sdpa(q, k, unit)
    torch.testing.assert_close(weights[dropped == 0], without[dropped == 0] / (1 - dropout_p))


def test_zero_dropout_draws_no_random_numbers():
    q, k, v = torch.randn(3, 2, 4, 6, 16)
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    assert torch.equal(sdpa(q, k, v, dropout_p=0), sdpa(q, k, v))
    assert torch.equal(torch.get_rng_state(), expected)
    sdpa(q, k, v, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), expected)


def test_meta_tensors_have_meta_gradients():
    q, k, v = (torch.empty(2, 4, 6, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = sdpa(q, k, v, is_causal=True)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    q, k, v = (torch.empty(10, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = cudnn_sdpa.sdpa_varlen(q, k, v, ends, ends, 10, 10)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape] * 3


def test_the_fallback_of_the_forward_pass_holds_for_the_backward_pass(monkeypatch):
    def declined(_):
        raise UnsupportedError("the gradient", ["of a test"])

    q, k, v = (torch.randn(2, 4, 6, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(sdpa(q, k, v).square().sum(), (q, k, v))
    monkeypatch.setattr(SdpaBackwardCall, "bind", declined)
    with gpu_on_the_cpu():
        with pytest.raises(UnsupportedError, match="of a test"):
            torch.autograd.grad(sdpa(q, k, v).square().sum(), (q, k, v))
        with cudnn_sdpa.fallback("torch"):
            out = sdpa(q, k, v)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
