"""Side operands at misaligned addresses, and lengths and offsets beyond their tensors."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa

HUGE = 1e4  #: fills the memory around a tensor, and is visible in any result that it reaches


def odd(tensor):
    """The same values, one element past an aligned address."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    assert place.data_ptr() % 16 != 0
    return place.copy_(tensor)


def among(tensor):
    """The same values in the middle of a buffer of others."""
    size = tensor.numel()
    buffer = torch.full((3 * size,), HUGE, dtype=tensor.dtype, device=tensor.device)
    return buffer[size : 2 * size].view(tensor.shape).copy_(tensor), buffer


@pytest.mark.parametrize("sq", [1, 64])
def test_sinks_and_lengths_at_odd_addresses(sq):
    q = make("bshd", 3, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 3, 2, 96, 64, torch.bfloat16) for _ in range(2))
    sinks, lengths = torch.randn(4, device="cuda") + 0.5, torch.tensor([5, 96, 33], dtype=torch.int32, device="cuda")
    plain, lse = exact(q, k, v, seq_lens_kv=lengths)
    total = torch.logaddexp(lse, sinks.double().view(1, -1, 1))
    expected = plain * torch.exp(lse - total)[..., None]
    for _ in range(3):
        out, found = cudnn_sdpa.sdpa(q, k, v, sinks=odd(sinks), seq_lens_kv=odd(lengths), return_lse=True)
        assert error(out, expected) < TOLERANCE[torch.bfloat16]
        assert error(found, total) < 1e-4
        out = cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=odd(lengths))
        assert error(out, plain) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("sq", [1, 64])
def test_negative_lengths_mean_no_keys(sq):
    q = make("bhsd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bhsd", 2, 2, 96, 64, torch.bfloat16) for _ in range(2))
    out = cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=torch.tensor([-3, 96], dtype=torch.int32, device="cuda"))
    assert (out[0] == 0).all()
    assert error(out[1:], exact(q[1:], k[1:], v[1:])[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("ends", [[0, 40, 200], [0, 40, 5000], [0, 100, 128, 300]])
@pytest.mark.parametrize("twice", [False, True])
def test_offsets_beyond_the_tokens_write_nothing_outside(ends, twice):
    leaves, buffers = zip(*(among(torch.randn(128, 4, 64, device="cuda").bfloat16()) for _ in range(3)), strict=True)
    out, around = among(torch.zeros(128, 4, 64, device="cuda", dtype=torch.bfloat16))
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    others = offsets.clone() if twice else offsets
    cudnn_sdpa.sdpa_varlen(*leaves, offsets, others, 5000, 5000, out=out)
    size = out.numel()
    assert (around[:size] == HUGE).all()
    assert (around[2 * size :] == HUGE).all()
    inside = offsets.clamp_max(128)
    rows = slice(0, int(inside[1]))
    expected = exact(*(x[rows].transpose(0, 1).unsqueeze(0) for x in leaves))[0]
    assert error(out[rows].transpose(0, 1).unsqueeze(0), expected) < TOLERANCE[torch.bfloat16]
    trained = [x.detach().requires_grad_() for x in leaves]
    result = cudnn_sdpa.sdpa_varlen(*trained, offsets, others, 5000, 5000)
    gradients = torch.autograd.grad(result, trained, torch.randn_like(result))
    assert all(x.isfinite().all() for x in gradients)
    assert all((b[:size] == HUGE).all() and (b[2 * size :] == HUGE).all() for b in buffers)


@pytest.mark.parametrize("sq", [1, 64])
def test_a_sink_of_minus_infinity_on_rows_without_keys(sq):
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, 96, 64, torch.bfloat16) for _ in range(2))
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, 1.5], device="cuda").requires_grad_()
    lengths = torch.tensor([0, 96], dtype=torch.int32, device="cuda")
    out, lse = cudnn_sdpa.sdpa(q, k, v, sinks=sinks, seq_lens_kv=lengths, return_lse=True)
    (gradient,) = torch.autograd.grad(out, sinks, torch.randn_like(out))
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    assert (lse[0, ::2] == -math.inf).all()
    assert gradient.isfinite().all()
    assert (gradient[::2] == 0).all()


def test_sinks_of_packed_sequences_may_be_misaligned():
    q, k, v = (torch.randn(96, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    offsets, whole = torch.tensor([0, 40, 96], dtype=torch.int32, device="cuda"), torch.randn(8, device="cuda")
    for first in range(5):
        sinks = whole[first : first + 4]
        expected = cudnn_sdpa.sdpa_varlen(q, k, v, offsets, offsets, 56, 56, sinks=sinks.clone())
        for _ in range(3):
            assert torch.equal(cudnn_sdpa.sdpa_varlen(q, k, v, offsets, offsets, 56, 56, sinks=sinks), expected)
