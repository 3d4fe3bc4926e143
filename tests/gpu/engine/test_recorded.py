"""Launches as recorded, with `CUDNN_SDPA_RECORDED`: the same bits as cuDNN's, the same time on the GPU, no harm beside.

`python -m benchmarks host --part recorded` measures the host's time of both. The generators compare more calls:
`CUDNN_SDPA_RECORDED=verify python tests/generators.py all --count 5000 --device cuda`.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import soak
import torch
from attention_checks import captured, make
from native_way import is_off
from torch import Tensor

import cudnn_sdpa
from benchmarks.tools.timing import device_times
from benchmarks.tools.ways import by_provider, recorders, recording, until_recorded, wait_for_native_calls
from cudnn_sdpa import plan_cache, providers
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import recorder
from cudnn_sdpa.graph.handles import ZEROS_BYTES
from cudnn_sdpa.plans import plan as plans

HALF = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A call; `draw` gives its tensors, by argument."""

    function: Callable[..., Any]
    draw: Callable[[], dict[str, Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    grads: Sequence[str] = ()

    def __call__(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Its results, and its gradients."""
        given = {name: x.detach().requires_grad_(name in self.grads) for name, x in tensors.items()}
        found = self.function(**given, **self.options)
        results = list(found) if isinstance(found, tuple) else [found]
        if not self.grads:
            return results
        wanted = [given[name] for name in self.grads]
        return [*results, *torch.autograd.grad(results[0], wanted, torch.ones_like(results[0]))]


def normal(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def dense(sq: int = 256, skv: int = 256, heads: tuple[int, int] = (8, 8), **more: Callable[[], Tensor]):
    def draw() -> dict[str, Tensor]:
        q = make("bshd", 2, heads[0], sq, 64, HALF)
        k, v = (make("bshd", 2, heads[1], skv, 64, HALF) for _ in range(2))
        return {"q": q, "k": k, "v": v, **{name: each() for name, each in more.items()}}

    return draw


def lengths() -> Tensor:
    return torch.randint(1, 256, (2,), dtype=torch.int32, device="cuda")


def packed() -> dict[str, Tensor]:
    offsets = torch.tensor([0, 100, 356], dtype=torch.int32, device="cuda")
    tensors = {name: normal(356, 8, 64) for name in ("q", "k", "v")}
    return {**tensors, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets.clone()}


def packed_late() -> dict[str, Tensor]:
    """One sequence, behind as many rows as a batch of the maximum length has."""
    offsets = torch.tensor([3900, 4000], dtype=torch.int32, device="cuda")
    tensors = {name: normal(4050, 8, 64) for name in ("q", "k", "v")}
    return {**tensors, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets.clone()}


def on_pages() -> dict[str, Tensor]:
    """Two sequences on pages of 64 tokens, in any order."""
    pages = {name: normal(20, 8, 64, 64) for name in ("k_pages", "v_pages")}
    table = torch.randperm(20, device="cuda")[:10].view(2, 5).int()
    lengths = torch.tensor([300, 90], dtype=torch.int32, device="cuda")
    return {"q": normal(2, 8, 1, 64), **pages, "page_table": table, "seq_lens_kv": lengths}


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: normal(*shape)


QKV = ("q", "k", "v")
MAX = {"max_seqlen_q": 256, "max_seqlen_kv": 256}
CASES = {
    "plain": Case(cudnn_sdpa.sdpa, dense()),
    "causal, grouped": Case(cudnn_sdpa.sdpa, dense(heads=(8, 2)), {"is_causal": True}),
    "lse": Case(cudnn_sdpa.sdpa, dense(), {"return_lse": True, "scale": 0.2}),
    "window, sinks": Case(
        cudnn_sdpa.sdpa, dense(sinks=lambda: normal(8, dtype=torch.float32)), {"window_size": (31, 0)}
    ),
    "mask": Case(cudnn_sdpa.sdpa, dense(attn_mask=rows(2, 1, 256, 256))),
    "lengths": Case(cudnn_sdpa.sdpa, dense(seq_lens_kv=lengths)),
    "one query": Case(cudnn_sdpa.sdpa, dense(sq=1, skv=4096)),
    "one query, lengths": Case(cudnn_sdpa.sdpa, dense(sq=1, seq_lens_kv=lengths)),
    "backward": Case(cudnn_sdpa.sdpa, dense(), grads=QKV),
    "backward, grouped": Case(cudnn_sdpa.sdpa, dense(heads=(8, 2)), {"is_causal": True}, QKV),
    "backward, deterministic": Case(cudnn_sdpa.sdpa, dense(), {"deterministic": True}, QKV),
    "varlen": Case(cudnn_sdpa.sdpa_varlen, packed, MAX),
    "varlen, late": Case(cudnn_sdpa.sdpa_varlen, packed_late, MAX),
    "varlen backward": Case(cudnn_sdpa.sdpa_varlen, packed, MAX, QKV),
    "paged": Case(cudnn_sdpa.sdpa_paged, on_pages, {"page_layout": "HND"}),
    "silu_mul": Case(cudnn_sdpa.silu_mul, lambda: {"gate": normal(256, 512), "up": normal(256, 512)}),
    "rms_norm": Case(cudnn_sdpa.rms_norm, lambda: {"x": normal(256, 512), "weight": normal(512)}),
    "layer_norm": Case(
        cudnn_sdpa.layer_norm, lambda: {"x": normal(256, 512), "weight": normal(512), "bias": normal(512)}
    ),
    "conv2d": Case(
        cudnn_sdpa.conv2d,
        lambda: {
            "x": normal(2, 64, 32, 32).to(memory_format=torch.channels_last),
            "weight": normal(64, 64, 3, 3).to(memory_format=torch.channels_last),
        },
        {"padding": 1},
    ),
}

#: Those whose kernels add in any order; they may be left to cuDNN, for one of these reasons.
UNSTEADY = (
    "by cuDNN, because its results differ in bits from launch to launch",
    "by cuDNN, because its recorded launch had other results at times",
)
MAY_VARY = ("one query", "one query, lengths", "paged", "backward", "backward, grouped", "varlen backward")


@pytest.fixture(autouse=True)
def recorded_calls() -> Iterator[None]:
    if is_off():
        pytest.skip("only native calls are launched as recorded")
    assert wait_for_native_calls()
    with recording(), providers("cudnn"):
        yield


def settled(name: str) -> Case:
    case = CASES[name]
    said = until_recorded(lambda: case(case.draw()))
    assert said
    expected = UNSTEADY if name in MAY_VARY else ()
    assert all(each.startswith(("as recorded", *expected)) for each in said), said
    return case


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_at_fresh_addresses(name):
    """On the stream of the recording and on another one; in every gap, too: results are allocated full of NaN."""
    case, other = settled(name), torch.cuda.Stream()
    is_steady = all(each.native.is_serving for each in recorders())
    for stream in (torch.cuda.current_stream(), other, torch.cuda.current_stream()):
        for _ in range(3):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                kept = [torch.empty(torch.randint(1, 4096, ()).item(), device="cuda")]  # addresses move
                tensors = case.draw()
                found = case(tensors)
                with by_provider():
                    expected = case(tensors)
                del kept
            torch.cuda.synchronize()
            for one, another in zip(found, expected, strict=True):
                assert torch.equal(one, another) if is_steady else (one - another).abs().max() < 0.1
                assert one.float().isfinite().all()


@pytest.mark.parametrize("name", ["causal, grouped", "backward, deterministic", "mask", "varlen", "rms_norm", "conv2d"])
def test_operands_whose_addresses_differ_in_the_upper_half(name):
    """Small tests have all memory within 4 GiB, where half an address may go unnoticed."""
    case = settled(name)
    drawn = case.draw()
    memory = torch.empty(len(drawn) << 32, dtype=torch.uint8, device="cuda")
    tensors = {}
    for number, (argument, x) in enumerate(drawn.items()):
        place = memory[number << 32 :][: x.untyped_storage().nbytes()].view(x.dtype)
        tensors[argument] = place.as_strided(x.shape, x.stride()).copy_(x)
    found = case(tensors)
    with by_provider():
        assert all(map(torch.equal, found, case(tensors)))


@pytest.mark.parametrize("name", ["plain", "backward", "varlen"])
def test_launches_count_in_zeros_that_one_memset_clears_for_many(name):
    """More launches than there is room for, on the default stream and on another one between them."""
    case, other = settled(name), torch.cuda.Stream()
    counting = [each for each in recorders() if each.native.takes_zeros]
    assert counting or not all(each.native.is_serving for each in recorders())
    tensors = [case.draw() for _ in range(3)]
    with by_provider():
        expected = [case(each) for each in tensors]
    wrong = []
    for turn in range(2 * ZEROS_BYTES // 256 + 10):
        stream = other if turn % 50 == 49 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = case(tensors[turn % 3])
            pairs = zip(found, expected[turn % 3], strict=True)
            wrong.append(torch.stack([(a != b).any() | ~a.float().isfinite().all() for a, b in pairs]).any())
        torch.cuda.current_stream().wait_stream(stream)
    assert not torch.stack(wrong).any() or name in MAY_VARY


@pytest.mark.parametrize("name", ["plain", "window, sinks", "lengths", "varlen", "silu_mul", "conv2d"])
def test_captures_have_the_recorded_launches(name):
    case = settled(name)
    tensors = case.draw()
    graph, results = captured(lambda: case(tensors))
    for _ in range(3):
        for tensor, drawn in zip(tensors.values(), case.draw().values(), strict=True):
            tensor.copy_(drawn)
        graph.replay()
        with by_provider():
            expected = case(tensors)
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))
    plans.captured_plans.clear()


def test_threads_on_streams_of_their_own():
    cases = [settled(name) for name in ("causal, grouped", "mask", "varlen")]
    ready = threading.Barrier(6)

    def work(number: int) -> bool:
        ready.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(100):
                case = cases[(number + turn) % len(cases)]
                tensors = case.draw()
                found, again = case(tensors), case(tensors)
                torch.cuda.current_stream().synchronize()
                assert all(map(torch.equal, found, again))
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    case, tensors = cases[0], cases[0].draw()
    found = case(tensors)
    with by_provider():
        assert all(map(torch.equal, found, case(tensors)))


def test_a_gpu_is_synchronized_while_plans_are_recorded():
    """CUDA refuses that while one of its streams is captured; no thread may ever see it."""
    over, failures, rounds = threading.Event(), [], 0

    def work() -> None:
        nonlocal rounds
        try:
            while not over.is_set():
                torch.cuda._sleep(200_000)  # it waits while the captures begin
                torch.cuda.synchronize()
                torch.zeros(8, device="cuda").sum().item()
                rounds += 1
        except Exception as failure:  # noqa: BLE001 - raised again below
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for size in range(64, 64 + 8 * 20, 8):
            case = Case(cudnn_sdpa.silu_mul, lambda size=size: {"gate": normal(64, size), "up": normal(64, size)})
            said = until_recorded(lambda case=case: case(case.draw()))
            assert all(each.startswith("as recorded") for each in said), said
    finally:
        over.set()
        thread.join()
    assert not failures, failures[0]
    assert rounds


def test_recording_keeps_neither_memory_nor_plans():
    sizes = range(64, 64 + 8 * 15, 8)

    def record(size: int) -> None:
        case = Case(cudnn_sdpa.silu_mul, lambda: {"gate": normal(64, size), "up": normal(64, size)})
        until_recorded(lambda: case(case.draw()))

    record(32)
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for size in sizes:
        record(size)
    torch.cuda.synchronize()
    assert not plans.captured_plans
    assert torch.cuda.memory_allocated() - allocated < 1 << 20
    assert torch.cuda.memory_reserved() - reserved < 64 << 20


class CountedGraphs:
    """CUDA's driver, of which the native module gets functions that count the graphs of captures."""

    def __init__(self) -> None:
        self._driver = driver = ctypes.PyDLL("libcuda.so.1")  # it keeps the GIL, as the module does in a capture
        self.made = self.freed = 0
        pointer = ctypes.c_void_p

        def end(stream, graph) -> int:
            status: int = driver.cuStreamEndCapture(pointer(stream), pointer(graph))
            self.made += not status
            return status

        def destroy(graph) -> int:
            status: int = driver.cuGraphDestroy(pointer(graph))
            self.freed += not status
            return status

        self.cuStreamEndCapture = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(end)
        self.cuGraphDestroy = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(destroy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


@pytest.fixture
def graphs(monkeypatch) -> Iterator[CountedGraphs]:
    counted = CountedGraphs()

    def connect() -> None:
        recorder._connect.cache_clear()
        assert recorder._connect(loader.module()) == ""

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_driver", lambda: counted)
        connect()
        yield counted
        plan_cache.clear()
        recorder._Background.pool.submit(lambda: None).result()  # nothing captures any more
    connect()


@pytest.mark.whole_gpu
def test_memory_is_flat_while_plans_are_recorded_and_evicted(graphs, monkeypatch):
    """The host's memory, but for less than 64 KiB a plan; the GPU's, with what the driver has loaded; graphs and plans.

    cuDNN builds the plans of each round anew. What it keeps of them it keeps without recordings, too.
    """
    lengths, rounds = range(64, 64 * 9, 64), 4
    served = 0

    def memory_of_plans() -> tuple[int, int, int]:
        """Bytes of the host's memory, of the GPU's, and of PyTorch's in it, after a round."""
        nonlocal served
        for length in lengths:
            case = Case(cudnn_sdpa.sdpa, dense(length, length))
            until_recorded(lambda case=case: case(case.draw()))
        served += sum(each.native.is_serving for each in recorders())
        built = [weakref.ref(plan.built) for plan in plan_cache.plans()]
        plan_cache.clear()
        host, allocated = soak.readings("cuda")
        free, total = torch.cuda.mem_get_info()
        assert len(built) == len(lengths)
        assert not [graph for graph in built if graph() is not None]
        return host, total - free, allocated

    def growth() -> list[int]:
        """The least of a round: whatever is kept of each plan grows in all of them."""
        with cudnn_sdpa.shape_policy("exact"):
            found = [memory_of_plans() for _ in range(1 + rounds)]
        return [min(after - before for before, after in itertools.pairwise(of)) for of in zip(*found, strict=True)]

    monkeypatch.setenv(loader.RECORDED_VARIABLE, loader.OFF)
    kept = growth()
    assert not served
    monkeypatch.setenv(loader.RECORDED_VARIABLE, loader.ON)
    host, gpu, allocated = (with_ - max(without, 0) for with_, without in zip(growth(), kept, strict=True))
    assert served > rounds * len(lengths) // 2
    assert host < soak.MAX_GROWTH
    assert gpu <= 0
    assert allocated <= 0
    assert graphs.made == graphs.freed >= 3 * served


def test_verified_calls_agree(monkeypatch):
    monkeypatch.setenv(loader.RECORDED_VARIABLE, loader.VERIFY)
    plan_cache.clear()
    for name in ("causal, grouped", "mask", "backward, deterministic", "varlen", "conv2d"):
        case = CASES[name]
        until_recorded(lambda case=case: case(case.draw()))
        for _ in range(20):
            case(case.draw())
    assert any("each compared with cuDNN's" in str(each) for each in recorders())


@pytest.mark.whole_gpu
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_takes_no_longer(name):
    """Kernels that may overlap still do: a lost programmatic edge takes a microsecond and more."""
    case = settled(name)
    tensors = case.draw()

    def of_cudnn() -> None:
        with by_provider():
            case(tensors)

    for _ in range(3):
        times = device_times({"recorded": lambda: case(tensors), "cudnn": of_cudnn}, repeats=100)
        if times["recorded"] <= max(times["cudnn"] * 1.02, times["cudnn"] + 0.3):
            break
    else:
        pytest.fail(f"{times['recorded']:.2f} µs as recorded, {times['cudnn']:.2f} by cuDNN")
