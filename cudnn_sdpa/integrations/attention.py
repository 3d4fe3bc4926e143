"""The attention function of transformers."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_sdpa.attention.dense.sdpa import NO_DROPOUT, sdpa
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.errors import DtypeError, UnsupportedError
from cudnn_sdpa.integrations import mask_encoding
from cudnn_sdpa.integrations.documents import SUGGESTION, Documents, documents

#: Arguments by which models choose keys, or ask for more than the output, that this attention does not know.
REFUSED = {
    "indices": "the model chooses keys for each query (sparse attention)",
    "block_indices": "the model chooses blocks of keys for each query (sparse attention)",
    "cache": "the keys lie in the paged cache of continuous batching",
    "head_mask": "single heads are masked out",
    "output_attentions": "the weights are asked for, which no fused kernel keeps",
}
#: The other way to say which tokens belong together, where offsets do not serve.
_BY_POSITIONS = "position_ids that begin anew, and use_cache=False"

#: Keys of a growing cache are padded to a multiple of this, to avoid an exact-shape plan for each length.
ROUNDED_TO = 256


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = NO_DROPOUT,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    *,
    inspect_positions: bool = True,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for a layer of transformers: query (B, Hq, Sq, D), key and value (B, Hkv, Skv, D) -> (B, Sq, Hq, Dv).

    A mask is None, for a causal mask aligned top-left if the layer is causal and no mask otherwise, or what `masks`
    makes, or a boolean or float (additive) tensor. `s_aux` are sinks. Where no mask says which tokens belong together,
    `position_ids` that begin anew do; `inspect_positions` allows a look at them, which waits for the GPU.

    Raises:
        UnsupportedError: cuDNN, this GPU or this library has nothing for it, with every reason.
    """
    if others:
        _refuse(others)
    options: dict[str, Any] = {
        "scale": scaling,
        "dropout_p": dropout or NO_DROPOUT,  # the object by which plain calls are known
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    causal = query.shape[2] > 1 and _is_causal(module, is_causal)
    if others and not _is_packed(attention_mask):
        call = _Call(query, key, value, attention_mask, position_bias, _is_causal(module, is_causal))
        packed = _by_arguments(call, others, options, inspect_positions)
        if packed is not None:
            return packed, None
    if position_bias is not None:
        attention_mask, causal = (
            _with_bias(attention_mask, position_bias, query, key),
            causal and attention_mask is None,
        )
    if attention_mask is None:
        lengths = None
        if query.shape[2] == 1 and not (dropout or softcap) and _grows(module, is_causal, key):
            key, value, lengths = _padded_with_lengths(key, value)
        out = sdpa(query, key, value, is_causal=causal, seq_lens_kv=lengths, **options)
    elif attention_mask.dtype == mask_encoding.DTYPE:
        found = mask_encoding.structure(attention_mask, query)
        if isinstance(found, mask_encoding.Packed):
            return _packed(query, key, value, found, options), None
        out = _banded(query, key, value, attention_mask, found, options)
    else:
        if query.shape[2] == 1 and _grows(module, is_causal, key) and not attention_mask.requires_grad:
            key, value, attention_mask = _padded_with_mask(attention_mask, key, value)
        if not attention_mask.is_floating_point() and attention_mask.dtype != torch.bool:
            hint = "Use attention_mask.bool() if its ones are keys that are seen."
            raise DtypeError("attention_mask", str(attention_mask.dtype), "booleans or a bias in floating point", hint)
        # Another dtype of floating point is converted.
        is_other = attention_mask.is_floating_point() and attention_mask.dtype != torch.float32
        mask = attention_mask.to(query.dtype) if is_other else attention_mask
        out = sdpa(query, key, value, attn_mask=mask, is_causal=causal and position_bias is not None, **options)
    return out.transpose(1, 2).contiguous(), None


def _banded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, found: mask_encoding.Band, options: dict[str, Any]
) -> Tensor:
    """Attention under a band that ends at the last query and the last key."""
    queries, keys = query.shape[2], key.shape[2]
    left, right, lengths = found
    is_square = lengths is None and queries == keys
    # cuDNN has no kernel for a single query with softcap and lengths, nor for dropout with a band that ends last.
    is_lone = options["softcap"] is not None and lengths is not None and queries == 1
    if is_lone or (options["dropout_p"] and not is_square):
        return cast(Tensor, sdpa(query, key, value, attn_mask=mask_encoding.drawn(mask, query, keys), **options))
    is_full = left == mask_encoding.UNBOUNDED or (queries == 1 and keys <= left + 1)
    needs_no_mask = is_full and queries == 1 and right == 0  # a single query on the last key sees all of them
    options = {**options, "seq_lens_kv": lengths, "window_size": None if is_full else (left, right)}
    if not needs_no_mask:
        options |= {"is_causal": right == 0, "causal_alignment": TOP_LEFT if is_square else BOTTOM_RIGHT}
    return cast(Tensor, sdpa(query, key, value, **options))


def _packed(query: Tensor, key: Tensor, value: Tensor, found: mask_encoding.Packed, options: dict[str, Any]) -> Tensor:
    """Causal attention among tokens that are not padding, packed; the rows of the others are zeros."""
    batch, heads, length, _ = query.shape
    q, k, v = (
        x[:, :, :length].transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]).index_select(0, found.order)
        for x in (query, key, value)
    )
    out: Tensor = sdpa_varlen(q, k, v, found.offsets, found.offsets, length, length, is_causal=True, **options)
    return out.index_select(0, found.place).view(batch, length, heads, value.shape[3])


def _is_packed(mask: Tensor | None) -> bool:
    """Whether a mask says already which tokens belong together."""
    return mask is not None and (mask.dtype != mask_encoding.DTYPE or mask_encoding.is_packed(mask))


class _Call(NamedTuple):
    """What a layer attends with, where no mask says which tokens belong together: none does, or a band."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    is_causal: bool


def _by_arguments(call: _Call, others: dict[str, Any], options: dict[str, Any], inspect: bool) -> Tensor | None:
    """Attention among tokens that other arguments than the mask say belong together; None if they say nothing."""
    if others.get("cu_seq_lens_q") is not None:
        return _by_offsets(call, others, options)
    positions = others.get("position_ids")
    if positions is None or call.query.shape[2] == 1:
        return None
    apart = documents(positions, call.query, may_look=inspect)
    return None if apart is None else _by_positions(call, apart, options)


def _by_offsets(call: _Call, others: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Attention among the sequences that lie end to end in a batch of one, as FlashAttention's arguments say it."""
    is_whole = all(others.get(name) is not None for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"))
    reasons = {
        "cu_seq_lens_q with a sliding window": call.mask is not None or others.get("sliding_window") is not None,
        "cu_seq_lens_q with a position bias": call.position_bias is not None,
        "cu_seq_lens_q in a batch of more than one": call.query.shape[0] != 1,
        "cu_seq_lens_q without cu_seq_lens_k, max_length_q and max_length_k": not is_whole,
    }
    _refuse_packed(reasons, _BY_POSITIONS)
    q, k, v = (x.transpose(1, 2)[0] for x in (call.query, call.key, call.value))
    out: Tensor = sdpa_varlen(
        q,
        k,
        v,
        cu_seqlens_q=others["cu_seq_lens_q"].int(),
        cu_seqlens_kv=others["cu_seq_lens_k"].int(),
        max_seqlen_q=int(others["max_length_q"]),
        max_seqlen_kv=int(others["max_length_k"]),
        is_causal=call.is_causal,
        **options,
    )
    return out.unsqueeze(0)


def _by_positions(call: _Call, apart: Documents, options: dict[str, Any]) -> Tensor:
    """Attention of each document to itself."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, _ = query.shape
    band = None if mask is None else cast(mask_encoding.Band, mask_encoding.structure(mask, query))
    is_empty = mask is None and call.is_causal and length < key.shape[2]  # a cache, and nothing sees what lies behind
    reasons = {
        "position_ids that begin anew, with keys from before": key.shape[2] != length and not is_empty,
        "position_ids that begin anew, on a static cache": band is not None and band.seq_lens_kv is not None,
        "position_ids that begin anew, with a position bias": call.position_bias is not None,
    }
    _refuse_packed(reasons, SUGGESTION)
    q, k, v = (
        x[:, :, :length].transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]) for x in (query, key, value)
    )
    causal = call.is_causal
    if band is not None:
        options, causal = {**options, "window_size": (band.left, band.right)}, band.right == 0
    offsets, longest = apart
    out: Tensor = sdpa_varlen(q, k, v, offsets, offsets, longest, longest, is_causal=causal, **options)
    return out.view(batch, length, heads, value.shape[3])


def _refuse_packed(reasons: dict[str, bool], suggestion: str) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UnsupportedError("cudnn_sdpa in transformers", found, suggestion)


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _with_bias(mask: Tensor | None, position_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A bias that the model learns, and -inf where a mask hides keys."""
    if mask is None:
        return position_bias
    if mask.dtype == mask_encoding.DTYPE:
        mask = mask_encoding.drawn(mask, query, key.shape[2])
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _grows(module: torch.nn.Module, is_causal: bool | None, key: Tensor) -> bool:
    """Whether a single query's keys are a cache of a length that a plan of its own would be built for."""
    if torch.compiler.is_compiling():  # and then no guard on the length either
        return False
    return key.shape[2] % ROUNDED_TO != 0 and not key.requires_grad and _is_causal(module, is_causal)


def _padded_with_lengths(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values padded with zeros, and their actual sequence lengths, (B,).

    A cache that grows has a new length in each step. It is copied in each step as it is, to append to it.
    """
    keys = key.shape[2]
    rest = (0, 0, 0, -keys % ROUNDED_TO)
    lengths = torch.full((key.shape[0],), keys, dtype=torch.int32, device=key.device)
    return pad(key, rest), pad(value, rest), lengths


def _padded_with_mask(mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a mask, padded; the mask hides the padding."""
    keys = key.shape[2]
    if mask.shape[-1] != keys:
        return key, value, mask
    missing = -keys % ROUNDED_TO
    hides = -torch.inf if mask.is_floating_point() else False
    return pad(key, (0, 0, 0, missing)), pad(value, (0, 0, 0, missing)), pad(mask, (0, missing), value=hides)


def _refuse(others: dict[str, Any]) -> None:
    asked = [name for name in REFUSED if others.get(name) is not None and others[name] is not False]
    if asked:
        reasons = [REFUSED[name] for name in asked]
        raise UnsupportedError("cudnn_sdpa in transformers", reasons, 'attn_implementation="eager" for this model')
