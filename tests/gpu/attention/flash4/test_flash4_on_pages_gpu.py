"""`sdpa_paged_varlen` by FlashAttention-4: values against float64 beside NaN in pages and shared memory, and replays.

Its kernel multiplies the values of whole tiles: those of slots of no sequence would turn results into NaN, and so would
what an earlier kernel left in shared memory.
"""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path

import pytest
import torch
from attention_checks import captured, poison, served_by
from compiled_functions import given_functions
from flash4_cases import CHUNKS, PAGES
from paged_batches import PLACES
from paged_varlen_checks import assert_close, drawn, within_canaries

from cudnn_sdpa import explain, plan_cache, providers, sdpa_paged_varlen
from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.plan import current_raw_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(installed().missing), reason=f"FlashAttention-4: {installed().missing}"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="FlashAttention-4 is tested on compute capability 9.0",
    ),
]

SHARED = 227 << 10  #: bytes that a block can have, so that a multiprocessor runs one at a time
POISON = Kernel(Path(__file__).with_name("nan_in_shared_memory.cu"), "fill_shared_memory", shared=SHARED)


@pytest.fixture(autouse=True)
def by_flash4():
    with given_functions(), providers("fa4"):
        yield


def poison_shared_memory():
    device = torch.cuda.current_device()
    blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    POISON.on(device).launch(blocks, 1024, array("q", [SHARED // 4]), current_raw_stream(device))


def check(given):
    """Results in memory that held NaN, and the same bits in a part of a tensor, whose rest stays as it is."""
    poison((*given["q"].shape[:2], given["v_pages"].shape[-1]), dtype=given["q"].dtype)
    sdpa_paged_varlen(**given)  # which loads kernels
    poison_shared_memory()
    out, by = served_by(lambda: sdpa_paged_varlen(**given))
    assert by == {"fa4"}
    assert_close(given, out, None)
    whole, part = within_canaries(given)
    assert torch.equal(sdpa_paged_varlen(**given, out=part), out)
    part.fill_(math.nan)
    assert whole.isnan().all()
    return out


@pytest.mark.parametrize("name", PAGES)
def test_values(name):
    check(drawn(CHUNKS, **PAGES[name]))


@pytest.mark.parametrize("page", [1, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_page_sizes(name, layout, page):
    check(drawn(CHUNKS, page=page, layout=layout, **PAGES[name]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_pages_in_every_place(name, layout, place):
    check(drawn(CHUNKS, place=place, layout=layout, **PAGES[name]))


@pytest.mark.parametrize("name", ["causal", "causal window", "64, sinks, causal window", "256"])
def test_random_sizes(name):
    """All of one plan."""
    plan_cache.clear()
    chance = random.Random(name)
    for _ in range(12):
        new = [chance.choice([0, 1, 2, 17, 64, 128, 129, 500]) for _ in range(chance.choice([1, 2, 5, 40]))]
        lengths = [chance.choice([0, 1, 63, 128, n, n + 1, n + 700]) for n in new]
        sizes = {"page": chance.choice([1, 3, 16, 64, 100, 128]), "layout": chance.choice(["HND", "NHD"])}
        sizes |= {"before": chance.choice([0, 7]), "behind": chance.choice([1, 200])}
        check(drawn((new, lengths), **PAGES[name], **sizes))
    assert plan_cache.info().builds == 1


@pytest.mark.parametrize("sizes", [{"heads": 4, "heads_kv": 1}, {"heads": 4, "heads_kv": 1, "layout": "HND"}])
@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_a_single_token_page_and_head(name, sizes):
    """Dimensions of size 1, whose strides the kernel gets as well."""
    for new, lengths in (((1,), (9,)), ((1, 1), (16, 1)), ((200,), (200,))):
        check(drawn((new, lengths), before=0, behind=0, **sizes, **PAGES[name]))


@pytest.mark.parametrize("name", PAGES)
def test_results_are_the_same_from_run_to_run(name):
    given = drawn(CHUNKS, **PAGES[name])
    out = check(given)
    for _ in range(1000):
        assert torch.equal(sdpa_paged_varlen(**given), out)


@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_replays_of_other_sequences(name):
    """A captured graph with growing lengths, other tables and other numbers of new tokens."""
    mixtures = [
        ([40, 3], [40, 100]),
        ([0, 200], [50, 700]),
        ([200, 0], [900, 0]),
        ([1, 150], [1, 3000]),
        ([0, 0], [5, 0]),
    ]
    batches = [drawn((new, lengths), before=0, behind=220 - sum(new), **PAGES[name]) for new, lengths in mixtures]
    columns, pages = (max(x[n].shape[at] for x in batches) for n, at in (("page_table", 1), ("k_pages", 0)))
    for given in batches:
        more = columns - given["page_table"].shape[1]
        given["page_table"] = torch.nn.functional.pad(given["page_table"], (0, more), value=2**30)
        for one in ("k_pages", "v_pages"):
            nothing = torch.full_like(given[one][:1], math.nan).expand(pages - len(given[one]), -1, -1, -1)
            given[one] = torch.cat([given[one], nothing])
        given["max_seqlen_q"] = 220
    static = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in batches[0].items()}
    graph, out = captured(lambda: sdpa_paged_varlen(**static))
    for given in batches:
        for one, tensor in given.items():
            if isinstance(tensor, torch.Tensor):
                static[one].copy_(tensor)
        out.fill_(math.nan)
        poison_shared_memory()
        graph.replay()
        assert_close(given, out, None)


@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_wrong_values_are_no_error_of_the_gpu(name):
    """Ids, lengths and offsets beyond all tensors: wrong numbers, but of the cache's own values."""
    given = drawn(CHUNKS, **PAGES[name])
    for one in ("k_pages", "v_pages"):
        given[one].copy_(torch.randn_like(given[one]))
    for ids, length, ends in ((2**31 - 1, 2**31 - 1, 2**30), (-(2**31), -5, -7), (-1, 10**6, 0), (10**6, 300, 5)):
        given["page_table"].fill_(ids)
        given["seq_lens_kv"].fill_(length)
        given["cu_seqlens_q"][3::2] = ends
        out, by = served_by(lambda: sdpa_paged_varlen(**given))
        torch.cuda.synchronize()
        assert by == {"fa4"}
        assert out.isfinite().all()


def test_known_calls_find_their_provider_again():
    given = drawn(CHUNKS)
    for names, provider in ((("default",), "own"), (("fa4", "own"), "fa4"), (("own",), "own"), (("fa4",), "fa4")):
        with providers(*names):
            for _ in range(3):
                out, by = served_by(lambda: sdpa_paged_varlen(**given))
                assert by == {provider}
                assert_close(given, out, None)
            assert explain(sdpa_paged_varlen, **given).provider == provider


def test_the_own_kernel_serves_what_it_declines():
    given = drawn(CHUNKS)
    with providers("fa4", "own"):
        (out, lse), by = served_by(lambda: sdpa_paged_varlen(**given, return_lse=True))
    assert by == {"own"}
    assert_close(given, out, lse)
