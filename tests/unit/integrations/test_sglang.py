"""The attention backend for SGLang, on SGLang's classes compiled from its source, and its plugin."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang_steps import MISSING, SGLANG, Graph, Server, compiled, definition, sglang, source, trees

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.integrations import sglang as integration
from cudnn_sdpa.integrations import sglang_backend
from cudnn_sdpa.integrations.sglang import NAME, VERSION, register
from cudnn_sdpa.integrations.sglang_backend import PagedAttention, backend_class

needs_sglang = pytest.mark.skipif(SGLANG is None, reason=MISSING)

ROOT = Path(__file__).parents[3]
E4M3 = torch.float8_e4m3fn
CHOICES, REGISTRY = "sglang.srt.arg_groups.choices", "sglang.srt.layers.attention.attention_registry"
OPTIONS = {
    "plain": {},
    "window": {"sliding_window_size": 6},
    "sinks": {"sinks": True},
    "soft cap": {"logit_cap": 1.5},
    "fp8": {"cache": E4M3},
    "all": {"sliding_window_size": 19, "sinks": True, "logit_cap": 2.0, "cache": torch.float8_e5m2},
    "window pool": {"sliding_window_size": 6, "has_window_pool": True},
}


@needs_sglang
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_steps_equal_float64(page, options):
    server = Server(page=page, **options)
    server.step("EXTEND", {0: 9, 2: 33, 1: 1})
    server.step("EXTEND", {2: 4, 3: 20})  # the first with a prefix
    server.step("DECODE", {3: 1, 0: 1, 1: 1})
    server.step("MIXED", {1: 30, 0: 1, 2: 1})
    server.step("DECODE", {0: 1, 1: 1, 2: 1, 3: 1})


@needs_sglang
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_replay_other_lengths_tables_and_fewer_requests(options):
    server = Server(**options)
    server.backend.init_cuda_graph_state(4, 4)
    graphs = [Graph(server, "DECODE", rows) for rows in (4, 2)]
    server.step("EXTEND", {0: 15, 2: 33, 1: 1})
    graphs[0].step({2: 1, 0: 1, 1: 1})  # the second then begins a page
    graphs[1].step({0: 1})
    server.step("EXTEND", {3: 40})
    graphs[0].step({0: 1, 1: 1, 2: 1, 3: 1})
    graphs[1].step({3: 1, 2: 1})


@needs_sglang
@pytest.mark.parametrize("options", [{}, {"cache": E4M3}, {"sinks": True, "page": 1}], ids=str)
@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_are_verified_with_and_without_a_graph(topk, options):
    server, tokens = Server(draft=5, topk=topk, **options), 5
    server.backend.init_cuda_graph_state(8, 8 * tokens)  # more rows than requests
    graph = Graph(server, "TARGET_VERIFY", 3, tokens)
    server.step("EXTEND", {0: 15, 2: 30, 1: 1})
    for new in ({0: tokens, 2: tokens}, {1: tokens, 0: tokens, 2: tokens}):
        server.step("TARGET_VERIFY", new, trees(len(new), tokens) if topk > 1 else None)
        graph.step(new, trees(len(new), tokens) if topk > 1 else None)
    assert server.backend.verify_mask.is_read == (topk > 1)


@needs_sglang
def test_chains_see_windows_and_trees_do_not():
    server = Server(draft=4, sliding_window_size=5)
    server.step("EXTEND", {0: 15, 1: 3})
    server.step("TARGET_VERIFY", {0: 4, 1: 4})
    server = Server(draft=4, topk=2, sliding_window_size=5)
    server.step("EXTEND", {0: 15, 1: 3})
    with pytest.raises(cudnn_sdpa.CudnnSdpaError, match="window"):
        server.step("TARGET_VERIFY", {0: 4, 1: 4}, trees(2, 4))


@needs_sglang
@pytest.mark.parametrize("with_graph", [False, True])
def test_masks_of_trees_that_are_elsewhere_are_declined(with_graph):
    server = Server(draft=3, topk=2)
    server.backend.init_cuda_graph_state(1, 3)
    graph = Graph(server, "TARGET_VERIFY", 1, 3)
    server.step("EXTEND", {0: 5})
    batch = server.batch("TARGET_VERIFY", {0: 3}, trees(1, 3))
    batch.spec_info.custom_mask = batch.spec_info.custom_mask.clone()
    prepare = "init_forward_metadata_out_graph" if with_graph else "init_forward_metadata"
    with pytest.raises(UnsupportedError, match="not in the backend's verify_mask"):
        getattr(server.backend, prepare)(batch)
    graph.step({0: 3}, trees(1, 3))


@needs_sglang
def test_lengths_that_only_the_gpu_knows_need_the_number_of_tokens_alone():
    server = Server()
    server.step("EXTEND", {0: 15, 1: 3})
    batch = server.batch("EXTEND", {0: 2, 1: 7})
    batch.extend_seq_lens_cpu = None
    server.backend.init_forward_metadata(batch)
    (layer,), (q, k, v) = server.layers, server._new(9)
    expected = server.expected(layer, {0: 2, 1: 7}, (q, k, v), None)
    server.compare(server.backend.forward(q, k, v, layer, batch), expected)


@needs_sglang
def test_padded_rows_are_zeros_and_outputs_are_written_in_place():
    server = Server(dims=(16, 16))
    batch = server.batch("EXTEND", {0: 5, 1: 2})
    server.backend.init_forward_metadata(batch)
    (layer,), (q, k, v) = server.layers, server._new(7)
    batch._attn_output = torch.full((7 + 3, 64), torch.nan)
    padded = torch.cat([q, torch.full((3, 64), torch.nan)])
    out = server.backend.forward(padded, k, v, layer, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    server.compare(out[:7], server.expected(layer, {0: 5, 1: 2}, (q, k, v), None))
    assert (out[7:] == 0).all()


@needs_sglang
def test_layers_that_share_a_cache_write_nothing():
    server = Server()
    server.step("EXTEND", {0: 15})
    batch = server.batch("DECODE", {0: 1})
    server.backend.init_forward_metadata(batch)
    (layer,), (q, k, v) = server.layers, server._new(1)
    first = server.backend.forward(q, k, v, layer, batch)
    before = server.pool.k_buffer[0].clone()
    assert server.backend.forward(q, None, None, layer, batch).equal(first)
    assert server.backend.forward(q, k + 1, v, layer, batch, save_kv_cache=False).equal(first)
    torch.testing.assert_close(server.pool.k_buffer[0], before, equal_nan=True)


@needs_sglang
def test_nothing_runs_without_requests():
    server = Server()
    server.backend.init_forward_metadata(server.batch("IDLE", {}))
    (layer,), (q, k, v) = server.layers, server._new(0)
    assert server.backend.forward(q, k, v, layer, server.batch("IDLE", {})).shape == (0, 4 * 32)


@needs_sglang
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_are_those_of_transformers(graphs):
    pytest.importorskip("transformers")
    from greedy_serving import assert_tokens_are_those_of_transformers, on_sglang

    assert_tokens_are_those_of_transformers(on_sglang(graphs=graphs))


@needs_sglang
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla_backend": True}, "latent"),
        ({"model_config": SimpleNamespace(context_len=96, is_encoder_decoder=True)}, "encoder"),
        ({"is_draft_worker": True}, "--speculative-draft-attention-backend"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory"),
        ({"token_to_kv_pool": SimpleNamespace()}, "KV cache is a SimpleNamespace, not a Pool"),
        ({"spec_algorithm": "NGRAM"}, "drafts of .*NGRAM are verified with masks of other forms"),
        ({"spec_algorithm": "FROZEN_KV_MTP"}, "masks of other forms"),
        ({"context_ranks": 2}, "2 ranks"),
        ({"kv_cache_layout": "hnd"}, "page size, heads, head dim"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_models_are_declined(changes, reason):
    server = Server()
    engine = server.engine._replace(context_ranks=changes.pop("context_ranks", 1))
    server.pool.kv_cache_layout = changes.pop("kv_cache_layout", "nhd")
    if "spec_algorithm" in changes:
        changes["spec_algorithm"] = sglang().SpeculativeAlgorithm[changes["spec_algorithm"]]
    with pytest.raises(UnsupportedError, match=reason) as caught:
        type(server.backend)(SimpleNamespace(**vars(server.runner) | changes), engine)
    assert len(caught.value.reasons) == 1
    assert "--attention-backend" in caught.value.suggestion


@needs_sglang
@pytest.mark.parametrize(
    ("layer", "call", "reason"),
    [
        ({"is_cross_attention": True}, {}, "cross-attention"),
        ({"attn_type": "ENCODER_ONLY"}, {}, "attn_type is encoder_only"),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, {}, "attn_type is decoder_bidirectional"),
        ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, {}, "capped by sigmoid"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "ALIBI"),
        ({"xai_temperature_len": 8}, {}, "temperature"),
        ({"use_irope": True}, {}, "chunks"),
        ({}, {"k_rope": torch.zeros(1), "rel_bias": None}, "passes k_rope$"),
        ({}, {"return_lse": True}, "passes return_lse"),
    ],
)
def test_layers_are_declined(layer, call, reason):
    server = Server()
    server.backend.has_chunks = True
    (one,) = server.layers
    for name, value in layer.items():
        setattr(one, name, sglang().AttentionType[value] if name == "attn_type" else value)
    batch = server.batch("DECODE", {0: 1})
    server.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match="layer 0 on SGLang's") as caught:
        server.backend.forward(*server._new(1), one, batch, **call)
    assert re.search(reason, caught.value.reasons[0])
    assert all(x.isnan().all() for x in server.pool.get_kv_buffer(0)), "written before it was declined"


@needs_sglang
@pytest.mark.parametrize("mode", ["DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND", "PREBUILT"])
def test_other_forward_modes_are_declined(mode):
    server = Server()
    with pytest.raises(UnsupportedError, match=f"forward mode {mode}"):
        server.backend.init_forward_metadata(server.batch(mode, {0: 1}))


@needs_sglang
def test_drafts_of_different_lengths_and_graphs_of_prompts_are_declined():
    server = Server(draft=2)
    batch = server.batch("TARGET_VERIFY", {0: 2})
    batch.spec_info.ragged_verify_layout = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="different lengths"):
        server.backend.init_forward_metadata(batch)
    server.backend.init_cuda_graph_state(2, 4)
    with pytest.raises(UnsupportedError, match="--cuda-graph-backend-prefill"):
        server.backend.init_forward_metadata_out_graph(server.batch("EXTEND", {0: 2}), in_capture=True)


@needs_sglang
def test_methods_have_the_signatures_of_sglangs():
    base = sglang().AttentionBackend
    ours = {name for name in vars(PagedAttention) if not name.startswith("_") or name == "__init__"}
    assert ours - set(vars(base)) == {"__init__"}, "SGLang calls no other"
    for name in sorted(ours - {"__init__", "needs_cpu_seq_lens", "verify_mask"}):
        theirs, mine = (inspect.signature(getattr(kind, name)).parameters for kind in (base, PagedAttention))
        assert [(x.name, x.kind, x.default) for x in mine.values()] == [
            (x.name, x.kind, x.default) for x in theirs.values()
        ], name
    assert backend_class(base).needs_cpu_seq_lens is False
    assert base.needs_cpu_seq_lens is True


@needs_sglang
@pytest.mark.parametrize(("drafts", "topk"), [(None, None), (4, 1)])
def test_the_backend_is_made_as_sglang_makes_it(drafts, topk, monkeypatch):
    """Of SGLang's classes and settings, by the names of their modules."""
    of, server = sglang(), Server(draft=drafts or 0)
    parallel = SimpleNamespace(dcp_size=1, attn_cp_size=1)
    modules = {
        "runtime_context": {
            "get_parallel": lambda: parallel,
            "get_spec": lambda: SimpleNamespace(speculative_eagle_topk=topk),
            "max_speculative_num_draft_tokens": lambda: drafts,
        },
        "mem_cache.memory_pool": {"KVWriteLoc": of.KVWriteLoc, "MHATokenToKVPool": server.engine.pool},
        "layers.attention.verify_mask": {"VerifyMask": of.VerifyMask},
        "speculative.eagle_utils": {"TreeMaskMode": of.TreeMaskMode},
        "layers.attention.base_attn_backend": {"AttentionBackend": of.AttentionBackend},
    }
    for name, values in modules.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made = integration._create(server.runner)
    assert isinstance(made, of.AttentionBackend)
    server.backend = made
    server.step("EXTEND", {0: 5, 1: 9})
    server.step("TARGET_VERIFY" if drafts else "DECODE", dict.fromkeys((0, 1), drafts or 1))
    parallel.dcp_size = 2
    with pytest.raises(UnsupportedError, match="spread over 2 ranks"):
        integration._create(server.runner)


@needs_sglang
def test_the_model_runner_and_its_settings_have_what_is_read():
    runner = ast.unparse(definition("srt/model_executor/model_runner.py", "ModelRunner"))
    used = set(re.findall(r"\brunner\.(\w+)", inspect.getsource(sglang_backend)))
    assert {"page_size", "token_to_kv_pool"} < used
    assert {name for name in used if f"self.{name} = " not in runner} <= {"req_to_token_pool", "token_to_kv_pool"}
    pools = (SGLANG / "srt/mem_cache/kv_cache_configurator.py").read_text() + runner
    assert all(re.search(rf"\b{name}\b", pools) for name in ("req_to_token_pool", "token_to_kv_pool"))
    assert "self.req_to_token = " in ast.unparse(definition("srt/mem_cache/memory_pool.py", "ReqToTokenPool"))
    config = (SGLANG / "srt/configs/model_config.py").read_text()
    assert "self.is_encoder_decoder = " in config
    assert "self.context_len" in config
    context = (SGLANG / "srt/runtime_context.py").read_text()
    functions = {node.name for node in source("srt/runtime_context.py").body if isinstance(node, ast.FunctionDef)}
    assert {"get_parallel", "get_spec", "max_speculative_num_draft_tokens"} <= functions
    for name in ("dcp_size", "attn_cp_size"):
        assert re.search(rf"^    (def )?{name}\b", context, re.MULTILINE), name
    assert "TreeMaskMode" in (SGLANG / "srt/speculative/eagle_utils.py").read_text()
    drafts = ast.unparse(definition("srt/speculative/eagle_info.py", "EagleVerifyInput"))
    assert "draft_token_num: int" in drafts
    assert "ragged_verify_layout" in (SGLANG / "srt/speculative/spec_info.py").read_text()


@pytest.fixture
def unregistered():
    register.cache_clear()
    yield
    register.cache_clear()


def test_the_plugin_is_an_entry_point():
    found = re.search(r'"sglang\.srt\.plugins"\]\n(\w+) = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert EntryPoint(found[1], found[2], "sglang.srt.plugins").load() is register


@needs_sglang
def test_sglang_looks_for_plugins_in_this_group():
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in (SGLANG / "srt/plugins/__init__.py").read_text()


@needs_sglang
def test_the_page_names_options_and_variables_that_sglang_has():
    page = (ROOT / "docs" / "sglang.md").read_text()
    options = "".join(path.read_text() for path in (SGLANG / "srt/arg_groups/fields").glob("*.py"))
    for option in set(re.findall(r"[ `(]--([a-z]+[a-z-]*)", page)):
        assert re.search(rf"^    {option.replace('-', '_')}: ", options, re.MULTILINE), option
    variables = (SGLANG / "srt/environ.py").read_text()
    for variable in set(re.findall(r"SGLANG_\w+", page)):
        assert f"    {variable} = " in variables


@pytest.mark.usefixtures("unregistered")
@needs_sglang
def test_registering_adds_a_choice_and_a_factory_once(monkeypatch):
    choices, registry = ModuleType(CHOICES), ModuleType(REGISTRY)
    exec((SGLANG / "srt/arg_groups/choices.py").read_text(), vars(choices))  # noqa: S102 - lists alone
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = compiled(
        "srt/layers/attention/attention_registry.py", "register_attention_backend", **vars(registry)
    )
    monkeypatch.setitem(sys.modules, CHOICES, choices)
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.setattr("importlib.metadata.version", lambda _: VERSION)
    register()
    register.cache_clear()
    register()
    assert choices.ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert registry.ATTENTION_BACKENDS[NAME] is integration._create


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "0.5.230"])
def test_other_versions_are_named_in_a_warning(version, monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    with caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        register()
    (record,) = caplog.records
    assert f"sglang {version} is installed" in record.getMessage()


@pytest.mark.usefixtures("unregistered")
def test_a_failure_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda _: VERSION)
    monkeypatch.setitem(sys.modules, CHOICES, None)  # its import raises
    with caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        register()
    (record,) = caplog.records
    assert "registering it failed: ModuleNotFoundError" in record.getMessage()


@needs_sglang
def test_sglang_registers_the_backend_where_all_of_it_imports(run_python):
    """By its own modules; they need all of its dependencies."""
    code = f"""
import importlib, warnings
warnings.simplefilter("ignore")
try:
    registry = importlib.import_module("{REGISTRY}")
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
except Exception as error:
    print("no", repr(error))
else:
    from cudnn_sdpa.integrations.sglang import NAME, register
    from cudnn_sdpa.integrations.sglang_backend import backend_class
    register()
    print(registry.ATTENTION_BACKENDS[NAME].__module__, issubclass(backend_class(base), base))
"""
    said = run_python(code, fresh=True).stdout.strip().splitlines()[-1]
    if said.startswith("no "):
        pytest.skip(f"SGLang does not import here: {said[3:100]}")
    assert said == "cudnn_sdpa.integrations.sglang True"
