"""The gradient of `attn_mask` has the strides of `attn_mask`: in launches, in the reference, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import gradients

from cudnn_sdpa import UnsupportedError, cpu_checks, sdpa, sdpa_backward
from cudnn_sdpa.attention.bias import mask_gradient

B, H, SQ, SKV = 2, 4, 5, 8

MASKS = {
    "dense": lambda: torch.randn(B, H, SQ, SKV),
    "a learned table, heads last": lambda: torch.randn(SQ, SKV, H).permute(2, 0, 1).unsqueeze(0),
    "keys before queries": lambda: torch.randn(B, 1, SKV, SQ).mT,
    "of rank 3": lambda: torch.randn(SQ, H, SKV).transpose(0, 1),
    "of rank 2, transposed": lambda: torch.randn(SKV, SQ).T,
    "of rank 1": lambda: torch.randn(SKV),
    "repeated": lambda: torch.randn(1, 1, SQ, SKV).expand(B, H, SQ, SKV),
    "repeated keys": lambda: torch.randn(B, H, SQ, 1).expand(B, H, SQ, SKV),
    "a part": lambda: torch.randn(B, H, SQ, 3 * SKV)[..., ::3],
}


def inputs():
    return torch.randn(B, H, SQ, 8), torch.randn(B, H, SKV, 8), torch.randn(B, H, SKV, 8)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mask_gradients_have_the_strides_of_the_mask(kind, dtype):
    mask = MASKS[kind]().to(dtype).requires_grad_()
    q, k, v = (x.to(dtype) for x in inputs())
    out = sdpa(q, k, v, attn_mask=mask)
    grad_out = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, mask, grad_out)
    assert found.stride() == torch.empty_like(mask).stride()
    exact = gradients({"q": q, "k": k, "v": v, "attn_mask": mask.detach()}, grad_out)[2]["attn_mask"]
    assert (found.double() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("masked_rows", [0, 2])
def test_the_plans_result_is_copied_into_that_order(kind, masked_rows):
    mask = MASKS[kind]()
    written = torch.randn(B, H, SQ - masked_rows, SKV)
    found = mask_gradient(written, mask, masked_rows)
    assert found.stride() == torch.empty_like(mask).stride()
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    whole = torch.cat([torch.zeros(B, H, masked_rows, SKV), written], 2)
    torch.testing.assert_close(found, whole.sum_to_size(shape).reshape(mask.shape))


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_learned_table_trains_when_compiled(backend):
    q, k, v = inputs()
    table = torch.randn(SQ, SKV, H, requires_grad=True)

    def loss(table):
        return sdpa(q, k, v, attn_mask=(table * 2).permute(2, 0, 1).unsqueeze(0)).square().sum()

    (eager,) = torch.autograd.grad(loss(table), table)
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(table), table)
    torch.testing.assert_close(compiled, eager)


def test_a_refused_gradient_of_the_mask_is_so_after_calls_that_need_none():
    """In the forward pass, and not when the loss is differentiated."""
    q, k, v = (x.half().requires_grad_() for x in inputs())
    mask = torch.randn(B, H, SQ, SKV).half()
    with gpu_on_the_cpu():
        for _ in range(3):
            sdpa(q, k, v, attn_mask=mask, softcap=30.0)
            with pytest.raises(UnsupportedError, match="attn_mask"):
                sdpa(q, k, v, attn_mask=mask.clone().requires_grad_(), softcap=30.0)


def test_a_refused_backward_call_is_so_after_one_that_wants_less():
    q, k, v = (x.half() for x in inputs())
    options = {"attn_mask": torch.randn(B, H, SQ, SKV).half(), "softcap": 30.0}
    with cpu_checks("h200"):
        out, lse = sdpa(q, k, v, return_lse=True, **options)
        sdpa_backward(out, out, lse, q, k, v, wanted=("q", "k", "v"), **options)
        with pytest.raises(UnsupportedError, match="attn_mask"):
            sdpa_backward(out, out, lse, q, k, v, **options)
