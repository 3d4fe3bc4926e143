"""`PagedKVCache.plans`: exactly the plans of the named steps."""

from __future__ import annotations

import inspect
import json
import random

import pytest
import torch

from cudnn_sdpa import DeviceError, OptionError, PagedKVCache, ShapeError, UnsupportedError, sdpa_paged
from cudnn_sdpa.attention.paged import specs
from cudnn_sdpa.attention.paged.explain import describe_paged
from cudnn_sdpa.attention.paged.sdpa_paged import call_of
from cudnn_sdpa.attention.paged.step_plans import plans_of_steps, queries_like
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.manifest import PlanManifest

TARGET = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 91900, "1.32.0", "a GPU")


@pytest.fixture
def cache():
    return PagedKVCache(pages=64, page_size=16, heads=2, head_dim=64, max_length=256, device="cpu")


def queries(batch=2, tokens=3, dim=64):
    return torch.randn(batch, tokens, 8, dim, dtype=torch.bfloat16).transpose(1, 2)


def names(manifest):
    return [plan["operation"].rpartition(":")[2] for plan in manifest.plans]


SINKS = torch.randn(8)


@pytest.mark.parametrize("tokens", [1, 4, 90])
@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"softcap": 20.0}, {"sinks": SINKS, "window_size": (9, 0)}], ids="+".join
)
def test_plans_are_those_of_the_calls(cache, batch, tokens, options):
    step = cache.new_step(batch, tokens)
    of_step = queries(batch, tokens), cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    forms = (None, step.seq_lens_q) if tokens == 1 else (step.seq_lens_q,)  # some tokens may be absent
    wanted = [
        describe_paged(*of_step, seq_lens_q=present, page_layout="HND", **options).for_target(TARGET).key(TARGET, None)
        for present in forms
    ]
    found = plans_of_steps(cache, queries(1, 2), [batch], [tokens], options, TARGET)
    assert found.plans == PlanManifest.of(wanted).plans


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_plans_cover_every_step_up_to_the_limits(cache, softcap):
    most = 9, 200
    options = {} if softcap is None else {"softcap": softcap}
    found = plans_of_steps(cache, queries(), range(1, most[0] + 1), range(1, most[1] + 1), options, TARGET)
    known = {json.dumps(plan, sort_keys=True) for plan in found.plans}
    assert len(known) <= 60
    draw = random.Random(3)
    for _ in range(300):
        batch, tokens = draw.randint(1, most[0]), draw.randint(1, most[1])
        step = cache.new_step(batch, tokens)
        of_step = queries(batch, tokens), cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
        present = step.seq_lens_q if tokens > 1 or draw.random() < 0.5 else None
        key = (
            describe_paged(*of_step, seq_lens_q=present, page_layout="HND", **options)
            .for_target(TARGET)
            .key(TARGET, None)
        )
        assert json.dumps(PlanManifest.of([key]).plans[0], sort_keys=True) in known, (batch, tokens)


def test_a_split_batch_has_the_plans_of_its_parts(cache, monkeypatch):
    monkeypatch.setattr(specs, "MAX_GATHERED_BYTES", 2 * 256 * 2 * 128 * 2)  # of two sequences
    found = plans_of_steps(cache, queries(), [5], [50], {}, TARGET)
    assert sorted(plan["inputs"][0]["layout"]["shape"][0] for plan in found.plans) == [3, 5]  # of 1 and 2, twice


def step_keys(cache, batch, tokens, **options):
    """The plans of the calls of a step, split or not."""
    step = cache.new_step(batch, tokens)
    tensors = queries(batch, tokens), cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    names = inspect.signature(sdpa_paged).parameters
    forms = (None, step.seq_lens_q) if tokens == 1 else (step.seq_lens_q,)
    for present in forms:
        defaults = {name: x.default for name, x in names.items()} | dict(zip(names, tensors, strict=False))
        call = call_of(**{**defaults, "page_layout": "HND", "seq_lens_q": present, **options})
        yield from call.keys(TARGET, None)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 9.0}, {"causal_alignment": "top_left", "window_size": (45, 0)}, {"sinks": SINKS}],
    ids=[*"abc"],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_plan_of_a_step_is_missing(cache, monkeypatch, options, deterministic):
    """Also where gathering splits some batches of a bucket, and where a window only hides keys of longer chunks."""
    monkeypatch.setattr(specs, "MAX_GATHERED_BYTES", 11 * 256 * 2 * 128 * 2)  # of eleven sequences
    torch.use_deterministic_algorithms(deterministic)
    try:
        batches, counts = range(8, 14), (1, 2, 5, 9, 33, 44, 45, 46, 47, 60, 130)
        found = plans_of_steps(cache, queries(), batches, counts, options, TARGET)
        wanted = [key for batch in batches for count in counts for key in step_keys(cache, batch, count, **options)]
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert found.plans == PlanManifest.of(wanted).plans


def test_known_wrong_decode_kernels_are_replaced(cache):
    blackwell = Target((("deviceVer", 1000), ("multiProcessorCount", 148)), 91900, "1.32.0", "a GPU")
    assert set(names(plans_of_steps(cache, queries(), [1, 4], [1], {}, blackwell))) == {"sdpa_forward"}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_a_serving_loop_needs_a_few_dozen_plans(order):
    """Steps whose batch, lengths and chunks change all the time, on any tables."""
    draw = random.Random(5)
    pages, table = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in PAGES_AND_TABLE)
    keys = set()
    for _ in range(3000):
        count = draw.choice([1] * 4 + [draw.randint(2, 8), draw.randint(9, 512)])
        batch = draw.randint(1, 64 if count <= 8 else 4)
        q = torch.empty(batch, *((8, count) if order == "heads first" else (count, 8)), 64, dtype=BF16, device="meta")
        q = q if order == "heads first" else q.transpose(1, 2)
        lengths = torch.empty(batch, dtype=torch.int32, device="meta")
        keys.add(describe_paged(q, pages, pages, table[:batch], lengths, page_layout="HND").key(TARGET, None))
    assert len(keys) <= 45


BF16 = torch.bfloat16
PAGES_AND_TABLE = (((2048, 2, 16, 64), BF16), ((64, 128), torch.int32))


@pytest.mark.parametrize("given", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("beside", [0, 4])
def test_queries_of_other_steps_keep_the_layout(given, beside):
    def as_made(batch, tokens):
        every_head = torch.randn(batch, tokens, 8 + beside, 64, dtype=torch.bfloat16)
        return every_head[:, :, :8].transpose(1, 2)

    for batch, tokens in ((1, 1), (2, 1), (1, 7), (5, 7)):
        like, wanted = queries_like(as_made(*given), batch, tokens), as_made(batch, tokens)
        assert (like.shape, like.dtype, like.is_meta) == (wanted.shape, wanted.dtype, True)
        for size, found, expected in zip(wanted.shape, like.stride(), wanted.stride(), strict=True):
            assert size == 1 or found == expected


def test_separate_heads_stay_separate():
    like = queries_like(torch.randn(1, 8, 3, 64), 2, 5)
    assert like.stride() == torch.empty(2, 8, 5, 64).stride()


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"q": None}, ShapeError, "q: got NoneType"),
        ({"q": torch.randn(8, 64)}, ShapeError, r"q: got shape \(8, 64\)"),
        ({"batches": 3}, OptionError, "batches: got 3; expected several ints"),
        ({"batches": [2, 0]}, OptionError, "batches: got 0"),
        ({"tokens": [1.0]}, OptionError, "tokens: got 1.0"),
        ({"q": queries(dim=128)}, ShapeError, "head dim"),
        ({"options": {"softcap": -1.0}}, OptionError, "softcap"),
        ({"options": {"nothing": 1}}, OptionError, "nothing"),
        ({"options": {"out": queries()}}, OptionError, "out: got an argument"),
        ({"q": queries().float()}, (UnsupportedError, TypeError, ValueError), "dtype|float32"),
    ],
)
def test_invalid_arguments_are_named(cache, wrong, error, match):
    arguments = {"q": queries(), "batches": [1], "tokens": [1], "options": {}, **wrong}
    with pytest.raises(error, match=match):
        plans_of_steps(cache, *arguments.values(), TARGET)


def test_a_cache_on_the_cpu_has_no_plans(cache):
    with pytest.raises(DeviceError, match="cpu"):
        cache.plans(queries(), [1])
