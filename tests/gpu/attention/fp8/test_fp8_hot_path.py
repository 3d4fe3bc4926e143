"""Warm FP8 calls: no synchronization, CUDA graphs, threads, and bad input that reaches no kernel."""

from __future__ import annotations

import fp8_values
import pytest
import torch
from attention_checks import nothing_synchronizes
from fp8_values import E5M2, error, lens, problem
from test_threads import THREADS

from benchmarks.tools.ways import until_recorded
from cudnn_sdpa import plan_cache
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from tests.threads import in_threads

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_size": {"window_size": (60, 3), "scale": 0.2},
    "lengths": {"seq_lens_kv": True},
}
FEWER = pytest.mark.parametrize("sizes", [(200, 333), (333, 200)], ids=["more keys", "fewer keys"])


def options_of(name):
    options = dict(OPTIONS[name])
    if "seq_lens_kv" in options:
        options["seq_lens_kv"] = lens(120, 0)
    return options


def both(of, grad_out, scales, **options):
    made = sdpa_fp8(*of, return_lse=True, **options)
    return *made, *sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, scales, **options)


def training(sizes=(200, 333)):
    of = problem(sizes=sizes)
    grad_out = fp8_values.fp8_of(tuple(of.q.shape), 300.0, dtype=E5M2)
    return of, grad_out, fp8_values.backward_scales(of, descale_do=1 / 300)


@FEWER
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_synchronizes(name, sizes):
    given, options = training(sizes), options_of(name)
    if name == "window_size" and sizes[0] > sizes[1]:
        options = {"is_causal": True, "window_size": (60, -1)}
    first = both(*given, **options)
    plain = sdpa_fp8(*given[0], **options)
    torch.cuda.synchronize()
    with nothing_synchronizes():
        again = both(*given, **options)
        alone = sdpa_fp8(*given[0], **options)
    assert all(error(a, b) < 1e-3 for a, b in zip(again, first, strict=True) if not a.float().isinf().any())
    assert torch.equal(alone.out.float(), plain.out.float())


def test_the_first_call_does_not_synchronize_either():
    of = problem(sizes=(77, 130))
    torch.cuda.synchronize()
    with nothing_synchronizes():
        found = sdpa_fp8(*of)
    assert error(found.out, fp8_values.emulated(of).out) < 0.06


@pytest.mark.parametrize("name", OPTIONS)
def test_capture_and_replay_with_new_scales(name):
    (of, grad_out, scales), options = training(), options_of(name)
    both(of, grad_out, scales, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(of, grad_out, scales, **options)
    for _ in range(3):
        new = problem()
        for old, fresh in zip((*of[:3], *of.scales), (*new[:3], *new.scales), strict=True):
            old.copy_(fresh)
        for old, fresh in zip(scales, fp8_values.backward_scales(of, descale_do=1 / 300), strict=True):
            old.copy_(fresh)
        if "seq_lens_kv" in options:
            options["seq_lens_kv"].copy_(torch.randint(0, 333, (2,), dtype=torch.int32))
        for tensor in captured:
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        wanted = both(of, grad_out, scales, **options)
        for found, expected in zip(captured, wanted, strict=True):
            assert torch.equal(found.isneginf(), expected.isneginf()) if found.dtype == torch.float32 else True
            finite = expected.float().isfinite()
            assert error(found.float()[finite], expected.float()[finite]) < 1e-2
        emulated = fp8_values.emulated(of, **options)
        assert error(captured[0], emulated.out) < 0.06


def test_one_plan_many_threads_and_streams():
    """Each thread has its own data, scales and stream."""
    given = [problem(heads=(4, 2), sizes=(130, 200)) for _ in range(THREADS)]
    factors = [0.03 + 0.02 * i for i in range(THREADS)]
    expected = [fp8_values.emulated(of, scale=factor).out for of, factor in zip(given, factors, strict=True)]
    sdpa_fp8(*given[0])
    torch.cuda.synchronize()
    builds, worst = plan_cache.info().builds, [1.0] * THREADS

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [sdpa_fp8(*given[index], scale=factors[index]).out for _ in range(200)]
            torch.cuda.current_stream().synchronize()
            worst[index] = max(error(out, expected[index]) for out in outs)

    in_threads(work, THREADS)
    assert plan_cache.info().builds == builds
    assert max(worst) < 0.06


def test_device_memory_does_not_grow():
    of = problem()
    until_recorded(lambda: sdpa_fp8(*of))  # a recording has memory of its own meanwhile
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(2_000):
        sdpa_fp8(*of)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)
