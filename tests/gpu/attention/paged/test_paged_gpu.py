"""`sdpa_paged`: values on pages in random order, invalid ids and lengths, plans of a serving loop, CUDA graphs."""

from __future__ import annotations

import math

import dense_calls
import pytest
import torch
from attention_checks import assert_same, nothing_synchronizes
from float64_reference import attend

import cudnn_sdpa
from benchmarks import decode
from cudnn_sdpa import PagedKVCache, PlanBuildError, explain, no_plan_builds, plan_cache, sdpa_paged, trusted_pages
from tests.threads import in_threads

BF16 = torch.bfloat16


class Cache:
    """Pages in random order, with NaN in every unused page and slot."""

    def __init__(self, lengths, page_size=64, heads=2, dims=(128, 128), layout="HND", dtype=BF16, slack=3, owned=False):
        counts = [-(-length // page_size) for length in lengths]
        total = sum(counts) + 5
        self.page_size, self.layout = page_size, layout
        order = torch.randperm(total, device="cuda")[: sum(counts)].split(counts)
        self.table = torch.randint(0, total, (len(lengths), max([*counts, 1]) + slack), device="cuda").int()
        self.lengths = torch.tensor(lengths, device="cuda").int()
        self.rows = []
        self.pages = []
        for dim in dims:
            rows = [torch.randn(length, heads, dim, device="cuda", dtype=dtype) for length in lengths]
            shape = (total, heads, page_size, dim) if layout == "HND" else (total, page_size, heads, dim)
            pages = torch.full(shape, math.nan, device="cuda", dtype=dtype)
            by_token = pages.transpose(1, 2) if layout == "HND" else pages
            for b, (mine, row) in enumerate(zip(order, rows, strict=True)):
                self.table[b, : len(mine)] = mine
                position = torch.arange(len(row), device="cuda")
                by_token[mine[position // page_size], position % page_size] = row
            self.rows.append(rows)
            self.pages.append(pages)
        if owned:  # as if a PagedKVCache had made them
            trusted_pages(self.table, self.lengths, pages=total, page_size=page_size)

    def __call__(self, q, **options):
        return sdpa_paged(q, *self.pages, self.table, self.lengths, page_layout=self.layout, **options)


def expected(cache, q, b, queries=None, **options):
    """Output (Hq, queries, Dv) and log-sum-exp of one sequence in float64."""
    queries = q.shape[2] if queries is None else queries
    k, v = (rows[b].transpose(0, 1).unsqueeze(0) for rows in cache.rows)
    usual = {"is_causal": True, "causal_alignment": "bottom_right"}
    out, lse = attend(q[b : b + 1, :, :queries], k, v, **usual | options)
    return out[0], lse[0]


def assert_right(cache, q, present=None, **options):
    """Checks two calls: the first of its kind, and a cached one with other queries."""
    assert_close(cache, q, present, **options)
    assert_close(cache, torch.empty_like(q).copy_(q.flip(0)), present, **options)


def assert_close(cache, q, present, **options):
    out, of_lse = cache(q, return_lse=True, **options, **({} if present is None else {"seq_lens_q": present}))
    assert out.shape == (*q.shape[:3], cache.rows[1][0].shape[2])
    for b in range(q.shape[0]):
        queries = q.shape[2] if present is None else int(present[b])
        found = out[b, :, :queries].double()
        wanted, wanted_lse = expected(cache, q, b, queries, **options)
        assert found.isfinite().all()
        if wanted.norm() == 0:
            assert (found == 0).all()
        else:
            assert dense_calls.difference(found, wanted) < dense_calls.FORWARD[q.dtype], b
        assert (out[b, :, queries:] == 0).all()
        torch.testing.assert_close(of_lse[b, :, :queries].double(), wanted_lse, atol=2e-3, rtol=2e-3)


def queries_for(cache, queries=1, heads=8, dtype=BF16):
    return torch.randn(len(cache.rows[0]), heads, queries, cache.rows[0][0].shape[2], device="cuda", dtype=dtype)


BORDERS = [1, 63, 64, 65, 128, 130, 1000]


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("queries", [1, 2, 5, 8, 9, 70])
def test_values_at_the_borders_of_pages(page_size, layout, queries, owned):
    cache = Cache([*BORDERS, page_size - 1, page_size], page_size, layout=layout, owned=owned)
    assert_right(cache, queries_for(cache, queries))


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 6, 16, 33])
def test_every_size_of_batch(batch, owned):
    cache = Cache([17 * b + 1 for b in range(batch)], owned=owned)
    assert_right(cache, queries_for(cache))


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((8, 8), (64, 64)),
        ((12, 1), (128, 128)),
        ((14, 2), (72, 72)),
        ((8, 2), (256, 256)),
        ((8, 2), (192, 128)),
        ((5, 1), (8, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_heads_and_head_dims(heads, dims, queries, dtype):
    cache = Cache([70, 5, 300], heads=heads[1], dims=dims, dtype=dtype)
    assert_right(cache, queries_for(cache, queries, heads[0], dtype))


OPTIONS = {
    "full": {"is_causal": False},
    "top left": {"causal_alignment": "top_left"},
    "window_size": {"window_size": (40, 0)},
    "window of one": {"window_size": (0, 0)},
    "window to both sides": {"window_size": (40, 2), "is_causal": False},
    "window to the right": {"window_size": (-1, 1), "is_causal": False},
    "window, top left": {"window_size": (3, 1), "is_causal": False, "causal_alignment": "top_left"},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.2},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window_size": (40, 0)},
}


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 40])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, queries, owned):
    options = dict(OPTIONS[name])
    if options.get("sinks"):
        options["sinks"] = torch.randn(8, device="cuda") * 2 + 0.5
    cache = Cache([70, 41, 300, 64], owned=owned)
    assert_right(cache, queries_for(cache, queries), **options)


@pytest.mark.parametrize("queries", [1, 4, 20])
@pytest.mark.parametrize("wrong", [10**8, -5, 2**31 - 1, -(2**31)])
def test_invalid_page_ids_and_lengths_write_nothing_outside(wrong, queries):
    cache = Cache([70, 41, 300])
    q, good = queries_for(cache, queries), cache.table.clone()
    cache.table.fill_(wrong)
    cache(q)
    cache.table.copy_(good)
    cache.lengths.fill_(wrong)
    out = cache(q)
    cache(q, seq_lens_q=cache.lengths)
    torch.cuda.synchronize()
    if wrong < 0:
        assert (out == 0).all()


def test_a_serving_loop_builds_two_plans():
    first, all_of_them = (row["plans built"] for row in decode.plans(2000))
    assert first == all_of_them <= 2


def filled(sequences, length, **sizes):
    """A cache with some sequences of random tokens, and these tokens."""
    cache = PagedKVCache(**{"pages": 200, "page_size": 16, "heads": 2, "head_dim": 64, "max_length": 512, **sizes})
    numbers = [cache.add() for _ in range(sequences)]
    step = cache.reserve(numbers, length)
    cache.append(step, *(torch.randn(sequences, 2, length, 64, device="cuda", dtype=BF16) for _ in range(2)))
    return cache, numbers


def assert_decoded(cache, numbers, q, out):
    for row, number in enumerate(numbers):
        k, v = (x.double().repeat_interleave(4, 0) for x in cache.read(number))
        weights = (q[row].double() @ k.mT * 0.125).softmax(-1)
        assert dense_calls.difference(out[row].double(), weights @ v) < dense_calls.FORWARD[BF16]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_cache_is_read_in_place(layout):
    cache, numbers = filled(4, 37, page_layout=layout)
    for _ in range(40):  # over the border of pages
        step = cache.reserve(numbers)
        cache.append(step, *(torch.randn(4, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)))
        q = torch.randn(4, 8, 1, 64, device="cuda", dtype=BF16)
        out = sdpa_paged(q, cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv, page_layout=layout)
        assert_decoded(cache, numbers, q, out)
    given = q, cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    assert not explain(sdpa_paged, *given, page_layout=layout).extra_kernels


def test_stale_steps_and_gradients_are_refused_on_warm_calls():
    cache, (one, two) = filled(2, 20)
    new = [torch.randn(2, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)]
    q = torch.randn(2, 8, 1, 64, device="cuda", dtype=BF16)
    for _ in range(3):
        step = cache.reserve([one, two])
        with pytest.raises(cudnn_sdpa.OptionError, match="without keys and values of layer 0"):
            cache.attend(step, q)
        cache.append(step, *new)
        cache.attend(step, q)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="require grad"):
        cache.append(step, new[0].requires_grad_(), new[1])
    new[0].requires_grad_(False)
    cache.free(one)
    other = cache.add()
    cache.reserve([other], 20)
    before = cache.read(other)
    for call in (lambda: cache.append(step, *new), lambda: cache.attend(step, q)):
        with pytest.raises(cudnn_sdpa.OptionError, match=f"a step of sequence {one}, which has been freed"):
            call()
    assert all(map(torch.equal, cache.read(other), before))
    with torch.cuda.stream(torch.cuda.Stream()), nothing_synchronizes():
        step = cache.reserve([two, other])
        cache.append(step, *new)
        cache.truncate(two, 5)
        with pytest.raises(cudnn_sdpa.OptionError, match="truncated"):
            cache.append(step, *new)


def test_nothing_synchronizes():
    cache, numbers = filled(4, 37)
    foreign = Cache([70, 41, 300, 64])
    new = [torch.randn(4, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)]
    q = torch.randn(4, 8, 1, 64, device="cuda", dtype=BF16)
    many = [queries_for(foreign, queries) for queries in (1, 4, 30)]

    def steps():
        step = cache.reserve(numbers)
        cache.append(step, *new)
        two = cache.fork(numbers[0])
        cache.reserve([two])
        cache.free(two)
        return [cache.attend(step, q), *(foreign(some) for some in many)]

    steps()
    torch.cuda.synchronize()
    with nothing_synchronizes():
        results = steps()
    assert [cache.length(number) for number in numbers] == [39] * 4
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page_layout", ["HND", "NHD"])
def test_pages_in_fp8_are_copied_for_a_fork(dtype, page_layout):
    """PyTorch has no `index_copy_` for them."""
    sizes = {"pages": 12, "page_size": 16, "heads": 2, "head_dim": 64, "layers": 2}
    cache = PagedKVCache(**sizes, dtype=dtype, page_layout=page_layout, v_scale=torch.tensor(0.4, device="cuda"))
    numbers = [cache.add() for _ in range(2)]

    def grow(sequences, tokens):
        step = cache.reserve(sequences, tokens)
        for layer in range(2):
            cache.append(step, *torch.randn(2, len(sequences), 2, tokens, 64, device="cuda", dtype=BF16), layer)

    def read(sequence):
        return [x.float() for layer in range(2) for x in cache.read(sequence, layer)]

    grow(numbers, 21)
    before = [read(number) for number in numbers]
    forks = [cache.fork(number) for number in numbers]
    grow(forks, 3)
    for number, fork, kept in zip(numbers, forks, before, strict=True):
        assert all(x.shape == (2, 21, 64) and x.any() for x in kept)
        assert all(map(torch.equal, read(number), kept))
        assert all(torch.equal(x[:, :21], y) and x.shape[1] == 24 for x, y in zip(read(fork), kept, strict=True))


def test_a_captured_step_replays_for_later_steps():
    cache, numbers = filled(3, 37)
    q = torch.randn(4, 8, 1, 64, device="cuda", dtype=BF16)
    new = [torch.randn(4, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)]
    step = cache.new_step(4)
    cache.reserve(numbers, into=step)
    cache.append(step, *new)
    cache.attend(step, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_plan_builds():
        cache.append(step, *new)
        out = cache.attend(step, q)
    more = cache.add()
    for _ in range(20):
        numbers = [*numbers[:2], more]
        cache.reserve(numbers, into=step)
        for x in (q, *new):
            x.normal_()
        out.fill_(math.nan)
        graph.replay()
        assert_decoded(cache, numbers, q, out)
        assert (out[3] == 0).all()


def test_two_captures_on_two_streams_share_a_cache():
    cache, numbers = filled(4, 37)
    halves = [numbers[:2], numbers[2:]]
    parts = []
    for half in halves:
        q = torch.randn(2, 8, 1, 64, device="cuda", dtype=BF16)
        new = [torch.randn(2, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)]
        step = cache.reserve(half)
        cache.append(step, *new)
        cache.attend(step, q)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            cache.append(step, *new)
            out = cache.attend(step, q)
        parts.append((half, q, new, step, stream, graph, out))
    for _ in range(10):
        for half, q, new, step, *_ in parts:
            cache.reserve(half, into=step)
            for x in (q, *new):
                x.normal_()
        torch.cuda.synchronize()
        for *_, stream, graph, _ in parts:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for half, q, _, _, _, _, out in parts:
            assert_decoded(cache, half, q, out)


@pytest.mark.parametrize("queries", [4, 100])
def test_captured_prefill_of_any_tables(queries):
    """Pages move, tables with them, and sequences become shorter."""
    cache = Cache([170, 141, 300])
    q = queries_for(cache, queries)
    cache(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache(q)
    for lengths in ([170, 130, 300], [150, 101, 129]):
        order = torch.randperm(len(cache.pages[0]), device="cuda")
        for pages in cache.pages:
            pages.copy_(pages[order].clone())
        cache.table.copy_(torch.argsort(order)[cache.table.long()])
        cache.lengths.copy_(torch.tensor(lengths))
        cache.rows = [[row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in cache.rows]
        q.normal_()
        out.fill_(math.nan)
        graph.replay()
        for b in range(3):
            assert dense_calls.difference(out[b].double(), expected(cache, q, b)[0]) < dense_calls.FORWARD[BF16]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_plan_that_is_missing_in_a_capture_says_what_to_do():
    cache = Cache([70, 41])
    q = queries_for(cache)
    torch.empty(1 << 20, device="cuda")
    plan_cache.clear()
    with pytest.raises(PlanBuildError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache(q)
    assert_right(cache, q)


def test_a_warm_step_on_another_stream_and_in_a_graph():
    cache, numbers = filled(4, 37)
    step, q = cache.new_step(4), torch.randn(4, 8, 1, 64, device="cuda", dtype=BF16)
    cache.reserve(numbers, into=step)
    cache.append(step, *(torch.randn(4, 2, 1, 64, device="cuda", dtype=BF16) for _ in range(2)))
    pages = cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    sdpa_paged(q, *pages, page_layout="HND")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_decoded(cache, numbers, q, sdpa_paged(q, *pages, page_layout="HND"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_plan_builds():
        out = sdpa_paged(q, *pages, page_layout="HND")
    for _ in range(3):
        q.normal_()
        out.fill_(math.nan)
        graph.replay()
        assert_decoded(cache, numbers, q, out)


@pytest.mark.usefixtures("default_providers")
def test_a_step_that_is_read_in_place_is_not_tuned():
    """Its lengths and tables change between launches."""
    cache = PagedKVCache(pages=600, page_size=64, heads=2, head_dim=64, max_length=32768)
    sequence = cache.add()
    step = cache.reserve([sequence], 30000)
    cache.k_pages().normal_(), cache.v_pages().normal_()
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=BF16)
    pages = cache.k_pages(), cache.v_pages(), step.page_table, step.seq_lens_kv
    assert not explain(sdpa_paged, q, *pages, page_layout="HND").extra_kernels
    plan_cache.clear()
    with cudnn_sdpa.autotune() as report:
        for _ in range(2):
            assert_decoded(cache, [sequence], q, sdpa_paged(q, *pages, page_layout="HND"))
    assert ["table_k" in entry.reason for entry in report.entries] == [True]
    assert_decoded(cache, [sequence], q, sdpa_paged(q, *pages, page_layout="HND"))


def test_many_threads():
    cache = Cache([70, 41, 300, 64])
    many = [queries_for(cache, queries) for queries in (1, 3, 20)]
    wanted = [cache(q) for q in many]

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(100):
                for q, right in zip(many, wanted, strict=True):
                    assert_same(cache(q), right)

    in_threads(work, 8)


def test_plans_are_recorded_and_warmed_up():
    cache, numbers = filled(4, 37)
    calls = []
    for queries in (1, 3, 20):
        step = cache.reserve(numbers, queries)
        cache.append(step, *(torch.randn(4, 2, queries, 64, device="cuda", dtype=BF16) for _ in range(2)))
        calls.append((step, torch.randn(4, 8, queries, 64, device="cuda", dtype=BF16)))
    plan_cache.clear()
    with cudnn_sdpa.record_plans() as manifest:
        for step, q in calls:
            cache.attend(step, q)
    assert len(manifest) == 3
    plan_cache.clear()
    cudnn_sdpa.warmup(manifest)
    with no_plan_builds():
        for step, q in calls:
            cache.attend(step, q)
