"""Autograd of `sdpa`: which gradients are computed, their memory order, and what is refused."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_on_the_cpu

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, sdpa
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall


def inputs(dtype=torch.float32):
    return {
        "q": torch.randn(2, 4, 6, 16, dtype=dtype),
        "k": torch.randn(2, 2, 9, 16, dtype=dtype),
        "v": torch.randn(2, 2, 9, 8, dtype=dtype),
        "attn_mask": torch.randn(4, 1, 9, dtype=dtype),
        "sinks": torch.randn(4),
    }


def dense_in_order_of(tensor):
    """Strides of a dense tensor in this one's memory order, with the last dimension innermost."""
    order = [*sorted(range(tensor.dim() - 1), key=lambda dim: (-tensor.stride(dim), dim)), tensor.dim() - 1]
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= tensor.shape[dim]
    return tuple(strides)


def test_a_boolean_mask_and_lengths_get_no_gradient():
    tensors = {**inputs(), "attn_mask": torch.rand(6, 9) < 0.8, "seq_lens_kv": torch.tensor([4, 9], dtype=torch.int32)}
    tensors["q"].requires_grad_()
    sdpa(**tensors).sum().backward()
    assert tensors["q"].grad.abs().sum() > 0
    assert tensors["attn_mask"].grad is None


def sliced(x):
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


MEMORY = {
    "dense": lambda x: x,
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "sliced": sliced,
    "sliced bshd": lambda x: sliced(x.transpose(1, 2)).transpose(1, 2),
    "every other row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "last dimension apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded batch": lambda x: x[:1].expand_as(x),
    "expanded heads": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("by_operator", [False, True])
def test_gradients_have_the_memory_order_of_their_inputs(memory, by_operator):
    tensors = inputs(torch.float64)
    given = {name: MEMORY[memory](tensors[name]).detach().requires_grad_() for name in "qkv"}
    values = {
        name: x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for name, x in given.items()
    }
    grad_out = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    expected = torch.autograd.grad(sdpa(**values), list(values.values()), grad_out)
    out = sdpa(**given)
    found = torch.autograd.grad(out, list(given.values()), grad_out, create_graph=by_operator)
    for x, gradient, right in zip(given.values(), found, expected, strict=True):
        torch.testing.assert_close(gradient, right)
        if "expanded" not in memory:
            assert gradient.stride() == dense_in_order_of(x)
        assert sorted(gradient.stride()) == sorted(dense_in_order_of(gradient))  # dense, nothing repeated


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
