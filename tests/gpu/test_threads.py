"""Threads, streams and devices: one plan launched from many places at once."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, problem

import cudnn_sdpa
from cudnn_sdpa import plan_cache
from cudnn_sdpa.graph import handles
from tests.threads import in_threads

THREADS = 8


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode with lengths"])
def test_one_plan_many_threads_and_streams(decode):
    """Each thread has its own stream, data and scale: nothing may leak between launches."""
    problems, options = [], []
    for i in range(THREADS):
        problems.append(problem(sq=1 if decode else 64))
        ends = torch.tensor([96 - i, 1 + 7 * i], dtype=torch.int32, device="cuda")
        options.append({"scale": 0.05 + 0.05 * i, **({"seq_lens_kv": ends} if decode else {})})
    expected = [exact(*p, **o)[0] for p, o in zip(problems, options, strict=True)]
    cudnn_sdpa.sdpa(*problems[0], **options[0])
    torch.cuda.synchronize()
    builds = plan_cache.info().builds
    worst = [0.0] * THREADS

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [cudnn_sdpa.sdpa(*problems[index], **options[index]) for _ in range(300)]
            torch.cuda.current_stream().synchronize()
            worst[index] = max(error(out, expected[index]) for out in outs)

    in_threads(work, THREADS)
    assert plan_cache.info().builds == builds
    assert max(worst) < TOLERANCE[torch.bfloat16]


def test_threads_that_need_the_same_new_plan_build_it_once():
    data = problem()
    torch.cuda.synchronize()
    expected = exact(*data)[0]
    errors = [1.0] * THREADS

    def work(index):
        out = cudnn_sdpa.sdpa(*data)
        torch.cuda.synchronize()
        errors[index] = error(out, expected)

    in_threads(work, THREADS)
    assert plan_cache.info().builds == 1
    assert max(errors) < TOLERANCE[torch.bfloat16]


def test_threads_with_different_shapes_while_plans_are_evicted():
    plan_cache.resize(4)
    lengths = [16 * (1 + i) for i in range(THREADS)]
    problems = [problem(sq=n) for n in lengths]
    expected = [exact(*p)[0] for p in problems]
    torch.cuda.synchronize()
    worst = [0.0] * THREADS

    def work(index):
        for step in range(6):
            which = (index + step) % THREADS
            out = cudnn_sdpa.sdpa(*problems[which])
            torch.cuda.current_stream().synchronize()
            worst[index] = max(worst[index], error(out, expected[which]))

    in_threads(work, THREADS)
    assert plan_cache.info().plans <= 4
    assert max(worst) < TOLERANCE[torch.bfloat16]


def test_handles_of_ended_threads_are_reused():
    data = problem()
    cudnn_sdpa.sdpa(*data)

    def work(_):
        cudnn_sdpa.sdpa(*data)

    in_threads(work, 2)
    after_first = len(handles._created)
    for _ in range(20):
        in_threads(work, 2)
    assert len(handles._created) == after_first


def test_a_threads_memory_is_of_the_small_pool():
    """PyTorch's allocator has more than 1 MiB from segments of 20 MiB, which it could never give back."""
    before = torch.cuda.memory_stats()["allocated_bytes.large_pool.current"]
    slot = handles._create(torch.cuda.current_device())
    slot.bind(0)
    assert slot.scratch
    assert torch.cuda.memory_stats()["allocated_bytes.large_pool.current"] == before


@pytest.mark.parametrize("name", ["sdpa", "lengths"])
def test_a_threads_memory_is_of_no_pool_of_its_caller(name):
    """Engines that sleep discard the contents of such a pool; a thread's first call may be within."""
    q, k, v = problem()
    options = (
        {"seq_lens_kv": torch.full((len(q),), 100, dtype=torch.int32, device=q.device)} if name == "lengths" else {}
    )
    expected = cudnn_sdpa.sdpa(q, k, v, **options)
    pool = torch.cuda.MemPool()

    def work(_):
        with torch.cuda.use_mem_pool(pool):
            out = cudnn_sdpa.sdpa(q, k, v, **options)
        mine = handles.thread.slots[q.device.index]
        found = [x.data_ptr() for x in (out, *mine._kept)]
        mapped = [range(x["address"], x["address"] + x["total_size"]) for x in pool.snapshot()]
        return torch.equal(out, expected), [any(address in each for each in mapped) for address in found]

    (found,) = in_threads(work, 1)
    is_right, (is_result, *are_kept) = found
    assert is_right
    assert is_result
    assert are_kept
    assert not any(are_kept)


@pytest.mark.parametrize("name", ["sdpa", "lengths"])
def test_a_threads_memory_is_not_filled_late(name, monkeypatch):
    """As deterministic PyTorch fills new tensors: by a kernel, which would come late where the GPU is busy."""
    q, k, v = problem()
    lengths = torch.full((len(q),), 50, dtype=torch.int32, device=q.device)
    options = {"seq_lens_kv": lengths} if name == "lengths" else {}

    def work(_):
        torch.cuda._sleep(100_000_000)
        return torch.equal(cudnn_sdpa.sdpa(q, k, v, **options), expected)

    torch.use_deterministic_algorithms(True)
    try:
        expected = cudnn_sdpa.sdpa(q, k, v, **options)
        monkeypatch.setattr(handles, "_free", {})
        assert in_threads(work, 4) == [True] * 4
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_current_stream_is_used():
    """Work on a side stream is ordered with that stream, not with the default stream."""
    q, k, v = problem()
    expected = exact(q, k, v)[0]
    cudnn_sdpa.sdpa(q, k, v)
    external = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    late = torch.zeros_like(q)
    for side in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1), external) * 3:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late.zero_()
            torch.cuda._sleep(20_000_000)
            late.copy_(q)
            out = cudnn_sdpa.sdpa(late, k, v)
        side.synchronize()
        assert error(out, expected) < TOLERANCE[torch.bfloat16]
        assert error(cudnn_sdpa.sdpa(q, k, v), expected) < TOLERANCE[torch.bfloat16]


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
def test_two_devices():
    """Keys hold the device; a call follows its tensors, whichever device is current."""
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        data = problem(device)
        expected = exact(*data)[0]
        for current in (0, 1):
            with torch.cuda.device(current):
                out = cudnn_sdpa.sdpa(*data, return_lse=True)[0]
                plain = cudnn_sdpa.sdpa(*data)
                assert torch.cuda.current_device() == current
            assert out.device == plain.device == data[0].device
            assert error(out, expected) < TOLERANCE[torch.bfloat16]
            assert error(plain, expected) < TOLERANCE[torch.bfloat16]


@needs_two
def test_threads_on_two_devices():
    problems = [problem(f"cuda:{i % 2}") for i in range(THREADS)]
    expected = [exact(*p)[0] for p in problems]
    for i in range(2):
        torch.cuda.synchronize(i)
    worst = [0.0] * THREADS

    def work(index):
        for step in range(50):
            which = (index + step) % THREADS
            with torch.cuda.device(problems[which][0].device), torch.cuda.stream(torch.cuda.Stream()):
                out = cudnn_sdpa.sdpa(*problems[which])
                torch.cuda.current_stream().synchronize()
                worst[index] = max(worst[index], error(out, expected[which]))

    in_threads(work, THREADS)
    assert max(worst) < TOLERANCE[torch.bfloat16]


@needs_two
def test_mixed_devices_are_refused():
    q, k, v = problem("cuda:0")
    with pytest.raises(cudnn_sdpa.DeviceError, match=r"k: got cuda:1; expected cuda:0"):
        cudnn_sdpa.sdpa(q, k.to("cuda:1"), v)
