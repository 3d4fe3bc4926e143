"""`rope` on the GPU: values and gradients against float64, of heads of any layout, and in a CUDA graph."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_checks import poison
from float64_reference import rope as right

from cudnn_sdpa import LayoutError, explain, nn, rope, rope_

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}

#: Head dim, rotated features, heads of queries and of keys, tokens.
SHAPES = [
    (128, 128, 32, 8, 1),
    (128, 128, 32, 8, 4096),
    (64, 64, 12, 12, 1000),
    (96, 32, 7, 1, 333),
    (256, 256, 16, 4, 700),
    (80, 40, 5, 5, 129),
    (1024, 512, 1, 2, 65),
    (16, 8, 3, 0, 20_000),
]


def drawn(shape, dtype, *, packed):
    dim, rotary_dim, heads_q, heads_k, tokens = shape
    leading = (tokens,) if packed else (2, tokens)
    whole = torch.randn(*leading, heads_q + 2 * heads_k, dim, device="cuda").to(dtype)
    q, k, _ = (x if packed else x.transpose(1, 2) for x in whole.split([heads_q, heads_k, heads_k], -2))
    angles = 9 * torch.randn(*leading, rotary_dim // 2, device="cuda")
    return {"q": q, "k": k if heads_k else None, "cos": angles.cos(), "sin": angles.sin()}


def difference(x, y):
    return (x.double() - y).norm() / y.norm()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", ["", "q", "qk"])
def test_values_and_gradients(shape, dtype, normed):
    for packed, interleaved in itertools.product((False, True), (False, True)):
        given = drawn(shape, dtype, packed=packed)
        names = [name for name in normed if given[name] is not None]
        given |= {f"{name}_weight": torch.rand(shape[0], device="cuda").to(dtype) - 0.3 for name in names}
        options = {"interleaved": interleaved, "zero_centered": packed, "eps": 1e-3}
        leaves = {n: x.detach().requires_grad_() for n, x in given.items() if x is not None and n not in ("cos", "sin")}
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        wanted = right(**{"k": None, **exact}, cos=given["cos"], sin=given["sin"], **options)
        grads = [torch.randn_like(x).to(dtype) for x in wanted]
        of_wanted = torch.autograd.grad(wanted, list(exact.values()), [x.double() for x in grads])
        of_runs = []
        for _ in range(2):
            poison(*(tuple(x.shape) for x in wanted), dtype=dtype)
            out = [x for x in rope(**{**given, **leaves}, **options) if x is not None]
            found = torch.autograd.grad(out, list(leaves.values()), grads)
            for x, y in zip(out, wanted, strict=True):
                assert difference(x, y) < BOUNDS[dtype]
            for x, y in zip(found, of_wanted, strict=True):
                assert difference(x, y) < 2 * BOUNDS[dtype]
            of_runs.append(found)
        assert all(map(torch.equal, *of_runs))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_in_place(shape, dtype):
    """Views of one projection, whose values stay; calls of one kind several times."""
    for packed, normed in itertools.product((False, True), ("", "q" if not shape[3] else "qk")):
        weights = {f"{name}_weight": torch.rand(shape[0], device="cuda") for name in normed}
        for interleaved in (False, True, True, True):
            given = drawn(shape, dtype, packed=packed) | weights
            rest = given["q"]._base[..., shape[2] + shape[3] :, :]
            before, wide = rest.clone(), {n: x if x is None else x.double() for n, x in given.items()}
            wanted = right(**wide, interleaved=interleaved)
            rope_(**given, interleaved=interleaved)
            for name, y in zip("qk", wanted, strict=False):
                assert difference(given[name], y) < BOUNDS[dtype]
            assert torch.equal(rest, before)
    if given["k"] is not None:
        with pytest.raises(LayoutError, match="overlaps k"):
            rope_(**given | {"k": given["q"]}, interleaved=True)


def test_in_place_in_a_cuda_graph():
    given = drawn((128, 128, 8, 2, 64), torch.bfloat16, packed=True)
    rope_(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_(**given)
    for name in ("q", "k", "cos", "sin"):
        given[name].normal_()
    wanted = right(**{name: x.double() for name, x in given.items()})
    graph.replay()
    for name, y in zip("qk", wanted, strict=True):
        assert difference(given[name], y) < BOUNDS[torch.bfloat16]


def test_in_a_cuda_graph():
    given = drawn((128, 128, 8, 2, 64), torch.bfloat16, packed=False)
    weights = {f"{name}_weight": torch.rand(128, device="cuda") for name in "qk"}
    rope(**given, **weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(**given, **weights)
    for name in ("q", "cos", "sin"):
        given[name].normal_()
    graph.replay()
    for x, y in zip(out, right(**{n: x.double() for n, x in {**given, **weights}.items()}), strict=True):
        assert difference(x, y) < BOUNDS[torch.bfloat16]


def test_layers_with_norms_of_heads():
    embedding = nn.RotaryEmbedding(64)
    layer = nn.Attention(512, 8, num_kv_heads=2, head_dim=64, rope=embedding, qk_norm=1e-6, is_causal=True)
    layer = layer.to("cuda", torch.bfloat16)
    with torch.no_grad():
        layer.q_norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 300, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    heads = layer.qkv_proj(x).unflatten(-1, (-1, 64)).transpose(1, 2).split([8, 2, 2], 1)
    q, k = (norm(y.contiguous()) for y, norm in zip(heads, (layer.q_norm, layer.k_norm), strict=False))
    angles = embedding(torch.arange(300, device="cuda"))
    q, k = (embedding.rotate(y.transpose(1, 2), angles).transpose(1, 2) for y in (q, k))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, heads[2], is_causal=True, enable_gqa=True)
    assert difference(out, layer.out_proj(expected.transpose(1, 2).flatten(2)).double()) < 2e-2
    for norm in (layer.q_norm, layer.k_norm):
        assert norm.weight.grad.isfinite().all()
        assert norm.weight.grad.any()


def test_explain_shows_the_kernels():
    given = drawn((128, 128, 8, 2, 64), torch.bfloat16, packed=False)
    given["q"] = given["q"].detach().requires_grad_()
    explained = explain(rope, **given, q_weight=torch.rand(128, device="cuda"))
    assert "own kernels: cuDNN has no rotation" in str(explained)
