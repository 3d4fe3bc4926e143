"""Errors within a model name the layer, what of the model causes them, and what works."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import DECODERS, SMALL, tiny

import cudnn_sdpa
from cudnn_sdpa import DtypeError, ShapeError, UnsupportedError
from cudnn_sdpa.integrations.transformers import NAME, register

IDS = torch.arange(3, 11)[None]


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    register()
    with cudnn_sdpa.cpu_checks("h200"):
        yield


def test_a_model_in_float32_is_told_how_to_be_loaded_and_what_works_does():
    model = tiny(DECODERS["llama"], NAME)
    with pytest.raises(DtypeError) as caught:
        model(IDS)
    text = str(caught.value)
    assert text.startswith("LlamaAttention of layer 0 of a llama model: query: got float32; expected float16 or")
    assert "The model's dtype is float32: load it with dtype=torch.bfloat16" in text
    assert 'set_attn_implementation("sdpa")' in text
    assert "query.to(" not in text
    assert "kernels.attention" not in text
    assert text.count("CPU tensors are checked for h200") == 1
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS).logits.float()
    assert isinstance(caught.value.__cause__, DtypeError)
    with cudnn_sdpa.fallback("torch"):
        found = model(IDS).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(IDS).logits, found, rtol=1e-4, atol=1e-4)
    assert (expected - found).norm() < 0.1 * found.norm()


def test_a_layer_of_two_dtypes_names_both():
    model = tiny(DECODERS["llama"], NAME).bfloat16()
    values = model.model.layers[1].self_attn.v_proj
    values.register_forward_hook(lambda *made: made[-1].float())  # as adapters in float32 do
    with pytest.raises(DtypeError, match=r"of layer 1 .*: value: got float32.* are bfloat16, its queries bfloat16"):
        model(IDS)


def test_a_head_dim_of_the_config(monkeypatch):
    monkeypatch.setitem(SMALL, "head_dim", 20)
    with pytest.raises(
        ShapeError, match=r"LlamaAttention .* head dim 20.* The head dim is the config's head_dim, or"
    ) as it:
        tiny(DECODERS["llama"], NAME).bfloat16()(IDS)
    assert "functional.pad" not in str(it.value)


def test_what_no_kernel_supports_keeps_its_reasons():
    model = tiny(DECODERS["gemma2"], NAME).bfloat16()
    with pytest.raises(UnsupportedError) as caught:
        model(IDS, output_attentions=True)
    assert caught.value.what == "Gemma2Attention of layer 0 of a gemma2 model: cudnn_sdpa in transformers"
    assert caught.value.reasons == caught.value.__cause__.reasons
    assert caught.value.suggestion.startswith('attn_implementation="eager" for this model. Without cuDNN')


def test_a_mask_of_heads():
    with pytest.raises(UnsupportedError, match="single heads are masked out"):
        tiny(DECODERS["llama"], NAME).bfloat16()(IDS, head_mask=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("family", "error", "words"),
    [
        ("Falcon", KeyError, NAME),
        ("Deberta", ValueError, "does not support"),
        ("Bloom", ValueError, "does not support"),
    ],
)
def test_models_without_the_attention_interface(family, error, words):
    config = getattr(transformers, f"{family}Config")(hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(error, match=words):
        transformers.AutoModel.from_config(config, attn_implementation=NAME)


def test_a_config_that_asks_for_attention_weights():
    config = tiny(DECODERS["llama"], NAME).config
    with pytest.raises(ValueError, match="output_attentions"):
        config.output_attentions = True


def test_a_module_without_a_config():
    from cudnn_sdpa.integrations.attention import attention

    with pytest.raises(DtypeError, match=r"^Identity: query: got float32"):
        attention(torch.nn.Identity(), *torch.randn(3, 1, 2, 4, 8), None)
