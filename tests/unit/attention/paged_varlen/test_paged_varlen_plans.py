"""`sdpa_paged_varlen` on the fake GPU, whose kernel is a formula: what its launches do, and what `explain` says."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import TARGET, FakePlan, gpu_on_the_cpu
from native_way import native_way
from paged_batches import PLACES, batch_on_pages

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, explain, plan_cache, sdpa_paged_varlen
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.explain import describer_of
from tests.unit.attention.paged_varlen.test_paged_varlen import E4M3, LENGTHS, MASKS, NEW, assert_right, tree_of

BF16 = {"rtol": 8e-3, "atol": 4e-3}


@pytest.fixture(params=["python", "native"])
def gpu(request):
    with native_way(on=request.param == "native"), gpu_on_the_cpu():
        yield


def check(**given):
    """A cold call, and further ones on other values."""
    made = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16, before=1, behind=2, **given)
    for _ in range(4):
        out, _ = assert_right(made, BF16)
        assert torch.equal(sdpa_paged_varlen(**made, out=torch.full_like(out, torch.nan)), out)
        made["q"] = torch.randn_like(made["q"])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("place", PLACES)
def test_pages_in_every_place(layout, place):
    check(layout=layout, place=place, dims=(16, 24) if place in ("apart", "side by side") else (16, 16))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(**MASKS[name])


@pytest.mark.usefixtures("gpu")
def test_all_tensors_at_once():
    tokens = sum(NEW) + 3
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.float16, cache=E4M3, dims=(16, 16), behind=3, has_table_v=True)
    given |= {"sinks": torch.randn(4), "k_scale": torch.tensor([0.6, 1.7]), "v_scale": torch.tensor(-1.4)}
    given |= {"scale": -0.4, "softcap": 3.0, "batch_invariant": True}
    given["tree_mask"] = torch.cat([tree_of(NEW, 16), torch.ones(3, 16, dtype=torch.bool)])[:, :9]
    assert given["tree_mask"].shape[0] == tokens
    for _ in range(4):
        assert_right(given, {"rtol": 2e-3, "atol": 4e-3})
        assert_right(
            {**given, "k_scale": torch.tensor([0.8]), "v_scale": torch.tensor([1.3, 0.6])}, {"rtol": 2e-3, "atol": 4e-3}
        )


@pytest.mark.usefixtures("gpu")
def test_one_plan_serves_all_sizes():
    """Numbers of tokens, sequences, pages and columns, and strides, are data of a launch."""
    for new, lengths in ((NEW, LENGTHS), (NEW[:4], LENGTHS[:4]), ((9, 1), (200, 3))):
        for layout in ("HND", "NHD"):
            assert_right(batch_on_pages(new, lengths, dtype=torch.bfloat16, layout=layout), BF16)
    assert plan_cache.info().builds == 1


@pytest.mark.usefixtures("gpu")
def test_wrong_values_stay_within_the_tensors():
    """They are not read by the host, and clamped: a wrong number, but of the caches' own values."""
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16)
    given |= {name: torch.randn_like(given[name].float()).bfloat16() for name in ("k_pages", "v_pages")}
    given["page_table"].fill_(2**31 - 1)
    given["seq_lens_kv"][::2] = 2**31 - 1
    given["seq_lens_kv"][1::2] = -5
    given["cu_seqlens_q"][-1] = 2**30
    out, lse = sdpa_paged_varlen(**given, return_lse=True)
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["page_table", "seq_lens_kv", "cu_seqlens_q"])
def test_values_are_read_on_request(monkeypatch, name):
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16)
    sdpa_paged_varlen(**given)
    monkeypatch.setattr(value_checks, "enabled", True)
    sdpa_paged_varlen(**given)
    given[name][0] = -9
    with pytest.raises(cudnn_sdpa.ShapeError, match=f"^{name}: got"):
        sdpa_paged_varlen(**given)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("has_sinks", [False, True])
def test_empty_calls_launch_nothing(has_sinks):
    given = batch_on_pages([2, 1], [0, 0], dtype=torch.bfloat16, before=1, behind=2)
    given["page_table"] = given["page_table"][:, :0]
    sinks = torch.randn(4) if has_sinks else None
    launched = len(FakePlan.launched)
    out, lse = sdpa_paged_varlen(**given, sinks=sinks, return_lse=True)
    assert len(FakePlan.launched) == launched
    assert not out.any()
    assert torch.equal(lse[1:4], sinks.expand(3, -1)) if has_sinks else lse[1:4].isneginf().all()
    assert lse[:1].isneginf().all()
    assert lse[4:].isneginf().all()


@pytest.mark.usefixtures("gpu")
def test_the_explained_plan_is_that_of_the_call():
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16)
    sdpa_paged_varlen(**given)
    described = describer_of(sdpa_paged_varlen)(**given)
    assert described.key(TARGET, 0) == FakePlan.launched[-1]
    assert described.extra_kernels == []
    errors = describer_of(sdpa_paged_varlen)(**given, return_lse=True).verify(False)
    assert 0 < errors["out"] < 4e-3
    assert errors["lse"] < 1e-5
    notes = describer_of(sdpa_paged_varlen)(**given, sinks=torch.randn(4).bfloat16()).extra_kernels
    assert notes == ["sinks are converted to float32"]


def test_verify_knows_pages_in_fp8():
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16, cache=E4M3, dims=(16, 16))
    with gpu_on_the_cpu():
        errors = describer_of(sdpa_paged_varlen)(**given, k_scale=torch.tensor(0.7)).verify(False)
    assert 0 < errors["out"] < 4e-3


def test_explain_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16)
    report = explain(sdpa_paged_varlen, **given)
    assert report.supported
    assert "paged_varlen_forward" in report.key
    refused = explain(sdpa_paged_varlen, **{**given, "q": given["q"].requires_grad_()})
    assert not refused.supported
    assert "inference only" in str(refused)


def latent(**given):
    made = batch_on_pages(
        NEW, LENGTHS, **{"dtype": torch.bfloat16, "heads": 16, "heads_kv": 1, "dims": (576, 512)} | given
    )
    return {**made, "v_pages": made["k_pages"][..., :512]}


@pytest.mark.usefixtures("gpu")
def test_latent_attention():
    """Values that are a part of their keys, and others by the same plans."""
    given = latent()
    for _ in range(4):
        assert_right(given, BF16)
        assert_right({**given, "v_pages": given["v_pages"].clone()}, BF16)
        given["q"] = torch.randn_like(given["q"])
    assert plan_cache.info().builds <= 3  # dense values are another layout; few rows and many


def test_latent_attention_on_gpus_with_too_little_shared_memory():
    given = latent()
    with cudnn_sdpa.cpu_checks("a100"):
        assert sdpa_paged_varlen(**given).isfinite().all()
    with (
        cudnn_sdpa.cpu_checks("l40s"),
        pytest.raises(
            UnsupportedError, match=r"head dims of 576 and 512 need 110 KB of shared memory for a block; .* has 99 KB"
        ),
    ):
        sdpa_paged_varlen(**given)


def test_latent_attention_on_pages_in_fp8():
    given = latent(cache=E4M3)
    with (
        cudnn_sdpa.cpu_checks("h200"),
        pytest.raises(UnsupportedError, match="head dims of 576 and 512 need pages in the dtype of the queries"),
    ):
        sdpa_paged_varlen(**given)


def test_the_cpu_refuses_what_a_gpu_does():
    given = batch_on_pages(NEW, LENGTHS, dtype=torch.bfloat16, cache=E4M3, dims=(16, 16))
    with cudnn_sdpa.cpu_checks("a100"):
        with pytest.raises(UnsupportedError, match=r"checked for a100(.|\n)*pages in FP8 need compute capability 8\.9"):
            sdpa_paged_varlen(**given)
        with cudnn_sdpa.fallback("torch"):
            assert sdpa_paged_varlen(**given).isfinite().all()
    assert sdpa_paged_varlen(**given).isfinite().all()
