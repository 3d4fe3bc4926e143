"""`attn_mask` over few keys, in every broadcast form, with every option that skips rows: against float64.

On cuDNN 9.19, masks over one key and masks with skipped rows caused misaligned addresses and wrong values.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from attention_checks import TOLERANCE, error, nothing_synchronizes, poison
from float64_reference import gradients
from random_tensors import somewhere

import cudnn_sdpa

SKV, SQ = (1, 2, 3, 7, 8, 9), (1, 2, 64, 129)
MASKS = [torch.bool, torch.float32, None]  #: None is the dtype of q


def random_call(rng, batch, heads, heads_kv, sq, skv, dims):
    """Tensors and options of a call that cuDNN can differentiate."""
    dtype, dim, dim_v = rng.choice([torch.bfloat16, torch.float16]), rng.choice([8, 64, 128]), rng.choice([64, 128])
    dim_v = dim if rng.random() < 0.7 else dim_v

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    tensors = {
        "q": normal(batch, heads, sq, dim),
        "k": normal(batch, heads_kv, skv, dim),
        "v": normal(batch, heads_kv, skv, dim_v),
    }
    shape = [1 if one else n for one, n in zip(dims, (batch, heads, sq, skv), strict=True)]
    kind = rng.choice(MASKS) or dtype
    mask = torch.rand(shape, device="cuda") > 0.3 if kind is torch.bool else torch.randn(shape, device="cuda").to(kind)
    tensors["attn_mask"] = somewhere(mask, rng)
    if rng.random() < 0.4:
        tensors["sinks"] = torch.randn(heads + 1, device="cuda")[rng.randrange(2) :][:heads]
    if rng.random() < 0.25:
        tensors["seq_lens_kv"] = torch.randint(0, skv + 1, (batch,), dtype=torch.int32, device="cuda")
    return tensors


@pytest.mark.parametrize("skv", SKV)
@pytest.mark.parametrize("sq", SQ)
def test_masks_of_every_broadcast_form(sq, skv):
    for number, (dims, causal) in enumerate(
        itertools.product(itertools.product((True, False), repeat=4), (None, "top_left", "bottom_right"))
    ):
        if (number + sq + skv) % 4:
            continue  # other sizes have this form
        seed = (sq * 10 + skv) * 100 + number
        rng = random.Random(seed)
        torch.manual_seed(seed)
        batch, heads_kv = rng.choice([(1, 1), (2, 2), (3, 1)])
        heads = heads_kv * rng.choice([1, 2, 5])
        tensors = random_call(rng, batch, heads, heads_kv, sq, skv, dims)
        options = {"is_causal": causal is not None, "causal_alignment": causal or "top_left"}
        leaves = {name: x.detach() for name, x in tensors.items()}
        wanted = [name for name in ("q", "k", "v", "attn_mask", "sinks") if name in leaves]
        wanted = [name for name in wanted if leaves[name].is_floating_point()]
        q, v = tensors["q"], tensors["v"]
        poison((*q.shape[:3], v.shape[3]), q.shape, tensors["k"].shape, v.shape, dtype=q.dtype)
        said = f"seed {seed}: Sq {sq}, Skv {skv}, mask {tuple(tensors['attn_mask'].shape)}, {options}"
        for name in wanted:
            leaves[name].requires_grad_()
        try:
            out, lse = cudnn_sdpa.sdpa(**leaves, **options, return_lse=True)
            lse = lse.detach()
        except cudnn_sdpa.UnsupportedError:
            continue
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out)
        with torch.no_grad():
            inference = cudnn_sdpa.sdpa(**tensors, **options)
        torch.cuda.synchronize()
        exact, exact_lse, exact_gradients = gradients(tensors, grad_out, **options)
        tolerance = TOLERANCE[q.dtype]
        assert error(out.detach(), exact) < tolerance, said
        assert error(inference, exact) < tolerance, said
        seen = ~exact_lse.isneginf()
        assert torch.equal(lse.isneginf(), ~seen), said
        assert error(lse[seen], exact_lse[seen]) < 1e-3, said
        for name, gradient in zip(wanted, found, strict=True):
            reference = exact_gradients[name]
            size = max(float(reference.norm()), 0.5 * float(grad_out.double().norm()))
            assert float((gradient.double() - reference).norm()) / size < 4 * tolerance, f"{name}, {said}"
            assert gradient.dtype == tensors[name].dtype


def test_a_mask_over_one_key_neither_synchronizes_nor_copies():
    """Also with dropout and linear biases, also captured in a CUDA graph."""
    q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = torch.randn(2, 1, 64, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run():
        out = cudnn_sdpa.sdpa(q, k, v, attn_mask=mask, dropout_p=0.5)
        return out, *torch.autograd.grad(out.sum(), [q, mask])

    run()
    with nothing_synchronizes():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad_q, grad_mask = run()
    graph.replay()
    torch.cuda.synchronize()
    ratio = out.detach() / v.repeat_interleave(2, 1)
    assert ((ratio.abs() < 1e-2) | ((ratio - 2).abs() < 3e-2)).all()
    assert grad_q.isfinite().all()
    assert grad_mask.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-8, 1e-6, 1e-4, 1e-2, -1e-6, -0.1])
def test_the_gradient_of_a_mask_at_any_scale(scale, dtype):
    """With a scale of 1e-30, which stands for 0, cuDNN 9.19 returned zeros."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, n, 64, device="cuda", dtype=dtype) for n in (40, 72, 72))
    mask = torch.randn(2, 1, 40, 72, device="cuda", dtype=dtype, requires_grad=True)
    out = cudnn_sdpa.sdpa(q, k, v, attn_mask=mask, scale=scale)
    grad_out = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, mask, grad_out)
    leaf = mask.detach().double().requires_grad_()
    exact = (q.double() @ k.double().mT * scale + leaf).softmax(-1) @ v.double()
    (wanted,) = torch.autograd.grad(exact, leaf, grad_out.double())
    assert error(out.detach(), exact.detach()) < TOLERANCE[dtype]
    assert error(found, wanted) < 4 * TOLERANCE[dtype]
