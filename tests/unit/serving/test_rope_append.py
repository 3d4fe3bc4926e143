"""`rope_append_paged_kv`: its kernel on the fake GPU, and two operations elsewhere, against float64; arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from fake_gpu import TARGET, EmulatedKernel, FakePlan, gpu_on_the_cpu
from float64_reference import rope as right
from native_way import native_way
from random_tensors import is_dense, is_in_order_of

import cudnn_sdpa
from cudnn_sdpa import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError, rope_append_paged_kv
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.serving import rope_append

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}

#: Head dim, rotated features, heads of queries and of keys, page size.
SHAPES = [(64, 64, 3, 2, 16), (96, 32, 2, 1, 5), (256, 256, 4, 4, 1), (24, 8, 5, 3, 7), (16, 16, 8, 1, 64)]


#: Half of the distance of neighboring numbers in FP8, of the numbers themselves and at least; the largest number.
FP8 = {torch.float8_e4m3fn: (2**-4, 2**-10, 448.0), torch.float8_e5m2: (2**-3, 2**-17, 57344.0)}


def drawn(dim, rotary_dim, heads_q, heads_k, page_size, *, dtype, layout, tokens=9, pages=6, stored=None):
    """Heads as views of one projection, and pages of keys and values beside each other; some tokens have no slot."""
    whole = torch.randn(tokens, heads_q + 2 * heads_k, dim).to(dtype)
    q, k, v = (x.clone() if x.data_ptr() % 16 else x for x in whole.split([heads_q, heads_k, heads_k], 1))
    angles = 4 * torch.randn(tokens, rotary_dim // 2)
    shape = (pages, page_size, heads_k) if layout == "NHD" else (pages, heads_k, page_size)
    k_pages, v_pages = torch.randn(*shape, 2, dim).to(stored or dtype).unbind(-2)
    if v_pages.data_ptr() % 16 and stored is None:
        v_pages = v_pages.clone()
    slots = torch.randperm(pages * page_size)[:tokens]
    slots = torch.cat([slots, slots.new_full((tokens - len(slots),), -1)])
    slots[2] = -1
    given = {"q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin()}
    return given | {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": slots}


def difference(x, y):
    return (x.double() - y).norm() / y.norm()


def check(given, layout, **options):
    """Compares what is returned and written with float64; nothing else is written."""
    before = [given[name].clone() for name in ("k_pages", "v_pages")]
    out = rope_append_paged_kv(**given, page_layout=layout, **options)
    rotation = {name: x.double() for name, x in given.items() if name in ("q", "k", "cos", "sin") or "weight" in name}
    q, k = right(**rotation, **options)
    bound, size = BOUNDS[given["q"].dtype], before[0].shape[1 if layout == "NHD" else 2]
    assert difference(out, q) < bound
    assert is_dense(out)
    assert is_in_order_of(out, given["q"])
    for name, old, new in (("k_pages", before[0], k), ("v_pages", before[1], given["v"].double())):
        expected, pages = old.double(), given[name]
        for token, slot in enumerate(given["slot_mapping"].tolist()):
            if 0 <= slot < len(old) * size:
                page, place = divmod(slot, size)
                expected[(page, place) if layout == "NHD" else (page, slice(None), place)] = new[token]
        assert difference(pages, expected) < bound
        kept = expected == old.double()
        assert torch.equal(pages[kept], old[kept])
    assert torch.equal(given["v_pages"].double(), expected), "values are copied"


CASES = list(itertools.product(SHAPES, BOUNDS, ("NHD", "HND"), (False, True), ("", "q", "qk")))


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_match_float64(number):
    shape, dtype, layout, interleaved, normed = CASES[number]
    weights = {f"{n}_weight": (torch.rand(shape[0]) - 0.3).to(torch.float32 if number % 3 else dtype) for n in normed}
    options = {"interleaved": interleaved, "zero_centered": number % 2 == 0, "eps": 0.01}
    for where in (gpu_on_the_cpu(), contextlib.nullcontext()):
        given = drawn(*shape, dtype=dtype, layout=layout) | weights
        given["slot_mapping"] = given["slot_mapping"].to(torch.int32 if number % 2 else torch.int64)
        with where:
            check(given, layout, **options)


def check_fp8(given, layout, **options):
    """Compares FP8 pages with float64; nothing else is written. Returns the operands of `rope`, and the old pages."""
    others = {name: given[name].clone() for name in ("k_pages", "v_pages")}
    of_rotation = {name: x for name, x in given.items() if name in ("q", "k", "cos", "sin") or "weight" in name}
    exact_q, exact_k = right(**{n: x.double() for n, x in of_rotation.items()}, **options)
    out = rope_append_paged_kv(**given, page_layout=layout, **options)
    assert difference(out, exact_q) < BOUNDS[given["q"].dtype]
    for name, exact in (("k", exact_k), ("v", given["v"].double())):
        pages, old = (x[f"{name}_pages"] for x in (given, others))
        half, least, most = FP8[pages.dtype]
        written, size = torch.zeros(pages.shape, dtype=torch.bool), pages.shape[1 if layout == "NHD" else 2]
        scale = given.get(f"{name}_scale", torch.ones(())).double().view(-1, 1)
        for token, slot in enumerate(given["slot_mapping"].tolist()):
            if slot < 0:
                continue
            page, offset = divmod(slot, size)
            place = (page, offset) if layout == "NHD" else (page, slice(None), offset)
            written[place] = True
            wanted = exact[token] / scale
            rounded = 2**-7 * wanted.abs().amax() if name == "k" else 0.0  # to the dtype of the keys
            off, wanted = (pages[place].double() - wanted.clamp(-most, most)).abs(), wanted.clamp(-most, most)
            assert (off <= 1.01 * (half * wanted.abs() + least) + rounded).all()
        assert torch.equal(pages.view(torch.uint8)[~written], old.view(torch.uint8)[~written])
    return of_rotation, others


FP8_CASES = list(itertools.product(SHAPES, FP8, ("NHD", "HND"), (False, True)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(FP8_CASES)))
def test_pages_in_fp8_hold_what_two_operations_write(number):
    """Bit for bit, with a scale for all heads or one for each, or none; some values saturate."""
    shape, stored, layout, interleaved = FP8_CASES[number]
    dtype, heads = list(BOUNDS)[number % 2], shape[3]
    scales = {"k_scale": (torch.rand(2 * heads) + 0.002)[::2], "v_scale": torch.tensor([0.003])}
    scales = {"v_scale": torch.rand(()) + 1e-3} if number % 3 == 0 else scales
    weights = {"k_weight": torch.rand(shape[0]) + 0.5} if number % 4 else {}
    for where in (gpu_on_the_cpu(), contextlib.nullcontext()):
        given = drawn(*shape, dtype=dtype, layout=layout, stored=stored) | weights | scales
        with where:
            of_rotation, pages = check_fp8(given, layout, interleaved=interleaved, eps=0.01)
            _, k = cudnn_sdpa.rope(**of_rotation, interleaved=interleaved, eps=0.01)
            cudnn_sdpa.append_paged_kv(
                k, given["v"], slot_mapping=given["slot_mapping"], page_layout=layout, **pages, **scales
            )
        for name, x in pages.items():
            assert torch.equal(x.view(torch.uint8), given[name].view(torch.uint8))


@pytest.mark.parametrize("native", [False, True])
def test_pages_in_fp8_take_one_launch_with_other_scales_and_addresses(native):
    given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD", stored=torch.float8_e4m3fn)
    memory = torch.zeros(given["k_pages"].numel() + 16, dtype=torch.uint8)
    scales = torch.tensor([0.02, 0.3, 0.5, 7.0])
    with native_way(on=native), gpu_on_the_cpu():
        for turn in range(4):
            pages = memory[turn : turn + given["k_pages"].numel()].view(torch.float8_e4m3fn)
            given["k_pages"] = pages.view(given["k_pages"].shape)
            given |= {"k_scale": scales[turn], "v_scale": scales[3 - turn]}
            before = len(FakePlan.launched)
            check_fp8(given, "NHD")
            assert len(FakePlan.launched) == before + 1


def test_nan_and_infinity_in_fp8_pages():
    given = drawn(16, 16, 2, 2, 4, dtype=torch.bfloat16, layout="NHD", stored=torch.float8_e4m3fn)
    given["v"][0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    given["k"][0, 1, 0] = torch.nan
    page, place = divmod(int(given["slot_mapping"][0]), 4)
    with gpu_on_the_cpu():
        rope_append_paged_kv(**given, page_layout="NHD")
    found = given["v_pages"][page, place, 0, :3].float()
    torch.testing.assert_close(found, torch.tensor([torch.nan, 448.0, -448.0]), equal_nan=True)
    assert given["k_pages"][page, place, 1].float().isnan().sum() == 2


@pytest.mark.parametrize("order", [0, 1])
def test_many_heads_of_a_thread(order, monkeypatch):
    """Four heads, which are queries, keys and values."""
    properties = tuple((name, 1 if name == "multiProcessorCount" else x) for name, x in TARGET.properties)
    monkeypatch.setattr(EmulatedKernel, "order", order)
    given = drawn(16, 8, 3, 2, 8, dtype=torch.bfloat16, layout="NHD", tokens=300, pages=40)
    with gpu_on_the_cpu(target=dataclasses.replace(TARGET, properties=properties)):
        check(given | {"k_weight": torch.rand(16)}, "NHD")


@pytest.mark.parametrize("native", [False, True])
def test_one_launch_of_known_calls_with_other_slots_and_eps(native, monkeypatch):
    given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD") | {"q_weight": torch.rand(64)}
    with native_way(on=native), gpu_on_the_cpu():
        for eps in (1e-3, 1, 0.5):
            given["slot_mapping"] = given["slot_mapping"].roll(1)
            before, version = len(FakePlan.launched), given["k_pages"]._version
            check(given, "NHD", eps=eps)
            assert len(FakePlan.launched) == before + 1
            assert given["k_pages"]._version > version
        for eps in (-1.0, torch.nan, 1e300):
            with pytest.raises(OptionError, match="eps"):
                rope_append_paged_kv(**given, page_layout="NHD", eps=eps)
        if native:
            assert rope_append._calls.find is not None
            monkeypatch.setattr(rope_append, "_find", None)  # a call that the module knows asks for nothing else
        given["slot_mapping"][:] = 6 * 16  # behind the last page
        check(given, "NHD")


@pytest.mark.parametrize("change", ["values of another head dim", "spread angles", "a spread weight"])
def test_elsewhere_two_operations_run(change):
    given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD")
    if change == "a spread weight":
        given["k_weight"] = torch.rand(128)[::2]
    elif change == "spread angles":
        given |= {name: given[name].repeat(1, 2)[:, ::2] for name in ("cos", "sin")}
    else:
        given |= {name: given[name][..., :32].clone() for name in ("v", "v_pages")}
    before, pages = given["k_pages"].clone(), given["k_pages"]
    with gpu_on_the_cpu():
        for _ in range(2):
            out = rope_append_paged_kv(**given, page_layout="NHD")
    rotation = {n: x.double() for n, x in given.items() if n in ("q", "k", "cos", "sin", "k_weight")}
    q, k = right(**rotation)
    assert difference(out, q) < BOUNDS[torch.bfloat16]
    slot = int(given["slot_mapping"][0])
    assert difference(pages[slot // 16, slot % 16], k[0]) < BOUNDS[torch.bfloat16]
    assert (pages != before).sum() <= 8 * 2 * 64


def test_the_kernel_compiles_for_all_gpus_supported():
    kernels = []
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        emulated = Kernel.on
        patch.setattr(Kernel, "on", lambda kernel, device: kernels.append(kernel) or emulated(kernel, device))
        for stored in (None, torch.float8_e4m3fn):
            given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD", stored=stored)
            rope_append_paged_kv(**given, page_layout="NHD")
    for kernel, sm in itertools.product(kernels, (80, 90, 100)):
        assert kernel.compile(sm)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD")
    other = given | {name: given[name].clone() for name in ("k_pages", "v_pages")}
    out = torch.compile(rope_append_paged_kv, fullgraph=True, backend="aot_eager")(**given, page_layout="NHD")
    torch.testing.assert_close(out, rope_append_paged_kv(**other, page_layout="NHD"))
    for name in ("k_pages", "v_pages"):
        torch.testing.assert_close(given[name], other[name])


WRONG = {
    "q of four dimensions": ({"q": torch.zeros(1, 3, 5, 16)}, ShapeError, "k|q"),
    "another dtype of k": ({"k": torch.zeros(5, 1, 16)}, DtypeError, "k"),
    "angles of other positions": ({"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}, ShapeError, "cos"),
    "values of other heads": ({"v": torch.zeros(5, 2, 16).half()}, ShapeError, "v"),
    "pages of another head dim": ({"k_pages": torch.zeros(3, 4, 1, 8).half()}, ShapeError, "k"),
    "pages of another dtype": ({"v_pages": torch.zeros(3, 4, 1, 16)}, DtypeError, "v_pages"),
    "slots of other tokens": ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, ShapeError, "slot_mapping"),
    "no keys": ({"k": None}, OptionError, "k"),
    "no slots": ({"slot_mapping": None}, OptionError, "slot_mapping"),
    "page_layout": ({"page_layout": "NDH"}, OptionError, "page_layout"),
    "interleaved": ({"interleaved": 2}, OptionError, "interleaved"),
    "eps without a weight": ({"eps": -1.0}, OptionError, "eps"),
    "an eps that is no number, without a weight": ({"eps": "1e-6"}, OptionError, "eps"),
    "a gradient": ({"q": torch.zeros(5, 3, 16, dtype=torch.half, requires_grad=True)}, UnsupportedError, "grad"),
    "a gradient of a weight": ({"k_weight": torch.ones(16, requires_grad=True)}, UnsupportedError, "grad"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("where", [gpu_on_the_cpu, contextlib.nullcontext])
def test_wrong_arguments_are_named(name, where):
    changed, error, named = WRONG[name]
    given = {"q": torch.zeros(5, 3, 16), "k": torch.zeros(5, 1, 16), "v": torch.zeros(5, 1, 16)}
    given |= {"k_pages": torch.zeros(3, 4, 1, 16), "v_pages": torch.zeros(3, 4, 1, 16)}
    given = {n: x.half() for n, x in given.items()} | {"cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}
    given |= {"slot_mapping": torch.arange(5), "page_layout": "NHD"}
    with where():
        rope_append_paged_kv(**given)
        with pytest.raises(error, match=named):
            rope_append_paged_kv(**{**given, **changed})


def layer_and_cache(qk_norm, dtype=torch.bfloat16):
    rope = cudnn_sdpa.nn.RotaryEmbedding(16)
    layer = cudnn_sdpa.nn.Attention(48, 4, num_kv_heads=2, head_dim=16, is_causal=True, rope=rope, qk_norm=qk_norm)
    layer = layer.bfloat16().requires_grad_(False)
    scales = {"k_scale": torch.tensor(0.01), "v_scale": torch.tensor(0.02)} if dtype.itemsize == 1 else {}
    return layer, cudnn_sdpa.PagedKVCache(
        pages=9, page_size=4, heads=2, head_dim=16, dtype=dtype, device="cpu", layers=2, **scales
    )


@pytest.mark.parametrize("qk_norm", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_layer_appends_what_two_operations_do(qk_norm, dtype):
    """Steps of several tokens and of one, of sequences of several lengths, some tokens of which are absent."""
    layer, cache = layer_and_cache(qk_norm, dtype)
    _, other = layer_and_cache(qk_norm, dtype)
    names = [[each.add() for _ in range(2)] for each in (cache, other)]
    q_norm, k_norm = layer.q_norm, layer.k_norm
    for tokens, counts in ((5, [5, 3]), (1, [1, 1]), (3, [0, 3])):
        x = torch.randn(2, tokens, 48).bfloat16()
        step, of_other = cache.reserve(names[0], counts), other.reserve(names[1], counts)
        with gpu_on_the_cpu():
            before = len(FakePlan.launched)
            q, k, v = layer._heads(x, None, layer.rope(of_other.positions))
            other.append(of_other, k, v, 1)
            separate = len(FakePlan.launched) - before
            found = layer._append_rotated(x, layer.rope(step.positions), step, 1)
        assert len(FakePlan.launched) - before == separate + 1
        assert torch.equal(found, q)
        assert 1 in step.written
    assert (layer.q_norm, layer.k_norm) == (q_norm, k_norm)
    for mine, theirs in ((cache.k_pages(1), other.k_pages(1)), (cache.v_pages(1), other.v_pages(1))):
        assert torch.equal(mine.float(), theirs.float())
    assert cache.k_pages(1).float().any()


def test_a_layer_on_the_cpu_attends_to_what_it_has_appended():
    layer, cache = layer_and_cache(1e-3)
    x, name = torch.randn(1, 7, 48).bfloat16(), cache.add()
    whole = layer(x)
    parts = [layer(part, step=cache.reserve([name], part.shape[1]), layer=1) for part in x.split([4, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=0.03, rtol=0.05)


def test_a_step_with_a_gradient_is_refused():
    layer, cache = layer_and_cache(None)
    step = cache.reserve([cache.add()], 3)
    with pytest.raises(UnsupportedError, match=r"PagedKVCache with a gradient(.|\n)*no_grad"):
        layer(torch.randn(1, 3, 48).bfloat16().requires_grad_(), step=step)
    assert not step.written


def test_misaligned_memory_is_refused():
    given = drawn(64, 64, 3, 2, 16, dtype=torch.bfloat16, layout="NHD")
    given["k_pages"] = torch.zeros(given["k_pages"].numel() + 1, dtype=torch.bfloat16)[1:].view(given["k_pages"].shape)
    with gpu_on_the_cpu(), pytest.raises(LayoutError, match="k_pages"):
        rope_append_paged_kv(**given, page_layout="NHD")
