"""`compat.flash_attn` and `compat.flash_attn_interface` beside attention in float64, in its conventions."""

from __future__ import annotations

import math

import pytest
import torch
from float64_reference import attend

from cudnn_sdpa import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.compat import flash_attn as fa2
from cudnn_sdpa.compat import flash_attn_interface as fa3
from cudnn_sdpa.compat import xformers

#: Options of both, and what they are in mathematics.
OPTIONS = {
    "none": ({}, {}),
    "causal, scale": ({"causal": True, "softmax_scale": 0.4}, {"is_causal": True, "scale": 0.4}),
    "window": ({"window_size": (3, 2)}, {"window_size": (3, 2)}),
    "causal window, soft cap": (
        {"causal": True, "window_size": (5, -1), "softcap": 2.5},
        {"is_causal": True, "window_size": (5, -1), "softcap": 2.5},
    ),
}
BOTH = pytest.mark.parametrize("fa", [fa2, fa3], ids=["2", "3"])
ALL = pytest.mark.parametrize("case", OPTIONS)


def random(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def exact_of(q, k, v, **options):
    """Tokens before heads, diagonals aligned at the last query and key; the LSE is (batch, heads, queries)."""
    out, lse = attend(*(x.double().transpose(1, 2) for x in (q, k, v)), causal_alignment="bottom_right", **options)
    return out.transpose(1, 2), lse


def exact_packed(q, k, v, ends_q, ends_k, **options):
    parts = []
    for b in range(len(ends_q) - 1):
        of_q, of_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        parts.append(exact_of(q[None, of_q], k[None, of_k], v[None, of_k], **options))
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def as_exact(fa, lse):
    """An LSE of rows without keys: plus infinity in FlashAttention-2."""
    return lse.masked_fill(lse == -math.inf, math.inf) if fa is fa2 else lse


@BOTH
@ALL
@pytest.mark.parametrize("queries", [9, 20], ids=["fewer queries", "rows without keys"])
def test_dense(fa, case, queries):
    given, options = OPTIONS[case]
    q, k, v = random(2, queries, 6, 32), random(2, 14, 3, 32), random(2, 14, 3, 32)
    exact, of_lse = exact_of(q, k, v, **options)
    out, lse, *rest = fa.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    close(out, exact)
    close(lse, as_exact(fa, of_lse))
    assert [x.numel() for x in rest] == ([0] if fa is fa2 else [])
    assert out.is_contiguous()
    assert torch.equal(fa.flash_attn_func(q, k, v, **given), out)
    qkv = random(2, 9, 3, 4, 32)
    close(fa.flash_attn_qkvpacked_func(qkv, **given), exact_of(*qkv.unbind(2), **options)[0])


@pytest.mark.parametrize("dim", [32, 27])
def test_gradients_and_head_dims_that_are_padded(dim):
    q, kv = random(2, 9, 6, dim).requires_grad_(), random(2, 14, 2, 3, dim).requires_grad_()
    grad = random(2, 9, 6, dim)
    out = fa2.flash_attn_kvpacked_func(q, kv, causal=True)
    found = torch.autograd.grad(out, (q, kv), grad)
    exact = exact_of(q, *kv.unbind(2), is_causal=True)[0]
    close(out, exact)
    for x, y in zip(found, torch.autograd.grad(exact, (q, kv), grad.double()), strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("attend", [fa2.flash_attn_func, fa3.flash_attn_func, xformers.memory_efficient_attention])
def test_padding_hides_no_head_dims_that_differ(attend):
    with pytest.raises(ArgumentError, match="head dim"):
        attend(random(2, 9, 6, 27), random(2, 14, 6, 29), random(2, 14, 6, 29))


@BOTH
def test_windows_of_tensors(fa):
    q, kv = random(2, 9, 6, 32), random(2, 14, 3, 32)
    for given in (torch.tensor([4, 2]), [torch.tensor(4), 2]):
        assert torch.equal(
            fa.flash_attn_func(q, kv, kv, window_size=given), fa.flash_attn_func(q, kv, kv, window_size=(4, 2))
        )
    for wrong in (3, torch.tensor([4.0, 2.5])):
        with pytest.raises(OptionError, match="window_size"):
            fa.flash_attn_func(q, kv, kv, window_size=wrong)


@BOTH
def test_caches_are_not_padded(fa):
    q = random(2, 8, 2, 27)
    with pytest.raises(UnsupportedError, match=r"multiples of 8, not 27[\s\S]*What works"):
        fa.flash_attn_with_kvcache(q, q, q)


def test_heads_of_queries_and_keys_in_one_tensor():
    qkv = random(2, 9, 6 + 2 + 2, 32)
    exact = exact_of(*qkv.split([6, 2, 2], 2), is_causal=True)[0]
    close(fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=6), exact)
    for heads in (None, 5, 10):
        with pytest.raises(OptionError, match="num_heads_q"):
            fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)


@BOTH
@ALL
def test_packed(fa, case):
    given, options = OPTIONS[case]
    q, kv = random(12, 6, 32), random(20, 2, 3, 32)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 12], [0, 8, 11, 20]))
    exact, of_lse = exact_packed(q, *kv.unbind(1), ends_q, ends_k, **options)
    lengths = ends_q, ends_k, 7, 9
    out, lse, *_ = fa.flash_attn_varlen_func(q, *kv.unbind(1), *lengths, **given, return_attn_probs=True)
    close(out, exact)
    close(lse, as_exact(fa, of_lse))
    assert lse.shape == (6, 12)
    if fa is fa2:
        close(fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **given), exact)
        qkv = random(12, 3, 4, 32)
        found = fa2.flash_attn_varlen_qkvpacked_func(qkv, ends_q, 7, **given)
        close(found, exact_packed(*qkv.unbind(1), ends_q, ends_q, **options)[0])


def test_packed_queries_on_pages():
    lengths, table = [8, 3, 9], torch.tensor([[5, 2, 0], [1, 9, 9], [3, 4, 6]], dtype=torch.int32)
    pages = random(2, 7, 4, 3, 32)
    q, ends_q, ends_k = random(12, 6, 32), [0, 5, 5, 12], [0, 8, 11, 20]
    k, v = (
        torch.cat([of[row.clamp(max=6)].flatten(0, 1)[:n] for n, row in zip(lengths, table, strict=True)])
        for of in pages
    )
    exact, of_lse = exact_packed(q, k, v, ends_q, ends_k, is_causal=True)
    ends = [torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k)]
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, *pages, *ends, 7, 9, causal=True, return_attn_probs=True, block_table=table
    )
    close(out, exact)
    close(lse, as_exact(fa2, of_lse))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_slopes(per_sequence):
    """A bias of -slope · |i + Sk - Sq - j|."""
    q, k, v = random(2, 9, 6, 32), random(2, 14, 3, 32), random(2, 14, 3, 32)
    slopes = torch.rand(2, 6) if per_sequence else torch.rand(6)
    bias = torch.empty(2, 6, 9, 14, dtype=torch.float64)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, bias.shape)).tolist():
        bias[b, h, i, j] = -float(slopes[b, h] if per_sequence else slopes[h]) * abs(i + 14 - 9 - j)
    out = fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    close(out, exact_of(q, k, v, is_causal=True, attn_mask=bias)[0])
    with pytest.raises(ShapeError, match="alibi_slopes"):
        fa2.flash_attn_func(q, k, v, alibi_slopes=torch.rand(3))


def test_dropout():
    q, k = torch.zeros(1, 256, 2, 16), torch.zeros(1, 256, 2, 16)
    kept = fa2.flash_attn_func(q, k, torch.ones_like(k), 0.25).mean()  # of values of 1, divided by what is kept
    assert abs(float(kept) - 1) < 0.02
    assert not torch.equal(fa2.flash_attn_func(q, k, torch.ones_like(k), 0.25), torch.ones_like(q))
    with pytest.raises(UnsupportedError, match="S_dmask"):
        fa2.flash_attn_func(q, k, k, 0.25, return_attn_probs=True)


def test_dropout_of_packed_sequences_with_two_tensors_of_offsets():
    """With a bottom-right diagonal, as many queries as keys are needed, which the numbers say, and no object."""
    x, offsets = torch.randn(12, 2, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    found = []
    for other in (offsets, offsets.clone()):
        torch.manual_seed(3)
        found.append(fa2.flash_attn_varlen_func(x, x, x, offsets, other, 7, 7, 0.25, causal=True))
    assert torch.equal(*found)
    assert not torch.equal(found[0], fa2.flash_attn_varlen_func(x, x, x, offsets, offsets, 7, 7, causal=True))
    with pytest.raises(UnsupportedError, match="dropout"):
        fa2.flash_attn_varlen_func(
            x, x, x, offsets, torch.tensor([0, 6, 12], dtype=torch.int32), 7, 7, 0.25, causal=True
        )


class Cached:
    """A cache with garbage in what is not used, contiguous or in pages, and what it should become."""

    def __init__(self, fa, kind, new):
        self.lengths, self.dim = torch.tensor([5, 0, 11], dtype=torch.int32), 32
        self.rows = random(2, 3, 16, 2, self.dim)
        self.new = random(2, 3, new, 2, self.dim) if new else None
        self.keys = self.rows.clone()
        for b, n in enumerate(self.lengths.tolist()):
            self.rows[:, b, n:] = math.nan
            if new:
                self.keys[:, b, n : n + new] = self.new[:, b]
        self.total = self.lengths + new
        table = "block_table" if fa is fa2 else "page_table"
        if kind == "contiguous":
            self.cache, self.given = self.rows, {}
        elif kind == "batch index":
            index = torch.tensor([3, 0, 4], dtype=torch.int32)
            self.cache = torch.full((2, 5, *self.rows.shape[2:]), math.nan, dtype=torch.bfloat16)
            self.cache[:, index.long()] = self.rows
            self.given = {"cache_batch_idx": index}
        else:
            ids = torch.randperm(12)[:12].view(3, 4)
            self.cache = torch.empty(2, 12, 4, 2, self.dim, dtype=torch.bfloat16)
            self.cache[:, ids] = self.rows.unflatten(2, (4, 4))
            self.given = {table: ids.int()}

    def exact(self, q, **options):
        parts = [
            exact_of(q[b : b + 1], self.keys[:1, b, :n], self.keys[1:, b, :n], **options)
            for b, n in enumerate(self.total.tolist())
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def test_rows_of_a_page_table_by_cache_batch_idx():
    cached, q = Cached(fa3, "pages", 3), random(3, 4, 4, 32)
    index = torch.tensor([3, 0, 4], dtype=torch.int32)
    table = torch.full((5, 4), 2**31 - 1, dtype=torch.int32)
    table[index.long()] = cached.given["page_table"]
    tokens = dict(zip("kv", cached.new, strict=True))
    given = {"page_table": table, "cache_batch_idx": index, "cache_seqlens": cached.lengths, **tokens, "causal": True}
    exact, _ = cached.exact(q, is_causal=True)
    close(fa3.flash_attn_with_kvcache(q, *cached.cache, **given), exact)
    for wrong, words in (
        (index.long(), "int64; expected int32"),
        (index[:2], r"expected shape \(3,\)"),
        (index + 1, "5 for batch entry 2; expected rows of page_table from 0 to 4"),
    ):
        with pytest.raises(ArgumentError, match=f"^cache_batch_idx: got .*{words}"):
            fa3.flash_attn_with_kvcache(q, *cached.cache, **{**given, "cache_batch_idx": wrong})


CACHES = pytest.mark.parametrize("kind", ["contiguous", "batch index", "pages"])


@BOTH
@ALL
@CACHES
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_cache(fa, case, kind, new, num_splits):
    given, options = OPTIONS[case]
    cached, q = Cached(fa, kind, new), random(3, 4, 4, 32)
    tokens = dict(zip("kv", cached.new, strict=True)) if new else {}
    exact, of_lse = cached.exact(q, **options)
    given = {**given, **tokens, **cached.given, "cache_seqlens": cached.lengths, "num_splits": num_splits}
    before = cached.cache.clone()
    out, lse, *_ = fa.flash_attn_with_kvcache(q, *cached.cache, **given, return_softmax_lse=True)
    close(out, exact)
    close(lse, as_exact(fa, of_lse))
    assert torch.equal(fa.flash_attn_with_kvcache(q, *cached.cache, **given), out)
    changed = cached.cache.view(torch.int16) != before.view(torch.int16)
    assert int(changed.any(-1).any(-1).sum()) == 2 * 3 * new


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_embeddings(fa, interleaved, causal):
    """Of positions behind the cached keys; queries that are neither causal nor local are all at the first one."""
    cached, q = Cached(fa, "pages", 3), random(3, 3, 4, 32)
    angles = torch.rand(32, 8) * 6
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}

    def rotated(x, advances):
        x = x.double().clone()
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 8) for i in range(8)]
        for b in range(3):
            for t in range(3):
                for i, (one, two) in enumerate(pairs):
                    angle = angles[int(cached.lengths[b]) + t * advances, i].double()
                    first, second = x[b, t, :, one].clone(), x[b, t, :, two].clone()
                    x[b, t, :, one] = first * angle.cos() - second * angle.sin()
                    x[b, t, :, two] = second * angle.cos() + first * angle.sin()
        return x

    k = rotated(cached.new[0], True)
    for b, n in enumerate(cached.lengths.tolist()):
        cached.keys[0, b, n : n + 3] = k[b].bfloat16()
    tokens = dict(zip("kv", cached.new, strict=True))
    given = {**rotary, **tokens, **cached.given, "cache_seqlens": cached.lengths, "causal": causal}
    close(fa.flash_attn_with_kvcache(q, *cached.cache, **given), cached.exact(rotated(q, causal), is_causal=causal)[0])
    with pytest.raises(OptionError, match="rotary_cos"):
        fa.flash_attn_with_kvcache(q, *cached.cache, **rotary, **cached.given, cache_seqlens=cached.lengths)
    with pytest.raises(OptionError, match="rotary_sin"):
        fa.flash_attn_with_kvcache(q, *cached.cache, **tokens, rotary_cos=angles, cache_seqlens=3, **cached.given)
    wrong = [("rotary_cos", angles[:15]), ("rotary_sin", angles[:15]), ("rotary_cos", angles[None])]
    if fa is fa3:
        begins = torch.tensor([0, 3, 30], dtype=torch.int32)  # of 32 positions, for three tokens
        wrong += [("rotary_seqlens", begins), ("rotary_seqlens", begins[:2]), ("rotary_seqlens", begins[None])]
    for name, value in wrong:
        with pytest.raises(ShapeError, match=name):
            fa.flash_attn_with_kvcache(q, *cached.cache, **(given | {name: value}))


@BOTH
def test_one_length_for_all_and_a_whole_cache(fa):
    cached, q = Cached(fa, "contiguous", 0), random(3, 1, 4, 32)
    rows = random(2, 3, 16, 2, 32)
    close(fa.flash_attn_with_kvcache(q, *rows), exact_of(q, *rows)[0])
    close(fa.flash_attn_with_kvcache(q, *rows, cache_seqlens=6), exact_of(q, *rows[:, :, :6])[0])
    with pytest.raises(OptionError, match="cache_seqlens"):
        fa.flash_attn_with_kvcache(q, *cached.cache, q[..., :2, :], q[..., :2, :])


@pytest.mark.parametrize("kind", ["contiguous", "pages"])
def test_packed_queries_on_a_cache(kind):
    cached, q, ends = Cached(fa3, kind, 2), random(6, 4, 32), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    tokens = dict(zip("kv", cached.new, strict=True))
    given = {**tokens, **cached.given, "cache_seqlens": cached.lengths, "cu_seqlens_q": ends, "causal": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, *cached.cache, **given, max_seqlen_q=3, return_softmax_lse=True)
    for b, n in enumerate(cached.total.tolist()):
        rows = slice(ends[b], ends[b + 1])
        exact, of_lse = exact_of(q[None, rows], cached.keys[:1, b, :n], cached.keys[1:, b, :n], is_causal=True)
        close(out[rows], exact[0])
        close(lse[:, rows], of_lse[0])
    with pytest.raises(OptionError, match="max_seqlen_q"):
        fa3.flash_attn_with_kvcache(q, *cached.cache, **given)


def test_scales_of_pages_in_fp8():
    cached, q = Cached(fa3, "pages", 0), random(3, 1, 4, 32)
    scales = torch.tensor([[0.5, 2.0]]).expand(3, 2), torch.tensor([[1.5, 0.25]]).expand(3, 2)
    stored = (cached.cache.float() / torch.stack([x[0] for x in scales])[:, None, None, :, None]).to(
        torch.float8_e4m3fn
    )
    read = stored.float() * torch.stack([x[0] for x in scales])[:, None, None, :, None]
    given = {"cache_seqlens": cached.lengths, **cached.given}
    found = fa3.flash_attn_with_kvcache(q, *stored, **given, k_descale=scales[0], v_descale=scales[1])
    close(found, fa3.flash_attn_with_kvcache(q, *read.bfloat16(), **given).double())
    with pytest.raises(UnsupportedError, match="k_descale"):
        fa3.flash_attn_with_kvcache(q, *stored, **given, k_descale=scales[0].contiguous())


Q = torch.zeros(2, 8, 2, 16)
ENDS = torch.tensor([0, 8, 16], dtype=torch.int32)
PACKED = *[Q.flatten(0, 1)] * 3, ENDS, ENDS, 8, 8


@pytest.mark.parametrize(
    ("function", "args", "name", "value"),
    [
        (fa2.flash_attn_varlen_func, PACKED, "alibi_slopes", torch.ones(2)),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), "alibi_slopes", torch.ones(2)),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), "cache_leftpad", ENDS),
        (fa3.flash_attn_with_kvcache, (Q, Q, Q), "cache_leftpad", ENDS),
        (fa3.flash_attn_with_kvcache, (Q, Q, Q, Q, Q), "cu_seqlens_k_new", ENDS),
        (fa3.flash_attn_with_kvcache, (Q, Q, Q), "rotary_seqlens", ENDS),
        (fa3.flash_attn_func, (Q, Q, Q), "qv", Q),
        (fa3.flash_attn_func, (Q, Q, Q), "attention_chunk", 4),
        (fa3.flash_attn_func, (Q, Q, Q), "k_descale", torch.ones(2, 2)),
        (fa3.flash_attn_varlen_func, PACKED, "seqused_k", ENDS[1:]),
    ],
)
def test_what_cannot_be_done_raises_with_what_works(function, args, name, value):
    with pytest.raises(UnsupportedError, match=f"(?s){name}.*What works"):
        function(*args, **{name: value})


@pytest.mark.parametrize(
    ("function", "args", "options", "name"),
    [
        (fa2.flash_attn_func, (Q, Q, Q), {"softmax_scale": "a"}, "softmax_scale"),
        (fa3.flash_attn_func, (Q, Q, Q), {"causal": None}, "causal"),
        (fa2.flash_attn_func, (Q[0], Q, Q), {}, "q"),
        (fa2.flash_attn_kvpacked_func, (Q, Q), {}, "kv"),
        (fa2.flash_attn_with_kvcache, (Q, None, Q), {}, "k_cache"),
        (fa2.flash_attn_with_kvcache, (Q, Q[:1], Q[:1]), {}, "k_cache"),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q, Q), {"cache_seqlens": 0}, "v"),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), {"cache_seqlens": ENDS}, "cache_seqlens"),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), {"cache_batch_idx": ENDS[:2].long()}, "cache_batch_idx"),
        (
            fa2.flash_attn_with_kvcache,
            (Q, Q, Q),
            {"cache_batch_idx": ENDS, "block_table": ENDS[None]},
            "cache_batch_idx",
        ),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), {"block_table": ENDS}, "block_table"),
        (fa2.flash_attn_with_kvcache, (Q, Q, Q), {"cache_seqlens": [1, 2]}, "cache_seqlens"),
        (fa3.flash_attn_with_kvcache, (Q, Q, Q), {"page_table": 3}, "page_table"),
        (fa3.flash_attn_with_kvcache, (Q[0], Q, Q), {"cu_seqlens_q": Q, "max_seqlen_q": 3}, "cu_seqlens_q"),
    ],
)
def test_errors_have_the_callers_names(function, args, options, name):
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        function(*args, **options)


@BOTH
@pytest.mark.parametrize("is_paged", [True, False])
def test_new_tokens_without_room_are_refused_before_any_is_written(fa, is_paged):
    q, new, cache = random(2, 4, 4, 16), random(2, 4, 2, 16), random(2, 48, 2, 16)
    before, pages, of_pages = cache.clone(), cache, {}
    if is_paged:
        name = "block_table" if fa is fa2 else "page_table"
        pages, of_pages = cache.view(6, 16, 2, 16), {name: torch.arange(6, dtype=torch.int32).view(2, 3)}
    no_room = r"^cache_seqlens: got 45 for batch entry 1; expected lengths from 0 to 44, as .* 4 are new"
    for numbers, words in (([3, 45], no_room), ([-1, 3], "^cache_seqlens: got -1 for batch entry 0")):
        lengths = torch.tensor(numbers, dtype=torch.int32)
        for rotary in ({}, dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(48, 8))):
            with pytest.raises(ShapeError, match=words):
                fa.flash_attn_with_kvcache(q, pages, pages, new, new, cache_seqlens=lengths, **of_pages, **rotary)
    assert torch.equal(cache, before)
    full = torch.tensor([0, 44], dtype=torch.int32)
    fa.flash_attn_with_kvcache(q, pages, pages.clone(), new, new, cache_seqlens=full, **of_pages)
    assert torch.equal(cache[0, :4], new[0])


@BOTH
@pytest.mark.parametrize("num_splits", [0, 1])
def test_gradients_through_a_cache_are_refused_in_the_callers_names(fa, num_splits):
    q, new, cache = random(2, 4, 4, 16), random(2, 4, 2, 16), random(2, 48, 2, 16)
    for given in ((q.clone().requires_grad_(), cache, cache), (q, cache, cache, new.clone().requires_grad_(), new)):
        with pytest.raises(UnsupportedError, match=r"^flash_attn_with_kvcache with a gradient") as caught:
            fa.flash_attn_with_kvcache(*given, cache_seqlens=3, num_splits=num_splits)
        assert "sdpa" not in str(caught.value)
        assert "PagedKVCache" not in str(caught.value)


def test_gradients_of_packed_queries_on_pages_are_refused_in_the_callers_names():
    q, pages = random(4, 4, 16).requires_grad_(), random(3, 8, 2, 16)
    ends, table = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    words = "^flash_attn_varlen_func with block_table with a gradient"
    with pytest.raises(UnsupportedError, match=words) as caught:
        fa2.flash_attn_varlen_func(q, pages, pages, ends, ends, 4, 4, block_table=table)
    assert "sdpa" not in str(caught.value)


@BOTH
@pytest.mark.parametrize("kind", ["dense", "packed", "cached"])
def test_compiled_without_a_break(fa, kind):
    q, k, v = random(2, 9, 6, 32), random(2, 14, 3, 32), random(2, 14, 3, 32)
    ends, lengths = (torch.tensor([0, n], dtype=torch.int32) for n in (9, 14)), torch.tensor([9, 12], dtype=torch.int32)
    function, args, options = {
        "dense": (fa.flash_attn_func, (q, k, v), {}),
        "packed": (fa.flash_attn_varlen_func, (q[0], k[0], v[0], *ends, 9, 14), {}),
        "cached": (fa.flash_attn_with_kvcache, (q, k, v), {"cache_seqlens": lengths}),
    }[kind]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, causal=True, **options), function(*args, causal=True, **options))
