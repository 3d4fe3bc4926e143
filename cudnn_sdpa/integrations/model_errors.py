"""Errors of attention in the words of who has a model: its layer, its dtype, its config."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from cudnn_sdpa.engine.tensor_checks import dtype_name
from cudnn_sdpa.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError

#: Arguments of this library, by what transformers calls them.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "attn_mask": "attention_mask",
    "scale": "scaling",
    "dropout_p": "attention_dropout",
    "sinks": "s_aux",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_kv": "cu_seq_lens_k",
    "max_seqlen_q": "max_length_q",
    "max_seqlen_kv": "max_length_k",
    "k_pages": "k_cache",
    "v_pages": "v_cache",
    "page_table": "block_table",
}
_WITHOUT_CUDNN = 'Without cuDNN the model runs after model.set_attn_implementation("sdpa")'
_FALLBACK = 'what cuDNN declines within cudnn_sdpa.fallback("torch")'
_CURE = "load it with dtype=torch.bfloat16, or convert it by model.to(torch.bfloat16)"
#: What a hint about tensors, which are not those of who has a model, says about checks of CPU tensors.
_NOTE = re.compile(r"\([^()]*CPU tensors [^()]*\)$")


def of_a_layer(
    error: ArgumentError | UnsupportedError, module: torch.nn.Module, query: Tensor, *, in_batches: bool
) -> ArgumentError | UnsupportedError:
    """The error of a layer with these queries (B, Hq, S, D), with what of the model causes it and what works.

    Continuous batching runs a model `in_batches` in another thread, where the caller's contexts are not in force.
    """
    where, renamed = _place(module), error.renamed(_NAMES)
    instead = f"{_WITHOUT_CUDNN}." if in_batches else f"{_WITHOUT_CUDNN}, and {_FALLBACK}."
    if isinstance(renamed, UnsupportedError):
        works = f"{renamed.suggestion}. {instead}" if renamed.suggestion else instead
        return UnsupportedError(f"{where}: {renamed.what}", renamed.reasons, works)
    cause, hint = _cause(renamed, module, query, in_batches=in_batches), renamed.hint
    if cause:
        note = _NOTE.search(hint)
        hint = "" if note is None else note[0]
    hints = " ".join(filter(None, (cause, hint, instead)))
    return type(renamed)(f"{where}: {renamed.argument}", renamed.got, renamed.expected, hints)


def _place(module: torch.nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    model = getattr(getattr(module, "config", None), "model_type", None)
    place = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    return place if model is None else f"{place} of a {model} model"


def _cause(error: ArgumentError, module: torch.nn.Module, query: Tensor, *, in_batches: bool) -> str:
    """The model's part in an error and what mends it, where that is known."""
    if isinstance(error, DtypeError) and error.argument in ("query", "key", "value"):
        cure = _CURE if in_batches else f"{_CURE}, or call it under torch.autocast"
        weights = {parameter.dtype for parameter in module.parameters()}
        if weights <= {query.dtype} and query.dtype not in (torch.bfloat16, torch.float16):
            return f"The model's dtype is {dtype_name(query.dtype)}: {cure}."
        kinds = " and ".join(sorted(map(dtype_name, weights)))
        return f"The layer's weights are {kinds}, its queries {dtype_name(query.dtype)}: {cure}."
    if isinstance(error, ShapeError) and "head dim" in str(error.got):
        return "The head dim is the config's head_dim, or hidden_size / num_attention_heads."
    return ""
