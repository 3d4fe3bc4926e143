"""`PagedKVCache.plans`: the plans of the steps that are named, and of no others."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import DeviceError, OptionError, PagedKVCache, ShapeError, UnsupportedError
from cudnn_sdpa.attention.describe_paged import describe_paged
from cudnn_sdpa.attention.step_plans import plans_of_steps, queries_like
from cudnn_sdpa.runtime.manifest import PlanManifest
from cudnn_sdpa.runtime.target import Target

TARGET = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 91900, "1.32.0", "a GPU")


@pytest.fixture
def cache():
    return PagedKVCache(pages=64, page_size=16, heads=2, head_dim=64, max_length=256, device="cpu")


def queries(batch=2, tokens=3, dim=64):
    return torch.randn(batch, tokens, 8, dim, dtype=torch.bfloat16).transpose(1, 2)


def names(manifest):
    return [plan["operation"].rpartition(":")[2] for plan in manifest.plans]


@pytest.mark.parametrize("tokens", [1, 4, 90])
@pytest.mark.parametrize("batch", [1, 4, 5])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"softcap": 20.0}], ids="+".join)
def test_they_are_those_of_the_calls(cache, batch, tokens, options):
    step = cache.reserve([cache.add() for _ in range(batch)], tokens if batch * tokens < 400 else 4)
    step = cache.new_step(batch, tokens) if step.tokens != tokens else step
    of_step = queries(batch, tokens), cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    present = step.seq_lens_q if tokens > 1 else None
    key = describe_paged(*of_step, seq_lens_q=present, **options).key(TARGET, None)
    found = plans_of_steps(cache, queries(1, 1), [batch], [tokens], options, TARGET)
    assert found.plans == PlanManifest.of([key]).plans


def test_most_share_a_plan(cache):
    found = plans_of_steps(cache, queries(), range(1, 65), [1], {}, TARGET)
    assert set(names(found)) == {"paged_decode"}
    assert 7 < len(found) <= 24
    both = plans_of_steps(cache, queries(), range(1, 65), (1, 200), {}, TARGET)
    assert set(names(both)) == {"paged_decode", "sdpa_forward"}


@pytest.mark.parametrize("given", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("beside", [0, 4])
def test_queries_of_another_step_lie_like_these(given, beside):
    def as_made(batch, tokens):
        every_head = torch.randn(batch, tokens, 8 + beside, 64, dtype=torch.bfloat16)
        return every_head[:, :, :8].transpose(1, 2)

    for batch, tokens in ((1, 1), (2, 1), (1, 7), (5, 7)):
        like, wanted = queries_like(as_made(*given), batch, tokens), as_made(batch, tokens)
        assert (like.shape, like.dtype, like.is_meta) == (wanted.shape, wanted.dtype, True)
        for size, found, expected in zip(wanted.shape, like.stride(), wanted.stride(), strict=True):
            assert size == 1 or found == expected


def test_heads_that_lie_apart_stay_apart():
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
        ({"options": {"nothing": 1}}, TypeError, "nothing"),
        ({"q": queries().float()}, (UnsupportedError, TypeError, ValueError), "dtype|float32"),
    ],
)
def test_what_makes_no_sense_is_said(cache, wrong, error, match):
    arguments = {"q": queries(), "batches": [1], "tokens": [1], "options": {}, **wrong}
    with pytest.raises(error, match=match):
        plans_of_steps(cache, *arguments.values(), TARGET)


def test_a_cache_on_the_cpu_has_no_plans(cache):
    with pytest.raises(DeviceError, match="cpu"):
        cache.plans(queries(), [1])
