"""FlashInfer's names on a GPU, against float64 on the keys that each sequence has; all other slots are NaN."""

from __future__ import annotations

import math

import pytest
import torch
from attention_checks import TOLERANCE, captured, error, nothing_synchronizes
from csr_batches import attention_of, attention_on, csr_batch, offsets

from cudnn_sdpa.compat import flashinfer

pytestmark = pytest.mark.gpu

BF16, HALF, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENGTHS, NEW = [1, 37, 900, 64, 300], [1, 7, 130, 0, 60]
OPTIONS = [{}, {"window_left": 40}, {"logits_soft_cap": 5.0, "sm_scale": 0.3}]
HEADS = {"heads": 2, "dim": 64}


def workspace():
    return torch.empty(0, device="cuda")


def needs_fp8(dtype):
    if dtype == E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


def drawn_batch(lengths, page, dtype, **options):
    return csr_batch(lengths, page, dtype=dtype, device="cuda", **HEADS, **options)


def queries(tokens, dtype=BF16):
    return torch.randn(tokens, 8, 64, dtype=dtype, device="cuda")


def expected_options(options):
    names = {"logits_soft_cap": "softcap", "sm_scale": "scale"}
    return {names.get(name, name): value for name, value in options.items()}


def assert_close(found, expected):
    assert error(found[0], expected[0]) < TOLERANCE[found[0].dtype]
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-3, atol=4e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("layout", "is_one"), [("NHD", True), ("HND", False)])
@pytest.mark.parametrize(("page", "cache"), [(1, BF16), (5, BF16), (16, E4M3), (64, BF16)])
def test_decodes(page, cache, layout, is_one, options):
    needs_fp8(cache)
    batch = drawn_batch(LENGTHS, page, cache, layout=layout, is_one=is_one)
    q = queries(15)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    dtypes = {"q_data_type": BF16, "kv_data_type": cache}
    for tokens in (1, 3):
        wrapper.plan(*batch.lists, 8, 2, 64, page, q_len_per_req=tokens, **dtypes, **options)
        found = wrapper.run(q[: 5 * tokens], batch.cache, return_lse=True)
        counts = [tokens] * 5
        expected = attention_on(batch, q[: 5 * tokens], counts, causal=True, **expected_options(options))
        assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("page", [1, 5, 16])
def test_chunks_and_sinks(page, options, causal):
    batch, sinks = drawn_batch(LENGTHS, page, HALF), torch.randn(8, device="cuda")
    q = queries(sum(NEW) * 2, HALF)[::2]  # a view of packed queries
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(offsets(NEW), *batch.lists, 8, 2, 64, page, causal=causal, **options)
    found = wrapper.run(q, batch.cache, return_lse=True, sinks=sinks)
    assert_close(found, attention_on(batch, q, NEW, causal=causal, sinks=sinks, **expected_options(options)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(layout, causal):
    lengths, new = [300, 17, 90], [300, 5, 33]
    q, (k, v) = queries(sum(new)), torch.randn(2, sum(lengths), 2, 64, dtype=BF16, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), layout)
    wrapper.plan(offsets(new), offsets(lengths), 8, 2, 64, causal=causal, q_data_type=BF16)
    given = [x.transpose(0, 1).contiguous() if layout == "HND" else x for x in (k, v)]
    parts = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
    expected = [torch.cat(x) for x in zip(*(attention_of(*part, causal=causal) for part in parts), strict=True)]
    assert_close(wrapper.run(q, *given, return_lse=True), expected)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_single_sequences(options, dtype):
    needs_fp8(dtype)
    k, v = torch.randn(2, 300, 2, 64, device="cuda").to(dtype)
    q, mask, names = queries(70), torch.rand(70, 300, device="cuda") < 0.5, expected_options(options)
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], k, v, return_lse=True, **options)
    assert_close((out[None], lse[None]), attention_of(q[:1], k, v, **names))
    found = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, **options)
    assert_close(found, attention_of(q, k, v, causal=True, **names))
    if dtype == BF16:
        found = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, custom_mask=mask)
        assert_close(found, attention_of(q, k, v, mask=mask))


def test_merges():
    q, (k, v) = queries(60), torch.randn(2, 300, 2, 64, device="cuda")
    whole = attention_of(q, k, v)
    outs, lses = zip(*(attention_of(q, *part) for part in zip(k.split(100), v.split(100), strict=True)), strict=True)
    outs, lses = [x.to(BF16) for x in outs], [x.float() for x in lses]
    assert_close(flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1)), whole)
    first = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    mask = torch.arange(60, device="cuda") % 2 == 0
    out, lse = outs[2].clone(), lses[2].clone()
    flashinfer.merge_state_in_place(out, lse, *first, mask)
    assert_close((out[mask], lse[mask]), [x[mask] for x in whole])
    assert torch.equal(out[~mask], outs[2][~mask])


def with_buffers(batch, pages):
    made = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (batch + 1, pages, batch)]
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *made)


def moved(batch, cache):
    """The cache of a batch in the memory of another one, of which there are as many pages or more."""
    cache.fill_(math.nan)
    cache[: len(batch.cache)].copy_(batch.cache)


def test_a_captured_step_reads_the_next_plans():
    """Appending and decoding are captured once; plans, positions and all values change."""
    page, plan = 16, {"q_data_type": BF16}
    wrapper = with_buffers(3, 200)
    cache = torch.full((200, 2, page, 2, 64), math.nan, dtype=BF16, device="cuda")
    q, (k, v) = queries(3), torch.randn(2, 3, 2, 64, dtype=BF16, device="cuda")
    ends = torch.arange(4, dtype=torch.int32, device="cuda")

    def step():
        lists = wrapper._buffers
        lengths = flashinfer.get_seq_lens(lists["indptr"], lists["last_page_len"], page)
        where = flashinfer.get_batch_indices_positions(ends, lengths, 3)
        flashinfer.append_paged_kv_cache(k, v, *where, cache, lists["indices"], lists["indptr"], lists["last_page_len"])
        return wrapper.run(q, cache, return_lse=True)

    batch = drawn_batch([4, 4, 4], page, BF16)
    moved(batch, cache)
    wrapper.plan(*batch.lists, 8, 2, 64, page, **plan)
    graph, found = captured(step)
    for lengths in ([1, 900, 33], [600, 2, 16], [17, 17, 1000]):
        batch = drawn_batch(lengths, page, BF16)
        moved(batch, cache)
        wrapper.plan(*batch.lists, 8, 2, 64, page, **plan)
        for x in (q, k, v):
            x.normal_()
        for x in found:
            x.fill_(math.nan)
        with nothing_synchronizes():
            graph.replay()
        for b in range(3):
            batch.keys[b][-1], batch.values[b][-1] = k[b], v[b]
        assert_close(found, attention_on(batch, q, [1, 1, 1]))


def test_captured_chunks_read_the_next_plans():
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    made = {
        name: torch.zeros(n, dtype=torch.int32, device="cuda") for name, n in zip(names, (4, 4, 300, 3), strict=True)
    }
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, **made)
    cache = torch.full((300, 2, 5, 2, 64), math.nan, dtype=BF16, device="cuda")
    q, graph, found = queries(90), None, ()
    for lengths, new in (([60, 40, 90], [30, 10, 50]), ([400, 1, 70], [80, 0, 7]), ([20, 300, 5], [1, 88, 1])):
        batch = drawn_batch(lengths, 5, BF16)
        moved(batch, cache)
        wrapper.plan(offsets(new), *batch.lists, 8, 2, 64, 5, causal=True, q_data_type=BF16)
        if graph is None:
            graph, found = captured(lambda: wrapper.run(q, cache, return_lse=True))
        q.normal_()
        graph.replay()
        tokens = sum(new)
        expected = attention_on(batch, q[:tokens], new, causal=True)
        assert_close([x[:tokens] for x in found], expected)
        assert not found[0][tokens:].any()


def test_runs_read_nothing_on_the_host():
    batch = drawn_batch(LENGTHS, 16, BF16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*batch.lists, 8, 2, 64, 16, q_data_type=BF16)
    chunks = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    chunks.plan(offsets(NEW), *batch.lists, 8, 2, 64, 16, causal=True, q_data_type=BF16)
    k, v = torch.randn(2, 300, 2, 64, dtype=BF16, device="cuda")
    calls = [
        lambda: decode.run(queries(5), batch.cache, return_lse=True, v_scale=2.0),
        lambda: chunks.run(queries(sum(NEW)), batch.cache, return_lse=True, lse_layout="HN"),
        lambda: flashinfer.single_decode_with_kv_cache(queries(1)[0], k, v),
        lambda: flashinfer.single_prefill_with_kv_cache(queries(9), k, v, causal=True),
    ]
    for call in calls:
        call()
        with nothing_synchronizes():
            call()
