"""`sdpa_paged_varlen` by FlashAttention-4 on the fake GPU: what its function gets, results, and what is declined."""

from __future__ import annotations

import itertools

import flash4_stand_in as stand_in
import pytest
import torch
from flash4_on_pages import gpu_with_flash4
from native_way import native_way
from paged_batches import PLACES, batch_on_pages

from cudnn_sdpa import UnsupportedError, explain, plan_cache, providers, record_plans, sdpa_paged_varlen
from cudnn_sdpa.attention.flash4 import preferences
from cudnn_sdpa.attention.flash4.plans import functions
from cudnn_sdpa.attention.flash4.preferences import PagesPreference
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from tests.unit.attention.paged_varlen.test_paged_varlen import exact

BF16 = torch.bfloat16
DIMS = (64, 64)

#: Decodes, drafts, chunks, a sequence without new tokens, one without keys, and one with fewer keys than new tokens.
NEW, LENGTHS = (1, 4, 0, 9, 3, 1, 2, 2), (23, 4, 7, 31, 2, 1, 0, 40)

MASKS = {
    "full": {"is_causal": False},
    "full, top-left": {"is_causal": False, "causal_alignment": "top_left"},
    "causal": {},
    "window": {"window_size": (6, 0)},
    "window of one": {"window_size": (0, 0)},
    "window wider than all keys": {"window_size": (1000, 0)},
    "window to both sides": {"is_causal": False, "window_size": (3, 2)},
    "window, ahead alone": {"is_causal": False, "window_size": (-1, 1)},
    "window, behind alone": {"is_causal": False, "window_size": (5, -1)},
}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "h100")
    stand_in.write(tmp_path)
    with stand_in.on_the_search_path(tmp_path):
        yield


@pytest.fixture(params=["python", "native"])
def gpu(request):
    with native_way(on=request.param == "native"), gpu_with_flash4(), providers("fa4"):
        yield


def drawn(new=NEW, lengths=LENGTHS, **settings):
    return batch_on_pages(new, lengths, **{"dims": DIMS, "dtype": BF16, "before": 1, "behind": 2, **settings})


def assert_right(given):
    shape = (*given["q"].shape[:2], given["v_pages"].shape[-1])
    with plan_cache.watch_uses() as keys:
        out = sdpa_paged_varlen(**given)
    assert {key.provider for key in keys} == {"fa4"}
    torch.testing.assert_close(out.double(), exact(given)[0], rtol=8e-3, atol=4e-3)
    into = torch.full((shape[0], shape[1] + 1, shape[2]), torch.nan, dtype=BF16)[:, 1:]
    assert torch.equal(sdpa_paged_varlen(**{**given, "out": into}), out)
    return out


def check(**settings):
    """A cold call, and further ones on other values."""
    given = drawn(**settings)
    for _ in range(4):
        assert_right(given)
        given["q"] = torch.randn_like(given["q"])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("page", [1, 5, 16])
def test_masks(name, page):
    """No slot of no sequence is read, nor one before the windows of all new tokens, in tiles of sixteen keys."""
    check(page=page, **MASKS[name])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [None, (6, 0)])
def test_pages_in_every_place(layout, place, window):
    check(layout=layout, place=place, window_size=window)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "sizes", [{"heads": 1, "heads_kv": 1}, {"heads": 6, "heads_kv": 1}, {"heads": 3, "heads_kv": 3}]
)
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_single_heads_pages_and_tokens(sizes, window):
    """Strides of dimensions of size 1 are multiples of 16 bytes, too."""
    for layout, page in itertools.product(("HND", "NHD"), (1, 16)):
        for new, lengths in (((1,), (5,)), ((3, 1), (3, 9))):
            check(new=new, lengths=lengths, page=page, layout=layout, before=0, behind=0, window_size=window, **sizes)


@pytest.mark.usefixtures("gpu")
def test_scores():
    """Scale, soft cap and sinks are data of known calls."""
    for scale, softcap in ((0.37, None), (0.2, 3.0), (1.9, 3.0), (0.2, 9.0)):
        assert_right({**drawn(window_size=(6, 0)), "scale": scale, "softcap": softcap, "sinks": torch.randn(4)})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("window", [None, (6, 0)])
def test_one_plan_serves_all_sizes(window):
    """Numbers of tokens, sequences, pages and columns, page sizes and strides are data of a launch."""
    for new, lengths in ((NEW, LENGTHS), (NEW[:4], LENGTHS[:4]), ((9, 1), (200, 3))):
        for layout in ("HND", "NHD"):
            for page in (16, 5):
                assert_right(drawn(new, lengths, page=page, layout=layout, window_size=window))
    assert plan_cache.info().builds == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("window", [None, (6, 0)])
def test_wrong_values_stay_within_the_tensors(window):
    """Its function checks what it gets; wrong tables give wrong numbers, but of the cache's own values."""
    for ends in ((0, 5, 3, 2**30, 6), (-7, 2, 2, 9, 4), (2**31 - 1,) * 5, (0, 0, 0, 0, -(2**31))):
        given = drawn((2, 3, 1, 4), (30, 9, 2, 40), window_size=window)
        given |= {name: torch.randn_like(given[name].float()).to(BF16) for name in ("k_pages", "v_pages")}
        given["page_table"].fill_(2**31 - 1)[1].fill_(-5)
        given["seq_lens_kv"].copy_(torch.tensor([2**31 - 1, -5, 2**30, 40]))
        given["cu_seqlens_q"].copy_(torch.tensor(ends))
        for _ in range(3):
            assert sdpa_paged_varlen(**given).isfinite().all()


@pytest.mark.usefixtures("gpu")
def test_more_new_tokens_than_were_said_read_no_other_memory():
    given = drawn((2, 30), (30, 40), window_size=(6, 0))
    given |= {"max_seqlen_q": 1, **{x: torch.ones_like(given[x]) for x in ("k_pages", "v_pages")}}
    assert sdpa_paged_varlen(**given).isfinite().all()


DECLINED = {
    "FP8": ({"cache": torch.float8_e4m3fn}, {}, "no FP8"),
    "a table of values": ({"has_table_v": True}, {}, "one page table"),
    "batch-invariant": ({}, {"batch_invariant": True}, "depend on the batch"),
    "LSE": ({}, {"return_lse": True}, "log-sum-exp"),
    "scale": ({}, {"scale": -0.3}, "above 0"),
    "top-left": ({"causal_alignment": "top_left"}, {}, "last key of each sequence"),
    "head dims": ({"dims": (64, 32)}, {}, "head dims of 64, 128, 256, and 192 with 128"),
    "sequences": ({"new": (1,) * 257, "lengths": (1,) * 257}, {}, "up to 256 sequences"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", DECLINED)
def test_what_it_declines_is_refused_or_the_own_kernels(name):
    settings, options, reason = DECLINED[name]
    given = {**drawn(**settings), **options}
    with pytest.raises(UnsupportedError, match=reason) as refused:
        sdpa_paged_varlen(**given)
    assert refused.value.suggestion == "providers('fa4', 'own')"
    for others in (("fa4", "own"), ("fa4", "cudnn"), ("fa4", "default"), ("fa4", "fastest")):
        with providers(*others), plan_cache.watch_uses() as keys:
            sdpa_paged_varlen(**given)
            found = explain(sdpa_paged_varlen, **given)
        assert {key.provider for key in keys} == {"own"}
        assert found.provider == "own"
        assert reason in found.choice
        assert found.choice.startswith("own kernels: FlashAttention-4 does not serve it, as ")


def test_known_bugs_of_either_provider_are_the_others(monkeypatch):
    given = drawn()
    for provider, other in (("fa4", "own"), ("own", "fa4")):
        bug = KnownIssue("it skips a page", "seen on an H200", "refused", concerns=lambda _: True, provider=provider)
        monkeypatch.setattr(known_issues, "ATTENTION_ISSUES", (bug,))
        with providers(provider, other):
            found = explain(sdpa_paged_varlen, **given)
        assert (found.provider, found.supported) == (other, True)
        with providers(provider):
            assert any(str(bug) in reason for reason in explain(sdpa_paged_varlen, **given).reasons)


def test_caches_whose_addresses_may_not_fit_32_bits_are_the_own_kernels():
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in drawn().items()}
    for count, provider in ((2**31 // given["k_pages"][0].numel() + 1, "own"), (2**20, "fa4")):
        pages = torch.empty(count, *given["k_pages"].shape[1:], dtype=BF16, device="meta")
        with providers("fa4", "own"):
            found = explain(sdpa_paged_varlen, **{**given, "k_pages": pages, "v_pages": pages})
        assert found.provider == provider
        assert ("elements of k" in found.choice) is (provider == "own")


@pytest.mark.usefixtures("gpu")
def test_a_tree_is_declined():
    given = drawn()
    given["tree_mask"] = torch.ones(given["q"].shape[0], 9, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="tree_mask"):
        sdpa_paged_varlen(**given)


def test_pages_whose_slots_cannot_be_numbered_are_declined_under_a_window():
    given = drawn(page=5)
    for name in ("k_pages", "v_pages"):
        count, *rest = given[name].shape
        one = given[name][0].numel()
        memory = torch.empty(count * (one + 8), dtype=BF16)
        given[name] = memory.as_strided((count, *rest), (one + 8, *given[name].stride()[1:]))
    with providers("fa4"):
        assert explain(sdpa_paged_varlen, **given).provider == "fa4"
        found = explain(sdpa_paged_varlen, **given, window_size=(3, 0))
    assert any("as many slots apart" in reason for reason in found.reasons)


@pytest.mark.parametrize("way", ["python", "native"])
def test_known_calls_find_their_provider_again(way, monkeypatch):
    """When the setting changes, and when a kind has been compiled, until when the own kernel serves."""
    given, ready, asked = drawn(), [], []
    with native_way(on=way == "native"), gpu_with_flash4(lambda _: bool(ready)):
        monkeypatch.setattr(functions, "compile_in_background", asked.append)

        def served():
            with plan_cache.watch_uses() as keys:
                for _ in range(3):
                    torch.testing.assert_close(
                        sdpa_paged_varlen(**given).double(), exact(given)[0], rtol=8e-3, atol=4e-3
                    )
            return {key.provider for key in keys}

        assert served() == {"own"}
        with providers("fa4", "own"):
            assert served() == {"own"}
            assert len(asked) >= 1
            assert explain(sdpa_paged_varlen, **given).choice == (
                "FlashAttention-4, by providers('fa4', 'own'); own kernels serve it until its kind is compiled"
            )
            ready.append(1)
            plan_cache.forget_calls()
            assert served() == {"fa4"}
        assert served() == {"own"}
        with providers("fa4"):
            assert served() == {"fa4"}


def test_the_fastest_is_what_was_measured(monkeypatch):
    """By the mean number of new tokens, and the slowest of the rows of as many."""
    rows = [
        PagesPreference(90, DIMS, True, 64, 101.0, 100.0, "16 × 64"),
        PagesPreference(90, DIMS, True, 512, 80.0, 100.0, "4 × 512"),
        PagesPreference(90, DIMS, True, 512, 99.0, 100.0, "8 × 512"),
        PagesPreference(90, DIMS, True, 2048, 70.0, 100.0, "1 × 2,048"),
    ]
    monkeypatch.setattr(preferences, "preferences_for_pages", lambda: rows)
    sizes = {(8,): "", (64,): "own", (600,): "own", (2100,): "fa4", (2100, 2100, 1): "own", (4000, 4000): "fa4"}
    for new, provider in sizes.items():
        given = drawn(new, new, page=64)
        with providers("fastest"):
            found = explain(sdpa_paged_varlen, **given)
            assert found.provider == (provider or "own")
            assert ("measured" in found.choice) is bool(provider), found.choice
            if provider == "fa4":
                assert explain(sdpa_paged_varlen, **given, window_size=(9, 0)).provider == "own"
                assert explain(sdpa_paged_varlen, **given, sinks=torch.zeros(4)).provider == "own"
        with providers("default"):
            found = explain(sdpa_paged_varlen, **given)
            assert found.provider == "own"
            assert ("would take FlashAttention-4" in found.choice) is (provider == "fa4")


def test_nothing_changes_by_default():
    assert explain(sdpa_paged_varlen, **drawn()).choice == ""
    with providers("frontend"):
        assert explain(sdpa_paged_varlen, **drawn()).provider == "own"


def test_plans_are_recorded_for_another_machine(tmp_path):
    """A manifest has their keys, of which each is the kind's alone."""
    manifests = []
    for new in ((3, 1), (50, 7, 9)):
        with providers("fa4"), record_plans(target="h100") as manifest:
            sdpa_paged_varlen(
                **{n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in drawn(new, new).items()}
            )
        manifest.save(tmp_path / f"{len(new)}.json")
        manifests.append((tmp_path / f"{len(new)}.json").read_text())
    assert manifests[0] == manifests[1]
    assert "flash4_forward" in manifests[0]
