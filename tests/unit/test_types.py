"""Types of calls: this file is run, and `mypy --strict` checks it like a user's code."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import cudnn_sdpa
from cudnn_sdpa.attention.dense.sdpa import SdpaOptions

Both = tuple[Tensor, Tensor]


@pytest.mark.parametrize("flag", [False, True])
def test_return_lse_may_be_a_variable(flag: bool) -> None:
    q = torch.randn(1, 2, 8, 16)
    assert_type(cudnn_sdpa.sdpa(q, q, q), Tensor)
    assert_type(cudnn_sdpa.sdpa(q, q, q, return_lse=False), Tensor)
    assert_type(cudnn_sdpa.sdpa(q, q, q, return_lse=True), Both)
    dense = cudnn_sdpa.sdpa(q, q, q, return_lse=flag)
    assert_type(dense, "Tensor | Both")

    packed, offsets = torch.randn(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    assert_type(cudnn_sdpa.sdpa_varlen(packed, packed, packed, offsets, offsets, 8, 8), Tensor)
    assert_type(cudnn_sdpa.sdpa_varlen(packed, packed, packed, offsets, offsets, 8, 8, return_lse=True), Both)
    varlen = cudnn_sdpa.sdpa_varlen(packed, packed, packed, offsets, offsets, 8, 8, return_lse=flag)
    assert_type(varlen, "Tensor | Both")

    pages, table = torch.randn(2, 2, 16, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    lengths = torch.tensor([20], dtype=torch.int32)
    assert_type(cudnn_sdpa.sdpa_paged(q, pages, pages, table, lengths, page_layout="HND"), Tensor)
    assert_type(cudnn_sdpa.sdpa_paged(q, pages, pages, table, lengths, page_layout="HND", return_lse=True), Both)
    paged = cudnn_sdpa.sdpa_paged(q, pages, pages, table, lengths, page_layout="HND", return_lse=flag)
    assert_type(paged, "Tensor | Both")

    tokens = pages, pages, table, lengths, offsets, 8
    assert_type(cudnn_sdpa.sdpa_paged_varlen(packed, *tokens, page_layout="HND"), Tensor)
    assert_type(cudnn_sdpa.sdpa_paged_varlen(packed, *tokens, page_layout="HND", return_lse=True), Both)
    packed_on_pages = cudnn_sdpa.sdpa_paged_varlen(packed, *tokens, page_layout="HND", return_lse=flag)
    assert_type(packed_on_pages, "Tensor | Both")

    with pytest.raises(cudnn_sdpa.OptionError):
        cudnn_sdpa.sdpa_paged(q, pages, pages, table, lengths)  # type: ignore[call-overload]

    for result in (dense, varlen, paged, packed_on_pages):
        assert isinstance(result, tuple) is flag


@pytest.mark.parametrize("flag", [False, True])
def test_cache_steps_return_tensors(flag: bool) -> None:
    cache = cudnn_sdpa.PagedKVCache(pages=4, page_size=16, heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    q = torch.randn(1, 2, 1, 16)
    step = cache.reserve([cache.add()], 1)
    cache.append(step, q, q)
    assert_type(cache.attend(step, q), Tensor)
    assert_type(cache.attend(step, q, 0, scale=0.5), Tensor)
    assert_type(cache.attend(step, q, return_lse=True), Both)
    either = cache.attend(step, q, return_lse=flag)
    assert_type(either, "Tensor | Both")
    assert isinstance(either, tuple) is flag


@pytest.mark.parametrize("flag", [False, True])
def test_a_norm_returns_the_sum_only_with_a_residual(flag: bool) -> None:
    x = torch.randn(2, 64)
    residual = x if flag else None
    assert_type(cudnn_sdpa.rms_norm(x), Tensor)
    assert_type(cudnn_sdpa.rms_norm(x, residual=x), Both)
    either = cudnn_sdpa.rms_norm(x, residual=residual)
    assert_type(either, "Tensor | Both")
    assert isinstance(either, tuple) is flag
    assert_type(cudnn_sdpa.layer_norm(x), Tensor)
    assert_type(cudnn_sdpa.layer_norm(x, residual=x), Both)
    assert_type(cudnn_sdpa.layer_norm(x, residual=residual), "Tensor | Both")


def test_results_have_public_types(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 8, 16)
    assert_type(cudnn_sdpa.plan_cache, cudnn_sdpa.PlanCache)
    assert_type(cudnn_sdpa.plan_cache.info(), cudnn_sdpa.PlanCacheInfo)
    assert_type(cudnn_sdpa.support(head_dim=64, sm=90, cudnn="9.19.0"), cudnn_sdpa.Support)
    with cudnn_sdpa.use_plan_store(tmp_path) as store:
        assert store is not None
        assert_type(store, cudnn_sdpa.PlanStore)
        assert isinstance(store.info(), cudnn_sdpa.PlanStoreInfo)
        assert_type(store.info(), cudnn_sdpa.PlanStoreInfo)
    with cudnn_sdpa.record_plans() as manifest:
        cudnn_sdpa.sdpa(q, q, q)
    assert_type(manifest, cudnn_sdpa.PlanManifest)
    with cudnn_sdpa.autotune() as report:
        assert_type(report, cudnn_sdpa.AutotuneReport)


def test_tools_can_read_types_of_options() -> None:
    for function in (
        cudnn_sdpa.nn.TransformerLayer.__init__,
        cudnn_sdpa.nn.VisionEncoder.__init__,
        cudnn_sdpa.nn.KVCache.attend,
        cudnn_sdpa.PagedKVCache.attend,
    ):
        assert "return" in typing.get_type_hints(function)


def test_options_of_few_values_are_checked_by_mypy() -> None:
    """Each ignored error is one that mypy reports; without it, the comment would be an error."""
    q = torch.randn(1, 2, 8, 16)
    for call in (
        lambda: cudnn_sdpa.sdpa(q, q, q, causal_alignment="bottom-right"),  # type: ignore[call-overload]
        lambda: cudnn_sdpa.fallback("pytorch"),  # type: ignore[arg-type]
        lambda: cudnn_sdpa.shape_policy("fast"),  # type: ignore[arg-type]
        lambda: cudnn_sdpa.kernels.attention(q, q, q, "quick"),  # type: ignore[arg-type]
        lambda: cudnn_sdpa.nn.Attention(32, 2, cp_method="gather"),  # type: ignore[arg-type]
        lambda: cudnn_sdpa.PagedKVCache(
            pages=4,
            page_size=16,
            heads=2,
            head_dim=16,
            device="cpu",
            page_layout="NDH",  # type: ignore[arg-type]
        ),
    ):
        with pytest.raises(cudnn_sdpa.OptionError):
            call()
    step_options: SdpaOptions = {"causal_alignment": "top_left"}
    assert step_options["causal_alignment"] == "top_left"


def explained_and_warmed(q: Tensor) -> None:  # needs a compiler and a GPU
    assert_type(cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q), cudnn_sdpa.Explanation)
    assert_type(cudnn_sdpa.warmup("plans.json"), cudnn_sdpa.WarmupReport)
    assert_type(cudnn_sdpa.compile_plans("plans.json", "h200", "plans"), cudnn_sdpa.WarmupReport)


def test_a_misspelt_name_is_an_error_for_mypy() -> None:
    with pytest.raises(AttributeError):
        _ = cudnn_sdpa.spda  # type: ignore[attr-defined]


def test_options_of_graph_op_have_types() -> None:
    def double(g: typing.Any, x: typing.Any) -> typing.Any:
        return g.add(a=x, b=x)

    assert_type(cudnn_sdpa.graph_op(reference=lambda x: x + x, shard={"x": 0})(double), cudnn_sdpa.GraphFunction)
    with pytest.raises(TypeError, match="reader"):
        cudnn_sdpa.graph_op(reader=torch.relu)  # type: ignore[call-arg]
