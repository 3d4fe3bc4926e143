"""Saved-tensor hooks may move saved tensors to other addresses, or return them in another layout."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import cudnn_sdpa
from cudnn_sdpa.attention.dense.sdpa import SDPA


def pinned():
    return save_on_cpu(pin_memory=True)


def shifted():
    """Returns tensors at addresses that are no multiple of 16 bytes."""

    def unpack(tensor):
        place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
        return place.copy_(tensor)

    return saved_tensors_hooks(lambda tensor: tensor, unpack)


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


@pytest.mark.parametrize("warm", [0, 3])
def test_misaligned_saved_tensors_are_refused(warm):
    q, k, v = (make("bhsd", 1, 2, 128, 64, torch.bfloat16) for _ in range(3))
    for _ in range(warm):
        assert_step(q, k, v)
    with pytest.raises(cudnn_sdpa.LayoutError, match="address"), shifted():
        assert_step(q, k, v)


@pytest.mark.parametrize("warm", [0, 3])
def test_batched_gradients_are_refused(warm):
    """`is_grads_batched` passes tensors without storage."""
    q, k, v = (make("bshd", 1, 2, 64, 64, torch.bfloat16).requires_grad_() for _ in range(3))
    for _ in range(warm):
        assert_step(q, k, v)
    grads = torch.randn(3, 1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="a batch of gradients"):
        torch.autograd.grad(cudnn_sdpa.sdpa(q, k, v), (q, k, v), grads, is_grads_batched=True)


def test_determinism_enabled_between_the_passes():
    q, k, v = (make("bshd", 1, 2, 256, 64, torch.bfloat16) for _ in range(3))
    for _ in range(3):
        assert_step(q, k, v)
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        for _ in range(3):
            assert_step(q, k, v)
        plans = [plan for plan in cudnn_sdpa.plan_cache.plans() if plan.key.name == "sdpa_backward"]
        assert sorted(plan.key.option_values["deterministic"] for plan in plans) == [False, True]
    finally:
        torch.use_deterministic_algorithms(False)


def test_evicted_plans_are_freed_without_the_garbage_collector():
    q, k, v = (make("bshd", 1, 2, 64, 64, torch.bfloat16) for _ in range(3))
    for _ in range(4):
        assert_step(q, k, v)
    plans = [weakref.ref(plan.built) for plan in cudnn_sdpa.plan_cache.plans()]
    assert len(plans) == 2
    gc.collect()
    gc.disable()
    try:
        assert len(SDPA.table)
        cudnn_sdpa.plan_cache.clear()
        assert len(SDPA.table) == 0
        assert [plan() for plan in plans] == [None, None]
    finally:
        gc.enable()
