"""Tiny transformers models with random weights, one for each kind of attention."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 6
MIXED = ["sliding_attention", "full_attention"]
DECODERS = {
    "llama": lambda **kw: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **kw)),
    "mistral": lambda **kw: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=WINDOW, **kw)),
    "qwen2": lambda **kw: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED, **kw)
    ),
    "qwen3": lambda **kw: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, **kw)),
    "gemma2": lambda **kw: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **SMALL, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=0.5, query_pre_attn_scalar=4, **kw
        )
    ),
    "gemma3": lambda **kw: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SMALL, sliding_window=WINDOW, layer_types=MIXED, **kw)
    ),
    "gpt_oss": lambda **kw: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **SMALL, sliding_window=WINDOW, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=1, **kw
        )
    ),
}


def tiny(make: Any, implementation: str, **kw: Any) -> Any:
    """A model with fixed weights, in eval mode, with an attention implementation."""
    torch.manual_seed(5)
    model = make(attn_implementation=implementation, **kw)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


_NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_PATCHES: dict[str, Any] = {**_NARROW, "image_size": 32, "patch_size": 8}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PAIR: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **_SPECIAL,
}
ENCODERS = {
    "bert": lambda **kw: hf.BertModel(hf.BertConfig(vocab_size=96, **_NARROW, **kw)),
    "modernbert": lambda **kw: hf.ModernBertModel(
        hf.ModernBertConfig(
            **_NARROW,
            **_SPECIAL,
            vocab_size=96,
            local_attention=8,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
            **kw,
        )
    ),
    "vit": lambda **kw: hf.ViTModel(hf.ViTConfig(**_PATCHES, **kw)),
    "siglip": lambda **kw: hf.SiglipVisionModel(hf.SiglipVisionConfig(**_PATCHES, **kw)),
    "clip": lambda **kw: hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**_NARROW, **_SPECIAL, "vocab_size": 96, "max_position_embeddings": 32},
            vision_config=_PATCHES,
            projection_dim=32,
            **kw,
        )
    ),
}
PAIRS = {
    "bart": lambda **kw: hf.BartForConditionalGeneration(hf.BartConfig(max_position_embeddings=64, **_PAIR, **kw)),
    "t5": lambda **kw: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=96,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
            **kw,
        )
    ),
    "whisper": lambda **kw: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            max_source_positions=20,
            max_target_positions=40,
            num_mel_bins=8,
            begin_suppress_tokens=None,
            suppress_tokens=None,
            **_PAIR,
            **kw,
        )
    ),
}


def padded(tokens: int, device: str = "cpu") -> torch.Tensor:
    """A padding mask of four sequences: left, right, with holes, and none."""
    mask = torch.ones(4, tokens, dtype=torch.long, device=device)
    mask[0, :4] = 0
    mask[1, -5:] = 0
    mask[2, [0, 4, 5, 9]] = 0
    return mask


def inputs_of(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Fresh inputs of an encoder or of a pair."""
    ids = torch.randint(3, 96, (4, 12), device=device)
    pixels = torch.randn(4, 3, 32, 32, device=device, dtype=dtype)
    steps = torch.randint(3, 96, (4, 7), device=device)
    text = {"input_ids": ids, "attention_mask": padded(12, device)}
    if name in ("vit", "siglip"):
        return {"pixel_values": pixels}
    if name == "clip":
        ids.clamp_(max=94)[:, 6] = 95  # the pooled token is not masked
        return {**text, "pixel_values": pixels}
    if name == "whisper":
        return {"input_features": torch.randn(4, 8, 40, device=device, dtype=dtype), "decoder_input_ids": steps}
    return {**text, "decoder_input_ids": steps} if name in PAIRS else text
