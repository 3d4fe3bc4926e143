"""Batches whose gathered keys and values would take too much memory run some sequences at a time, on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from float64_reference import attend

from cudnn_sdpa import LayoutError, plan_cache, sdpa_paged
from cudnn_sdpa.attention.paged import paging, specs

BATCH, AT_ONCE = 5, 2


def arguments() -> dict[str, torch.Tensor]:
    pages = {name: torch.randn(13, 2, 4, 16).to(torch.bfloat16) for name in ("k_pages", "v_pages")}
    return {
        "q": torch.randn(BATCH, 40, 4, 16).to(torch.bfloat16).transpose(1, 2),
        **pages,
        "page_table": torch.stack([torch.randperm(13)[:3] for _ in range(BATCH)]).int(),
        "seq_lens_kv": torch.tensor([12, 0, 7, 12, 3], dtype=torch.int32),
        "page_layout": "HND",
    }


@pytest.fixture
def gathers(monkeypatch):
    """Two sequences are gathered at a time. Counts how often."""
    monkeypatch.setattr(specs, "MAX_GATHERED_BYTES", AT_ONCE * 12 * 2 * 32 * 2)
    counted, gather = [], paging.GatherKernel.__call__
    monkeypatch.setattr(paging.GatherKernel, "__call__", lambda self, call: counted.append(call) or gather(self, call))
    with gpu_on_the_cpu():
        yield counted


def exact(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (given[name][given["page_table"].long()].transpose(1, 2).flatten(2, 3) for name in ("k_pages", "v_pages"))
    q, k, v = (x.double() for x in (given["q"], *rows))
    return attend(q, k, v, seq_lens_kv=given["seq_lens_kv"], is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("scale", [None, -0.25])
def test_the_parts_are_right_and_are_bound_once(gathers, scale):
    for _ in range(3):
        given = arguments()
        gathers.clear()
        before, launched = plan_cache.info().builds, len(FakePlan.launched)
        out, lse = sdpa_paged(**given, return_lse=True, scale=scale)
        wanted = exact({**given, "q": given["q"] * (1.0 if scale is None else -1.0)})
        for found, right in zip((out, lse), wanted, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)
    assert plan_cache.info().builds == before
    assert len(FakePlan.launched) - launched == 3
    assert [call.q.shape[0] for call in gathers] == [2, 2, 1]


def test_a_result_may_be_given(gathers):  # noqa: ARG001
    given = arguments()
    out = torch.full((BATCH, 4, 40, 16), torch.nan, dtype=torch.bfloat16)
    assert sdpa_paged(**given, out=out) is out
    torch.testing.assert_close(out.double(), exact(given)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [name for name, value in arguments().items() if isinstance(value, torch.Tensor)])
def test_freed_tensors_are_named(gathers, name):  # noqa: ARG001
    given = arguments()
    for _ in range(2):
        sdpa_paged(**given)
        freed = given[name].clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(LayoutError, match=f"^{name}: got a tensor without memory"):
            sdpa_paged(**{**given, name: freed})
