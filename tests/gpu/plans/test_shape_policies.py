"""Shape policies on the GPU: results of bucket plans, when exact-shape plans take over, CUDA graphs and streams."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make, nothing_synchronizes, poison

import cudnn_sdpa
from cudnn_sdpa import no_plan_builds, plan_cache, sdpa, shape_policy
from cudnn_sdpa.attention.dense import forward
from cudnn_sdpa.attention.dense.forward import BucketRun
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.graph import private_memory
from cudnn_sdpa.offline.background import background
from cudnn_sdpa.plans import device_memory
from cudnn_sdpa.plans.cache import plan_of
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("default_providers")

BF16 = torch.bfloat16


def inputs(rows, layout="bshd", batch=1, heads=(8, 2), dim=64, dtype=BF16):
    rows_q, rows_kv = rows if isinstance(rows, tuple) else (rows, rows)
    sizes = ((heads[0], rows_q), (heads[1], rows_kv), (heads[1], rows_kv))
    return [make(layout, batch, h, s, dim, dtype) for h, s in sizes]


def served_by_buckets():
    return SDPA.runs(BucketRun)


def assert_right(q, k, v, **options):
    poison(tuple(q.shape), dtype=q.dtype)
    found = sdpa(q, k, v, **options)
    assert error(found, exact(q, k, v, **options)[0]) < TOLERANCE[q.dtype]
    return found


@pytest.fixture
def bucketed():
    with shape_policy("bucketed"):
        yield


@pytest.fixture
def tiered(monkeypatch):
    """Uses buckets from the first shape on, counts every call as a use, and leaves no background work."""
    monkeypatch.setattr(forward, "SHAPES_BEFORE_BUCKET", 0)
    monkeypatch.setattr(forward, "SECONDS_PER_USE", 0.0)
    forward.usages.clear()
    with shape_policy("tiered"):
        yield
        assert background.wait(120)
    forward.usages.clear()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_range_of_lengths_builds_one_plan_and_then_none(bucketed, layout):  # noqa: ARG001
    assert_right(*inputs(300, layout), is_causal=True)
    builds = plan_cache.info().builds
    assert builds == 1
    with no_plan_builds():
        for rows in (2, 17, 128, 500, 900, 1024):
            assert_right(*inputs(rows, layout), is_causal=True)
    assert plan_cache.info().builds == 1


def test_sequence_counts_share_a_plan(bucketed):  # noqa: ARG001
    for batch in (5, 6):
        assert_right(*inputs(100, batch=batch))
    assert plan_cache.info().builds == 1


def test_out_is_written_and_its_surroundings_are_not(bucketed):  # noqa: ARG001
    q, k, v = inputs(77)
    around = torch.full((3, 77 + 60, 8, 64), 7.0, device="cuda", dtype=BF16)
    out = around[1:2, 30:107].transpose(1, 2)
    assert sdpa(q, k, v, out=out) is out
    assert len(served_by_buckets()) == 1
    assert error(out, exact(q, k, v)[0]) < TOLERANCE[BF16]
    out.fill_(7.0)
    assert (around == 7.0).all()


def test_memory_after_keys_and_values_is_not_read(bucketed):  # noqa: ARG001
    for layout in ("bshd", "bhsd"):
        cut = [x[:, :, :77] for x in inputs(300, layout)]
        for x in cut:
            whole = torch.as_strided(x, (x.untyped_storage().nbytes() // 2,), (1,), 0)
            kept = x.clone()
            whole.fill_(torch.nan)
            x.copy_(kept)
        assert_right(*cut, is_causal=True)


def test_nothing_waits(bucketed):  # noqa: ARG001
    sdpa(*inputs(300))
    tensors = [inputs(rows) for rows in (100, 200, 300)]
    torch.cuda.synchronize()
    with nothing_synchronizes():
        for _ in range(2):
            found = [sdpa(*x) for x in tensors]
    assert len(served_by_buckets()) == 3
    for x, out in zip(tensors, found, strict=True):
        assert error(out, exact(*x)[0]) < TOLERANCE[BF16]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rows", [(300, 100), (100, 300), (1, 300), (77, 1), (333, 333)], ids=str)
@pytest.mark.parametrize("window_size", [(40, 0), (-1, 30), (10, 5)], ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_windows(bucketed, layout, rows, window_size, alignment):  # noqa: ARG001
    q, k, v = inputs(rows, layout)
    poison(tuple(q.shape), dtype=q.dtype)
    found = sdpa(q, k, v, window_size=window_size, causal_alignment=alignment)
    left, right = window_size
    shift = rows[1] - rows[0] if alignment == "bottom_right" else 0
    after = torch.arange(rows[1], device="cuda") - torch.arange(rows[0], device="cuda").unsqueeze(1) - shift
    seen = (after <= right) & (after >= -(left if left >= 0 else 10_000))
    scores = q.double() @ k.repeat_interleave(4, 1).double().mT * 64**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    assert error(found, weights @ v.repeat_interleave(4, 1).double()) < TOLERANCE[BF16]


def test_large_sequence_offsets(bucketed):  # noqa: ARG001
    """Offsets beyond 2^31 elements."""
    whole = torch.randn(3, 1 << 20, 8, 128, device="cuda", dtype=BF16)
    q, k, v = (whole[:, at : at + 70].transpose(1, 2) for at in (5, 1 << 19, (1 << 20) - 70))
    out = torch.full_like(whole[:, :70], torch.nan).transpose(1, 2)
    assert 2 * whole.stride(0) > 1 << 31 or 3 * whole.stride(0) > 1 << 31
    sdpa(q, k, v, is_causal=True, out=out)
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[BF16]
    assert len(served_by_buckets()) == 1


@pytest.mark.filterwarnings("ignore")
def test_cuda_graphs_of_torch_compile(bucketed):  # noqa: ARG001
    """Their private pool reuses the memory of a call, so tables must not be allocated there."""
    torch.compiler.reset()
    sdpa(*inputs(300))

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True) + 1

    for rows in (120, 130):
        tensors = inputs(rows)
        with torch.no_grad():
            for _ in range(4):
                for x in tensors:
                    x.normal_()
                torch.compiler.cudagraph_mark_step_begin()
                found = layer(*tensors).clone()
                q, k, v = tensors
                assert error(found, exact(q * 2, k, v, is_causal=True)[0] + 1) < TOLERANCE[BF16]
    assert served_by_buckets()


def test_another_stream_waits_for_the_tables(bucketed):  # noqa: ARG001
    sdpa(*inputs(300))
    tensors = inputs(123)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)  # the tables are written after this
        sdpa(*tensors)
    with torch.cuda.stream(other):
        found = sdpa(*tensors)
    torch.cuda.synchronize()
    assert error(found, exact(*tensors)[0]) < TOLERANCE[BF16]


def test_tables_live_until_other_streams_have_read_them(bucketed):  # noqa: ARG001
    sdpa(*inputs(300))
    tensors = inputs(123)
    sdpa(*tensors)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        found = sdpa(*tensors)
    plan_cache.clear()
    with torch.cuda.stream(private_memory._streams[0]):  # new allocations would reuse the memory of the tables
        device_memory._arenas[0]._chunk = None
        fill = [torch.full((1 << 16,), 1 << 40, device="cuda") for _ in range(50)]
    torch.cuda.synchronize()
    del fill
    assert error(found, exact(*tensors)[0]) < TOLERANCE[BF16]


def test_the_memory_of_tables_is_bounded(bucketed, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(forward, "MAX_TABLE_BYTES", 3 * 4096)
    for rows in range(100, 160):
        sdpa(*inputs(rows, "bhsd", batch=4))
        assert sum(run.table_bytes for run in served_by_buckets()) <= 3 * 4096
    assert 1 <= len(served_by_buckets()) < 60
    assert_right(*inputs(100, "bhsd", batch=4))


def test_first_shapes_get_exact_shape_plans_and_later_ones_bucket_plans():
    with shape_policy("tiered"):
        for number, rows in enumerate((100, 110, 120), start=1):
            assert_right(*inputs(rows))
            assert plan_cache.info().builds == number
        assert served_by_buckets() == []
        assert_right(*inputs(130))
        assert plan_cache.info().builds == 4
        for rows in (131, 1000):
            assert_right(*inputs(rows))
        assert plan_cache.info().builds == 4
        assert len(served_by_buckets()) == 3
        assert_right(*inputs(100))  # still the exact-shape plan
        assert len(served_by_buckets()) == 3


def test_a_recurring_shape_gets_an_exact_shape_plan(tiered):  # noqa: ARG001
    one, two = inputs(200), inputs(210)
    with shape_policy("exact"):
        expected = sdpa(*one, is_causal=True)
    plan_cache.clear()
    for _ in range(2):
        assert_right(*one, is_causal=True)
        assert_right(*two, is_causal=True)
    assert background.wait(0.0)  # nothing was requested yet
    from_bucket = sdpa(*one, is_causal=True)
    assert background.wait(120)
    assert len(served_by_buckets()) == 2
    assert plan_cache.info().loads == 1  # in the background: a call would wait for the GPU
    own = sdpa(*one, is_causal=True)
    assert len(served_by_buckets()) == 1
    assert plan_cache.info().loads == 1
    assert torch.equal(own, expected)
    assert torch.equal(sdpa(*one, is_causal=True), expected)
    assert error(from_bucket, expected.double()) < TOLERANCE[BF16]


def use_often(*calls):
    for _ in range(forward.USES_BEFORE_EXACT_SHAPE_PLAN):
        for tensors in calls:
            sdpa(*tensors)


def test_a_plan_that_cannot_be_loaded_leaves_the_bucket_in_place(tiered, caplog, monkeypatch):  # noqa: ARG001
    def load(key, stored):
        return plan_of(key, replace(stored, data=stored.data[:1000]))

    monkeypatch.setattr("cudnn_sdpa.offline.background.plan_of", load)
    tensors = inputs(200)
    use_often(tensors)
    assert background.wait(120)
    (run,) = served_by_buckets()
    for _ in range(3):
        assert_right(*tensors)
    assert caplog.text.count("cannot be used") == 1
    assert served_by_buckets() == [run]


def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def test_a_new_shape_in_a_capture(bucketed):  # noqa: ARG001
    sdpa(*inputs(300))
    tensors = inputs(150)
    with no_plan_builds():
        graph, out = captured(lambda: sdpa(*tensors))
    for _ in range(2):
        for x in tensors:
            x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, exact(*tensors)[0]) < TOLERANCE[BF16]
    assert_right(*tensors)
    graph.replay()
    assert error(out, exact(*tensors)[0]) < TOLERANCE[BF16]


def test_a_capture_outlives_its_bucket_plan(tiered):  # noqa: ARG001
    tensors = inputs(150)
    use_often(tensors, inputs(160))
    assert background.wait(120)
    graph, out = captured(lambda: sdpa(*tensors))
    assert len(served_by_buckets()) == 2  # no plan takes over within a capture
    sdpa(*tensors)
    assert len(served_by_buckets()) == 1
    plan_cache.clear()
    torch.cuda.empty_cache()
    fill = [torch.full((1 << 16,), 1 << 40, device="cuda") for _ in range(20)]
    for x in tensors:
        x.normal_()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    del fill
    assert error(out, exact(*tensors)[0]) < TOLERANCE[BF16]


def test_an_exact_shape_plan_takes_over_while_another_thread_captures(tiered):  # noqa: ARG001
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # reserves memory: PyTorch cannot allocate more during a capture
        tensors = inputs(150)
        for _ in range(forward.USES_BEFORE_EXACT_SHAPE_PLAN - 1):
            sdpa(*tensors)
    torch.cuda.synchronize()
    assert background.wait(0.0)  # nothing was requested yet
    static = torch.randn(64, device="cuda")
    capturing, go_on, failures = threading.Event(), threading.Event(), []
    graphs = []

    def capture():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                doubled = static * 2
                capturing.set()
                assert go_on.wait(120)
            graphs.append((graph, doubled))
        except Exception as failure:  # noqa: BLE001 - looked at below
            failures.append(failure)
            capturing.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert capturing.wait(60)
    with torch.cuda.stream(side):
        sdpa(*tensors)  # requests it
        assert background.wait(120)
        assert plan_cache.info().loads == 1
        out = sdpa(*tensors)
    assert served_by_buckets() == []
    go_on.set()
    thread.join()
    assert failures == []
    assert error(out, exact(*tensors)[0]) < TOLERANCE[BF16]
    graph, doubled = graphs[0]
    graph.replay()
    assert torch.equal(doubled, static * 2)


def test_many_threads(bucketed):  # noqa: ARG001
    sdpa(*inputs(300))

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for rows in range(100 + number % 4, 200, 8):
                assert_right(*inputs(rows))

    in_threads(work, 8)
    assert plan_cache.info().builds == 1


def test_buckets_are_recorded_and_warmed(bucketed, tmp_path):  # noqa: ARG001
    with cudnn_sdpa.record_plans() as manifest:
        for rows in (100, 200, 300):
            sdpa(*inputs(rows))
    assert len(manifest) == 1
    manifest.save(tmp_path / "plans.json")
    plan_cache.clear()
    assert cudnn_sdpa.warmup(tmp_path / "plans.json").built == 1
    with no_plan_builds():
        assert_right(*inputs(400))
