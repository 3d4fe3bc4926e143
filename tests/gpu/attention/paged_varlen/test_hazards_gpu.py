"""What can go wrong around the kernel for pages: other sequences, replays, streams, and values that make no sense."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import captured
from paged_varlen_checks import E4M3, assert_close, assert_right, drawn, within_canaries
from torch.nn.functional import pad

from cudnn_sdpa import sdpa_paged_varlen
from tests.threads import in_threads

TENSORS = ("q", "k_pages", "v_pages", "page_table", "seq_lens_kv", "cu_seqlens_q")


def alone(given, b, new):
    """The call of sequence b of a batch without other tokens, with its row of the table."""
    begin = sum(new[:b])
    mine = {name: given[name][b : b + 1] for name in ("page_table", "seq_lens_kv")}
    mine |= {"q": given["q"][begin : begin + new[b]], "max_seqlen_q": new[b]}
    mine["cu_seqlens_q"] = torch.tensor([0, new[b]], dtype=torch.int32, device="cuda")
    return {**given, **mine}, slice(begin, begin + new[b])


@pytest.mark.parametrize("cache", [None, E4M3])
@pytest.mark.parametrize("new", [[1, 7, 1, 0, 60], [4, 1, 31, 2, 1], [33, 32, 1, 5, 200]], ids=str)
def test_batch_invariance(new, cache):
    """A sequence alone, in the batch, and in the batch with others of other lengths: the same bits."""
    if cache is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    lengths = [9000, 300, 2500, 40, 4100]
    given = drawn((new, lengths), cache=cache, before=0, behind=0) | {"batch_invariant": True}
    whole = assert_right(given)
    for b in range(5):
        if new[b] == 0:
            continue
        mine, rows = alone(given, b, new)
        found = sdpa_paged_varlen(**mine, return_lse=True)
        others = given["seq_lens_kv"].clone().random_(1, 41)
        others[b] = lengths[b]
        again = sdpa_paged_varlen(**{**given, "seq_lens_kv": others}, return_lse=True)
        for one, other, third in zip(found, whole, again, strict=True):
            assert torch.equal(one, other[rows])
            assert torch.equal(one, third[rows])


def of_one_size(batches, tokens):
    """Calls with as many pages, columns and tokens as the largest: more tokens, pages and columns of no sequence."""
    columns = max(x["page_table"].shape[1] for x in batches)
    pages = max(x["k_pages"].shape[0] for x in batches)
    for given in batches:
        given["page_table"] = pad(given["page_table"], (0, columns - given["page_table"].shape[1]), value=2**30)
        for name in ("k_pages", "v_pages"):
            more = torch.full_like(given[name][:1], math.nan).expand(pages - len(given[name]), -1, -1, -1)
            given[name] = torch.cat([given[name], more])
        given["max_seqlen_q"] = tokens
    return batches


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [16, 80])
def test_replays_of_other_sequences(tokens, batch_invariant):
    """Fewer sequences, too, which leave tokens without one; other calls use the memory of the parts in between."""
    mixtures = [
        ([1, 3], [8000, 100]),
        ([3, 0], [50, 7000]),
        ([tokens, 0], [7900, 0]),
        ([0, 0], [5, 0]),
        ([2, tokens - 5], [6000, 7500]),
        ([1, 1], [3, 8000]),
    ]
    batches = [drawn((new, lengths), before=0, behind=tokens - sum(new)) for new, lengths in mixtures]
    of_one_size(batches, tokens)
    static = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in batches[0].items()}
    static["batch_invariant"] = batch_invariant
    whole, out = within_canaries(static)
    graph, (_, lse) = captured(lambda: sdpa_paged_varlen(**static, out=out, return_lse=True))
    for given in batches * 2:
        for name in TENSORS:
            static[name].copy_(given[name])
        whole.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert_close(given, out, lse)
        out.fill_(math.nan)
        assert whole.isnan().all()
        sdpa_paged_varlen(**batches[4])


def test_threads_on_streams_of_their_own():
    """Long sequences, whose parts several blocks merge, and at once many short ones."""
    calls = [
        drawn(([1 + i], [9000 + 700 * i])) if i % 2 else drawn(([1] * 70, [100 + i + 13 * b for b in range(70)]))
        for i in range(8)
    ]
    expected = [assert_right(given) for given in calls]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [sdpa_paged_varlen(**calls[index], return_lse=True) for _ in range(40)]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(*pair) for one in found for pair in zip(one, expected[index], strict=True))

    assert in_threads(work, 8) == [True] * 8


def test_launches_in_a_row_share_memory():
    """The allocator gives the parts of one launch the memory of those before."""
    calls = [drawn(([n], [length])) for n, length in ((1, 9000), (16, 20000), (4, 5000), (2, 12345))]
    expected = [assert_right(given) for given in calls]
    found = [[sdpa_paged_varlen(**given, return_lse=True) for given in calls] for _ in range(25)]
    for several in found:
        for one, other in zip(several, expected, strict=True):
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("has_tree", [False, True])
def test_values_that_make_no_sense_stay_within_the_tensors(batch_invariant, has_tree):
    given = drawn(([3, 20, 1, 0, 9, 5, 2], [300, 3100, 1, 9, 64, 65, 129]), dims=(64, 64))
    given |= {"batch_invariant": batch_invariant}
    if has_tree:
        given["tree_mask"] = torch.rand(given["q"].shape[0], 20, device="cuda") < 0.5
    right = assert_right(given)
    tokens = given["q"].shape[0]
    for attempt in range(24):
        wrong = dict(given)
        for name, few in (("page_table", 9), ("seq_lens_kv", 5000), ("cu_seqlens_q", tokens + 3)):
            bound = few if attempt % 2 else 2**31 - 1
            wrong[name] = torch.randint(-bound, bound, given[name].shape, device="cuda", dtype=torch.int32)
        if attempt % 4 == 3:  # all sequences have nearly all tokens
            wrong["cu_seqlens_q"] = torch.tensor([0, tokens] * 4, dtype=torch.int32, device="cuda")
            wrong["seq_lens_kv"] = given["seq_lens_kv"] * 0 + 3100
        before = {name: wrong[name].clone() for name in TENSORS[3:]}
        whole, out = within_canaries(wrong)
        sdpa_paged_varlen(**wrong, out=out)
        torch.cuda.synchronize()
        out.fill_(math.nan)
        assert whole.isnan().all()
        assert all(torch.equal(wrong[name], x) for name, x in before.items())
    for one, other in zip(sdpa_paged_varlen(**given, return_lse=True), right, strict=True):
        assert torch.equal(one, other)
