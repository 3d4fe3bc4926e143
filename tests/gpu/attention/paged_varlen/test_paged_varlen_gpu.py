"""`sdpa_paged_varlen` on a GPU: values with NaN in every slot that no new token sees, plans, CUDA graphs."""

from __future__ import annotations

import paged_varlen_checks
import pytest
import torch
from attention_checks import captured, nothing_synchronizes
from paged_batches import PLACES, batch_on_pages
from paged_varlen_checks import BF16, E4M3, E5M2, HALF, OF_ALL, assert_right, exact

from cudnn_sdpa import no_plan_builds, plan_cache, sdpa_paged_varlen

BATCHES = {
    "decodes": ([1] * 9, [4000, 1, 63, 64, 65, 128, 777, 2049, 5]),
    "one long decode": ([1], [9001]),
    "drafts": ([4, 8, 1, 3, 0, 6], [700, 8, 4000, 3, 90, 129]),
    "a chunk among decodes": ([1, 300, 1, 17], [2000, 1300, 64, 17]),
    "more new tokens than keys": ([5, 70, 2], [2, 33, 0]),
}


def drawn(name="drafts", **given):
    return paged_varlen_checks.drawn(BATCHES[name], **given)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (24, 72)])
def test_batches(name, group, dims):
    assert_right(drawn(name, heads=2 * group, dims=dims))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, 7, 16, 48, 64, 256])
@pytest.mark.parametrize("place", PLACES)
def test_pages(layout, page, place):
    assert_right(drawn(layout=layout, page=page, place=place, has_table_v=page == 48))


MASKS = {
    "full": {"is_causal": False},
    "top-left": {"causal_alignment": "top_left"},
    "window": {"window_size": (100, 0)},
    "window of one": {"window_size": (0, 0)},
    "window to both sides": {"is_causal": False, "window_size": (70, 3)},
    "window, top-left": {"causal_alignment": "top_left", "window_size": (5, 0)},
}


@pytest.mark.parametrize("name", ["drafts", "a chunk among decodes"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_masks(name, mask, dtype):
    assert_right(drawn(name, dtype=dtype, **MASKS[mask]))


@pytest.mark.parametrize("name", ["decodes", "drafts", "a chunk among decodes"])
@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"scale": -0.11}, {"scale": 0.0}, {"scale": 0.4, "softcap": 20.0}]
)
def test_scores_and_sinks(name, options):
    given = drawn(name)
    assert_right({**given, **options, "sinks": 2 + torch.randn(8, device="cuda")})


@pytest.mark.parametrize("name", ["decodes", "drafts", "a chunk among decodes"])
@pytest.mark.parametrize("cache", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_in_fp8(name, cache, dtype, dim):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversions of FP8")
    given = drawn(name, cache=cache, dtype=dtype, dims=(dim, dim))
    scales = {"k_scale": torch.tensor([0.6, 1.7], device="cuda"), "v_scale": torch.tensor(1.4, device="cuda")}
    assert_right(given)
    assert_right({**given, **scales})


@pytest.mark.parametrize("name", ["drafts", "a chunk among decodes"])
def test_trees_of_drafts(name):
    given = drawn(name)
    tree = torch.rand(given["q"].shape[0], given["max_seqlen_q"] + 3, device="cuda") < 0.6
    assert_right({**given, "tree_mask": tree[:, 1:-1]})


@pytest.mark.parametrize("name", BATCHES)
def test_results_are_the_same_from_run_to_run(name):
    given = drawn(name)
    first = sdpa_paged_varlen(**given, return_lse=True)
    for _ in range(5):
        again = sdpa_paged_varlen(**given, return_lse=True)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.parametrize("new", [1, 4, 200])
def test_batch_invariance(new):
    """The bits of a sequence alone are those that it has among others of any length."""
    given = batch_on_pages(
        [new] * 5, [5000, 300, 900, 2500, 700], heads=8, dims=(128, 128), page=16, dtype=BF16, device="cuda"
    )
    given |= {"batch_invariant": True}
    whole = sdpa_paged_varlen(**given, return_lse=True)
    for b in range(5):
        alone = {**given, "q": given["q"][b * new : (b + 1) * new]}
        alone |= {name: given[name][b : b + 1] for name in ("page_table", "seq_lens_kv")}
        alone["cu_seqlens_q"] = torch.tensor([0, new], dtype=torch.int32, device="cuda")
        found = sdpa_paged_varlen(**alone, return_lse=True)
        for one, other in zip(found, whole, strict=True):
            assert torch.equal(one, other[b * new : (b + 1) * new])
    assert_right(given)


def test_warm_calls_neither_synchronize_nor_build():
    given = drawn("drafts")
    sdpa_paged_varlen(**given)
    others = drawn("drafts", page=16)
    builds = plan_cache.info().builds
    with nothing_synchronizes(), no_plan_builds():
        for _ in range(3):
            sdpa_paged_varlen(**given)
            sdpa_paged_varlen(**others)
    assert plan_cache.info().builds == builds


def test_a_graph_replays_any_mixture():
    """Its lengths, offsets, tables, queries and pages are data; tokens behind the last sequence get zeros."""
    shapes = {"heads": 8, "dims": (128, 128), "page": 16, "dtype": BF16, "device": "cuda"}
    mixtures = [([1, 1, 1], [900, 60, 200]), ([4, 0, 7], [100, 0, 800]), ([0, 16, 0], [3, 700, 8])]
    batches = [batch_on_pages(new, lengths, behind=16 - sum(new), **shapes) for new, lengths in mixtures]
    columns = max(x["page_table"].shape[1] for x in batches)
    pages = max(x["k_pages"].shape[0] for x in batches)
    for given in batches:
        table = given["page_table"]
        given["page_table"] = torch.nn.functional.pad(table, (0, columns - table.shape[1]), value=-1)
        for name in ("k_pages", "v_pages"):
            x = given[name]
            given[name] = torch.cat(
                [x, torch.full((pages - len(x), *x.shape[1:]), torch.nan, device="cuda", dtype=BF16)]
            )
        given["max_seqlen_q"] = 16
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in batches[0].items()}
    out = torch.full((16, 8, 128), torch.nan, dtype=BF16, device="cuda")
    graph, (_, lse) = captured(lambda: sdpa_paged_varlen(**static, out=out, return_lse=True))
    for given in batches * 2:
        for name, x in static.items():
            if isinstance(x, torch.Tensor):
                x.copy_(given[name])
        out.fill_(torch.nan)
        graph.replay()
        wanted, of_lse = exact(given)
        assert float((out.double() - wanted).norm()) <= OF_ALL[BF16] * float(wanted.norm())
        torch.testing.assert_close(lse.double(), of_lse, rtol=1e-4, atol=2e-3)


def test_wrong_values_stay_within_the_tensors():
    given = drawn("drafts")
    given |= {name: torch.randn_like(given[name]) for name in ("k_pages", "v_pages")}
    given["page_table"].fill_(2**31 - 1)
    given["seq_lens_kv"][::2] = 2**31 - 1
    given["seq_lens_kv"][1::2] = -5
    given["cu_seqlens_q"][-1] = 2**30
    out, lse = sdpa_paged_varlen(**given, return_lse=True)
    torch.cuda.synchronize()
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_tables_without_columns(has_sinks):
    given = batch_on_pages([2, 1], [0, 0], dtype=BF16, before=1, behind=2, device="cuda")
    given["page_table"] = given["page_table"][:, :0]
    sinks = torch.randn(4, device="cuda") if has_sinks else None
    out, lse = sdpa_paged_varlen(**given, sinks=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse[1:4], sinks.expand(3, -1)) if has_sinks else lse[1:4].isneginf().all()
    assert lse[:1].isneginf().all()
    assert lse[4:].isneginf().all()


def test_compiled_code():
    given = drawn("drafts")
    compiled = torch.compile(lambda q, **x: 2 * sdpa_paged_varlen(q, **x), fullgraph=True)
    expected = 2 * sdpa_paged_varlen(**given)
    torch.testing.assert_close(compiled(**given), expected)
