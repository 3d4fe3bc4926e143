"""Saved-tensor hooks may move saved tensors to other addresses, or return them in another layout."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make
from torch.autograd.graph import save_on_cpu

import cudnn_sdpa


def pinned():
    return save_on_cpu(pin_memory=True)


def assert_step(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grad_out = torch.randn_like(q)
    out = cudnn_sdpa.sdpa(*leaves, **options)
    found = torch.autograd.grad(out, leaves, grad_out)
    assert_right(leaves, grad_out, out, found)


def assert_right(leaves, grad_out, out, found):
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected = exact(*doubles)[0]
    gradients = torch.autograd.grad(expected, doubles, grad_out.double())
    for a, b in zip((out, *found), (expected, *gradients), strict=True):
        assert error(a.detach(), b.detach()) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "options", [{}, {"return_lse": False, "window_size": (500, 500)}], ids=["plain", "window_size"]
)
@pytest.mark.parametrize("layout", ["bshd", "packed", "padded"])
@pytest.mark.parametrize("hooked_first", [True, False])
def test_offloaded_tensors_return_in_another_layout(layout, hooked_first, options):
    for step in range(6):
        q, k, v = (make(layout, 2, 4, 128, 64, torch.bfloat16) for _ in range(3))
        if (step % 2 == 0) == hooked_first:
            with pinned():
                assert_step(q, k, v, **options)
        else:
            assert_step(q, k, v, **options)


def test_offloaded_packed_sequences():
    ends = torch.tensor([0, 40, 128], dtype=torch.int32, device="cuda")
    for step in range(4):
        qkv = torch.randn(128, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
        leaves = [x.requires_grad_() for x in qkv.unbind(1)]
        grad_out = torch.randn(128, 4, 64, device="cuda", dtype=torch.bfloat16)
        with pinned() if step % 2 else torch.enable_grad():
            out = cudnn_sdpa.sdpa_varlen(*leaves, ends, ends, 88, 88)
        found = torch.autograd.grad(out, leaves, grad_out)
        for rows in (slice(0, 40), slice(40, 128)):
            parts = [x[rows].transpose(0, 1).unsqueeze(0) for x in (*leaves, grad_out, out, *found)]
            assert_right(parts[:3], parts[3], parts[4], parts[5:])
