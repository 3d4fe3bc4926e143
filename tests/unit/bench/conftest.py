"""Fixtures of the benchmarks' tests: inputs on the CPU, and a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarks.tools import cases, peers
from cudnn_sdpa import sdpa_paged, sdpa_paged_varlen


@pytest.fixture
def cases_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks' inputs on the CPU, in float32: sums in bfloat16 differ there by more than on a GPU."""
    normal = cases.normal
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "normal", lambda *shape, **_: normal(*shape, dtype=torch.float32))


@pytest.fixture
def times_by_place() -> Callable[..., dict[str, float]]:
    """A fake clock: each call runs once; the n-th candidate takes n microseconds."""

    def times(calls: Mapping[str, Callable[[], object]], **_: object) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: float(place) for place, name in enumerate(calls, start=1)}

    return times


@pytest.fixture
def peers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's backends on the CPU, which has none of the fast ones."""
    backends = dict.fromkeys(peers.PYTORCH_BACKENDS, torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setattr(peers, "PYTORCH_BACKENDS", backends)


@pytest.fixture
def cached_attention() -> Callable[..., torch.Tensor]:
    """What computes as FlashAttention-3's `flash_attn_with_kvcache`, of padded or packed queries."""

    def attend(q, k_cache, v_cache, *, page_table, cache_seqlens, causal, cu_seqlens_q=None, max_seqlen_q=None):
        tables, options = (page_table, cache_seqlens), {"page_layout": "NHD", "is_causal": causal}
        if cu_seqlens_q is not None:
            return sdpa_paged_varlen(q, k_cache, v_cache, *tables, cu_seqlens_q, max_seqlen_q, **options)
        return sdpa_paged(q.transpose(1, 2), k_cache, v_cache, *tables, **options).transpose(1, 2)

    return attend
