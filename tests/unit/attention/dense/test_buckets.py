"""Buckets of dense calls: which calls share one, and the tables of their sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.forward import MAX_LENGTH, MAX_SEQUENCES, Bucket
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.graph.target import Target, load_properties

LAYOUTS = ("bshd", "bhsd", "sbhd", "sliced", "packed", "one head for all")


def make(layout, batch, heads, rows, dim, device="meta"):
    def new(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device=device)

    if layout == "bshd":
        return new(batch, rows, heads, dim).transpose(1, 2)
    if layout == "sbhd":
        return new(rows, batch, heads, dim).permute(1, 2, 0, 3)
    if layout == "sliced":  # out of a longer cache
        return new(batch, heads, rows + 40, dim)[:, :, 8 : rows + 8]
    if layout == "packed":
        return new(batch, rows, 3, heads, dim)[:, :, 1].transpose(1, 2)
    if layout == "one head for all":
        return new(batch, 1, rows, dim).expand(-1, heads, -1, -1)
    return new(batch, heads, rows, dim)


def forward(layout="bshd", batch=2, heads=(4, 2), rows=(100, 100), dim=64, out="bshd", device="meta", **options):
    layouts = layout if isinstance(layout, tuple) else (layout, layout)
    q = make(layouts[0], batch, heads[0], rows[0], dim, device)
    k = make(layouts[1], batch, heads[1], rows[1], dim, device)
    result = None if out is None else make(out, batch, heads[0], rows[0], dim, device)
    return ForwardSpec.of(from_fields(ForwardArguments, q, k, k, out=result, **options))


@pytest.fixture(scope="module")
def target():
    from dataclasses import replace

    properties = load_properties("h200")
    return replace(Target.from_properties(properties), cudnn=91900)


def key(target, *args, **options):
    bucket = Bucket.of(forward(*args, **options))
    assert bucket is not None
    return bucket.key(target, 0)


def test_lengths_of_a_range_share_a_plan(target):
    for causal in (False, True):
        keys = {key(target, rows=(n, n), is_causal=causal) for n in (2, 77, 100, 128, 500, 1000, 1024)}
        assert len(keys) == 1
        assert {key(target, rows=(n, n), is_causal=causal) for n in (1025, 3000, 8192)}.isdisjoint(keys)
    assert len({key(target, rows=(n, n)) for n in range(2, 8193, 13)}) == 2


def test_sequence_counts_are_rounded_up(target):
    assert len({key(target, batch=n) for n in range(1, 65)}) <= 12
    assert key(target, batch=5) == key(target, batch=6)
    assert key(target, batch=6) != key(target, batch=7)


def test_batch_and_heads_are_merged_where_heads_are_outermost(target):
    assert key(target, "bhsd", batch=2, heads=(8, 8), out=None) == key(target, "bhsd", batch=4, heads=(4, 1), out=None)
    assert key(target, "bhsd", rows=(100, 100), out=None) == key(target, "bhsd", rows=(900, 300), out=None)


def test_what_decides_the_kernel_is_in_the_key(target):
    different = [
        {},
        {"is_causal": True},
        {"is_causal": True, "window_left": 40},
        {"is_causal": True, "window_left": 41},
        {"dim": 128},
        {"heads": (4, 4)},
        {"layout": "packed"},
        {"layout": "bhsd"},
        {"rows": (100, 300), "is_causal": True, "causal_alignment": "bottom_right"},
        {"rows": (1, 300)},
    ]
    assert len({key(target, **options) for options in different}) == len(different)


def test_single_queries_with_a_window_share_a_plan(target):
    window_size = {"window_left": 40, "is_causal": True, "causal_alignment": "bottom_right"}
    assert key(target, rows=(1, 300), **window_size) == key(target, rows=(1, 900), **window_size)


def test_both_alignments_share_a_plan_if_lengths_are_equal(target):
    assert key(target, is_causal=True) == key(target, is_causal=True, causal_alignment="bottom_right")


TENSOR = torch.empty(1, device="meta")
UNFIT = {
    "log-sum-exp": {"with_lse": True},
    "lengths": {"seq_lens_kv": torch.empty(2, dtype=torch.int32, device="meta")},
    "mask": {"attn_mask": torch.empty(1, 1, 100, 100, dtype=torch.bfloat16, device="meta")},
    "sinks": {"sinks": torch.empty(4, device="meta")},
    "softcap": {"softcap": 5.0},
    "linear biases": {"alibi": True},
    "dropout": {"dropout_p": 0.1},
    "too long": {"rows": (MAX_LENGTH + 1, 100)},
    "too many sequences": {"layout": "bhsd", "batch": MAX_SEQUENCES // 4 + 1},
    "queries that see nothing": {"rows": (100, 60), "is_causal": True, "causal_alignment": "bottom_right"},
    "a window, and queries that may see nothing": {"rows": (100, 60), "window_left": 20},
    "rows in one place": {"layout": ("bshd", "stretched")},
}


@pytest.mark.parametrize("name", UNFIT)
def test_calls_that_need_an_exact_shape_plan(name):
    options = dict(UNFIT[name])
    if name == "rows in one place":
        q = make("bshd", 2, 4, 100, 64)
        k = torch.empty(2, 4, 1, 64, dtype=torch.bfloat16, device="meta").expand(-1, -1, 100, -1)
        assert Bucket.of(ForwardSpec.of(ForwardArguments(q, k, k))) is None
    else:
        assert Bucket.of(forward(**options)) is None


def places(tables, bucket, name, x):
    """For each head of each batch entry: the offsets of its rows, as the plan reads them from these tables."""
    batch, heads, rows, _ = x.shape
    operand = {"q": bucket.packed.q, "k": bucket.packed.k, "v": bucket.packed.v, "out": bucket.out}[name]
    begins, lengths = tables[f"offsets_{name}"], tables["seq_len_q" if name in ("q", "out") else "seq_len_kv"]
    heads_q = bucket.forward.dense.q.shape[1]
    found = torch.empty(batch, heads_q, rows, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads_q):
            number = b * heads_q + h if bucket.split_heads else b
            assert lengths[number] == rows
            of_head = 0 if bucket.split_heads else h // (heads_q // heads) * operand.stride[1]
            found[b, h] = begins[number] + of_head + torch.arange(rows) * operand.stride[0]
    return found


@settings(max_examples=60, deadline=None)
@given(
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    out=st.sampled_from(("bshd", "bhsd", "sbhd", None)),
    batch=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)]),
    rows=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_the_tables_point_into_the_tensors(layouts, out, batch, heads, rows):
    call = forward(layouts, batch, heads, rows, 16, out, "cpu")
    bucket = Bucket.of(call)
    assert bucket is not None
    tables = bucket.tables("cpu")
    sequences = bucket.packed.sequences
    real = batch * heads[0] if bucket.split_heads else batch
    assert sequences >= real
    for lengths in (tables["seq_len_q"], tables["seq_len_kv"]):
        assert lengths.dtype == torch.int32
        assert lengths.shape == (sequences,)
        assert lengths[real:].sum() == 0
    dense = call.dense
    for name, x in (("q", dense.q), ("k", dense.k), ("v", dense.v), ("out", call.out)):
        assert tables[f"offsets_{name}"].shape == (sequences + 1,)
        assert tables[f"offsets_{name}"].dtype == torch.int64
        group = heads[0] // x.shape[1]
        b, h, r = (torch.arange(n) for n in (batch, heads[0], x.shape[2]))
        real_places = (
            b.view(-1, 1, 1) * (x.stride[0] if batch > 1 else 0)
            + (h // group).view(1, -1, 1) * (x.stride[1] if x.shape[1] > 1 else 0)
            + r.view(1, 1, -1) * (x.stride[2] if x.shape[2] > 1 else 0)
        )
        assert torch.equal(places(tables, bucket, name, x), real_places)
