"""Keys, counters and eviction with real plans."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from attention_checks import check, exact, make

import cudnn_sdpa
from cudnn_sdpa import plan_cache
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan

pytestmark = pytest.mark.usefixtures("default_providers")


def tensors(sq=48, skv=80, heads_q=4, heads_kv=2, dim=64, dim_v=64, dtype=torch.bfloat16, layout="bshd", batch=2):
    return (
        make(layout, batch, heads_q, sq, dim, dtype),
        make(layout, batch, heads_kv, skv, dim, dtype),
        make(layout, batch, heads_kv, skv, dim_v, dtype),
    )


def test_strides_of_size_one_dimensions_share_a_plan():
    q, k, v = tensors(sq=1, batch=1)
    cudnn_sdpa.sdpa(q, k, v)
    with cudnn_sdpa.no_plan_builds():
        odd = torch.as_strided(q, q.shape, (7777, q.stride(1), 4242, 1))
        torch.testing.assert_close(cudnn_sdpa.sdpa(odd, k, v), cudnn_sdpa.sdpa(q, k, v), atol=0, rtol=0)


def test_bounded_and_evicted_plans_are_freed_and_rebuilt():
    plan_cache.resize(3)
    q, k, v = tensors()
    for _ in range(4):
        cudnn_sdpa.sdpa(q[:, :, :5], k, v)
    gc.collect()
    gc.disable()  # a plan must be freed by itself
    victim = weakref.ref(plan_cache.plans()[0].built)
    for length in range(6, 12):
        check(q[:, :, :length], k, v)
    info = plan_cache.info()
    assert info.plans == 3
    assert info.evictions == info.builds - 3
    assert len(SDPA.table) == 3
    gone = victim() is None
    gc.enable()
    assert gone
    check(q[:, :, :5], k, v)


def test_plans_may_be_evicted_while_their_launches_are_queued():
    """The constants and kernels of an evicted plan must live until its launches have run."""
    q, k, v = tensors()
    ends = torch.tensor([48, 17], dtype=torch.int32, device="cuda")
    expected = exact(q, k, v, seq_lens_q=ends)[0]
    side = torch.cuda.Stream()
    for _ in range(3):
        cudnn_sdpa.sdpa(q, k, v, seq_lens_q=ends)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            out = cudnn_sdpa.sdpa(q, k, v, seq_lens_q=ends)
        plan_cache.clear()
        gc.collect()
        junk = [torch.full((2,), 3, dtype=torch.int32, device="cuda") for _ in range(256)]
        cudnn_sdpa.sdpa(q[:, :, :7], k, v)
        torch.cuda.synchronize()
        assert len(junk) == 256
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_the_frontends_public_execute_gives_the_same_results(monkeypatch):
    """Without the private launch, the public one is used, with every kind of operand."""
    monkeypatch.setattr(backend, "_raw_executor", lambda *_: None)
    q, k, v = tensors()
    check(q, k, v, is_causal=True, scale=0.31)
    ends = torch.tensor([80, 33], dtype=torch.int32, device="cuda")
    check(q, k, v, scale=0.31, seq_lens_kv=ends)
    check(q[:, :, :1], k, v, scale=0.31, seq_lens_kv=ends)


def test_only_cudnn_engines_are_chosen():
    """The frontend ranks its own Python engines in the same list, on this GPU for a head dim of 512."""
    check(*tensors(dim=512, dim_v=512), scale=0.05)
    check(*tensors(dim=256, dim_v=256))
    check(*tensors())
    for plan in plan_cache.plans():
        assert plan.engine.startswith("eng")
        assert plan.built.graph.selected_engine is None


@GraphDefinition
def bottom_right_alibi(g, q):
    """cuDNN has no plan for this combination."""
    out, _ = g.sdpa(
        q=q,
        k=q,
        v=q,
        attn_scale=0.3,
        generate_stats=False,
        use_alibi_mask=True,
        diagonal_alignment=g.types.diagonal_alignment.BOTTOM_RIGHT,
        diagonal_band_right_bound=0,
    )
    return out


def test_a_failed_build_leaves_no_damage():
    layout = TensorLayout.of(tensors()[0])
    key = bottom_right_alibi.key([Operand("q", layout)], [Operand("out", layout)], {}, live_target(0), 0)
    for _ in range(2):
        with pytest.raises(cudnn_sdpa.UnsupportedError) as caught:
            plan_cache.get(key, lambda key: build_plan(bottom_right_alibi, key))
        assert caught.value.reasons
        assert "python engines" not in str(caught.value)
    info = plan_cache.info()
    assert (info.failures, info.builds, info.plans) == (2, 0, 0)
    check(*tensors())


def test_head_dims_up_to_the_limit():
    check(*tensors(dim=1024, dim_v=1024), scale=0.05)
    check(*tensors(dim=1024, dim_v=1024, sq=1), scale=0.05)
    check(*tensors(dim=576, dim_v=512), scale=0.05, is_causal=True)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="head dim 1032 is over 1024"):
        cudnn_sdpa.sdpa(*tensors(dim=1032))


def test_decode_uses_the_decode_engine():
    q, k, v = tensors(sq=1)
    plain = cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, k, v)
    causal = cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, k, v, is_causal=True, causal_alignment="bottom_right")
    assert causal.cached
    assert causal.engine == plain.engine
