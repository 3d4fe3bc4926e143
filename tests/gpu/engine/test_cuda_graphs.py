"""Capture and replay of forward passes; `test_training_hot_path` has those of whole steps."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, problem

import cudnn_sdpa
from cudnn_sdpa import plan_cache


@pytest.mark.parametrize("sq", [1, 32], ids=["decode", "prefill"])
def test_replay_with_changing_lengths(sq):
    q, k, v = problem(sq=sq)
    ends = torch.tensor([5, 90], dtype=torch.int32, device="cuda")
    cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=ends)
    for values in ([5, 90], [96, 1], [0, 44]):
        ends.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = exact(q, k, v, seq_lens_kv=ends)
        assert error(out, expected) < TOLERANCE[torch.bfloat16]
        assert not out.isnan().any()


def test_a_missing_plan_raises_without_side_effects():
    q, k, v = problem()
    cudnn_sdpa.sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cudnn_sdpa.sdpa(q, k, v)
        with pytest.raises(cudnn_sdpa.PlanBuildError, match="before the capture"):
            cudnn_sdpa.sdpa(q[:, :, :17], k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]


def test_captured_plans_outlive_the_cache():
    q, k, v = problem()
    ends = torch.tensor([30, 90], dtype=torch.int32, device="cuda")
    before = plan_cache.info().captured
    cudnn_sdpa.sdpa(q[:, :, :1], k, v, seq_lens_kv=ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cudnn_sdpa.sdpa(q[:, :, :1], k, v, seq_lens_kv=ends)
    assert plan_cache.info().captured == before + 1
    plan_cache.clear()
    plan_cache.resize(1)
    for length in range(2, 6):  # other plans, and their memory, are created and freed
        cudnn_sdpa.sdpa(q[:, :, :length], k, v)
    junk = [torch.full((4096,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, exact(q[:, :, :1], k, v, seq_lens_kv=ends)[0]) < TOLERANCE[torch.bfloat16]
    assert len(junk) == 64


def test_two_captures_of_one_plan_on_different_streams():
    first, second = problem(), problem()
    cudnn_sdpa.sdpa(*first)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, data in zip(graphs, (first, second), strict=True):
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            outs.append(cudnn_sdpa.sdpa(*data))
    for _ in range(20):
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
    torch.cuda.synchronize()
    for out, data in zip(outs, (first, second), strict=True):
        assert error(out, exact(*data)[0]) < TOLERANCE[torch.bfloat16]
