"""The attention backend for vLLM against vLLM's own classes, and its plugin, also where vLLM is another or missing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from vllm_steps import Layer, backend_of_vllm, config_of, layer_of

import cudnn_sdpa
from cudnn_sdpa import ShapeError, UnsupportedError

#: New tokens and keys before them, by what a step is; the layer has rows and tokens for more.
BATCHES = {
    "decodes": ([20, 5, 33, 0], [1, 1, 1, 1]),
    "prompts": ([0, 0], [9, 40]),
    "chunks and decodes": ([20, 7, 16, 0], [1, 1, 15, 30]),
    "drafts": ([40, 3, 17, 0, 31], [16, 4, 1, 2, 5]),
    "padded rows": ([20, 7], [1, 1]),
    "nothing": ([], []),
}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 6},
    "sinks": {"sinks": torch.linspace(-2, 2, 8)},
    "soft cap": {"logits_soft_cap": 1.5},
    "fp8": {"kv_cache_dtype": "fp8"},
    "all": {
        "sliding_window": 19,
        "sinks": torch.linspace(-1, 3, 8),
        "logits_soft_cap": 2.0,
        "kv_cache_dtype": "fp8_e4m3",
    },
}


@pytest.fixture(scope="module")
def backend():
    """The backend, in place of a test that needs vLLM where it is missing."""
    return backend_of_vllm()


def bases(backend):
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    yield AttentionBackend, backend
    yield AttentionImpl, backend.get_impl_cls()
    yield AttentionMetadataBuilder, backend.get_builder_cls()


def test_classes_have_all_that_vllm_asks_for_under_its_names(backend):
    compared = 0
    for base, ours in bases(backend):
        assert issubclass(ours, base)
        assert not ours.__abstractmethods__
        for name in vars(ours).keys() - {"__module__", "__doc__", "__parameters__", "__orig_bases__", "_of_cache"}:
            if name in (
                "do_kv_cache_update",
                "__static_attributes__",
                "__firstlineno__",
                "__abstractmethods__",
                "_abc_impl",
            ):
                continue
            theirs = getattr(base, name)  # an attribute that vLLM does not know would be one that it renamed
            if callable(theirs):
                names = list(inspect.signature(getattr(ours, name)).parameters)
                assert [x for x in names if x != "sinks"] == list(inspect.signature(theirs).parameters), name
                compared += 1
    assert compared > 15


def test_the_update_of_the_cache_has_the_parameters_of_vllms_own(backend):
    """No base class has it: the text of a backend of vLLM's, which needs its kernels, is read."""
    import vllm

    text = (Path(vllm.__file__).parent / "v1/attention/backends/triton_attn.py").read_text()
    names = re.findall(r"(\w+):", re.search(r"def do_kv_cache_update\(\s*self,(.*?)\)", text, re.DOTALL)[1])
    assert ["self", *names] == list(inspect.signature(backend.get_impl_cls().do_kv_cache_update).parameters)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_values(batch, layout, options):
    layer = Layer(rows=5, tokens=60, max_query_len=40, layout=layout, **OPTIONS[options])
    wanted = layer.fill(*BATCHES[batch])
    out = layer.step(layer.metadata())
    assert out is layer.out
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)


def test_the_layouts_are_all_that_vllm_has(backend):
    from vllm.v1.kv_cache_interface import KVCacheLayout

    assert {x.name for x in KVCacheLayout} == set(LAYOUTS)
    assert backend.supported_kv_cache_layouts() is None, "any"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "settings",
    [
        {"causal": False},
        {"causal": False, "sliding_window": 4},
        {"dims": (16, 24)},
        {"page": 5, "columns": 20},
        {"heads": 4, "heads_kv": 4},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", ["chunks and decodes", "drafts"])
def test_other_layers(batch, settings):
    layer = Layer(rows=5, tokens=60, max_query_len=40, **settings)
    wanted = layer.fill(*BATCHES[batch])
    tolerance = 2e-2 if layer.out.dtype == torch.bfloat16 else 2e-5
    out = layer.step(layer.metadata())
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("backend")
def test_scales_of_each_head():
    layer = Layer(rows=5, tokens=60, max_query_len=40, kv_cache_dtype="fp8")
    layer.layer._k_scale, layer.layer._v_scale = torch.tensor([0.011, 0.05]), torch.tensor([0.03, 0.009])
    wanted = layer.fill(*BATCHES["chunks and decodes"])
    torch.testing.assert_close(layer.step(layer.metadata()).double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("backend")
def test_metadata_of_a_captured_graph_serves_later_batches():
    """vLLM's buffers are all that a step reads; host numbers are bounds."""
    layer = Layer(rows=5, tokens=60, max_query_len=16)
    layer.fill([8] * 5, [1] * 5)
    kept = layer.builder.build_for_cudagraph_capture(layer.batch)
    for past, new in ([[20, 5], [1, 16]], [[3, 0, 33, 10], [0, 9, 1, 16]], [[50], [4]]):
        wanted = layer.fill(past, new)
        torch.testing.assert_close(layer.step(kept).double(), wanted, rtol=2e-5, atol=2e-5)
        layer.builder.update_draft_decode_metadata(kept)


@pytest.mark.usefixtures("backend")
def test_tables_of_another_group_replace_those_of_a_batch():
    layer = Layer(rows=5, tokens=60, max_query_len=40)
    wanted = layer.fill(*BATCHES["drafts"])
    table = layer.batch.block_table_tensor.clone()
    layer.batch.block_table_tensor.fill_(-1)
    builder = layer.builder
    assert builder.supports_update_block_table
    moved = builder.update_block_table(layer.metadata(), table, layer.batch.slot_mapping)
    torch.testing.assert_close(layer.step(moved).double(), wanted, rtol=2e-5, atol=2e-5)


def test_graphs_hold_batches_of_up_to_sixteen_new_tokens(backend):
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(None, None) == 16


@pytest.mark.usefixtures("backend")
def test_keys_without_a_slot_are_padding():
    """Outside of whole graphs, vLLM pads keys but not slots."""
    layer = Layer(rows=5, tokens=60, max_query_len=40)
    past, new = BATCHES["drafts"]
    wanted = layer.fill(past, new)
    layer.batch.slot_mapping = layer.batch.slot_mapping[: sum(new)]
    torch.testing.assert_close(layer.step(layer.metadata()).double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("backend")
def test_a_profiling_run_gets_zeros():
    layer = Layer(rows=2, tokens=8, max_query_len=4)
    layer.fill([3, 4], [4, 4])
    impl = layer.layer.impl
    assert impl.forward(layer.layer, layer.query, None, None, torch.tensor([]), None, layer.out) is layer.out
    assert not layer.out.any()


@pytest.mark.usefixtures("backend")
def test_sinks_are_those_that_are_loaded_after_the_layer_was_made():
    sinks = torch.nn.Parameter(torch.full((8,), torch.nan, dtype=torch.bfloat16), requires_grad=False)
    layer = Layer(rows=2, tokens=8, max_query_len=4, sinks=sinks)
    sinks.copy_(torch.linspace(-2, 2, 8))
    layer.layer.impl.process_weights_after_loading(torch.float32)
    wanted = layer.fill([3, 4], [4, 4])
    assert wanted.isfinite().all()
    torch.testing.assert_close(layer.step(layer.metadata()).double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("backend")
def test_warm_up_makes_the_plans_of_steps():
    """Those of decodes and of prompts, in layers of the same sizes with and without a soft cap."""
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    registry, settings = JitWarmupRegistry(None), {"dims": (64, 64), "dtype": torch.bfloat16, "kv_cache_dtype": "fp8"}
    with registry.activate():
        layers = [Layer(rows=2, tokens=66, max_query_len=66, **settings, logits_soft_cap=cap) for cap in (None, 3.0)]
    with cudnn_sdpa.record_plans(target="h200") as warmed_up:
        for kernel, registrations in registry._registrations.items():
            for arguments, _ in registrations:
                kernel.compile_many(kernel.get_warmup_keys(*arguments))
    with cudnn_sdpa.record_plans(target="h200") as used:
        for layer in layers:
            for new in ([1, 1], [66]):
                layer.fill([0] * len(new), new)
                layer.batch.max_query_len = max(new)
                layer.step(layer.metadata())
    texts = [sorted(json.dumps(plan, sort_keys=True) for plan in x.plans) for x in (warmed_up, used)]
    assert len(texts[1]) >= 4
    assert texts[0] == texts[1]


def test_layers_alike_are_warmed_up_once_and_none_if_it_is_off(backend):
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    layers = {f"layers.{n}": layer_of(8, 2, (16, 16), torch.float32) for n in range(3)}
    for is_on in (True, False):
        config, registry = config_of(**layers), JitWarmupRegistry(None)
        config.kernel_config.enable_jit_warmup = is_on
        with registry.activate():
            backend.get_builder_cls()(None, list(layers), config, torch.device("cpu"))
        keys = [
            key for kernel, ((given, _),) in registry._registrations.items() for key in kernel.get_warmup_keys(*given)
        ]
        assert len(keys) == 2 * is_on


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_are_those_of_transformers(graphs):
    from greedy_serving import assert_tokens_are_those_of_transformers, on_vllm

    assert_tokens_are_those_of_transformers(on_vllm(graphs=graphs))


# What is declined.


def reasons(backend, head_size=128, dtype=torch.bfloat16, cache="auto", block_size=16, capability=(9, 0), **given):
    from vllm.platforms.interface import DeviceCapability

    flags = dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False)
    flags |= {"attn_type": "decoder", "device_capability": DeviceCapability(*capability)}
    return "; ".join(backend.validate_configuration(head_size, dtype, cache, block_size, **flags | given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": torch.float16, "head_size": 72, "block_size": None, "capability": (8, 0)},
        {"cache": None, "head_size": 256, "has_sink": True, "has_sliding_window": True},
        {"cache": "bfloat16", "block_size": 784},
        {"cache": "fp8", "capability": (8, 9), "use_non_causal": True, "use_kv_connector": True},
        {"cache": "fp8_e4m3", "head_size": 80, "use_per_head_quant_scales": True, "use_adaptive_verification": True},
    ],
    ids=str,
)
def test_what_is_served(backend, given):
    assert reasons(backend, **given) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"head_size": 60}, "head dim 60; expected a positive multiple of 8"),
        ({"head_size": 320}, "head dim 320; expected at most 256"),
        ({"head_size": 72, "cache": "fp8"}, "values begin 72 bytes behind keys"),
        ({"dtype": torch.float32}, "dtype is torch.float32; the kernel has torch.float16 and torch.bfloat16"),
        ({"cache": "float16"}, "k_pages: got float16; expected bfloat16"),
        ({"cache": "fp8_e5m2"}, "use --kv-cache-dtype fp8, which is E4M3"),
        ({"cache": "int8_per_token_head"}, "this backend has auto, float16, bfloat16, fp8, fp8_e4m3"),
        ({"capability": (7, 5)}, "it needs compute capability 8.0; this GPU has 7.5"),
        ({"capability": (8, 6), "cache": "fp8"}, "pages in FP8 need compute capability 8.9; this GPU has 8.6"),
        ({"use_mla": True}, "multi-head latent attention has other classes in vLLM"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
    ],
    ids=str,
)
def test_what_is_declined_and_why(backend, given, words):
    assert words in reasons(backend, **given)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("options", "words"),
    [({"alibi_slopes": [0.5] * 8}, "ALiBi"), ({"attn_type": "encoder_decoder"}, "not in a cache of the decoder")],
    ids=str,
)
def test_layers_that_are_declined(options, words):
    with pytest.raises(UnsupportedError, match=words):
        layer_of(8, 2, (16, 16), torch.float32, **options)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("causal", torch.ones(2, dtype=torch.int32), "a causal flag for each request"),
        ("mm_req_doc_ranges", {0: [(0, 4)]}, "mm_req_doc_ranges"),
        ("rswa_prefix_lens", torch.ones(2, dtype=torch.int32), "rswa_prefix_lens"),
        ("dcp_local_seq_lens", torch.ones(2, dtype=torch.int32), "dcp_local_seq_lens"),
    ],
)
def test_batches_that_are_declined(field, value, words):
    layer = Layer(rows=2, tokens=8, max_query_len=4)
    setattr(layer.batch, field, value)
    with pytest.raises(UnsupportedError, match=words):
        layer.metadata()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantization_of_the_output_is_declined(name):
    layer = Layer(rows=2, tokens=8, max_query_len=4)
    layer.fill([3, 4], [4, 4])
    with pytest.raises(UnsupportedError, match=r"in the dtype of the queries[\s\S]*a separate kernel"):
        layer.layer.impl.forward(
            layer.layer,
            layer.query,
            layer.key,
            layer.value,
            layer.kv_cache,
            layer.metadata(),
            layer.out,
            **{name: torch.ones(())},
        )
    assert layer.out.isnan().all()


@pytest.mark.usefixtures("backend")
def test_an_output_of_another_shape_is_refused():
    layer = Layer(rows=2, tokens=8, max_query_len=4)
    layer.fill([3, 4], [4, 4])
    layer.out = layer.out.flatten(1)
    with pytest.raises(ShapeError, match="out"):
        layer.step(layer.metadata())


# The plugin.


def entry_point(repository: Path) -> EntryPoint:
    text = (repository / "pyproject.toml").read_text()
    section = re.search(r'^\[project.entry-points."vllm.general_plugins"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)
    return EntryPoint(section[1], section[2], "vllm.general_plugins")


def test_the_plugin_registers_and_may_do_so_again(backend, repository):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin = entry_point(repository).load()
    plugin()
    plugin.cache_clear()  # as in another process, whose registry has it already
    plugin()
    assert AttentionBackendEnum["CUDNN_SDPA"].get_path() == f"{backend.__module__}.{backend.__qualname__}"


@pytest.mark.usefixtures("backend")
def test_the_plugin_is_found_by_vllm(run_python, tmp_path):
    """In a process of vLLM's, where this package's metadata has the entry point."""
    metadata = tmp_path / "plugin" / "cudnn_sdpa-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: cudnn_sdpa\nVersion: 0\n")
    found = entry_point(Path(cudnn_sdpa.__file__).parent.parent)
    (metadata / "entry_points.txt").write_text(f"[{found.group}]\n{found.name} = {found.value}\n")
    result = run_python(
        """
import sys
sys.path.insert(0, sys.argv[1])
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert "cudnn_sdpa.integrations.vllm_backend" not in sys.modules
print(AttentionBackendEnum["CUDNN_SDPA"].get_class().get_name())
""",
        str(metadata.parent),
        fresh=True,
        VLLM_PLUGINS="cudnn_sdpa",
    )
    assert result.stdout.strip().splitlines()[-1] == "CUDNN_SDPA"


STAND_IN = {
    "0.34.0": (
        "__version__, __version_tuple__ = '0.34.0', (0, 34, 0)",
        ["for vLLM >=0.33,<0.34", "vllm 0.34.0 is installed", "pip install 'vllm>=0.33,<0.34'"],
    ),
    "0.33 without a registry": (
        "__version__, __version_tuple__ = '0.33.9', (0, 33, 9)",
        ["registering it failed: ModuleNotFoundError", "vllm.v1"],
    ),
    "without a version": ("", ["registering it failed: AttributeError"]),
    "broken": ("raise OSError('libcudart.so.13: cannot open')", ["registering it failed: OSError", "libcudart.so.13"]),
}


@pytest.mark.parametrize("which", STAND_IN)
def test_another_vllm_is_named_in_one_warning(run_python, tmp_path, which):
    """A vllm that is a file: none of its versions but one is there to try."""
    source, words = STAND_IN[which]
    (tmp_path / "vllm.py").write_text(source)
    result: subprocess.CompletedProcess[str] = run_python(
        """
import sys
sys.path.insert(0, sys.argv[1])
from cudnn_sdpa.integrations.vllm import register
register()
register()
""",
        str(tmp_path),
    )
    (warning,) = result.stderr.splitlines()
    for part in ("CUDNN_SDPA", *words):
        assert part in warning


def test_importing_the_plugin_imports_nothing_more(run_python):
    run_python(
        """
import sys, cudnn_sdpa
before = set(sys.modules)
import cudnn_sdpa.integrations.vllm
new = {name for name in set(sys.modules) - before if not name.startswith("cudnn_sdpa.integrations")}
assert new <= {"logging"}, new
""",
    )
