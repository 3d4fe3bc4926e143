"""`register`: what it needs, what it changes, and what it refuses."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import DECODERS, tiny
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cudnn_sdpa import DtypeError, LibraryError, OptionError, UnsupportedError, sdpa
from cudnn_sdpa.integrations import forward
from cudnn_sdpa.integrations.transformers import NAME, register


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


def test_importing_it_imports_no_transformers(run_python):
    run_python("""
import sys
import cudnn_sdpa.integrations.transformers
assert "transformers" not in sys.modules
""")


def test_without_transformers_it_says_so(run_python):
    run_python("""
import sys
sys.modules["transformers"] = None
from cudnn_sdpa import LibraryError
from cudnn_sdpa.integrations.transformers import register
try:
    register()
except LibraryError as error:
    assert "transformers is not installed" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError("it registered with what is not there")
""")


def test_an_older_transformers_is_refused(monkeypatch):
    from transformers import masking_utils

    def sdpa_mask(batch_size, cache_position, kv_length, kv_offset=0, **kwargs):
        """The signature of 5.0."""

    monkeypatch.setattr(masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(LibraryError, match=r"\['allow_is_causal_skip', .*'q_length'.*\].*5\.4"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(LibraryError, match="no attention and mask interfaces"):
        register()


def test_registering_twice_changes_nothing():
    method = PreTrainedModel.get_correct_attn_implementation
    register()
    assert PreTrainedModel.get_correct_attn_implementation is method
    assert AttentionInterface()[NAME] is forward.attention
    assert NAME in AttentionMaskInterface().valid_keys()


def test_settings_are_checked():
    with pytest.raises(OptionError, match="inspect_padding"):
        register(inspect_padding=1)


def test_models_with_sinks_are_let_in_here_but_not_on_pytorchs_attention():
    model = tiny(DECODERS["gpt_oss"], "eager")
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    with pytest.raises(ValueError, match="does not support"):
        tiny(DECODERS["gpt_oss"], "sdpa")
    with pytest.raises(ValueError, match="not supported"):
        tiny(DECODERS["gpt_oss"], "cudnn_sdpa_of_another_kind")


def layer(is_causal=True):
    module = torch.nn.Module()
    module.is_causal = is_causal
    return module


@pytest.mark.parametrize("argument", forward.REFUSED)
def test_what_would_be_ignored_is_refused(argument):
    q = torch.randn(1, 2, 4, 8)
    for nothing in (None, False):
        assert forward.attention(layer(), q, q, q, None, **{argument: nothing})[0].shape == (1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=forward.REFUSED[argument].split("(", maxsplit=1)[0]):
        forward.attention(layer(), q, q, q, None, **{argument: torch.zeros(1)})


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("of_layer", [True, False])
def test_without_a_mask_the_layer_says_whether_it_is_causal(of_layer, said, queries):
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 16)
    out, weights = forward.attention(layer(of_layer), q, k, v, None, scaling=0.3, is_causal=said)
    causal = queries > 1 and (of_layer if said is None else said)
    torch.testing.assert_close(out, sdpa(q, k, v, is_causal=causal, scale=0.3).transpose(1, 2))
    assert out.is_contiguous()
    assert weights is None


@pytest.mark.parametrize("kind", ["bool", "float", "bfloat16"])
def test_masks_of_ones_own_are_taken_as_they_are(kind):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    seen = torch.rand(2, 1, 3, 5) < 0.6
    mask = seen if kind == "bool" else torch.where(seen, 0.25, -torch.inf).to(getattr(torch, kind))
    out = forward.attention(layer(), q, k, k, mask)[0]
    torch.testing.assert_close(out, sdpa(q, k, k, attn_mask=seen).transpose(1, 2))


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_a_step_on_a_growing_cache_is_filled_up_so_that_its_plan_serves_the_next_one(kind, monkeypatch):
    seen_by_sdpa = []

    def watched(query, key, value, **options):
        mask = options.get("attn_mask")
        seen_by_sdpa.append((key.shape[2], value.shape[2], key.shape[2] if mask is None else mask.shape[3]))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(forward, "sdpa", watched)
    for keys in (255, 256, 257):
        q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 16)
        seen = torch.rand(2, 1, 1, keys) < 0.6
        mask = {"bool": seen, "float": torch.where(seen, 0.0, -torch.inf), "none": None}[kind]
        out = forward.attention(layer(), q, k, v, mask)[0]
        expected = sdpa(q, k, v, attn_mask=None if kind == "none" else seen)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    assert seen_by_sdpa == [(256,) * 3, (256,) * 3, (512,) * 3]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_masks_of_integers_are_refused(queries, dtype):
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(DtypeError, match=r"attention_mask: got .*attention_mask\.bool\(\)"):
        forward.attention(layer(), q, k, k, torch.ones(2, 1, queries, 5, dtype=dtype))


@pytest.mark.parametrize("strict", [True, False])
def test_a_step_is_exported_for_all_lengths(strict):
    class Step(torch.nn.Module):
        is_causal = True

        def forward(self, q, k):
            return forward.attention(self, q, k, k, None)[0]

    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 10, 8)
    keys = torch.export.Dim("keys", min=2, max=600)
    program = torch.export.export(Step(), (q, k), dynamic_shapes=({}, {2: keys}), strict=strict).module()
    for length in (255, 256, 300):
        k = torch.randn(2, 2, length, 8)
        torch.testing.assert_close(program(q, k), sdpa(q, k, k).transpose(1, 2))


def test_a_query_on_other_tokens_or_with_a_gradient_is_not_filled_up(monkeypatch):
    lengths = []

    def watched(query, key, value, **options):
        lengths.append(key.shape[2])
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(forward, "sdpa", watched)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 7, 8)
    forward.attention(layer(False), q, k, k, None)
    forward.attention(layer(), q, k.clone().requires_grad_(), k, None)
    forward.attention(layer(), q, k, k, None, softcap=3.0)
    assert lengths == [7, 7, 7]
