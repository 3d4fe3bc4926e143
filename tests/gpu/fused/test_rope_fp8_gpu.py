"""`rope_fp8`, and `Fp8Attention` with rotations, on the GPU: values against float64, amax values, CUDA graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_checks import nothing_synchronizes, poison
from float64_reference import rope as right

from cudnn_sdpa import Fp8Attention, Fp8Scaling, rope, rope_fp8
from cudnn_sdpa.nn import RotaryEmbedding

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

pytestmark = pytest.mark.skipif(CAPABILITY < (8, 9), reason="FP8 needs compute capability 8.9")

#: Head dim, rotated features, heads of queries and of keys, tokens.
SHAPES = [
    (128, 128, 32, 8, 1),
    (128, 128, 32, 8, 4096),
    (64, 64, 12, 12, 1000),
    (96, 32, 7, 1, 333),
    (256, 256, 16, 4, 700),
    (12, 4, 4, 2, 50),
    (1024, 512, 1, 2, 65),
    (16, 8, 3, 0, 70_000),
]


def drawn(shape, dtype, *, packed, normed):
    """Heads as views of one projection, angles, weights, and scales by which some values saturate."""
    dim, rotary_dim, heads_q, heads_k, tokens = shape
    leading = (tokens,) if packed else (2, tokens)
    whole = torch.randn(*leading, heads_q + 2 * heads_k, dim, device="cuda").to(dtype)
    q, k, _ = (x if packed else x.transpose(1, 2) for x in whole.split([heads_q, heads_k, heads_k], -2))
    angles = 9 * torch.randn(*leading, rotary_dim // 2, device="cuda")
    given = {"q": q, "k": k if heads_k else None, "cos": angles.cos(), "sin": angles.sin()}
    given = {n: x.clone() if x is not None and x.data_ptr() % 16 else x for n, x in given.items()}
    names = [name for name in "qk" if given[name] is not None]
    given |= {f"{name}_scale": torch.tensor([0.0061], device="cuda") for name in names}
    return given | {f"{n}_weight": torch.rand(dim, device="cuda").to(dtype) - 0.3 for n in names if n in normed}


def check(given, found, **options):
    """Each value is one of the nearest two of E4M3."""
    exact = {name: x for name, x in given.items() if not name.endswith("scale")}
    wanted = right(**{n: x if x is None else x.double() for n, x in exact.items()}, **options)
    for name, y in zip("qk", wanted, strict=False):
        torch.testing.assert_close(getattr(found, f"{name}_amax").double(), y.abs().amax().view(1), rtol=1e-5, atol=0.0)
        values = (y / given[f"{name}_scale"].double()).clamp(-448, 448)
        off, half = (getattr(found, name).double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", ["", "q", "qk"])
def test_values(shape, dtype, normed):
    for packed, interleaved in itertools.product((False, True), (False, True)):
        given = drawn(shape, dtype, packed=packed, normed=normed)
        options = {"interleaved": interleaved, "zero_centered": packed, "eps": 1e-3}
        for _ in range(2):
            poison(*(tuple(given[name].shape) for name in "qk" if given[name] is not None), dtype=torch.float8_e4m3fn)
            check(given, rope_fp8(**given, **options), **options)


def test_nan():
    given = drawn((128, 128, 8, 2, 300), torch.bfloat16, packed=False, normed="q")
    given["k"][1, 1, 299, 5] = torch.nan
    found = rope_fp8(**given)
    assert found.q_amax.isfinite()
    assert found.k_amax.isnan()
    assert found.k.float().isnan().sum() == 2


def test_in_a_cuda_graph():
    given = drawn((128, 128, 8, 2, 64), torch.bfloat16, packed=False, normed="qk")
    rope_fp8(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope_fp8(**given)
    for name in ("q", "cos", "sin"):
        given[name].normal_()
    given["k_scale"].fill_(0.02)
    graph.replay()
    check(given, out)


@pytest.mark.skipif(CAPABILITY < (9, 0), reason="attention in FP8 needs compute capability 9.0")
@pytest.mark.parametrize("qk_norm", [None, 1e-5])
def test_a_layer_rotates_and_quantizes(qk_norm):
    embedding = RotaryEmbedding(128)
    layer = Fp8Attention(is_causal=True, scaling=Fp8Scaling(calibration=1), rope=embedding, qk_norm=qk_norm).cuda()
    weights = {}
    if qk_norm is not None:
        for name, norm in (("q_weight", layer.q_norm), ("k_weight", layer.k_norm)):
            weights[name] = torch.nn.init.uniform_(norm.weight, 0.5, 1.5)

    def heads(**options):
        whole = torch.randn(2, 1000, 8 + 2 + 2, 128, device="cuda", dtype=torch.bfloat16, **options)
        return whole.transpose(1, 2).split([8, 2, 2], 1)

    for _ in range(2):
        layer(*heads(requires_grad=True)).square().mean().backward()
    layer.eval()
    q, k, v = heads()
    rotations = embedding(torch.arange(1000, device="cuda"))
    with torch.no_grad():
        layer(q, k, v, rotations=rotations)
        with nothing_synchronizes():
            out = layer(q, k, v, rotations=rotations)
        rotated = rope(q, k, *rotations, **weights, eps=1e-5)
        exact = torch.nn.functional.scaled_dot_product_attention(*rotated, v, is_causal=True, enable_gqa=True)
        assert (out.double() - exact.double()).norm() < 0.08 * exact.double().norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(q, k, v, rotations=rotations)
        graph.replay()
        assert (captured.double() - out.double()).norm() < 1e-2 * out.double().norm()
        k[0, 1, 7, 9] = torch.nan
        graph.replay()
        assert captured.isnan().all()
