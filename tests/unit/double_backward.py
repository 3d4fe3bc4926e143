"""Calls with double backward: the gradients of gradients are right, or raise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from custom_backward import scaled_gate, squares

from cudnn_sdpa import (
    UnsupportedError,
    conv1d,
    conv2d,
    conv3d,
    fallback,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    sdpa,
    sdpa_varlen,
    silu_mul,
)
from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def channels_last(x):
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.detach().contiguous(memory_format=form).requires_grad_()


def rms(x, weight, *, zero_centered=False):
    return F.rms_norm(x, (x.shape[-1],), weight + 1 if zero_centered else weight, 1e-6)


def with_sum(x, weight, residual):
    return rms(x + residual, weight) * (x + residual)


def of_halves(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def by_fallback(function):
    """The function on its reference, where no kernel has the head dim."""

    def call(q, k, v):
        with fallback("torch"):
            return function(q, k, v)

    return call


def capped(q, k, v):
    return sdpa(q, k, v, softcap=3.0)


def of_capped(q, k, v):
    scores = 3 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 3)
    return scores.softmax(-1) @ v


def packed(q, k, v):
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    return sdpa_varlen(q, k, v, offsets, offsets, 5, 5)


def of_one_sequence(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


#: Name: our function, PyTorch's equivalent, leaves; functions with a double backward are in `SUPPORTED`.
CALLS = {
    "rms_norm": (rms_norm, rms, lambda: leaves((4, 128), 128)),
    "rms_norm without weight": (rms_norm, lambda x: F.rms_norm(x, (128,), None, 1e-6), lambda: leaves((4, 128))),
    "rms_norm, zero-centered": (
        lambda *x: rms_norm(*x, zero_centered=True),
        lambda *x: rms(*x, zero_centered=True),
        lambda: leaves((4, 128), 128),
    ),
    "rms_norm with a residual": (
        lambda x, w, r: torch.mul(*rms_norm(x, w, residual=r)),
        with_sum,
        lambda: leaves((4, 128), 128, (4, 128)),
    ),
    "layer_norm": (
        lambda *x: layer_norm(*x, eps=1e-5),
        lambda x, w, b: F.layer_norm(x, (128,), w, b),
        lambda: leaves((4, 128), 128, 128),
    ),
    "silu_mul": (silu_mul, lambda gate, up: F.silu(gate) * up, lambda: leaves((4, 128), (4, 128))),
    "silu_mul of both": (silu_mul, of_halves, lambda: leaves((4, 256))),
    "conv1d": (
        lambda *x: conv1d(*x, padding=1, activation="silu"),
        lambda *x: F.silu(F.conv1d(*x, padding=1)),
        lambda: leaves((2, 6, 12), (4, 6, 3), 4),
    ),
    "conv2d": (
        lambda *x: conv2d(*x, stride=2, padding=1, groups=2),
        lambda *x: F.conv2d(*x, stride=2, padding=1, groups=2),
        lambda: [*map(channels_last, leaves((2, 6, 9, 8), (4, 3, 3, 1))), *leaves(4)],
    ),
    "conv2d that lies otherwise": (conv2d, F.conv2d, lambda: leaves((2, 6, 9, 8), (4, 6, 1, 3))),
    "conv3d": (
        lambda *x: conv3d(*x, dilation=2),
        lambda *x: F.conv3d(*x, dilation=2),
        lambda: [*map(channels_last, leaves((2, 4, 5, 6, 4), (4, 4, 2, 2, 2)))],
    ),
    "graph_op whose gradient is PyTorch's": (
        scaled_gate,
        lambda x, y: torch.tanh(x) * y,
        lambda: leaves((1, 4, 128), (1, 4, 128)),
    ),
    "graph_op whose gradient has none": (squares, torch.square, lambda: leaves((1, 4, 128))),
}

#: Those that run on the CPU alone: attention has no stand-in for a GPU.
ATTENTION = {
    "sdpa": (
        lambda *qkv: sdpa(*qkv, is_causal=True),
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        lambda: leaves(*[(1, 2, 5, 8)] * 3),
    ),
    "scaled_dot_product_attention": (
        scaled_dot_product_attention,
        F.scaled_dot_product_attention,
        lambda: leaves(*[(2, 5, 8)] * 3),
    ),
    "sdpa by fallback": (by_fallback(capped), of_capped, lambda: leaves(*[(1, 2, 5, 12)] * 3)),
    "sdpa_varlen by fallback": (by_fallback(packed), of_one_sequence, lambda: leaves(*[(5, 2, 12)] * 3)),
    "sdpa_varlen": (packed, of_one_sequence, lambda: leaves(*[(5, 2, 8)] * 3)),
}

SUPPORTED = ("conv1d", "conv2d", "conv2d that lies otherwise", "conv3d", "graph_op whose gradient is PyTorch's")


def check(name, *, times=1):
    """Checks that double backward is right, or raises, in the first call and in cached ones."""
    ours, of_torch, make = (CALLS | ATTENTION)[name]
    for _ in range(times):
        given = make()
        exact = [x.detach().double().requires_grad_() for x in given]
        out, wanted = ours(*given), of_torch(*exact)
        grad = torch.randn_like(out)
        expected = torch.autograd.grad(wanted, exact, grad.double(), create_graph=True)
        if name == "graph_op whose gradient has none":
            with_error(lambda: torch.autograd.grad(out, given, grad, create_graph=True))  # noqa: B023
            continue
        found = torch.autograd.grad(out, given, grad, create_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)
            if name not in SUPPORTED:
                assert one.requires_grad, "a second gradient would be dropped in silence"
        first, right = (sum(x.square().sum() for x in gradients) for gradients in (found, expected))
        if name not in SUPPORTED:
            with_error(lambda: torch.autograd.grad(first, given))  # noqa: B023
            continue
        again = torch.autograd.grad(first, given, allow_unused=True)
        for leaf, one, other in zip(given, again, torch.autograd.grad(right, exact, allow_unused=True), strict=True):
            both = [torch.zeros_like(leaf).double() if x is None else x.double() for x in (one, other)]
            torch.testing.assert_close(*both, rtol=1e-3, atol=1e-2)


def with_error(call):
    try:
        call()
    except UnsupportedError as error:
        assert "gradient" in str(error)  # noqa: PT017 - also runs without pytest
    else:
        raise AssertionError("a gradient of a gradient was dropped in silence")


def check_fp8():
    q, k, v = (torch.randn(1, 2, 32, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = fp8_attention(q, k, v)
    with_error(lambda: torch.autograd.grad(out.sum(), q, create_graph=True))
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
