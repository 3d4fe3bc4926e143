"""The attention backend for vLLM on a GPU, driven by vLLM's metadata, eager and in a replayed graph, against float64.

It needs the Python files of vLLM that importing the backend takes, made by `scripts/engines.py pack` and named in
PYTHONPATH, and the packages that they import: transformers, pyzmq, psutil and regex.
"""

from __future__ import annotations

import pytest
import torch
from attention_checks import captured, nothing_synchronizes
from vllm_steps import Layer, backend_of_vllm

from cudnn_sdpa import no_plan_builds

BF16 = torch.bfloat16
SETTINGS = {"device": "cuda", "dtype": BF16, "dims": (128, 128), "columns": 80}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 100},
    "sinks, window": {"sinks": torch.linspace(-1, 3, 8), "sliding_window": 128},
    "soft cap": {"logits_soft_cap": 5.0, "dtype": torch.float16},
    "fp8": {"kv_cache_dtype": "fp8"},
    "64 query heads": {"heads": 64, "heads_kv": 8, "dims": (64, 64)},
    "not causal": {"causal": False, "sliding_window": 50},
    "all": {
        "sliding_window": 100,
        "sinks": torch.linspace(-1, 3, 8),
        "logits_soft_cap": 5.0,
        "kv_cache_dtype": "fp8_e4m3",
    },
}
STEPS = {
    "prompts": ([0, 0, 0], [500, 33, 129]),
    "chunks and decodes": ([900, 1, 64, 700, 0], [1, 1, 300, 40, 60]),
    "decodes": ([1200, 5, 63, 64, 300], [1, 1, 1, 1, 1]),
    "drafts": ([1200, 5, 63, 64, 300], [16, 4, 1, 0, 7]),
    "padded rows": ([700, 31], [1, 1]),
}


@pytest.fixture(autouse=True)
def _backend():
    backend_of_vllm()


def made(rows, tokens, max_query_len, **options):
    if options.get("kv_cache_dtype") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversions of FP8")
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda()
    return Layer(rows, tokens, max_query_len, **{**SETTINGS, **options})


def assert_right(layer, wanted):
    out = layer.out.double()
    assert out.isfinite().all()
    off, size = (out - wanted).norm(dim=-1), wanted.norm(dim=-1)
    assert float(off.norm()) <= 6e-3 * float(size.norm()) + 1e-6
    assert bool((off <= 2e-2 * size + 1e-3).all())
    assert not layer.out[size == 0].any()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_layouts(layout, cache):
    layer = made(5, 700, 500, layout=layout, kv_cache_dtype=cache)
    for step in ("chunks and decodes", "drafts"):
        wanted = layer.fill(*STEPS[step])
        layer.step(layer.metadata())
        assert_right(layer, wanted)


@pytest.mark.parametrize("options", OPTIONS)
def test_steps(options):
    for past, new in STEPS.values():
        layer = made(5, sum(new) + 3, max(new), **OPTIONS[options])
        wanted = layer.fill(past, new)
        metadata = layer.metadata()
        layer.step(metadata)
        with nothing_synchronizes():
            layer.step(metadata)
        assert_right(layer, wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_are_those_of_transformers(graphs):
    """With attention in float16 in a model in float32, whose tokens it cannot change."""
    from greedy_serving import assert_tokens_are_those_of_transformers, on_vllm

    of_gpu = {"device": "cuda", "dtype": torch.float16}
    assert_tokens_are_those_of_transformers(on_vllm(graphs=graphs, **of_gpu), "cuda")


def drawn_batch(rows, longest):
    """Past and new tokens of some of the rows: 0 to `longest` new ones, with one who has that many."""
    count = int(torch.randint(1, rows + 1, ()))
    new = torch.randint(longest + 1, (count,))
    new[torch.randint(count, ())] = longest
    return torch.randint(1000, (count,)).tolist(), new.tolist()


def batches_with_prompts(longest):
    """Six prompts without a past, which a graph serves, too; then decodes between them, before them and behind them."""
    new = [max(1, longest - 3 * row) for row in range(6)]
    yield [0] * 6, new
    yield [0, 1, 0, 63, 0, 900], [x if row % 2 == 0 else 1 for row, x in enumerate(new)]
    yield [900, 100, 0, 0, 0, 0], [1, 1, *new[:4]]
    yield [0, 0, 700, 16], [longest, longest, 1, 1]


@pytest.mark.parametrize("longest", [1, 4, 16])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_graph_is_replayed_with_other_batches(options, longest):
    """Lengths, tables, slots and numbers of new tokens, 0 to 16 for each row, are read by each replay."""
    rows = 6
    layer = made(rows, rows * longest, longest, **OPTIONS[options])
    layer.fill([3] * rows, [1] * rows)
    metadata = layer.builder.build_for_cudagraph_capture(layer.batch)
    graph, _ = captured(lambda: layer.step(metadata))
    for past, new in (*(drawn_batch(rows, longest) for _ in range(6)), *batches_with_prompts(longest)):
        wanted = layer.fill(past, new)
        graph.replay()
        assert_right(layer, wanted)


def test_warmed_up_layers_need_no_plan():
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    registry = JitWarmupRegistry(None)
    options = {"heads": 12, "heads_kv": 4, "dims": (96, 96), "page": 32}  # of no other test
    with registry.activate():
        layers = [made(5, 700, 500, **options, logits_soft_cap=cap) for cap in (None, 4.0)]
    for kernel, registrations in registry._registrations.items():
        for arguments, _ in registrations:
            kernel.compile_many(kernel.get_warmup_keys(*arguments))
    for layer in layers:
        for step in ("decodes", "prompts"):
            wanted = layer.fill(*STEPS[step])
            layer.batch.max_query_len = max(STEPS[step][1])
            with no_plan_builds():
                layer.step(layer.metadata())
            assert_right(layer, wanted)
