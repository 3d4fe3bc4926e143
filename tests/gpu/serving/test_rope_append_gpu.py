"""`rope_append_paged_kv` on a GPU: queries and pages against float64, in CUDA graphs, and in layers with a cache."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from attention_checks import nothing_synchronizes, poison
from float64_reference import rope as right

from cudnn_sdpa import (
    PagedKVCache,
    append_paged_kv,
    nn,
    no_plan_builds,
    record_plans,
    rope,
    rope_,
    rope_append_paged_kv,
)
from cudnn_sdpa.graph.target import live_properties

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}

#: Head dim, rotated features, heads of queries and of keys, tokens, page size.
SHAPES = [
    (128, 128, 32, 8, 1, 16),
    (128, 128, 32, 8, 3000, 16),
    (64, 64, 12, 12, 100, 5),
    (96, 32, 7, 1, 333, 1),
    (256, 256, 16, 4, 64, 64),
    (8, 8, 3, 3, 777, 3),
]


def drawn(shape, dtype, layout, normed):
    dim, rotary_dim, heads_q, heads_k, tokens, size = shape
    whole = torch.randn(tokens, heads_q + 2 * heads_k, dim, device="cuda").to(dtype)
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in whole.split([heads_q, heads_k, heads_k], 1))
    angles, pages = 9 * torch.randn(tokens, rotary_dim // 2, device="cuda"), tokens // size + 3
    shape = (pages, size, heads_k) if layout == "NHD" else (pages, heads_k, size)
    memory = torch.randn(*shape, 2, dim, device="cuda").to(dtype)
    slots = torch.randperm(pages * size, device="cuda")[:tokens]
    slots[tokens // 2] = -1 if tokens > 1 else 7
    given = {"q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin()}
    given |= {"k_pages": memory[..., 0, :], "v_pages": memory[..., 1, :], "slot_mapping": slots}
    return given | {f"{name}_weight": torch.rand(dim, device="cuda") - 0.3 for name in normed}


def by_slot(pages, layout):
    return pages.flatten(0, 1) if layout == "NHD" else pages.transpose(1, 2).flatten(0, 1)


def check(given, out, before, layout, **options):
    bound, slots = BOUNDS[given["q"].dtype], given["slot_mapping"].long()
    exact = {n: x.double() for n, x in given.items() if n in ("q", "k", "cos", "sin") or "weight" in n}
    q, k = right(**exact, **options)
    assert (out.double() - q).norm() < bound * q.norm()
    there = slots >= 0
    for name, old, new in zip(("k_pages", "v_pages"), before, (k, given["v"].double()), strict=True):
        found, kept = by_slot(given[name], layout), torch.ones(by_slot(old, layout).shape[0], device="cuda")
        kept[slots[there]] = 0
        assert torch.equal(found[kept > 0], by_slot(old, layout)[kept > 0])
        assert (found[slots[there]].double() - new[there]).norm() <= bound * new[there].norm()
    assert torch.equal(by_slot(given["v_pages"], layout)[slots[there]], given["v"][there])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, dtype):
    for layout, interleaved, normed in itertools.product(("NHD", "HND"), (False, True), ("", "q", "qk")):
        options = {"interleaved": interleaved, "zero_centered": interleaved, "eps": 1e-3}
        for number in (torch.int64, torch.int32):
            given = drawn(shape, dtype, layout, normed)
            given["slot_mapping"] = given["slot_mapping"].to(number)
            before = [given[name].clone() for name in ("k_pages", "v_pages")]
            poison(tuple(given["q"].shape), dtype=dtype)
            out = rope_append_paged_kv(**given, page_layout=layout, **options)
            check(given, out, before, layout, **options)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_in_fp8_hold_what_two_operations_write(shape, stored):
    """Scales are of all heads or of each; keys begin at an odd address. Rotations may differ in the last bit."""
    heads_k = shape[3]
    for dtype, layout, of_one_head in itertools.product(BOUNDS, ("NHD", "HND"), (False, True)):
        given, options = drawn(shape, dtype, layout, "qk"), {"page_layout": layout, "interleaved": of_one_head}
        scales = torch.rand(heads_k if of_one_head else 1, device="cuda") + 0.003
        given |= {"k_scale": scales, "v_scale": torch.full((), 0.004, device="cuda")}
        bits = torch.randint(120, (given["k_pages"].numel() + 1,), device="cuda").to(torch.uint8)
        given["k_pages"] = bits[1:].view(stored).view(given["k_pages"].shape)
        given["v_pages"] = given["v_pages"].to(stored)
        into = {name: given[name].clone() for name in ("k_pages", "v_pages")}
        rotation = {n: x for n, x in given.items() if n in ("q", "k", "cos", "sin") or "weight" in n}
        q, k = rope(**rotation, interleaved=of_one_head)
        of = {name: given[name] for name in ("v", "slot_mapping", "k_scale", "v_scale")}
        append_paged_kv(k, **of, **into, page_layout=layout)
        torch.testing.assert_close(rope_append_paged_kv(**given, **options), q)
        differ = {name: pages.view(torch.uint8) != given[name].view(torch.uint8) for name, pages in into.items()}
        assert not differ["v_pages"].any()
        assert differ["k_pages"].float().mean() < 1e-3


def test_in_a_cuda_graph():
    given = drawn((128, 128, 8, 2, 64, 16), torch.bfloat16, "NHD", "qk")
    rope_append_paged_kv(**given, page_layout="NHD")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope_append_paged_kv(**given, page_layout="NHD")
    for name in ("q", "k", "v"):
        given[name].normal_()
    given["slot_mapping"].copy_(given["slot_mapping"].roll(3))
    before = [given[name].clone() for name in ("k_pages", "v_pages")]
    graph.replay()
    check(given, out, before, "NHD")


def test_plans_are_recorded_as_without_the_gpu(tmp_path):
    """And another number of tokens needs no other kernel."""
    path, shape = tmp_path / "device.json", (128, 128, 8, 2, 64, 16)
    path.write_text(json.dumps(live_properties(0)))
    given = drawn(shape, torch.bfloat16, "NHD", "qk")
    q, k = (given[name].clone() for name in "qk")
    with record_plans() as used:
        rope_append_paged_kv(**given, page_layout="NHD")
        rope_(q, k, given["cos"], given["sin"])
    meta = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for n, x in given.items()}
    with record_plans(target=str(path)) as recorded:
        rope_append_paged_kv(**meta, page_layout="NHD")
        rope_(*(torch.empty_like(x, device="meta") for x in (q, k)), meta["cos"], meta["sin"])
    assert len(used) == 2
    assert recorded.plans == used.plans
    with no_plan_builds():
        rope_append_paged_kv(**drawn((*shape[:4], 65, 16), torch.bfloat16, "NHD", "qk"), page_layout="NHD")


@pytest.mark.parametrize("qk_norm", [None, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_layers_on_a_cache(qk_norm, dtype):
    """Steps of a prompt and of single tokens give what the whole sequence gives."""
    rope = nn.RotaryEmbedding(64)
    layer = nn.Attention(256, 8, num_kv_heads=2, head_dim=64, is_causal=True, rope=rope, qk_norm=qk_norm)
    layer = layer.to("cuda", torch.bfloat16).requires_grad_(False)
    is_fp8 = dtype.itemsize == 1
    scales = {name: torch.tensor(0.02, device="cuda") for name in ("k_scale", "v_scale")} if is_fp8 else {}
    cache = PagedKVCache(pages=40, page_size=16, heads=2, head_dim=64, dtype=dtype, device="cuda", layers=1, **scales)
    names, x = [cache.add(), cache.add()], torch.randn(2, 52, 256, device="cuda", dtype=torch.bfloat16)
    parts = [layer(part, step=cache.reserve(names, part.shape[1])) for part in x.split([50, 1, 1], 1)]
    wanted = layer(x).double()
    assert (torch.cat(parts, 1).double() - wanted).norm() < (0.1 if is_fp8 else 0.02) * wanted.norm()
    step = cache.reserve(names, 1)
    rotations = rope(step.positions)
    with nothing_synchronizes():
        layer(x[:, :1], step=step, rotations=rotations)
