"""`PagedKVCache.plans` and `warmup`: no step of the named kinds builds a plan."""

from __future__ import annotations

import random

import pytest
import torch
from attention_checks import TOLERANCE, error

import cudnn_sdpa
from cudnn_sdpa import PagedKVCache, PlanBuildError, no_plan_builds, plan_cache, sdpa_paged

pytestmark = pytest.mark.usefixtures("default_providers")

BF16 = torch.bfloat16
HEADS = (8, 2)


def queries(batch, tokens, order):
    """Queries as a projection returns them: alone, next to keys and values, or head by head."""
    if order == "heads apart":
        return torch.randn(batch, HEADS[0], tokens, 64, device="cuda", dtype=BF16)
    more = 2 * HEADS[1] if order == "of one projection" else 0
    every_head = torch.randn(batch, tokens, HEADS[0] + more, 64, device="cuda", dtype=BF16)
    return every_head[:, :, : HEADS[0]].transpose(1, 2)


@pytest.mark.parametrize("order", ["alone", "of one projection", "heads apart"])
@pytest.mark.parametrize("options", [{}, {"return_lse": True, "window_size": (20, 0)}, {"softcap": 20.0}], ids="+".join)
def test_steps_find_their_warmed_plans(order, options):
    """Any number of sequences and tokens up to the limits, also with absent tokens."""
    cache = PagedKVCache(pages=400, page_size=16, heads=HEADS[1], head_dim=64, max_length=512)
    manifest = cache.plans(queries(2, 5, order), range(1, 14), range(1, 80), **options)
    report = cudnn_sdpa.warmup(manifest, workers=2)
    assert (report.failed, report.built) == ({}, len(manifest))
    assert len(manifest) <= 60
    draw, sequences = random.Random(2), [cache.add() for _ in range(13)]
    with no_plan_builds():
        for batch in range(1, 14):
            for count in (1, draw.randint(2, 8), draw.randint(9, 79)):
                counts = [count, *(draw.randint(0, count) for _ in range(batch - 1))]
                step = cache.reserve(sequences[:batch], counts if draw.random() < 0.5 else count)
                k, v = (torch.randn(batch, HEADS[1], count, 64, device="cuda", dtype=BF16) for _ in range(2))
                cache.append(step, k, v)
                q = queries(batch, count, order)
                found, wanted = cache.attend(step, q, **options), reference(cache, step, q, options)
                if not options.get("return_lse"):
                    found, wanted = (found,), (wanted,)
                assert error(found[0].cpu(), wanted[0].double()) < TOLERANCE[BF16]
                for of_lse, wanted_lse in zip(found[1:], wanted[1:], strict=True):
                    torch.testing.assert_close(of_lse.cpu(), wanted_lse, atol=2e-3, rtol=2e-3)
            for sequence in sequences:
                cache.evict(sequence)


def reference(cache, step, q, options):
    """The same on the CPU, in float32: plans that a helper made must compute what they should."""
    pages = (x.cpu().float() for x in (cache.k_pages(), cache.v_pages()))
    numbers = step.page_table.cpu(), step.seq_lens_kv.cpu()
    options = {"seq_lens_q": step.seq_lens_q.cpu(), "page_layout": cache.page_layout, **options}
    return sdpa_paged(q.cpu().float(), *pages, *numbers, **options)


def test_a_capture_without_a_plan_suggests_warmup():
    cache = PagedKVCache(pages=40, page_size=16, heads=HEADS[1], head_dim=64, max_length=128)
    step, q = cache.reserve([cache.add()], 3), queries(1, 3, "alone")
    cache.append(step, *torch.randn(2, 1, HEADS[1], 3, 64, device="cuda", dtype=BF16))
    cache.attend(step, q)  # our own kernels are there
    plan_cache.clear()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        q.add_(1)  # PyTorch warns of graphs without anything in them
        with pytest.raises(PlanBuildError, match=r"warmup\(\)"):
            cache.attend(step, q)
    cudnn_sdpa.warmup(cache.plans(q, [1], [3]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(step, q)
    graph.replay()
    assert out.isfinite().all()
