"""Transformers models whose masks are not just causal: chunks, prefixes, images, masks concatenated by the model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from hf_models import MIXED, SMALL, WINDOW, padded, tiny

from cudnn_sdpa.integrations.transformers import register

_SLIDING = {**SMALL, "sliding_window": WINDOW, "layer_types": MIXED}
_PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_IMAGE = 90


@pytest.fixture(autouse=True)
def registered():
    register()


def llama4(**kw):
    layers = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SMALL, **layers, **experts, **kw))


def embedding_gemma(**kw):
    return hf.Gemma3TextModel(hf.Gemma3TextConfig(**_SLIDING, use_bidirectional_attention=True, **kw))


def gemma3(**kw):
    places = {"image_token_index": _IMAGE, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    config = hf.Gemma3Config(text_config=_SLIDING, vision_config=_PATCHES, **places, **kw)
    return hf.Gemma3ForConditionalGeneration(config)


def paligemma(**kw):
    text = {"model_type": "gemma", **SMALL}
    vision = {"model_type": "siglip_vision_model", **_PATCHES, "projection_dim": 64}
    sizes = {"image_token_index": _IMAGE, "projection_dim": 64, "hidden_size": 64}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=vision, **sizes, **kw)
    return hf.PaliGemmaForConditionalGeneration(config)


def t5gemma2(**kw):
    encoder = {"text_config": _SLIDING, "vision_config": _PATCHES}
    return hf.T5Gemma2ForConditionalGeneration(hf.T5Gemma2Config(encoder=encoder, decoder=_SLIDING, **kw))


def assert_near(ours, theirs, where=...):
    torch.testing.assert_close(ours[where], theirs[where], rtol=2e-4, atol=2e-5)


def generated(model, inputs, **options):
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **options}
    out = model.generate(**inputs, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits)


def assert_generates_the_same(make, inputs, **options):
    found, expected = (generated(tiny(make, name), inputs, **options) for name in ("cudnn_sdpa", "eager"))
    assert torch.equal(found[0], expected[0])
    assert_near(found[1], expected[1])


def with_pictures(tokens):
    """Two prompts with an image each, the second one padded on the left."""
    ids = torch.randint(3, 80, (2, 3 + tokens + 6))
    ids[:, 3 : 3 + tokens] = _IMAGE
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (ids == _IMAGE).long()}
    return {**inputs, "pixel_values": torch.randn(2, 3, 16, 16)}


@torch.no_grad()
def test_chunks():
    ids, mask = torch.randint(3, 96, (4, 14)), padded(14)
    ours, theirs = (tiny(llama4, name) for name in ("cudnn_sdpa", "eager"))
    assert_near(ours(ids).logits, theirs(ids).logits)
    assert_near(ours(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits, mask.bool())
    inputs = {"input_ids": ids[:2], "attention_mask": mask[[0, 3]]}
    assert_generates_the_same(llama4, inputs)
    assert_generates_the_same(llama4, inputs, num_beams=2)


@pytest.mark.parametrize("padding", ["none", "ones", "some"])
@torch.no_grad()
def test_a_bidirectional_decoder(padding):
    ids = torch.randint(3, 96, (4, 14))
    mask = {"none": None, "ones": torch.ones(4, 14, dtype=torch.long), "some": padded(14)}[padding]
    found, expected = (
        tiny(embedding_gemma, name)(ids, attention_mask=mask).last_hidden_state for name in ("cudnn_sdpa", "eager")
    )
    assert_near(found, expected, mask.bool() if padding == "some" else ...)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("make", "tokens"), [(gemma3, 4), (paligemma, 16)], ids=["gemma3", "paligemma"])
@torch.no_grad()
def test_bidirectional_image_tokens(make, tokens, cache):
    assert_generates_the_same(make, with_pictures(tokens), cache_implementation=cache)


@torch.no_grad()
def test_text_and_vision_may_have_different_implementations():
    model, inputs = tiny(gemma3, "eager"), with_pictures(4)
    seen = inputs["attention_mask"].bool()
    expected = model(**inputs).logits
    for asked in ({"text_config": "cudnn_sdpa", "vision_config": "sdpa"}, "cudnn_sdpa"):
        model.set_attn_implementation(asked)
        assert model.config.text_config._attn_implementation == "cudnn_sdpa"
        assert_near(model(**inputs).logits, expected, seen)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_model_that_concatenates_masks(cache):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    inputs = {"input_ids": torch.randint(3, 96, (2, 9)), "attention_mask": mask}
    assert_generates_the_same(t5gemma2, inputs, cache_implementation=cache)


@pytest.mark.parametrize("kind", ["bool", "float"])
@torch.no_grad()
def test_custom_4d_masks(kind):
    ids, seen = torch.randint(3, 96, (2, 10)), torch.rand(2, 1, 10, 10).lt(0.6).tril() | torch.eye(10).bool()
    lowest = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ours, theirs = (tiny(llama4, name) for name in ("cudnn_sdpa", "eager"))
    found = ours(ids, attention_mask=seen if kind == "bool" else lowest).logits
    assert_near(found, theirs(ids, attention_mask=lowest).logits)
