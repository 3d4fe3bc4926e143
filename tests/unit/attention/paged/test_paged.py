"""`sdpa_paged` and `PagedKVCache` on the CPU, against dense attention of the same keys."""

from __future__ import annotations

import math

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend

import cudnn_sdpa
from cudnn_sdpa import (
    ArgumentError,
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    OutOfPagesError,
    PagedKVCache,
    PagedStep,
    ShapeError,
    UnsupportedError,
    sdpa,
    sdpa_paged,
)
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.nn import KVCache

HEADS, HEADS_KV, DIM = 8, 2, 32


def pages_of(lengths, page_size=16, layout="HND", dtype=torch.float64, extra=3):
    """Pages in random order whose unowned slots are NaN, their table, and contiguous keys and values."""
    counts = [-(-length // page_size) for length in lengths]
    total, columns = sum(counts) + extra, max([*counts, 1]) + 2
    order = torch.randperm(total)[: sum(counts)].split(counts)
    table = torch.randint(0, total, (len(lengths), columns), dtype=torch.int32)
    pages = [torch.full((total, HEADS_KV, page_size, DIM), math.nan, dtype=dtype) for _ in range(2)]
    rows = [[torch.randn(HEADS_KV, length, DIM, dtype=dtype) for length in lengths] for _ in range(2)]
    for b, (length, mine) in enumerate(zip(lengths, order, strict=True)):
        table[b, : len(mine)] = mine
        for which in range(2):
            for j in range(length):
                pages[which][mine[j // page_size], :, j % page_size] = rows[which][b][:, j]
    if layout == "NHD":
        pages = [x.transpose(1, 2).contiguous() for x in pages]
    return *pages, table, torch.tensor(lengths, dtype=torch.int32), *rows


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_matches_dense_attention_of_contiguous_keys(layout, page_size, queries):
    lengths = [37, 20, 64, 65, 130]
    k_pages, v_pages, table, lens, k, v = pages_of(lengths, page_size, layout)
    q = torch.randn(len(lengths), HEADS, queries, DIM, dtype=torch.float64)
    out, lse = sdpa_paged(q, k_pages, v_pages, table, lens, page_layout=layout, return_lse=True)
    for b in range(len(lengths)):
        expected, of_lse = sdpa(
            q[b : b + 1], k[b][None], v[b][None], is_causal=True, causal_alignment="bottom_right", return_lse=True
        )
        torch.testing.assert_close(out[b : b + 1], expected)
        torch.testing.assert_close(lse[b : b + 1], of_lse)


def arguments(dtype=torch.float32):
    k_pages, v_pages, table, lens, *_ = pages_of([37, 20], dtype=dtype)
    q = torch.randn(2, HEADS, 1, DIM, dtype=dtype)
    return {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": table,
        "seq_lens_kv": lens,
        "page_layout": "HND",
    }


WRONG = {
    "rank of q": (lambda a: {"q": a["q"][0]}, "q: got shape"),
    "rank of pages": (lambda a: {"k_pages": a["k_pages"][0]}, "k_pages: got shape"),
    "page size": (lambda a: {n: a[n][:, :, :0] for n in ("k_pages", "v_pages")}, "pages of 0 tokens"),
    "number of pages": (lambda a: {"v_pages": a["v_pages"][:2]}, "v_pages: got 2 pages"),
    "no pages": (lambda a: {n: a[n][:0] for n in ("k_pages", "v_pages")}, "at least one page"),
    "dtype of pages": (lambda a: {"v_pages": a["v_pages"].half()}, "v_pages: got float16"),
    "heads": (lambda a: {"q": a["q"][:, :3]}, "a divisor of q's 3 heads"),
    "dtype of the table": (lambda a: {"page_table": a["page_table"].long()}, "page_table: got int64"),
    "batch of the table": (lambda a: {"page_table": a["page_table"][:1]}, "page_table: got shape"),
    "rows of the table": (lambda a: {"page_table": a["page_table"].t().contiguous().t()}, "page_table: got stride"),
    "no table": (lambda _: {"page_table": None}, "page_table: got NoneType"),
    "second table": (lambda a: {"page_table_v": a["page_table"][:, :2]}, "page_table_v: got shape"),
    "dtype of lengths": (lambda a: {"seq_lens_kv": a["seq_lens_kv"].long()}, "seq_lens_kv: got int64"),
    "number of lengths": (lambda a: {"seq_lens_kv": a["seq_lens_kv"][:1]}, "seq_lens_kv: got shape"),
    "layout": (lambda _: {"page_layout": "DNH"}, "page_layout: got 'DNH'"),
    "window_size": (lambda _: {"window_size": 3}, "window_size: got 3"),
    "sinks": (lambda _: {"sinks": torch.zeros(3)}, "sinks: got shape"),
    "out": (lambda a: {"out": a["q"][:1]}, "out: got shape"),
    "return_lse": (lambda _: {"return_lse": 1}, "return_lse: got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    given = arguments()
    change, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        sdpa_paged(**{**given, **change(given)})


def test_fallback_runs_on_the_reference(monkeypatch, caplog):
    given = arguments()
    expected = sdpa_paged(**given, return_lse=True)

    def decline(*_):
        raise UnsupportedError("sdpa_paged", ["no kernel today"])

    monkeypatch.setattr(PAGED, "_run", decline)
    with pytest.raises(UnsupportedError, match="no kernel today"):
        sdpa_paged(**given, return_lse=True)
    with cudnn_sdpa.fallback("torch"):
        found = sdpa_paged(**given, return_lse=True)
        with pytest.raises(UnsupportedError, match="inference only"):
            sdpa_paged(**{**given, "q": given["q"].clone().requires_grad_()})
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert "no kernel today" in caplog.text


def test_out_of_range_values_are_clamped(monkeypatch):
    for check in ("check_lengths", "check_pages"):  # as on a GPU, where they are not read
        monkeypatch.setattr(value_checks, check, lambda *_, **__: None)
    given = arguments()
    given["page_table"].fill_(10**6)
    given["seq_lens_kv"].fill_(-3)
    assert (sdpa_paged(**given) == 0).all()


def new_cache(**changes):
    sizes = {"pages": 20, "page_size": 4, "heads": HEADS_KV, "head_dim": DIM, "layers": 2, "device": "cpu"}
    return PagedKVCache(**{**sizes, "dtype": torch.float64, **changes})


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_cache_holds_what_was_appended(layout):
    cache = new_cache(page_layout=layout, head_dim_v=16)
    one, two = cache.add(), cache.add()
    kept = {
        (s, layer): [torch.empty(HEADS_KV, 0, d, dtype=torch.float64) for d in (DIM, 16)]
        for s in (one, two)
        for layer in (0, 1)
    }
    for sequences, tokens in (([one], [7]), ([one, two], [1, 5]), ([two, one], [1, 1]), ([one, two], [0, 3])):
        step = cache.reserve(sequences, tokens)
        assert step.seq_lens_q.tolist() == tokens
        assert step.seq_lens_kv.tolist() == [cache.length(s) for s in sequences]
        for layer in (0, 1):
            new = [torch.randn(len(sequences), HEADS_KV, max(tokens), d, dtype=torch.float64) for d in (DIM, 16)]
            cache.append(step, *new, layer)
            for row, sequence in enumerate(sequences):
                for which in (0, 1):
                    of = kept[sequence, layer]
                    of[which] = torch.cat([of[which], new[which][row, :, : tokens[row]]], 1)
    for (sequence, layer), expected in kept.items():
        for found, wanted in zip(cache.read(sequence, layer), expected, strict=True):
            assert torch.equal(found, wanted)


def test_positions_are_those_of_the_new_tokens():
    cache = new_cache()
    one, two = cache.add(), cache.add()
    cache.reserve([one], 6)
    step = cache.reserve([one, two], [2, 3])
    assert step.positions.tolist() == [[6, 7, 0], [0, 1, 2]]


@pytest.mark.parametrize("is_given", [False, True])
def test_sequences_without_a_new_token_in_a_decode_step(is_given):
    """Their queries are padding if the step says so; the tables are those that cuDNN may read in place."""
    cache = new_cache(dtype=torch.float16, layers=1, head_dim=16)
    sequences = [cache.add(), cache.add()]
    for tokens in ([5, 3], [1, 0]):
        step = cache.reserve(sequences, tokens)
        cache.append(step, *torch.randn(2, 2, HEADS_KV, max(tokens), 16).half())
    rows = [cache.read(sequence) for sequence in sequences]
    q = torch.randn(2, HEADS, 1, 16).half()
    pages = cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    present = step.seq_lens_q if is_given else None
    with gpu_on_the_cpu():
        out, lse = sdpa_paged(q, *pages, seq_lens_q=present, page_layout="HND", return_lse=True)
    for i, (k, v) in enumerate(rows):
        if is_given and i == 1:
            assert not out[i].any()
            assert lse[i].isneginf().all()
            continue
        exact, of_exact = attend(*(x.double().unsqueeze(0) for x in (q[i], k, v)))
        torch.testing.assert_close(out[i].double(), exact[0], rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(lse[i].double(), of_exact[0], rtol=1e-3, atol=1e-3)


def test_sinks_are_added_to_the_results_of_a_decode_step():
    """cuDNN's decode engines take none on pages."""
    k_pages, v_pages, table, *_ = pages_of([5, 20], dtype=torch.float16)
    q, sinks, lengths = torch.randn(2, HEADS, 1, DIM).half(), 2 + torch.randn(HEADS), torch.tensor([5, 20]).int()
    call = (q, k_pages, v_pages, table, lengths)
    expected = sdpa_paged(*call, sinks=sinks, page_layout="HND")
    with gpu_on_the_cpu():
        found, again = (sdpa_paged(*call, sinks=sinks, page_layout="HND") for _ in range(2))
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
    assert torch.equal(again, found)


def test_a_fork_keeps_its_prefix_when_the_other_grows():
    cache = new_cache()
    one = cache.add()
    k = torch.randn(1, HEADS_KV, 6, DIM, dtype=torch.float64)
    step = cache.reserve([one], 6)
    for layer in (0, 1):
        cache.append(step, k + layer, -k - layer, layer)
    two = cache.fork(one)
    assert cache.use().shared == 2
    more = torch.randn(2, HEADS_KV, 1, DIM, dtype=torch.float64)
    step = cache.reserve([one, two])
    for layer in (0, 1):
        cache.append(step, more, more, layer)
    for row, sequence in enumerate((one, two)):
        for layer in (0, 1):
            found, _ = cache.read(sequence, layer)
            assert torch.equal(found, torch.cat([k[0] + layer, more[row]], 1))
    assert cache.use().shared == 1


def test_reserve_into_reuses_a_step():
    cache = new_cache()
    one, two = cache.add(), cache.add()
    cache.reserve([one, two], 3)
    step = cache.new_step(4)
    addresses = [x.data_ptr() for x in (step.page_table, step.seq_lens_kv, step.seq_lens_q, step.positions)]
    assert cache.reserve([two], into=step) is step
    assert (step.seq_lens_kv.tolist(), step.seq_lens_q.tolist()) == ([4, 0, 0, 0], [1, 0, 0, 0])
    cache.reserve([one, two], into=step)
    assert step.seq_lens_kv.tolist() == [4, 5, 0, 0]
    assert [x.data_ptr() for x in (step.page_table, step.seq_lens_kv, step.seq_lens_q, step.positions)] == addresses
    with pytest.raises(OptionError, match="room for 4 sequences and 1 tokens"):
        cache.reserve([one, two], 2, into=step)


def test_out_of_pages_and_evict():
    cache = new_cache(pages=4)
    one, two = cache.add(), cache.add()
    cache.reserve([one, two], [8, 7])
    with pytest.raises(OutOfPagesError):
        cache.reserve([one, two], [1, 2])
    assert (cache.length(one), cache.length(two), cache.use().free) == (8, 7, 0)
    assert cache.evict(one) == 8
    assert (cache.length(one), cache.use().free) == (0, 2)
    cache.reserve([two], 2)
    cache.free(two)
    assert cache.use().sequences == 1


@pytest.mark.parametrize(
    "wrong",
    [{"pages": 0}, {"page_size": 0}, {"page_layout": "X"}, {"heads": 1.0}, {"max_length": -1}, {"layers": True}],
)
def test_invalid_cache_sizes(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        new_cache(**wrong)


def test_tokens_that_do_not_fit_are_not_appended():
    cache = new_cache(max_length=9)
    assert cache.max_length == 12
    one = cache.add()
    with pytest.raises(OptionError, match="max_length"):
        cache.reserve([one], 13)
    step = cache.reserve([one], 2)
    right = torch.zeros(1, HEADS_KV, 2, DIM, dtype=torch.float64)
    for wrong in (right[:, :1], right[:, :, :1], right.float(), right.to("meta")):
        with pytest.raises(ArgumentError, match="k: got"):
            cache.append(step, wrong, right)
        with pytest.raises(ArgumentError, match="v: got"):
            cache.append(step, right, wrong)
    with pytest.raises(OptionError, match="one for each sequence"):
        cache.reserve([one], [1, 2])
    assert cudnn_sdpa.PagedStep is type(step)


def test_a_step_belongs_to_its_cache():
    cache, other = new_cache(), new_cache()
    one = cache.add()
    for wrong in (other.new_step(1), 3):
        with pytest.raises(OptionError, match=r"into: got .*; expected a PagedStep that this cache has made"):
            cache.reserve([one], into=wrong)
    for wrong in (other.new_step(1), None, 3):
        with pytest.raises(OptionError, match=r"step: got .*; expected a PagedStep that this cache has made"):
            cache.append(wrong, None, None)
    k = torch.zeros(1, HEADS_KV, 1, DIM, dtype=torch.float64)
    with pytest.raises(OptionError, match="a PagedStep that this cache has made"):
        cache.append(other.reserve([other.add()]), k, k)
    assert (cache.length(one), cache.use().used) == (0, 0)


def test_a_failed_reserve_is_undone(monkeypatch):
    cache = new_cache()
    one = cache.add()
    step = cache.reserve([one], 6)
    k = torch.randn(1, HEADS_KV, 6, DIM, dtype=torch.float64)
    cache.append(step, k, k)
    two = cache.fork(one)
    before = cache.use()

    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    for of, name in ((paging, "copy_pages"), (PagedStep, "fill")):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, fail)
            with pytest.raises(torch.OutOfMemoryError):
                cache.reserve([one, two], 5)
    assert cache.use() == before
    assert (cache.length(one), cache.length(two)) == (6, 6)
    for sequence in (one, two):
        assert torch.equal(cache.read(sequence)[0], k[0])


BAD_RESERVES = [
    {"tokens": 1.5},
    {"tokens": None},
    {"tokens": "a"},
    {"tokens": [None]},
    {"tokens": -1},
    {"tokens": True},
    {"tokens": [1, 2]},
    {"sequences": 3},
    {"sequences": [99]},
    {"sequences": [0, 0], "tokens": [1, 1]},
]


@pytest.mark.parametrize("wrong", BAD_RESERVES, ids=str)
def test_invalid_reserves(wrong):
    cache = new_cache()
    assert cache.add() == 0
    with pytest.raises(OptionError):
        cache.reserve(**{"sequences": [0], "tokens": 1, **wrong})
    assert cache.use().tokens == 0


@pytest.mark.parametrize(("name", "value"), [("batch", -1), ("tokens", 2.5), ("batch", "a"), ("tokens", True)])
def test_invalid_steps(name, value):
    with pytest.raises(OptionError, match=name):
        new_cache().new_step(**{"batch": 1, "tokens": 1, name: value})


@pytest.mark.parametrize("layer", [-1, 2, 1.0, None, True])
def test_unknown_layers(layer):
    cache = new_cache()
    step = cache.reserve([cache.add()])
    k = torch.zeros(1, HEADS_KV, 1, DIM, dtype=torch.float64)
    for call in (
        cache.k_pages,
        cache.v_pages,
        lambda layer: cache.read(0, layer),
        lambda n: cache.append(step, k, k, n),
    ):
        with pytest.raises(OptionError, match="layer"):
            call(layer)


def test_works_in_every_grad_mode():
    with torch.inference_mode():
        cache = new_cache()
        one = cache.add()
        step = cache.reserve([one], 3)
    k = torch.randn(1, HEADS_KV, 3, DIM, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        cache.append(step, k, k)
    two = cache.fork(one)
    cache.reserve([two])
    assert not cache.k_pages().requires_grad
    assert torch.equal(cache.read(one)[0], k[0].detach())


def test_pages_of_unknown_layout_are_refused():
    """32 query heads and pages of 16 tokens with 8 heads: as (pages, 16 heads, 8 tokens, …) they would fit, too."""
    q, pages = torch.randn(2, 32, 1, 64).bfloat16(), torch.randn(16, 16, 8, 64).bfloat16()
    table = torch.randperm(16).view(2, 8).int()
    given = q, pages, pages.flip(0), table, torch.tensor([60, 33], dtype=torch.int32)
    message = (
        r"page_layout: got None; expected 'HND' for pages \(pages, heads, page size, head dim\), .*PagedKVCache.*"
        r"'NHD' for pages \(pages, page size, heads, head dim\), .*FlashAttention.*FlashInfer.*vLLM"
    )
    for _ in range(2):
        with pytest.raises(OptionError, match=message):
            sdpa_paged(*given)
    with pytest.raises(OptionError, match=message):
        cudnn_sdpa.explain(sdpa_paged, *given)
    rows = [x[table.long()].flatten(1, 2).transpose(1, 2).double() for x in given[1:3]]
    exact, _ = attend(q.double(), *rows, seq_lens_kv=[60, 33])
    assert float((sdpa_paged(*given, page_layout="NHD").double() - exact).abs().max()) < 2e-2
    assert float((sdpa_paged(*given, page_layout="HND").double() - exact).abs().max()) > 0.5, "nothing else tells"


@pytest.mark.parametrize("page_layout", [["HND"], None, 3])
def test_invalid_layouts(page_layout):
    with pytest.raises(OptionError, match="page_layout"):
        sdpa_paged(**{**arguments(), "page_layout": page_layout})
    with pytest.raises(OptionError, match="page_layout"):
        new_cache(page_layout=page_layout)


def test_a_self_overlapping_out_is_refused():
    given = arguments()
    out = torch.empty(1, HEADS, 1, DIM).expand(2, -1, -1, -1)
    with pytest.raises(ArgumentError, match="out: got"):
        sdpa_paged(**given, out=out)


@pytest.mark.parametrize("wrong", [{"head_dim": 20}, {"head_dim_v": 0}, {"max_length": 0}, {"dtype": "bfloat16"}])
def test_unsupported_sizes(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        new_cache(**wrong)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_attend_uses_the_tokens_of_the_step(layout):
    cache = new_cache(page_layout=layout)
    one, two = cache.add(), cache.add()
    k, v = torch.randn(2, 2, HEADS_KV, 9, DIM, dtype=torch.float64)
    q = torch.randn(2, HEADS, 9, DIM, dtype=torch.float64)
    expected = sdpa(q, k, v, is_causal=True)
    done = [0, 0]
    for tokens in ([5, 2], [1, 4], [3, 3]):
        most = max(tokens)
        step = cache.reserve([one, two], tokens)
        new = [torch.zeros(2, x.shape[1], most, DIM, dtype=torch.float64) for x in (q, k, v)]
        for row, more in enumerate(tokens):
            for part, whole in zip(new, (q, k, v), strict=True):
                part[row, :, :more] = whole[row, :, done[row] : done[row] + more]
        cache.append(step, *new[1:], layer=1)
        out, lse = cache.attend(step, new[0], 1, return_lse=True)
        for row, more in enumerate(tokens):
            torch.testing.assert_close(out[row, :, :more], expected[row, :, done[row] : done[row] + more])
            assert (out[row, :, more:] == 0).all()
            assert (lse[row, :, more:] == -torch.inf).all()
            done[row] += more
    step = cache.reserve([one, two], [1, 0])
    assert step.has_absent
    cache.append(step, *torch.zeros(2, 2, HEADS_KV, 1, DIM, dtype=torch.float64))
    assert (cache.attend(step, q[:, :, :1])[1] == 0).all()
    with pytest.raises(OptionError, match="a PagedStep that this cache has made"):
        new_cache().attend(step, q[:, :, :1])


def new_tokens(batch=1, tokens=1, **like):
    return tuple(torch.randn(2, batch, HEADS_KV, tokens, DIM, **{"dtype": torch.float64, **like}))


REMOVALS = {
    "free": lambda cache, sequence: cache.free(sequence),
    "evict": lambda cache, sequence: cache.evict(sequence),
    "truncate": lambda cache, sequence: cache.truncate(sequence, 3),
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_step_is_stale_after_truncation(removal):
    cache = new_cache()
    one, two = cache.add(), cache.add()
    step = cache.reserve([one, two], 6)
    cache.append(step, *new_tokens(2, 6))
    REMOVALS[removal](cache, one)
    others = [cache.add() for _ in range(4)]
    cache.append(cache.reserve(others, 12), *new_tokens(4, 12))
    before = [cache.read(number) for number in (two, *others)]
    q = torch.randn(2, HEADS, 6, DIM, dtype=torch.float64)
    for _ in range(2):
        for call in (lambda: cache.append(step, *new_tokens(2, 6)), lambda: cache.attend(step, q)):
            what = "freed" if removal == "free" else "evicted, truncated"
            with pytest.raises(OptionError, match=f"step: got a step of sequence {one}, which has been {what}"):
                call()
    for number, (k, v) in zip((two, *others), before, strict=True):
        assert torch.equal(cache.read(number)[0], k)
        assert torch.equal(cache.read(number)[1], v)
    of_two = cache.reserve([two], into=step, tokens=6)
    assert of_two is step, "made anew, it is a step like any other"
    cache.append(step, *new_tokens(2, 6))
    assert cache.attend(step, q).isfinite().all()


def test_steps_of_other_sequences_stay_right():
    cache = new_cache()
    one, two, three = (cache.add() for _ in range(3))
    step = cache.reserve([one, two])
    cache.append(step, *new_tokens(2))
    cache.append(cache.reserve([three], 9), *new_tokens(1, 9))
    cache.truncate(three, 9)  # nothing is lost
    cache.free(three)
    assert cache.attend(step, torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)).shape == (2, HEADS, 1, DIM)
    cache.append(step, *new_tokens(2), layer=1)


def test_a_step_before_a_page_was_copied_may_not_write_to_the_old_one():
    cache = new_cache()
    one = cache.add()
    step = cache.reserve([one], 6)
    cache.append(step, *new_tokens(1, 6))
    two = cache.fork(one)
    cache.append(cache.reserve([one]), *new_tokens())  # the page was copied
    before = cache.read(two)
    with pytest.raises(OptionError, match=f"a step of sequence {one}, which has been .*given a page of its own"):
        cache.append(step, *new_tokens(1, 6))
    assert torch.equal(cache.read(two)[0], before[0])


@pytest.mark.parametrize("new_step", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 17])
def test_a_fork_within_a_step_misses_no_layer_in_silence(tokens, new_step):
    """The fork shares the page, until it gets tokens and a copy: of zeros, where the step has no keys yet."""
    cache = new_cache()
    one, given = cache.add(), new_tokens(1, tokens)
    step = cache.reserve([one], tokens, into=cache.new_step(1, tokens) if new_step else None)
    cache.append(step, *given)
    two, three = cache.fork(one), cache.fork(one)
    cache.append(step, *given, layer=1)  # all share the page
    assert torch.equal(cache.read(two, 1)[0], given[0][0])
    for _ in range(2):
        grown = cache.reserve([three], into=cache.new_step(1, 1) if new_step else None)
        cache.append(grown, *new_tokens())
        cache.append(grown, *new_tokens(), layer=1)
    with pytest.raises(OptionError, match="after a page of the step was copied for a fork"):
        cache.append(step, *given, layer=1)
    assert cache.attend(step, torch.randn(1, HEADS, tokens, DIM, dtype=torch.float64)).isfinite().all()
    cache.free(three)
    cache.free(two)

    step = cache.reserve([one], into=step)
    k, v = new_tokens(1, step.tokens)
    cache.append(step, k, v)
    fork = cache.fork(one)
    cache.reserve([fork])
    for _ in range(2):
        with pytest.raises(OptionError, match="after a page of the step was copied for a fork"):
            cache.append(step, k, v, layer=1)
    step = cache.reserve([one], into=step)
    cache.append(step, k, v, layer=1)


@pytest.mark.parametrize("page_layout", ["HND", "NHD"])
def test_negative_bits_of_new_tokens_are_heeded(page_layout, monkeypatch):
    """On a GPU a kernel copies their memory. The first appends are cold, the others warm."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    sizes = {"pages": 8, "page_size": 4, "heads": 2, "head_dim": 8, "head_dim_v": 16}
    written = []
    with gpu_on_the_cpu():
        cache = PagedKVCache(**sizes, page_layout=page_layout, device="cpu")
        one = cache.add()
        for which in ("kv", "", "k", "v", "kv"):
            new = {name: torch.randn(1, 2, 2, dim).bfloat16() for name, dim in (("k", 8), ("v", 16))}
            given = {name: torch._neg_view(-x) if name in which else x for name, x in new.items()}
            cache.append(cache.reserve([one], 2), **given)
            written.append(new)
        found = dict(zip("kv", cache.read(one), strict=True))
    for name, x in found.items():
        assert torch.equal(x, torch.cat([new[name][0] for new in written], 1))


def test_an_interrupted_reserve_leaves_no_usable_step(monkeypatch):
    cache = new_cache()
    one, step = cache.add(), cache.new_step(2, 4)
    cache.append(cache.reserve([one], 4, into=step), *new_tokens(2, 4))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PagedStep, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.reserve([one], 2, into=step)
    assert (cache.length(one), cache.use().used) == (4, 1)
    with pytest.raises(OptionError, match="a step whose reserve was interrupted"):
        cache.attend(step, torch.randn(2, HEADS, 4, DIM, dtype=torch.float64))


def test_attend_before_append_is_refused():
    cache = new_cache()
    one, q = cache.add(), torch.randn(1, HEADS, 1, DIM, dtype=torch.float64)
    step = cache.reserve([one])
    with pytest.raises(OptionError, match=r"without keys and values of layer 0.*append\(step, k, v, layer\).*_paged"):
        cache.attend(step, q)
    cache.append(step, *new_tokens())
    assert cache.attend(step, q).isfinite().all()
    with pytest.raises(OptionError, match="without keys and values of layer 1"):
        cache.attend(step, q, 1)
    cache.reserve([one], into=step)
    with pytest.raises(OptionError, match="without keys and values of layer 0"):
        cache.attend(step, q)
    assert cache.attend(cache.new_step(1), q).eq(0).all(), "no sequence, nothing to append"
    assert cache.attend(cache.reserve([one], 0, into=cache.new_step(1)), q).eq(0).all()


def test_gradients_and_unknown_options_are_refused():
    cache = new_cache()
    step, (k, v) = cache.reserve([cache.add()]), new_tokens()
    for given in ((k.clone().requires_grad_(), v), (k, v.clone().requires_grad_())):
        with pytest.raises(UnsupportedError, match="a PagedKVCache with a gradient"):
            cache.append(step, *given)
        with torch.no_grad():
            cache.append(step, *given)
    q = torch.randn(1, HEADS, 1, DIM, dtype=torch.float64)
    for name in ("foo", "page_layout", "seq_lens_q"):
        with pytest.raises(OptionError, match=f"{name}: got an argument; expected one of causal_alignment, is_causal"):
            cache.attend(step, q, **{name: 1})
    for layer in (2, -1, True, [0], "0", None):
        with pytest.raises(OptionError, match="layer"):
            cache.append(step, k, v, layer)
        with pytest.raises(OptionError, match="layer"):
            cache.attend(step, q, layer)


@pytest.mark.parametrize("kind", ["pages", "static"])
def test_invalid_cache_options_are_refused(kind):
    def make(**changes):
        if kind == "pages":
            return new_cache(**changes)
        sizes = {"batch": 2, "heads": 2, "head_dim": 16, "max_length": 8, "device": "cpu"}
        return KVCache(**{**sizes, **changes})

    of_fp8 = () if kind == "pages" else (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in (torch.int32, torch.bool, torch.complex64, *of_fp8):
        with pytest.raises(DtypeError, match=r"dtype: got .*; expected float16 or .* or float64 on cpu"):
            make(dtype=dtype)
    with pytest.raises(OptionError, match=r"expected a torch\.dtype"):
        make(dtype="bfloat16")
    for device in ("nowhere", "gpu0", [], "cuda:x", -7):
        with pytest.raises(OptionError, match=r"device: got .*'cuda:0', or 'cpu'"):
            make(device=device)
    with pytest.raises(DeviceError, match="device: got mps"):
        make(device="mps")
    with pytest.raises(DeviceError, match="device: got cuda:99"):
        make(device="cuda:99")


def test_fp8_queries_name_sdpa_fp8():
    given, fp8 = arguments(torch.bfloat16), torch.float8_e4m3fn
    with pytest.raises(DtypeError, match=r"q: got float8_e4m3fn; .* sdpa_fp8\(..., page_table=...\)"):
        sdpa_paged(**{**given, **{name: given[name].to(fp8) for name in ("q", "k_pages", "v_pages")}})
    with pytest.raises(DtypeError, match="v_pages: got bfloat16; expected float8_e4m3fn, the dtype of k_pages"):
        sdpa_paged(**{**given, "k_pages": given["k_pages"].to(fp8)})
    with pytest.raises(DtypeError, match="v_pages: got float8_e4m3fn; expected bfloat16, the dtype of k_pages"):
        sdpa_paged(**{**given, "v_pages": given["v_pages"].to(fp8)})


def test_nested_and_sparse_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    for odd in (nested, torch.ones(2, 2).to_sparse()):
        for name in ("page_table", "page_table_v", "seq_lens_kv", "seq_lens_q", "q", "k_pages", "sinks"):
            with pytest.raises(LayoutError, match=name):
                sdpa_paged(**{**arguments(), name: odd})


def test_queries_in_the_order_of_flash_attention_are_recognized():
    pages, table = torch.randn(8, 2, 16, 8), torch.arange(8, dtype=torch.int32).view(2, 4)
    q, lengths = torch.randn(2, 1, 4, 8), torch.tensor([20, 50], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"^q: got shape \(2, 1, 4, 8\).*Pass q.transpose\(1, 2\)"):
        sdpa_paged(q, pages, pages, table, lengths, page_layout="HND")
    assert sdpa_paged(q.transpose(1, 2), pages, pages, table, lengths, page_layout="HND").shape == (2, 4, 1, 8)
    with pytest.raises(ShapeError, match=r"^k_pages: got 2 heads"):  # neither order fits
        sdpa_paged(q[:, :, :3], pages, pages, table, lengths, page_layout="HND")
