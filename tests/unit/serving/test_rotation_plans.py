"""Plans of `rope_` and `rope_append_paged_kv`: forbidden, recorded, also for another GPU, compiled and warmed up."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from native_way import native_way

import cudnn_sdpa
from cudnn_sdpa import PlanBuildError, ShapeError, UnsupportedError, no_plan_builds, plan_cache, record_plans
from cudnn_sdpa.offline import warmup
from cudnn_sdpa.plans.nvrtc import Kernel


def heads(tokens, device, dtype=torch.bfloat16):
    """Queries, keys and values that are views of one projection, and angles."""
    q, k, v = torch.randn(tokens, 8, 64, device=device).to(dtype).split([4, 2, 2], 1)
    angles = torch.randn(tokens, 32, device=device)
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}, v


def rotate(tokens=9, device="cpu", **given):
    cudnn_sdpa.rope_(**heads(tokens, device)[0] | given)


def rotate_and_append(tokens=9, device="cpu", stored=torch.bfloat16, **given):
    rotation, v = heads(tokens, device)
    pages = torch.zeros(2, 4, 16, 2, 64, dtype=stored, device=device)
    slots = torch.arange(tokens, device=device)
    cudnn_sdpa.rope_append_paged_kv(**rotation | given, v=v, **of_pages(pages), slot_mapping=slots)


def of_pages(pages):
    return {"k_pages": pages[0], "v_pages": pages[1], "page_layout": "NHD"}


#: Each with the operation of its plan.
CALLS = {rotate: "own_rope", rotate_and_append: "own_rope_append"}
of_both = pytest.mark.parametrize("call", CALLS)


@of_both
@pytest.mark.parametrize("native", [False, True])
def test_builds_can_be_forbidden_and_known_calls_need_none(call, native):
    with native_way(on=native), gpu_on_the_cpu():
        for _ in range(2):
            launched = len(FakePlan.launched)
            with no_plan_builds(), pytest.raises(PlanBuildError, match=rf"no_plan_builds\(\)(.|\n)*{CALLS[call]}"):
                call()
            assert len(FakePlan.launched) == launched
            call()
            before = plan_cache.info()
            with no_plan_builds():
                for _ in range(3):
                    call()
                with pytest.raises(PlanBuildError):
                    call(8)
            after = plan_cache.info()
            assert (after.builds, after.plans, after.hits - before.hits) == (1, 1, 3)
            assert len(FakePlan.launched) == launched + 4
            plan_cache.clear()


@of_both
@pytest.mark.parametrize("native", [False, True])
def test_an_evicted_plan_is_built_again(call, native):
    with native_way(on=native), gpu_on_the_cpu():
        capacity = plan_cache.info().capacity
        try:
            plan_cache.resize(1)
            for tokens in (9, 9, 8, 9):
                call(tokens)
            gc.collect()
            info = plan_cache.info()
        finally:
            plan_cache.resize(capacity)
    assert (info.plans, info.builds, info.evictions) == (1, 3, 2)


@of_both
@pytest.mark.parametrize("native", [False, True])
def test_uses_are_recorded_and_the_same_are_recorded_without_a_gpu(call, native):
    with native_way(on=native), gpu_on_the_cpu():
        call()
        with record_plans() as used:
            call()
        (key,) = used.keys(TARGET, 0)
        assert key == FakePlan.launched[-1]
        assert key.name == CALLS[call]
    for device in ("cpu", "meta"):
        with record_plans(target="h200") as recorded:
            call(device=device)
        assert recorded.plans == used.plans


@of_both
def test_recorded_plans_are_compiled_and_warmed_up(call, tmp_path, monkeypatch):
    with record_plans(target="h200") as manifest:
        for tokens in (9, 1):
            call(tokens, device="meta")
    compiled = []
    monkeypatch.setattr(Kernel, "compile", lambda kernel, sm: compiled.append((kernel, sm)) or b"code")
    report = cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    assert not report.failed
    assert {sm for _, sm in compiled} == {90}
    run = []
    with gpu_on_the_cpu():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(warmup, "live_properties", lambda _: {})
        monkeypatch.setattr(warmup, "live_target", lambda _: TARGET)
        emulated = Kernel.on
        monkeypatch.setattr(Kernel, "on", lambda kernel, device: run.append(kernel) or emulated(kernel, device))
        report = cudnn_sdpa.warmup(manifest)
        assert (report.built, report.failed) == (2, {})
        with no_plan_builds():
            call(9)
            call(1)
    assert {kernel for kernel, _ in compiled} == set(run), "the kernels that run are those compiled"


def test_recording_changes_no_result():
    for _ in range(2):
        given, _ = heads(9, "cpu")
        expected = cudnn_sdpa.rope(**given)
        with record_plans(target="h200"):
            cudnn_sdpa.rope_(**given)
        assert all(torch.equal(given[name], x) for name, x in zip("qk", expected, strict=True))


@of_both
def test_what_runs_as_rope_is_recorded_as_rope(call):
    """Spread angles, which the kernel cannot read; and operators after a call are recorded again, also if it raised."""
    spread, plans = torch.randn(9, 64)[:, ::2], []
    refused = pytest.raises(ShapeError, match="cos")
    for changed, how in (
        ({"cos": spread, "sin": spread}, contextlib.nullcontext()),
        ({}, contextlib.nullcontext()),
        ({"cos": spread[:8]}, refused),
    ):
        with record_plans(target="b200") as outer, record_plans(target="h200") as manifest:
            with how:
                call(**changed)
            cudnn_sdpa.rope(**heads(3, "cpu")[0])
        assert outer.plans == manifest.plans
        plans.append([plan["operation"].partition(":")[2] for plan in manifest.plans])
    assert plans == [["own_rope", "own_rope"], sorted([CALLS[call], "own_rope"]), ["own_rope"]]


def test_in_fp8_and_in_double_precision():
    names = []
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        with record_plans(target="h200") as manifest:
            rotate_and_append(stored=stored)
        names += [plan["operation"].partition(":")[2] for plan in manifest.plans]
    assert names == ["own_rope_append"] * 2
    given = {name: x.double() for name, x in heads(9, "cpu")[0].items()}
    with cudnn_sdpa.cpu_checks(None), record_plans(target="h200"), pytest.raises(UnsupportedError, match="float64"):
        rotate(**given)


def test_steps_of_a_layer_are_recorded():
    rope = cudnn_sdpa.nn.RotaryEmbedding(64)
    layer = cudnn_sdpa.nn.Attention(64, 4, num_kv_heads=2, head_dim=64, is_causal=True, rope=rope)
    layer = layer.bfloat16().requires_grad_(False)
    cache = cudnn_sdpa.PagedKVCache(
        pages=9, page_size=16, heads=2, head_dim=64, dtype=torch.bfloat16, device="cpu", layers=1
    )
    step = cache.reserve([cache.add()], 5)
    with record_plans(target="h200") as manifest:
        layer(torch.randn(1, 5, 64).bfloat16(), step=step)
    names = {plan["operation"].partition(":")[2] for plan in manifest.plans}
    assert "own_rope_append" in names
    assert "own_rope" not in names
