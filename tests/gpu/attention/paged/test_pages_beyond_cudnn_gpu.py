"""`sdpa_paged` and `PagedKVCache` on a GPU, on pages that cuDNN cannot read: in FP8, and of no power of two tokens."""

from __future__ import annotations

import pytest
import torch
from attention_checks import captured, nothing_synchronizes, poison
from float64_reference import attend
from paged_batches import attend_padded_on_pages, padded_on_pages

import cudnn_sdpa
from cudnn_sdpa import PagedKVCache, no_plan_builds, plan_cache, sdpa_paged

E4M3, E5M2, BF16, F16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
LENGTHS = [4000, 1, 63, 0, 64, 65, 777, 5]

#: Largest relative error in the norm, over all queries and in the worst of them.
WHOLE, WORST = {BF16: 6e-3, F16: 1e-3}, {BF16: 2e-2, F16: 4e-3}


@pytest.fixture(autouse=True)
def needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversions of FP8")


def assert_close(out, wanted):
    off, size = (out.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert out.isfinite().all()
    assert float(off.norm()) <= WHOLE[out.dtype] * float(size.norm()) + 1e-6
    assert bool((off <= WORST[out.dtype] * size + 1e-5).all())


def assert_right(given):
    """Output and log-sum-exp of a cold and a warm call, in memory that held NaN, and written into a tensor."""
    shape = (*given["q"].shape[:3], given["v_pages"].shape[-1])
    wanted, of_lse = attend_padded_on_pages(**given)
    for _ in range(2):
        poison(shape, dtype=given["q"].dtype)
        poison(shape[:3], dtype=torch.float32)
        out, lse = sdpa_paged(**given, return_lse=True)
        assert_close(out, wanted)
        torch.testing.assert_close(lse.double(), of_lse, rtol=1e-4, atol=2e-3)
    into = torch.full_like(out, torch.nan)
    assert sdpa_paged(**given, out=into) is into
    assert torch.equal(into, out)


def drawn(queries=1, present=None, **given):
    settings = {"heads": 8, "dims": (128, 128), "page": 16, "dtype": BF16, "cache": E4M3, "device": "cuda"}
    return padded_on_pages(queries, LENGTHS, present, **settings | given)


def scales(kind):
    """None, one for all heads, one for each, or one for each in a wider tensor."""
    of = {
        "none": {},
        "one": {"k_scale": torch.tensor(0.7), "v_scale": torch.tensor([1.9])},
        "heads": {"k_scale": torch.tensor([0.6, 1.7]), "v_scale": torch.tensor([-1.4, 2.3])},
        "apart": {"k_scale": torch.tensor([0.6, 9.0, 1.7, 9.0]), "v_scale": torch.tensor([1.3])},
    }[kind]
    found = {name: x.cuda() for name, x in of.items()}
    return {**found, "k_scale": found["k_scale"][::2]} if kind == "apart" else found


@pytest.mark.parametrize("kind", ["none", "one", "heads", "apart"])
@pytest.mark.parametrize("queries", [1, 4, 70])
@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_scales(kind, queries, cache, dtype, dims):
    assert_right({**drawn(queries, cache=cache, dtype=dtype, dims=dims), **scales(kind)})


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, 7, 24, 48, 100])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("cache", [None, E5M2])
def test_pages_of_any_size(layout, page, queries, cache):
    assert_right(drawn(queries, layout=layout, page=page, cache=cache, has_table_v=page == 48))


OPTIONS = {
    "full": {"is_causal": False},
    "window": {"window_size": (100, 0)},
    "window to both sides, top-left": {"is_causal": False, "window_size": (70, 3), "causal_alignment": "top_left"},
    "soft cap, a negative scale": {"softcap": 3.0, "scale": -0.11},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": 2.0},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("present", [None, [5, 1, 0, 2, 4, 5, 3, 0]])
@pytest.mark.parametrize("cache", [None, E4M3])
def test_options(name, present, cache):
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = options["sinks"] + torch.randn(8, device="cuda")
    assert_right({**drawn(5, present, cache=cache, page=12), **options})


def test_a_known_call_synchronizes_nothing_and_builds_nothing():
    given = {**drawn(2), **scales("heads")}
    sdpa_paged(**given)
    before = plan_cache.info().builds
    with nothing_synchronizes(), no_plan_builds():
        for _ in range(3):
            out = sdpa_paged(**given)
    assert plan_cache.info().builds == before
    assert_close(out, attend_padded_on_pages(**given)[0])


def test_a_captured_call_replays_on_other_values():
    given = {**drawn(3, [3] * len(LENGTHS)), **scales("heads")}
    sdpa_paged(**given)
    graph, out = captured(lambda: sdpa_paged(**given))
    for turn in range(3):
        given["q"].normal_()
        given["k_scale"].uniform_(0.3, 1.5)
        given["seq_lens_kv"].copy_(torch.tensor([x // (turn + 1) for x in LENGTHS]))
        given["seq_lens_q"].copy_(torch.randint(0, 4, (len(LENGTHS),)))
        graph.replay()
        assert_close(out, attend_padded_on_pages(**given)[0])


@pytest.mark.parametrize("options", [{"dtype": E4M3, "page_size": 16}, {"dtype": E5M2, "page_size": 24}], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_cache_end_to_end(options, layout):
    """Prompts, decodes, drafts and a fork; then the same steps without building a plan."""
    of = scales("heads")
    of["v_scale"] = of["v_scale"].abs()
    cache = PagedKVCache(pages=200, heads=2, head_dim=64, max_length=800, page_layout=layout, **options, **of)
    cudnn_sdpa.warmup(cache.plans(torch.empty(1, 8, 2, 64, device="cuda", dtype=BF16), range(1, 4), range(1, 200)))
    one, two = cache.add(), cache.add()
    compared = []
    with no_plan_builds():
        for numbers, counts in (([one, two], [177, 30]), ([one, two], [1, 1]), ([two, one], [5, 2]), ([one], [1])):
            compared += step_of(cache, numbers, counts)
        three = cache.fork(one)
        for numbers, counts in (([three, one, two], [1, 1, 1]), ([one, three], [0, 3]), ([three], [40])):
            compared += step_of(cache, numbers, counts)
    for found, wanted in compared:
        assert_close(found, wanted)
    assert [cache.length(number) for number in (one, two, three)] == [182, 37, 225]


def step_of(cache, numbers, counts):
    """Appends and attends; the results of each sequence, beside float64 attention of what the cache holds."""
    step = cache.reserve(numbers, counts)
    new = (torch.randn(len(numbers), max(counts), 2, 64, device="cuda").to(BF16).transpose(1, 2) for _ in "kv")
    cache.append(step, *new)
    q = torch.randn(len(numbers), max(counts), 8, 64, device="cuda").to(BF16).transpose(1, 2)
    out = cache.attend(step, q)
    compared = []
    for b, (number, count) in enumerate(zip(numbers, counts, strict=True)):
        absent = out[b : b + 1, :, count:]
        compared.append((absent, torch.zeros_like(absent).double()))
        if not count:
            continue
        stored = zip(cache.read(number), (cache.k_scale, cache.v_scale), strict=True)
        k, v = ((x.double() * scale.view(-1, 1, 1)).unsqueeze(0) for x, scale in stored)
        wanted, _ = attend(q[b : b + 1, :, :count], k, v, is_causal=True, causal_alignment="bottom_right")
        compared.append((out[b : b + 1, :, :count], wanted))
    return compared
