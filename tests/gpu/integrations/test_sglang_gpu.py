"""The backend for SGLang on the GPU: prompts, decodes and drafts, without synchronization, and in graphs."""

from __future__ import annotations

import pytest
import torch
from sglang_steps import MISSING, SGLANG, Graph, Server, trees

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SGLANG is None, reason=MISSING)]

E4M3 = torch.float8_e4m3fn
OPTIONS = {
    "plain": {},
    "page 1": {"page": 1, "sinks": True},
    "page 64": {"page": 64, "logit_cap": 1.5},
    "fp8": {"cache": E4M3, "sliding_window_size": 19},
    "window pool": {"sliding_window_size": 40, "has_window_pool": True, "sinks": True},
}


def server_of(**options):
    if options.get("cache") is E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    of_all = {"heads": (8, 2), "dims": (64, 64), "dtype": torch.bfloat16, "device": "cuda", "context": 700}
    return Server(**of_all, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_equal_float64(options):
    server = server_of(**options)
    server.step("EXTEND", {0: 300, 2: 33, 1: 1})
    server.step("EXTEND", {2: 150, 3: 20})
    server.step("DECODE", {3: 1, 0: 1, 1: 1})
    server.step("MIXED", {1: 200, 0: 1, 2: 1})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_replay_other_lengths_tables_and_fewer_requests(options):
    server = server_of(**options)
    server.backend.init_cuda_graph_state(4, 4)
    graphs = [Graph(server, "DECODE", rows) for rows in (4, 2)]
    server.step("EXTEND", {0: 15, 2: 333, 1: 1})
    graphs[0].step({2: 1, 0: 1, 1: 1})
    graphs[1].step({0: 1})
    server.step("EXTEND", {3: 140})
    graphs[0].step({0: 1, 1: 1, 2: 1, 3: 1})
    graphs[1].step({3: 1, 2: 1})


@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_verified_with_and_without_a_graph(topk):
    server, tokens = server_of(draft=5, topk=topk), 5
    server.backend.init_cuda_graph_state(3, 3 * tokens)
    graph = Graph(server, "TARGET_VERIFY", 3, tokens)
    server.step("EXTEND", {0: 15, 2: 300, 1: 1})
    for new in ({0: tokens, 2: tokens}, {1: tokens, 0: tokens, 2: tokens}):
        server.step("TARGET_VERIFY", new, trees(len(new), tokens) if topk > 1 else None)
        graph.step(new, trees(len(new), tokens) if topk > 1 else None)


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_are_those_of_transformers(graphs):
    """With attention in float16 in a model in float32, whose tokens it cannot change."""
    pytest.importorskip("transformers")
    from greedy_serving import assert_tokens_are_those_of_transformers, on_sglang

    of_gpu = {"device": "cuda", "dtype": torch.float16}
    assert_tokens_are_those_of_transformers(on_sglang(graphs=graphs, **of_gpu), "cuda")


@pytest.mark.parametrize("mode", ["EXTEND", "DECODE"])
def test_nothing_waits_for_the_gpu(mode):
    server = server_of(sliding_window_size=40, has_window_pool=True)
    server.step("EXTEND", {0: 300, 1: 5})
    batch = server.batch(mode, {0: 1, 1: 1})
    inputs = [server._new(2) for _ in server.layers]
    for wanted in ("default", "error"):  # the first builds plans
        torch.cuda.set_sync_debug_mode(wanted)
        try:
            server.backend.init_forward_metadata(batch)
            for layer, (q, k, v) in zip(server.layers, inputs, strict=True):
                server.backend.forward(q, k, v, layer, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
