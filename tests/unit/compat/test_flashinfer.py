"""FlashInfer's names on our kernels, against float64 on the keys that each sequence has; all other slots are NaN."""

from __future__ import annotations

import math
import re

import pytest
import torch
from csr_batches import attention_of, attention_on, csr_batch, offsets

from cudnn_sdpa.compat import flashinfer
from cudnn_sdpa.compat.flashinfer import paged as flashinfer_paged
from cudnn_sdpa.errors import ArgumentError, CudnnSdpaError, OptionError, ShapeError, UnsupportedError

LENGTHS = [1, 37, 16, 64, 5]
NEW = [1, 7, 0, 30, 5]
WORKSPACE = torch.empty(0)
OPTIONS = [{}, {"window_left": 4}, {"logits_soft_cap": 1.5, "sm_scale": 0.7}, {"window_left": 0, "sm_scale": 0.3}]

pytestmark = pytest.mark.usefixtures("reference_alone")


def expected_options(options):
    names = {"logits_soft_cap": "softcap", "sm_scale": "scale"}
    return {names.get(name, name): value for name, value in options.items()}


def decoder(batch, heads=4, *, page=16, dim=16, layout="NHD", **options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    kv_heads = batch.keys[0].shape[1]
    wrapper.plan(*batch.lists, heads, kv_heads, dim, page, **{"q_data_type": torch.float64, **options})
    return wrapper


def assert_same(found, expected):
    """Outputs in float64, LSEs in float32."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)


# Decodes.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_one", [True, False], ids=["one", "two"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 5, 16, 64])
def test_decodes(page, layout, is_one, options):
    batch = csr_batch(LENGTHS, page, layout=layout, is_one=is_one)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    wrapper = decoder(batch, page=page, layout=layout, **options)
    assert_same(
        wrapper.run(q, batch.cache, return_lse=True),
        attention_on(batch, q, [1] * len(LENGTHS), **expected_options(options)),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_are_causal(options):
    batch = csr_batch([3, 40, 17], 5)
    q = torch.randn(9, 4, 16, dtype=torch.float64)
    wrapper = decoder(batch, page=5, q_len_per_req=3, **options)
    expected = attention_on(batch, q, [3, 3, 3], causal=True, **expected_options(options))
    assert_same(wrapper.run_return_lse(q, batch.cache), expected)
    assert torch.equal(wrapper.run(q, batch.cache, q_len_per_req=3), wrapper.run(q, batch.cache))
    with pytest.raises(OptionError, match="q_len_per_req: got 2; expected 3"):
        wrapper.run(q, batch.cache, q_len_per_req=2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_one", [True, False])
def test_pages_of_one_token_may_lack_their_dimension(layout, is_one):
    batch = csr_batch(LENGTHS, 1, layout=layout, is_one=is_one)
    dim = 1 if layout == "NHD" else 2
    cache = batch.cache.squeeze(dim + 1) if is_one else [x.squeeze(dim) for x in batch.cache]
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    found = decoder(batch, page=1, layout=layout).run_return_lse(q, cache)
    assert_same(found, attention_on(batch, q, [1] * 5))


def test_sequences_without_pages_get_zeros():
    batch = csr_batch([0, 20], 16)
    q = torch.randn(2, 4, 16, dtype=torch.float64)
    out, lse = decoder(batch).run(q, batch.cache, return_lse=True)
    assert_same((out, lse), attention_on(batch, q, [1, 1]))
    assert not out[0].any()
    assert lse[0].isneginf().all()


def test_sinks():
    batch, sinks = csr_batch(LENGTHS), torch.randn(4)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    found = decoder(batch).run(q, batch.cache, return_lse=True, sinks=sinks)
    assert_same(found, attention_on(batch, q, [1] * 5, sinks=sinks))


def test_buffers_for_results_are_written():
    batch = csr_batch(LENGTHS)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    out, lse = torch.full_like(q, math.nan), torch.full((len(LENGTHS), 4), math.nan)
    found = decoder(batch).run(q, batch.cache, return_lse=True, out=out, lse=lse)
    assert found[0].data_ptr() == out.data_ptr()
    assert found[1] is lse
    assert_same((out, lse), attention_on(batch, q, [1] * 5))
    with pytest.raises(ShapeError, match="lse"):
        decoder(batch).run(q, batch.cache, return_lse=True, lse=lse[:, :3])


def test_options_of_older_code():
    """By position, `begin_forward`, and `forward` with options of its own."""
    batch = csr_batch(LENGTHS)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*batch.lists, 4, 2, 16, 16, "NONE", 3, None, torch.float64)
    assert_same(wrapper.run_return_lse(q, batch.cache), attention_on(batch, q, [1] * 5, window_left=3))
    found = wrapper.forward_return_lse(q, batch.cache, logits_soft_cap=2.0)
    assert_same(found, attention_on(batch, q, [1] * 5, softcap=2.0))
    assert torch.equal(wrapper.forward(q, batch.cache, logits_soft_cap=2.0), found[0])
    with pytest.raises(TypeError, match="window_left"):
        wrapper.plan(*batch.lists, 4, 2, 16, 16, "NONE", 3, window_left=4)


def test_page_tables_and_lengths_that_are_given():
    batch = csr_batch([20, 7], 5)
    table = torch.full((2, 6), -1, dtype=torch.int32)
    table[0, :4], table[1, :2] = batch.indices[:4], batch.indices[4:]
    q = torch.randn(2, 4, 16, dtype=torch.float64)
    expected = attention_on(batch, q, [1, 1])
    unread = torch.full_like(batch.indices, 10**6)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    plan = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 5, "q_data_type": "float64"}
    wrapper.plan(batch.indptr, unread, batch.last_page_len, block_tables=table, **plan)
    assert_same(wrapper.run_return_lse(q, batch.cache), expected)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    wrapper.plan(batch.indptr, batch.indices, torch.ones(2, dtype=torch.int32), seq_lens=lengths, **plan)
    assert_same(wrapper.run_return_lse(q, batch.cache), expected)


def test_fast_plans_of_decodes():
    batch = csr_batch(LENGTHS)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    flashinfer.fast_decode_plan(
        *(wrapper, *batch.lists, 4, 2, 16, 16), data_type="float64", global_override_indptr_cpu=batch.indptr
    )
    assert_same(wrapper.run_return_lse(q, batch.cache), attention_on(batch, q, [1] * 5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("of_heads", [False, True])
def test_scales(dtype, of_heads):
    """Factors for all heads, and on pages in FP8 tensors for each."""
    batch = csr_batch(LENGTHS, dtype=dtype)
    q = torch.randn(len(LENGTHS), 4, 16, dtype=torch.float64)
    k_scale, v_scale = (torch.rand(2) + 0.5, torch.rand(2) + 0.5) if of_heads else (1.7, 0.6)
    for name, scale in (("keys", k_scale), ("values", v_scale)):
        factor = scale.view(-1, 1) if of_heads else scale
        setattr(batch, name, [x * factor for x in getattr(batch, name)])
    batch.keys = [x * 0.9 for x in batch.keys]
    wrapper = decoder(batch, kv_data_type=dtype)
    found = wrapper.run(q, batch.cache, q_scale=0.9, k_scale=k_scale, v_scale=v_scale, return_lse=True)
    assert_same(found, attention_on(batch, q, [1] * 5))


# Chunks of prompts.


def prefill(batch, new, *, page=16, layout="NHD", **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(offsets(new), *batch.lists, 4, 2, 16, page, **{"q_data_type": torch.float64, **options})
    return wrapper


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 5, 16, 64])
def test_chunks(page, layout, causal, options):
    batch = csr_batch(LENGTHS, page, layout=layout, is_one=page != 5)
    q = torch.randn(sum(NEW), 4, 16, dtype=torch.float64)
    wrapper = prefill(batch, NEW, page=page, layout=layout, causal=causal, **options)
    expected = attention_on(batch, q, NEW, causal=causal, **expected_options(options))
    assert_same(wrapper.run_return_lse(q, batch.cache), expected)


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("order", ["NH", "HN"])
def test_bases_and_orders_of_lse(base, order):
    batch = csr_batch(LENGTHS)
    q = torch.randn(sum(NEW), 4, 16, dtype=torch.float64)
    out, lse = attention_on(batch, q, NEW)
    lse = lse * (math.log(2) if base == "ln" else 1)
    lse = lse.t() if order == "HN" else lse
    into = torch.full(lse.shape, math.nan)
    for given in (None, into):
        found = prefill(batch, NEW).run(q, batch.cache, return_lse=True, lse=given, lse_base=base, lse_layout=order)
        assert found[1].is_contiguous()
        assert_same(found, (out, lse))
    assert_same((out, into), (out, lse))


def test_forward_changes_the_mask_of_a_plan():
    batch = csr_batch(LENGTHS)
    q = torch.randn(sum(NEW), 4, 16, dtype=torch.float64)
    wrapper = prefill(batch, NEW)
    found = wrapper.forward_return_lse(q, batch.cache, causal=True, window_left=2)
    assert_same(found, attention_on(batch, q, NEW, causal=True, window_left=2))
    assert torch.equal(wrapper.forward(q, batch.cache, causal=True, window_left=2), found[0])


@pytest.mark.parametrize("causal", [False, True])
def test_batch_attention(causal):
    batch = csr_batch(LENGTHS, 5)
    q = torch.randn(sum(NEW), 4, 16, dtype=torch.float64)
    wrapper = flashinfer.BatchAttention(device="cpu")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    dtypes = {"q_data_type": torch.float64, "kv_data_type": torch.float64}
    wrapper.plan(
        *(offsets(NEW), batch.indptr, batch.indices, lengths, 4, 2, 16, 16, 5), causal, logits_soft_cap=2.0, **dtypes
    )
    expected = attention_on(batch, q, NEW, causal=causal, softcap=2.0)
    assert_same(wrapper.run(q, batch.cache, logits_soft_cap=2.0), expected)
    with pytest.raises(OptionError, match="logits_soft_cap: got 3"):
        wrapper.run(q, batch.cache, logits_soft_cap=3.0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_sequences(layout, causal, options):
    lengths = [4, 0, 33, 5]
    new = [6, 2, 9, 0]  # a longer and an empty one, and one without queries
    q = torch.randn(sum(new), 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, sum(lengths), 2, 16, dtype=torch.float64)
    parts = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
    expected = [attention_of(*part, causal=causal, **expected_options(options)) for part in parts]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
    plan = {"causal": causal, "q_data_type": torch.float64, **options}
    wrapper.plan(offsets(new), offsets(lengths), 4, 2, 16, **plan)
    given = [x.transpose(0, 1).contiguous() if layout == "HND" else x for x in (k, v)]
    expected = [torch.cat(x) for x in zip(*expected, strict=True)]
    assert_same(wrapper.run_return_lse(q, *given), expected)
    with pytest.raises(ShapeError, match="k: got"):
        wrapper.run(q, *(x[:, :-1] for x in given))
    out, lse = wrapper.run(q, *given, v_scale=2.0, return_lse=True, lse_layout="HN", lse_base="ln")
    assert_same((out / 2, lse.t() / math.log(2)), expected)
    wrapper.plan(offsets(new), offsets(lengths), 4, 2, 16, q_data_type=torch.float64)
    assert_same(
        wrapper.forward_return_lse(q, *given, **{x: y for x, y in plan.items() if x != "q_data_type"}), expected
    )


# Single sequences.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_sequences(layout, options):
    k, v = torch.randn(2, 23, 2, 16, dtype=torch.float64)
    given = [x.transpose(0, 1).contiguous() if layout == "HND" else x for x in (k, v)]
    q = torch.randn(6, 4, 16, dtype=torch.float64)
    names = expected_options(options)
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], *given, layout, return_lse=True, **options)
    assert_same((out[None], lse[None]), attention_of(q[:1], k, v, **names))
    mask = torch.rand(6, 23) < 0.5
    mask[2] = False  # a query that sees no key
    for mine, theirs in (({"causal": True}, {"causal": True}), ({}, {}), ({"custom_mask": mask}, {"mask": mask})):
        found = flashinfer.single_prefill_with_kv_cache_return_lse(q, *given, kv_layout=layout, **mine, **options)
        assert_same(found, attention_of(q, k, v, **theirs, **names))


def test_single_sequences_with_keys_in_fp8():
    k, v = (torch.randn(23, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(6, 4, 16, dtype=torch.float64)
    expected = attention_of(q, 0.5 * k.double(), 3 * v.double(), causal=True)
    scales = {"k_scale": 0.5, "v_scale": 3.0, "return_lse": True}
    assert_same(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, **scales), expected)
    found = flashinfer.single_decode_with_kv_cache(q[-1], k, v, **scales)
    assert_same([x[None] for x in found], [x[-1:] for x in expected])


# Appending.


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_new_tokens_are_appended_and_seen(page, layout):
    lengths, new = [9, 16, 3], [4, 0, 3]
    batch = csr_batch(lengths, page, layout=layout)
    before = [x.clone() for x in batch.pair]
    k, v = torch.randn(2, 9, 2, 16, dtype=torch.float64)  # two of padding
    seq_lens = flashinfer.get_seq_lens(batch.indptr, batch.last_page_len, page)
    assert seq_lens.tolist() == lengths
    sequences, positions = flashinfer.get_batch_indices_positions(offsets(new), seq_lens, 9)
    assert sequences.tolist() == [0, 0, 0, 0, 2, 2, 2, -1, -1]
    assert positions.tolist() == [5, 6, 7, 8, 0, 1, 2, 0, 0]
    into = torch.empty(9, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    again = flashinfer.get_batch_indices_positions(offsets(new), seq_lens, 9, *into)
    assert again[0] is into[0]
    assert torch.equal(torch.stack(again), torch.stack([sequences, positions]))

    flashinfer.append_paged_kv_cache(k, v, sequences, positions, batch.cache, batch.indices, batch.indptr, None, layout)
    for row, (b, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        if b >= 0:
            batch.keys[b][position], batch.values[b][position] = k[row], v[row]
    for old, now in zip(before, batch.pair, strict=True):
        assert torch.equal(old.isnan(), now.isnan()), "only slots of the sequences were written"
    q = torch.randn(3, 4, 16, dtype=torch.float64)
    expected = attention_on(batch, q, [1, 1, 1])
    torch.testing.assert_close(decoder(batch, page=page, layout=layout).run(q, batch.cache), expected[0])


def test_no_sequence_gets_more_than_its_pages():
    batch = csr_batch([9, 16], 5)
    k = torch.randn(1, 2, 16, dtype=torch.float64)
    for sequence, position in ((0, 10), (2, 0), (1, -1)):
        where = torch.tensor([sequence]), torch.tensor([position])
        with pytest.raises(ShapeError, match="slot"):
            flashinfer.append_paged_kv_cache(k, k, *where, batch.cache, batch.indices, batch.indptr, None)


def test_no_new_tokens():
    batch = csr_batch([9], 5)
    sequences, positions = flashinfer.get_batch_indices_positions(offsets([0]), torch.tensor([9]), 0)
    none = torch.empty(0, 2, 16, dtype=torch.float64)
    flashinfer.append_paged_kv_cache(none, none, sequences, positions, batch.cache, batch.indices, batch.indptr, None)
    nobody, at = flashinfer.get_batch_indices_positions(offsets([]), torch.empty(0, dtype=torch.int32), 2)
    assert (nobody.tolist(), at.tolist()) == ([-1, -1], [0, 0])


# Merges.


def states(number):
    q = torch.randn(5, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 12 * number, 2, 16, dtype=torch.float64)
    parts = [attention_of(q, *part) for part in zip(k.split(12), v.split(12), strict=True)]
    return [out for out, _ in parts], [lse.float() for _, lse in parts], attention_of(q, k, v)


def test_merges():
    outs, lses, expected = states(3)
    first = flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert_same(flashinfer.merge_state(*first, outs[2], lses[2]), expected)
    assert_same(flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1)), expected)
    out, lse = outs[2].clone(), lses[2].clone()
    flashinfer.merge_state_in_place(out, lse, *first)
    assert_same((out, lse), expected)


def test_merges_of_some_tokens():
    outs, lses, expected = states(2)
    out, lse, mask = outs[0].clone(), lses[0].clone(), torch.tensor([True, False, True, False, True])
    flashinfer.merge_state_in_place(out, lse, outs[1], lses[1], mask)
    assert_same((out[mask], lse[mask]), [x[mask] for x in expected])
    assert torch.equal(out[~mask], outs[0][~mask])
    assert torch.equal(lse[~mask], lses[0][~mask])
    with pytest.raises(ArgumentError, match="s: got float64"):
        flashinfer.merge_state_in_place(out, lse.double(), outs[1], lses[1])


def test_states_without_keys_weigh_nothing():
    (out, _), (lse, _), _ = states(2)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    assert_same(flashinfer.merge_state(*nothing, out, lse), (out, lse.double()))
    zeros, minus = flashinfer.merge_state(*nothing, *nothing)
    assert not zeros.any()
    assert minus.isneginf().all()


# Plans in buffers.


def buffers(batch, room):
    return [torch.full((n,), -1, dtype=torch.int32) for n in (batch + 1, room, batch)]


def test_decodes_with_buffers():
    """The next plan changes what the tables of the first hold, so that a captured run reads it."""
    indptr, indices, last = buffers(3, 20)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, indptr, indices, last)
    assert wrapper.is_cuda_graph_enabled
    seen = []
    for lengths in ([4, 9, 1], [30, 1, 17], [0, 60, 2]):
        batch = csr_batch(lengths, 5)
        wrapper.plan(*batch.lists, 4, 2, 16, 5, q_data_type=torch.float64)
        assert torch.equal(indptr, batch.indptr)
        assert torch.equal(indices[: len(batch.indices)], batch.indices)
        q = torch.randn(3, 4, 16, dtype=torch.float64)
        assert_same(wrapper.run_return_lse(q, batch.cache), attention_on(batch, q, [1, 1, 1]))
        plan = wrapper._plan
        seen.append([x.data_ptr() for x in (plan.table, plan.lengths, plan.cu_seqlens_q)])
    assert seen[0] == seen[1] == seen[2]

    for lengths, name in (([101, 1, 1], "indices"), ([1, 1], "indptr")):
        with pytest.raises(ShapeError, match=name):
            wrapper.plan(*csr_batch(lengths, 5).lists, 4, 2, 16, 5, q_data_type=torch.float64)
    with pytest.raises(OptionError, match="q_len_per_req: got 2; expected 1"):
        wrapper.plan(*batch.lists, 4, 2, 16, 5, q_len_per_req=2)


def test_captured_decodes_keep_the_table_that_was_given():
    batch, table = csr_batch([4, 9, 1], 5), torch.zeros(3, 4, dtype=torch.int32)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(3, 20))
    plan = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 5}
    for _ in range(2):
        wrapper.plan(*batch.lists, block_tables=table, **plan)
        assert wrapper._plan.table is table
    for other in (None, table.clone()):
        with pytest.raises(OptionError, match="block_tables: got another one"):
            wrapper.plan(*batch.lists, block_tables=other, **plan)
    assert not table.any()


def test_tables_for_captured_decodes_are_not_much_larger_than_needed(monkeypatch):
    monkeypatch.setattr(flashinfer_paged, "MAX_ENTRIES", 24)
    for room, columns in ((40, 14), (20, 8), (6, 6)):  # each one's share; the most that it may be; all pages
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(3, room))
        wrapper.plan(*csr_batch([1, 1, 1], 5).lists, 4, 2, 16, 5)
        assert wrapper._plan.table.shape == (3, columns)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(3, 20))
    with pytest.raises(ShapeError, match="9 pages of a sequence; expected at most 8"):
        wrapper.plan(*csr_batch([41, 1, 1], 5).lists, 4, 2, 16, 5)


def test_chunks_with_buffers():
    made = dict(
        zip(("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"), buffers(3, 40), strict=True)
    )
    new_buffer = torch.empty(4, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, new_buffer, **made)
    seen = []
    for lengths, new in (([4, 9, 70], [3, 8, 4]), ([30, 12, 17], [1, 12, 2]), ([9, 60, 2], [0, 1, 1])):
        batch = csr_batch(lengths, 5)
        wrapper.plan(
            offsets(new), *batch.lists, 4, 2, 16, 5, causal=True, q_data_type=torch.float64, max_sequence_kv=70
        )
        q = torch.randn(sum(new), 4, 16, dtype=torch.float64)
        assert_same(wrapper.run_return_lse(q, batch.cache), attention_on(batch, q, new, causal=True))
        plan = wrapper._plan
        assert plan.table.shape == (3, 14)
        assert plan.max_seqlen_q == 15
        seen.append([x.data_ptr() for x in (plan.table, plan.lengths, plan.cu_seqlens_q)])
    assert seen[0] == seen[1] == seen[2]
    with pytest.raises(ShapeError, match="qo_indptr: got 16 tokens"):
        wrapper.plan(offsets([1, 14, 1]), *batch.lists, 4, 2, 16, 5)
    with pytest.raises(ShapeError, match="15 pages of a sequence"):
        wrapper.plan(offsets(new), *csr_batch([71, 1, 1], 5).lists, 4, 2, 16, 5)


def test_packed_sequences_with_buffers():
    buffer_q, buffer_kv = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, buffer_q, buffer_kv)
    for new, lengths in (([5, 7], [9, 9]), ([12, 0], [1, 17]), ([1, 2], [3, 4])):
        q, (k, v) = torch.randn(sum(new), 2, 16).double(), torch.randn(2, sum(lengths), 2, 16).double()
        wrapper.plan(offsets(new), offsets(lengths), 2, 2, 16, q_data_type=torch.float64)
        parts = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
        expected = [torch.cat(x) for x in zip(*(attention_of(*part) for part in parts), strict=True)]
        assert_same(wrapper.run_return_lse(q, k, v), expected)
        assert torch.equal(buffer_kv, offsets(lengths))


@pytest.mark.parametrize("bound", ["max_token_per_sequence", "uniform_q_len"])
def test_bounds_that_do_not_hold_are_refused(bound):
    batch = csr_batch([9, 9])
    with pytest.raises(OptionError, match=f"{bound}: got 3; expected at least 4"):
        prefill(batch, [4, 2], **{bound: 3})
    assert prefill(batch, [4, 2], **{bound: 4}) is not None
    with pytest.raises(ShapeError, match="seq_lens_q"):
        prefill(batch, [4, 2], seq_lens_q=torch.tensor([4, 4]))


# What is refused.

BATCH = csr_batch([9, 20])
Q = torch.randn(2, 4, 16, dtype=torch.float64)
MASK = torch.ones(29, dtype=torch.bool)
CSR = offsets([1, 1])


def build(name, **options):
    return lambda: getattr(flashinfer, name)(WORKSPACE, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decoder(BATCH, pos_encoding_mode="ROPE_LLAMA"), "rotate both before the call"),
        (lambda: prefill(BATCH, [1, 1], pos_encoding_mode="ALIBI"), "attn_mask"),
        (lambda: prefill(BATCH, [1, 1], custom_mask=MASK), "custom_mask"),
        (lambda: prefill(BATCH, [1, 1], packed_custom_mask=MASK), "packed_custom_mask"),
        (lambda: prefill(BATCH, [1, 1], prefix_len_ptr=CSR), "prefix_len_ptr"),
        (lambda: prefill(BATCH, [1, 1], o_data_type=torch.float32), "o_data_type"),
        (lambda: decoder(BATCH, window_right=1), "window_right"),
        (lambda: decoder(BATCH, is_causal=True), "is_causal"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, kv_cache_sf=BATCH.cache), "NVFP4"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, 1.0), "args"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, skip_softmax_threshold_scale_factor=1.0), "leaves keys out"),
        (build("BatchDecodeWithPagedKVCacheWrapper", jit_args=["name"]), "jit_args"),
        (build("BatchPrefillWithPagedKVCacheWrapper", variant_owns_mask=True), "variant_owns_mask"),
        (build("BatchPrefillWithRaggedKVCacheWrapper", jit_kwargs={"a": 1}), "jit_kwargs"),
        (build("MultiLevelCascadeAttentionWrapper"), "merge_state"),
        (build("BatchMLAPagedAttentionWrapper"), "576 and 512"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, Q, Q, torch.ones(4)), "scale_q"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, Q, Q, packed_custom_mask=MASK), "custom_mask"),
        (lambda: flashinfer.single_decode_with_kv_cache(Q[0], Q, Q, pos_encoding_mode="ALIBI"), "bias"),
    ],
)  # fmt: skip
def test_what_no_kernel_does_is_refused(call, words):
    with pytest.raises(UnsupportedError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decoder(BATCH, layout="DHN"), "kv_layout"),
        (lambda: decoder(BATCH, q_data_type="half precision"), "q_data_type"),
        (lambda: decoder(BATCH, q_data_type=None), "q_data_type"),
        (lambda: decoder(BATCH, page=0), "page_size"),
        (lambda: decoder(BATCH, q_len_per_req=0), "q_len_per_req"),
        (lambda: decoder(BATCH, pos_encoding_mode="ROPE"), "pos_encoding_mode"),
        (lambda: decoder(BATCH, q_data_type="float16").run(Q, BATCH.cache), "q: got float64; expected float16"),
        (lambda: decoder(BATCH, kv_data_type="float16").run(Q, BATCH.cache), r"paged_kv_cache\[:, 0\]: got float64"),
        (lambda: decoder(BATCH, page=8).run(Q, BATCH.cache), r"paged_kv_cache\[:, 0\]: got"),
        (lambda: decoder(BATCH).run(Q[:1], BATCH.cache), r"q: got .*; expected shape \(2, 4, 16\)"),
        (lambda: decoder(BATCH).run(Q[..., :8], BATCH.cache), "q: got"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache[:, 0]), "paged_kv_cache"),
        (lambda: decoder(BATCH).run(Q, (BATCH.cache,)), "paged_kv_cache"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, window_left=3), "window_left: got 3; expected -1"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, q_scale=torch.ones(1)), "q_scale"),
        (lambda: decoder(BATCH).run(Q, BATCH.cache, k_scale=torch.ones(1)), "k_scale"),
        (lambda: build("BatchDecodeWithPagedKVCacheWrapper")().run(Q, BATCH.cache), "before plan"),
        (lambda: build("BatchPrefillWithRaggedKVCacheWrapper")().run(Q, Q, Q), "before plan"),
        (build("BatchDecodeWithPagedKVCacheWrapper", use_cuda_graph=True), "paged_kv_indptr_buffer"),
        (build("BatchPrefillWithPagedKVCacheWrapper", use_cuda_graph=True, qo_indptr_buf=MASK), "qo_indptr_buf"),
        (lambda: prefill(BATCH, [1, 1]).run(Q, BATCH.cache, return_lse=True, lse_base="e"), "lse_base"),
        (lambda: prefill(BATCH, [1]), "qo_indptr: got 2 entries; expected 3, as paged_kv_indptr"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(CudnnSdpaError, match=words):
        call()


K, NARROW = torch.zeros(9, 4, 16, dtype=torch.float64), torch.zeros(9, 3, 16, dtype=torch.float64)
ONE = torch.zeros(1, dtype=torch.int64)


def appended(new, pages=BATCH.cache, last=0):
    flashinfer.append_paged_kv_cache(new, new, ONE, ONE + last, pages, ONE, torch.tensor([0, 1]), ONE)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, custom_mask=torch.ones(3, 9).bool()), "custom_mask"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, sm_scale="a"), "sm_scale: got str"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, sm_scale="a", k_scale=2.0), "sm_scale: got str"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, k_scale="a"), "k_scale: got str"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, logits_soft_cap="a"), "logits_soft_cap: got str"),
        (lambda: flashinfer.single_prefill_with_kv_cache(Q, K, K, window_left=1.5), "window_left: got 1.5"),
        (lambda: flashinfer.single_decode_with_kv_cache(Q[0], NARROW, NARROW), "k: got 3 heads"),
        (lambda: flashinfer.single_decode_with_kv_cache(Q[0], K.int(), K), "k: got int32"),
        (lambda: decoder(BATCH, heads=3).run(Q[:, :3], BATCH.cache), r"paged_kv_cache\[:, 0\]: got 2 heads"),
        (lambda: decoder(BATCH, page=8).run(Q, BATCH.cache.unbind(1)), r"paged_kv_cache\[0\]: got"),
        (lambda: decoder(BATCH, block_tables=CSR[None].expand(2, -1) + 99).run(Q, BATCH.cache), "block_tables: got"),
        (lambda: decoder(BATCH, seq_lens=CSR[:2] + 9999).run(Q, BATCH.cache), "seq_lens: got "),
        (lambda: appended(NARROW[:1]), "append_key: got shape"),
        (lambda: appended(K[:1, :2], last=99), "positions: got slot"),
        (lambda: flashinfer.merge_state(K, K[..., 0], K, NARROW[..., 0]), "s_b: got shape"),
        (lambda: flashinfer.merge_state(K, K[..., 0], K.float(), K[..., 0]), "v_b: got float32"),
    ],
)  # fmt: skip
def test_errors_have_the_callers_names(call, words):
    with pytest.raises(ArgumentError, match=f"^{words}") as caught:
        call()
    assert not re.search(r"_pages|attn_mask|\bsoftcap|\bscale:|\blses|\bouts", str(caught.value))


def test_gradients_are_refused_in_the_callers_names():
    q, new = Q.clone().requires_grad_(), K[:1, :2].clone().requires_grad_()
    calls = {
        "single_decode_with_kv_cache": lambda: flashinfer.single_decode_with_kv_cache(q[0], K, K),
        "BatchDecodeWithPagedKVCacheWrapper.run": lambda: decoder(BATCH).run(q, BATCH.cache),
        "append_paged_kv_cache": lambda: appended(new),
    }
    for name, call in calls.items():
        with pytest.raises(UnsupportedError, match=f"^{name} with a gradient"):
            call()
