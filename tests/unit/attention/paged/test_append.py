"""`append_paged_kv`: against plain loops, as a CPU computes it and by its kernel, on pages of any layout."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from native_way import native_way

from cudnn_sdpa import (
    DtypeError,
    LayoutError,
    OptionError,
    PagedKVCache,
    ShapeError,
    UnsupportedError,
    append_paged_kv,
    cpu_checks,
)
from cudnn_sdpa.attention.paged import append as append_module
from cudnn_sdpa.engine import value_checks

E4M3, E5M2, BF16, HALF = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16
FP8 = {E4M3: 448.0, E5M2: 57344.0}


@pytest.fixture(params=["cpu", "kernel", "native"])
def way(request):
    """Calls on the CPU; by the kernel, emulated, from Python; or from C++."""
    with contextlib.ExitStack() as stack:
        if request.param != "cpu":
            stack.enter_context(gpu_on_the_cpu())
            stack.enter_context(native_way(on=request.param == "native"))
        yield request.param


def bits(x):
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32)


def assert_same_memory(found, wanted):
    """The same bits, but any NaN for a NaN."""
    is_nan = wanted.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(bits(found).masked_fill(is_nan, 0), bits(wanted).masked_fill(is_nan, 0))


def as_stored(x, dtype, scale):
    """One head vector, rounded by PyTorch."""
    if x.dtype == dtype:
        return x
    values = x.float() / scale
    return values.clamp(-FP8[dtype], FP8[dtype]).to(dtype)


def by_loops(k, v, k_pages, v_pages, slots, *, page_layout, k_scale=None, v_scale=None):
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        size = pages.shape[2 if page_layout == "HND" else 1]
        for token, slot in enumerate(slots.tolist()):
            for head in range(new.shape[1]) if 0 <= slot < pages.shape[0] * size else ():
                page, offset = divmod(slot, size)
                place = (page, head, offset) if page_layout == "HND" else (page, offset, head)
                one = torch.ones(()) if scale is None else scale.reshape(-1)[head % scale.numel()]
                pages[place] = as_stored(new[token, head], pages.dtype, one)


def values(shape, dtype, rng):
    """Random numbers of all magnitudes; some are NaN, infinite, subnormal, or halfway between two of FP8."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, shape))
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 464.0, 465.0, 1.0625, -1.1875, 2**-9, 3 * 2**-11])
    x = torch.where(torch.rand(shape) < 0.2, special[torch.randint(0, len(special), shape)], x)
    if dtype in FP8:
        return x.clamp(-FP8[dtype], FP8[dtype]).to(dtype)
    return x.to(dtype) if rng.random() < 0.8 else x.mul(1e-7).to(dtype)


def anywhere(x, rng):
    """The same numbers in other memory: of another order, with gaps, or at an address that is no multiple of 16."""
    kind = rng.randrange(4)
    if kind == 0:
        return x
    if kind == 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    gap = 8 if kind == 2 else 1
    whole = torch.empty((*x.shape[:-1], x.shape[-1] + gap), dtype=x.dtype)
    return whole[..., gap:].copy_(x)


def pages_of(kind, dtype, pages, heads, size, dims, layout):
    """Pages of keys and values, and the memory that they are in, full of numbers that must stay."""

    def memory(*shape):
        return torch.randint(0, 120, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)

    shape = (pages, heads, size) if layout == "HND" else (pages, size, heads)
    if kind == "apart":
        whole = [memory(*shape, dim) for dim in dims]
        return whole, whole
    if kind == "side by side":
        whole = memory(*shape, sum(dims))
        return whole.split(dims, -1), [whole]
    if kind == "interleaved":
        whole = memory(pages, 2, *shape[1:], max(dims))
        return [whole[:, which, ..., :dim] for which, dim in enumerate(dims)], [whole]
    if kind == "elements apart":
        whole = memory(*shape, max(dims), 2)
        return [whole[..., :dim, which] for which, dim in enumerate(dims)], [whole]
    whole = [memory(math.prod(shape) * dim + 3) for dim in dims]  # at any address
    return [x[3:].view(*shape, dim) for x, dim in zip(whole, dims, strict=True)], whole


KINDS = ("apart", "side by side", "interleaved", "elements apart", "misaligned")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("way")
def test_equals_plain_loops(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokens, heads, size, pages = rng.choice((0, 1, 7, 40)), rng.choice((1, 2, 5)), rng.choice((1, 3, 16)), 6
    dims = (rng.choice((8, 40, 64)), rng.choice((8, 16, 72)))
    dtype = rng.choice((BF16, HALF, E4M3, E5M2))
    stored = dtype if dtype in FP8 or rng.random() < 0.3 else rng.choice((E4M3, E5M2))
    layout, kind = rng.choice(("HND", "NHD")), KINDS[seed % len(KINDS)]
    options = {"page_layout": layout}
    if stored != dtype:
        for name in ("k_scale", "v_scale"):
            shape = rng.choice((None, (), (1,), (heads,)))
            options |= {name: None if shape is None else torch.rand(shape) * 3 + 0.05}
    twins = [pages_of(kind, stored, pages, heads, size, dims, layout) for _ in range(2)]
    for one, other in zip(twins[0][1], twins[1][1], strict=True):
        bits(other).copy_(bits(one))
    for _ in range(3):  # cold, warm, and the second time native
        new = [anywhere(values((tokens, heads, dim), dtype, rng), rng) for dim in dims]
        slots = torch.randperm(pages * size)[:tokens]
        slots = torch.cat([slots, torch.full((tokens - len(slots),), -1)])
        slots[torch.rand(tokens) < 0.2] = rng.choice((-1, -7, -(2**31)))
        slots = slots.to(rng.choice((torch.int64, torch.int32)))
        assert append_paged_kv(*new, *twins[0][0], slots, **options) is None
        by_loops(*new, *twins[1][0], slots, **options)
        for one, other in zip(twins[0][1], twins[1][1], strict=True):
            assert_same_memory(one, other)


@pytest.mark.usefixtures("way")
def test_every_number_of_16_bits_is_rounded_as_pytorch_does():
    """Also with scales at the ends of float32, whose reciprocals it lacks, and with those that nobody should give."""
    scales = ((1.0, 0.37, 300.0, 1e-4), (-0.37, 1e-40, 3e38, 5e-39), (0.0, math.inf, math.nan, 2.0**127))
    for dtype in (BF16, HALF):
        every = torch.arange(2**16).to(torch.uint16).view(torch.int16).view(dtype).view(64, 4, 256)
        for stored, limit in FP8.items():
            for scale in (None, *map(torch.tensor, scales)):
                pages = [torch.zeros(64, 4, 1, 256).to(stored) for _ in "kv"]
                append_paged_kv(every, every, *pages, torch.arange(64), page_layout="HND", k_scale=scale)
                shown = every.float() if scale is None else every.float() / scale.view(4, 1)
                wanted = shown.clamp(-limit, limit).to(stored)
                assert_same_memory(pages[0].squeeze(2), wanted)
                assert pages[0].isnan().sum() == shown.isnan().sum()
                assert_same_memory(pages[1].squeeze(2), every.float().clamp(-limit, limit).to(stored))


def call(**changes):
    torch.manual_seed(1)
    given = {"k": torch.randn(3, 2, 16).bfloat16(), "v": torch.randn(3, 2, 8).bfloat16(), "page_layout": "HND"}
    given |= {"k_pages": torch.zeros(4, 2, 5, 16).bfloat16(), "v_pages": torch.zeros(4, 2, 5, 8).bfloat16()}
    return {**given, "slot_mapping": torch.tensor([7, 19, -1]), **changes}


def test_slots_behind_the_pages_are_refused_where_values_are_read(way, monkeypatch):
    given = call(slot_mapping=torch.tensor([7, 20, -1]))
    if way != "cpu":
        for _ in range(2):
            append_paged_kv(**given)
        assert torch.equal(given["k_pages"][1, :, 2], given["k"][0])
        assert given["k_pages"].count_nonzero() == given["k"][0].count_nonzero()
        monkeypatch.setattr(value_checks, "enabled", True)
    with pytest.raises(ShapeError, match="slot_mapping: got slot 20 for token 1; expected slots below 20, or negative"):
        append_paged_kv(**given)


FP8_PAGES = {"k_pages": torch.zeros(4, 2, 5, 16).to(E4M3), "v_pages": torch.zeros(4, 2, 5, 8).to(E4M3)}
WRONG = {
    "another rank": ({"k": torch.zeros(1, 3, 2, 16).bfloat16()}, ShapeError, "k: got shape"),
    "another head dim": ({"v": torch.zeros(3, 2, 16).bfloat16()}, ShapeError, "v: got shape"),
    "other heads": ({"k": torch.zeros(3, 1, 16).bfloat16()}, ShapeError, "k: got shape"),
    "fewer tokens": ({"v": torch.zeros(2, 2, 8).bfloat16()}, ShapeError, "v: got shape"),
    "another dtype of v": ({"v": torch.zeros(3, 2, 8).half()}, DtypeError, "v: got float16"),
    "pages of another dtype": ({"k_pages": torch.zeros(4, 2, 5, 16).half()}, DtypeError, "k_pages: got float16"),
    "pages of two dtypes": ({"k_pages": FP8_PAGES["k_pages"]}, DtypeError, "v_pages: got bfloat16"),
    "integers": ({"k": torch.zeros(3, 2, 16, dtype=torch.int32)}, DtypeError, "k: got int32"),
    "pages of rank 3": ({"v_pages": torch.zeros(4, 2, 40).bfloat16()}, ShapeError, "v_pages: .*HND"),
    "no pages": ({"k_pages": torch.zeros(0, 2, 5, 16).bfloat16()}, ShapeError, "k_pages: .*at least one page"),
    "other pages": ({"v_pages": torch.zeros(3, 2, 5, 8).bfloat16()}, ShapeError, "v_pages: got 3 pages"),
    "other page size": ({"v_pages": torch.zeros(4, 2, 6, 8).bfloat16()}, ShapeError, "v_pages: got 6 tokens per page"),
    "expanded pages": ({"k_pages": torch.zeros(1, 2, 5, 16).bfloat16().expand(4, -1, -1, -1)}, LayoutError, "k_pages"),
    "sparse elements": ({"k": torch.zeros(3, 2, 32).bfloat16()[..., ::2]}, LayoutError, "k: got stride 2"),
    "a slot too many": ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, ShapeError, "slot_mapping: got shape"),
    "slots of floats": ({"slot_mapping": torch.zeros(3)}, DtypeError, "slot_mapping: got float32"),
    "slots elsewhere": ({"slot_mapping": torch.zeros(3, dtype=torch.int64, device="meta")}, Exception, "slot_mapping"),
    "no slots": ({"slot_mapping": None}, OptionError, "slot_mapping: got NoneType"),
    "a list": ({"slot_mapping": [1, 2, 3]}, OptionError, "slot_mapping: got list"),
    "a scale without FP8": ({"k_scale": torch.ones(1)}, OptionError, "k_scale: got a scale for pages in bfloat16"),
    "a scale of two": ({**FP8_PAGES, "v_scale": torch.ones(3)}, ShapeError, "v_scale: got shape"),
    "a scale in bfloat16": ({**FP8_PAGES, "v_scale": torch.ones(2).bfloat16()}, DtypeError, "v_scale: got bfloat16"),
    "a number": ({**FP8_PAGES, "v_scale": 0.5}, OptionError, "v_scale: got float"),
    "an unknown layout": ({"page_layout": "PHD"}, OptionError, "page_layout"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("way")
def test_wrong_arguments(name):
    changes, error, message = WRONG[name]
    append_paged_kv(**call())
    with pytest.raises(error, match=message):
        append_paged_kv(**call(**changes))


@pytest.mark.usefixtures("way")
def test_gradients_are_refused():
    given = call()
    given["k"].requires_grad_()
    with pytest.raises(UnsupportedError, match="append_paged_kv with a gradient"):
        append_paged_kv(**given)
    for _ in range(2):
        with torch.no_grad():
            append_paged_kv(**given)
    assert torch.equal(given["k_pages"][1, :, 2], given["k"][0])


@pytest.mark.usefixtures("way")
def test_autograd_notices_the_change():
    given = call()
    factor = torch.ones(16, dtype=BF16, requires_grad=True)
    for _ in range(3):
        loss = (given["k_pages"] * factor).sum()
        append_paged_kv(**given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("which", ["k_pages", "v_pages", "both"])
def test_memory_that_is_shared_until_it_is_written_to_keeps_its_values(which):
    for _ in range(4):
        given, kept = call(), torch.full((4, 2, 5, 16 + 8), 5.0).bfloat16()
        parts = torch._lazy_clone(kept).split((16, 8), -1)
        given |= {name: x for name, x in zip(("k_pages", "v_pages"), parts, strict=True) if which in (name, "both")}
        append_paged_kv(**given)
        assert (kept == 5).all()
        assert torch.equal(given["k_pages"][1, :, 2], given["k"][0])
        assert torch.equal(given["v_pages"][3, :, 4], given["v"][1])


@pytest.mark.usefixtures("way")
def test_a_cache_whose_memory_is_shared_until_it_is_written_to(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    for _ in range(4):
        cache = PagedKVCache(pages=4, page_size=5, heads=2, head_dim=16, device="cpu")
        kept, cache._k = cache._k, torch._lazy_clone(cache._k)
        cache._set_up()
        new = torch.randn(1, 2, 3, 16).bfloat16()
        cache.append(cache.reserve([one := cache.add()], 3), new, new)
        assert not kept.any()
        assert all(torch.equal(x, new[0]) for x in cache.read(one))


@pytest.mark.usefixtures("way")
def test_inference_mode():
    with torch.inference_mode():
        given = call()
        for _ in range(3):
            append_paged_kv(**given)
    append_paged_kv(**given)
    assert torch.equal(given["v_pages"][3, :, 4], given["v"][1])


@pytest.mark.usefixtures("way")
def test_negative_bits_are_heeded():
    given = call()
    for _ in range(3):
        append_paged_kv(**{**given, "k": torch._neg_view(given["k"])})
        assert torch.equal(given["k_pages"][1, :, 2], -given["k"][0])
    with pytest.raises(LayoutError, match="v_pages: got a negated view"):
        append_paged_kv(**{**given, "v_pages": torch._neg_view(given["v_pages"])})


@pytest.mark.usefixtures("way")
def test_it_is_captured_by_torch_compile():
    def step(k, v, cache, slots):
        append_paged_kv(k * 2, v, *cache.split((16, 8), -1), slots, page_layout="NHD")
        return cache.float().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 4, 9):
        k, v = torch.randn(tokens, 2, 16).bfloat16(), torch.randn(tokens, 2, 8).bfloat16()
        cache, slots = torch.zeros(4, 5, 2, 24).bfloat16(), torch.randperm(20)[:tokens]
        twin = cache.clone()
        assert torch.equal(compiled(k, v, cache, slots), step(k, v, twin, slots))
        assert torch.equal(cache, twin)
        assert cache.count_nonzero() == k.numel() + v.numel()


def test_the_operator_keeps_pytorchs_rules():
    given = append_module.AppendCall(**call(), page_table=None, seq_lens_kv=None, seq_lens_q=None, k_scale=None,
                                     v_scale=None, tokens=None)  # fmt: skip
    found = torch.library.opcheck(torch.ops.cudnn_sdpa.append_paged_kv.default, tuple(given))
    assert set(found.values()) == {"SUCCESS"}


def test_a_warm_call_makes_no_plan_and_takes_the_native_way(monkeypatch):
    with gpu_on_the_cpu(), native_way():
        given = call()
        for _ in range(2):
            append_paged_kv(**given)

        def asked(*_):
            raise AssertionError("Python was asked")

        monkeypatch.setattr(append_module, "_find", asked)
        given["slot_mapping"] = torch.tensor([0, 1, 2])
        append_paged_kv(**given)
        assert torch.equal(given["k_pages"][0, :, 2], given["k"][2])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.usefixtures("way")
def test_a_cache_in_fp8_quantizes(monkeypatch, dtype, layout):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    scales = {"k_scale": torch.tensor([0.3, 1.7]), "v_scale": torch.tensor(2.5)}
    sizes = {"pages": 8, "page_size": 5, "heads": 2, "head_dim": 16, "head_dim_v": 32, "device": "cpu"}
    cache = PagedKVCache(**sizes, dtype=dtype, page_layout=layout, **scales)
    numbers, written = [cache.add(), cache.add()], []
    for added in ([5, 3], [1, 1], [0, 2], [1, 1]):
        step = cache.reserve(numbers, added)
        new = [torch.randn(2, max(added), 2, dim).mul(300).bfloat16().transpose(1, 2) for dim in (16, 32)]
        cache.append(step, *new)
        written.append((added, new))
    for b, number in enumerate(numbers):
        for which, (found, scale) in enumerate(zip(cache.read(number), scales.values(), strict=True)):
            wanted = torch.cat([new[which][b, :, : added[b]] for added, new in written], 1)
            shown = wanted.float() / scale.view(-1, 1, 1)
            assert_same_memory(found, shown.clamp(-FP8[dtype], FP8[dtype]).to(dtype))
    other = next(x for x in FP8 if x != dtype)
    with pytest.raises(DtypeError, match="k: got float8"):
        cache.append(step, *(x.to(other) for x in new))


def test_caches_pickled_before_they_had_scales():
    cache = PagedKVCache(pages=4, page_size=5, heads=2, head_dim=16, device="cpu")
    state = {name: value for name, value in cache.__getstate__().items() if name not in ("k_scale", "v_scale")}
    found, new = PagedKVCache.__new__(PagedKVCache), torch.randn(1, 2, 3, 16).bfloat16()
    found.__setstate__(state)
    found.append(found.reserve([one := found.add()], 3), new, new)
    assert all(torch.equal(x, new[0]) for x in found.read(one))


def test_scales_and_sizes_of_a_cache_are_checked():
    sizes = {"pages": 8, "page_size": 4, "heads": 2, "head_dim": 16, "device": "cpu"}
    with pytest.raises(OptionError, match="head_dim_v: got 24; expected a multiple of 16, as head vectors in FP8"):
        PagedKVCache(**sizes, dtype=E4M3, head_dim_v=24)
    with pytest.raises(OptionError, match="k_scale: got a scale for a cache in bfloat16"):
        PagedKVCache(**sizes, k_scale=torch.ones(1))
    with pytest.raises(ShapeError, match="v_scale: got shape"):
        PagedKVCache(**sizes, dtype=E4M3, v_scale=torch.ones(3))
    with pytest.raises(OptionError, match="v_scale: got float"):
        PagedKVCache(**sizes, dtype=E4M3, v_scale=0.5)


def test_any_dtype_of_the_reference():
    given = call(**{name: x.double() for name, x in call().items() if torch.is_tensor(x) and x.is_floating_point()})
    with cpu_checks(None):
        append_paged_kv(**given)
    assert torch.equal(given["k_pages"][3, :, 4], given["k"][1])
