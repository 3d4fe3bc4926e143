"""`sdpa_paged` and `PagedKVCache` on pages that cuDNN cannot read: in FP8, and of sizes that are no power of two."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from float64_reference import attend
from native_way import native_way
from paged_batches import attend_padded_on_pages, padded_on_pages

import cudnn_sdpa
from cudnn_sdpa import (
    ArgumentError,
    DtypeError,
    OptionError,
    PagedKVCache,
    ShapeError,
    UnsupportedError,
    explain,
    plan_cache,
    sdpa_paged,
)
from cudnn_sdpa.attention.paged.step_plans import plans_of_steps
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.plans.manifest import PlanManifest

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
LENGTHS = (23, 1, 0, 40, 6)
TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    BF16: {"rtol": 8e-3, "atol": 4e-3},
}


@pytest.fixture(params=["python", "native"])
def gpu(request):
    with native_way(on=request.param == "native"), gpu_on_the_cpu():
        yield


def call(queries=1, lengths=LENGTHS, present=None, **sizes):
    return padded_on_pages(queries, lengths, present, **{"dims": (16, 32), "layout": "HND", **sizes})


def assert_right(given):
    """A call with and without `out`; on the fake GPU the first of its kind, and a known one."""
    tolerances = TOLERANCES[given["q"].dtype]
    expected, of_lse = attend_padded_on_pages(**given)
    for _ in range(2):
        out, lse = sdpa_paged(**given, return_lse=True)
        torch.testing.assert_close(out.double(), expected, **tolerances)
        torch.testing.assert_close(lse.double(), of_lse, rtol=1e-5, atol=max(1e-6, tolerances["atol"]))
        into = torch.full_like(expected, torch.nan).to(out.dtype)
        assert sdpa_paged(**given, out=into) is into
        assert torch.equal(into, out)
    return out


SCALES = {
    "none": {},
    "one": {"k_scale": torch.tensor(0.7), "v_scale": torch.tensor([1.9])},
    "heads": {"k_scale": torch.tensor([0.6, 1.7]), "v_scale": torch.tensor([-1.4, 2.3])},
    "keys alone, apart": {"k_scale": torch.tensor([[0.6, 9.0], [1.7, 9.0]])[:, 0]},
    "expanded": {"v_scale": torch.tensor([1.3]).expand(2)},
}


@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_scales(cache, scales, dtype):
    assert_right({**call(2, dtype=dtype, cache=cache), **SCALES[scales]})


OPTIONS = {
    "full": {"is_causal": False},
    "window": {"window_size": (6, 0)},
    "window to both sides, top-left": {"is_causal": False, "window_size": (3, 2), "causal_alignment": "top_left"},
    "soft cap, a negative scale": {"softcap": 1.7, "scale": -0.8},
    "no scale": {"scale": 0.0},
    "sinks": {"sinks": torch.tensor([0.4, -2.0, 1.3, 5.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "present"), [(1, None), (1, [1, 0, 1, 1, 0]), (4, [4, 0, 3, 1, 2]), (20, None)])
@pytest.mark.parametrize("cache", [None, E4M3])
def test_options(name, queries, present, cache):
    given = call(queries, present=present, cache=cache, page=7, **({"has_table_v": True} if queries == 4 else {}))
    scales = SCALES["heads"] if cache is not None else {}
    assert_right({**given, **scales, **OPTIONS[name]})


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, 12, 16, 100])
@pytest.mark.parametrize("cache", [None, E4M3])
@pytest.mark.usefixtures("gpu")
def test_pages_of_any_size_on_a_gpu(layout, page, cache):
    for queries in (1, 20):
        assert_right(call(queries, page=page, layout=layout, cache=cache, dtype=BF16))


@pytest.mark.parametrize(
    ("name", "scales"), [*((name, "heads") for name in OPTIONS), *(("full", scales) for scales in SCALES)]
)
@pytest.mark.usefixtures("gpu")
def test_fp8_on_a_gpu(name, scales):
    given = {**call(3, dtype=torch.float16, cache=E5M2, page=16), **OPTIONS[name], **SCALES[scales]}
    assert_right(given)
    assert_right({**given, "seq_lens_q": torch.tensor([3, 0, 1, 2, 3], dtype=torch.int32)})
    new = {name: torch.rand_like(x) + 0.5 for name, x in given.items() if name.endswith("_scale")}
    assert_right({**given, **new})
    assert plan_cache.info().builds == 2, "one of them has the LSE"
    assert {key.operation.rpartition(":")[2] for key in FakePlan.launched[-3:]} == {"paged_varlen_forward"}


@pytest.mark.usefixtures("gpu")
def test_the_explained_plan_is_that_of_the_call():
    for given, why in (
        (call(dtype=BF16, cache=E4M3), "pages in FP8"),
        (call(9, dtype=BF16, page=12), "pages of no power of two tokens"),
    ):
        sdpa_paged(**given)
        described = describer_of(sdpa_paged)(**given).for_target(TARGET)
        assert described.key(TARGET, 0) == FakePlan.launched[-1]
        assert described.choice == f"our own kernel for pages: cuDNN has none for {why}"
        assert described.extra_kernels == []
        errors = describer_of(sdpa_paged)(**given, return_lse=True).verify(False)
        assert 0 < errors["out"] < 4e-3
        assert errors["lse"] < 1e-5


def test_what_a_gpu_has_no_kernel_for(monkeypatch):
    given = call(dtype=BF16, cache=E4M3)
    with cudnn_sdpa.cpu_checks("a100"):
        assert_right(call(dtype=BF16, page=12))
        with pytest.raises(UnsupportedError, match=r"sdpa_paged(.|\n)*pages in FP8 need compute capability 8\.9"):
            sdpa_paged(**given)
        with cudnn_sdpa.fallback("torch"):
            assert_right(given)
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "a100")
    assert not explain(sdpa_paged, **given).supported
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    report = explain(sdpa_paged, **given)
    assert report.supported
    assert "paged_varlen_forward" in report.key


def test_autocast_casts_the_queries():
    given = call(3, dtype=BF16, cache=E4M3)
    expected = sdpa_paged(**given)
    with torch.autocast("cpu", BF16):
        assert torch.equal(sdpa_paged(**{**given, "q": given["q"].float()}), expected)


ONE = torch.ones(1)
WRONG = {
    "a scale of bfloat16": (None, {"k_scale": ONE}, OptionError, "k_scale: got a tensor; .* pages in bfloat16"),
    "a scale as a number": (E4M3, {"v_scale": 0.5}, OptionError, "v_scale: got float; expected a torch.Tensor or"),
    "dtype of a scale": (E4M3, {"k_scale": ONE.double()}, DtypeError, "k_scale: got float64"),
    "size of a scale": (E4M3, {"v_scale": torch.ones(4)}, ShapeError, r"v_scale: got shape \(4,\); expected .*\(2,\)"),
    "rank of a scale": (E4M3, {"v_scale": torch.ones(2, 1)}, ShapeError, r"v_scale: got shape \(2, 1\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_scales(name):
    cache, change, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        sdpa_paged(**{**call(dtype=BF16, cache=cache), **change})


def test_head_dims_that_the_kernel_lacks():
    for sizes, message in (
        ({"cache": E4M3, "dims": (272, 16)}, "q: got head dim 272; expected at most 256 on pages in FP8"),
        ({"page": 12, "dims": (16, 264)}, "v_pages: got head dim 264; expected at most 256 on pages of 12 tokens"),
    ):
        given = call(dtype=BF16, **sizes)
        with pytest.raises(ShapeError, match=message):
            sdpa_paged(**given)
        with cudnn_sdpa.cpu_checks(None):
            assert_right(given)
    given = call(dtype=BF16, cache=E4M3, dims=(24, 32))
    with pytest.raises(ArgumentError, match=r"k_pages: got stride .*Allocate pages with 16 bytes"):
        sdpa_paged(**given)


# Caches.


def shown(x, dtype, scale):
    """The values of keys or values (Hkv, tokens, D) that are stored in a dtype."""
    if dtype == BF16:
        return x.double()
    scale = torch.ones(()) if scale is None else scale
    most = torch.finfo(dtype).max
    return (x.float() / scale.view(-1, 1, 1)).clamp(-most, most).to(dtype).double() * scale.double().view(-1, 1, 1)


class Served:
    """A cache, and what was written for each of its sequences."""

    def __init__(self, **options):
        sizes = {"pages": 40, "heads": 2, "head_dim": 16, "head_dim_v": 32, "layers": 2, "device": "cpu"}
        self.cache, self.rows = PagedKVCache(**sizes, **options), {}
        self.of = [(options["dtype"], options.get(name)) for name in ("k_scale", "v_scale")]

    def add(self):
        number = self.cache.add()
        self.rows[number] = [torch.empty(2, 0, dim, dtype=torch.float64) for dim in (16, 32)]
        return number

    def fork(self, number):
        other = self.cache.fork(number)
        self.rows[other] = list(self.rows[number])
        return other

    def step(self, numbers, counts, **options):
        """Appends, attends in the second layer, and gives the results of each sequence beside those of float64."""
        compared = []
        step = self.cache.reserve(numbers, counts)
        new = [torch.randn(len(numbers), 2, max(counts), dim).mul(3).bfloat16() for dim in (16, 32)]
        for layer in (0, 1):
            self.cache.append(step, *(x if layer else -x for x in new), layer)
        q = torch.randn(len(numbers), 4, max(counts), 16).bfloat16()
        found = self.cache.attend(step, q, layer=1, **options)
        for b, (number, count) in enumerate(zip(numbers, counts, strict=True)):
            more = [shown(x[b, :, :count], *of) for x, of in zip(new, self.of, strict=True)]
            self.rows[number] = [torch.cat(pair, 1) for pair in zip(self.rows[number], more, strict=True)]
            rows = (x.unsqueeze(0) for x in self.rows[number])
            options_here = {"is_causal": True, "causal_alignment": "bottom_right", **options}
            expected, _ = attend(q[b : b + 1, :, :count], *rows, **options_here)
            absent = found[b : b + 1, :, count:].double()
            compared += [(found[b : b + 1, :, :count].double(), expected), (absent, torch.zeros_like(absent))]
        return compared


KINDS = {
    "E4M3, scales of heads": {"dtype": E4M3, "page_size": 16, **SCALES["heads"]},
    "E5M2, one scale, 5 tokens": {"dtype": E5M2, "page_size": 5, "page_layout": "NHD", **SCALES["one"]},
    "E4M3, no scale, 1 token": {"dtype": E4M3, "page_size": 1},
    "bfloat16, 12 tokens": {"dtype": BF16, "page_size": 12},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["cpu", "python", "native"])
def test_caches_end_to_end(monkeypatch, kind, where):
    """Prompts, decodes, drafts, absent tokens and forks, whose copied pages have the same numbers."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    options = {name: x.abs() if torch.is_tensor(x) else x for name, x in KINDS[kind].items()}

    with contextlib.ExitStack() as stack:
        if where != "cpu":
            stack.enter_context(native_way(on=where == "native"))
            stack.enter_context(gpu_on_the_cpu())
        served = Served(**options)
        one, two = served.add(), served.add()
        compared = served.step([one, two], [13, 4])
        for _ in range(3):
            compared += served.step([one, two], [1, 1])
        three = served.fork(one)
        for _ in range(2):
            compared += served.step([three, one, two], [2, 0, 4], softcap=3.0)
            sinks = torch.tensor([0.4, -2.0, 1.3, 5.0])
            compared += served.step([one, three], [1, 1], window_size=(6, 0), sinks=sinks)
    for found, expected in compared:
        torch.testing.assert_close(found, expected, **TOLERANCES[BF16])
    assert [served.cache.length(number) for number in (one, two, three)] == [18, 15, 22]


@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_a_cache_are_those_of_its_steps(kind):
    options = {name: x.abs() if torch.is_tensor(x) else x for name, x in KINDS[kind].items()}
    cache = PagedKVCache(pages=40, heads=2, head_dim=16, max_length=80, device="cpu", **options)
    listed = plans_of_steps(cache, torch.randn(1, 4, 2, 16).bfloat16(), range(1, 80, 6), range(1, 50), {}, TARGET)
    assert len(listed) == 2, "few rows, and many"
    with gpu_on_the_cpu():
        for batch in (1, 43, 73):
            for tokens in (1, 3, 4, 5, 6, 9, 49):
                step = cache.new_step(batch, tokens)
                cache.attend(step, torch.randn(batch, tokens, 4, 16).bfloat16().transpose(1, 2))
        assert PlanManifest.of(FakePlan.launched[-1:]).plans[0] in listed.plans
        assert plan_cache.info().builds == len(listed)
