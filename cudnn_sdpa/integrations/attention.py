"""The attention function for Hugging Face Transformers."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.errors import DtypeError, UnsupportedError
from cudnn_sdpa.integrations import mask_encoding
from cudnn_sdpa.integrations.documents import SUGGESTION, Documents, documents

#: Keyword arguments of transformers.
Arguments: TypeAlias = dict[str, Any]


class Options(TypedDict):
    """Options of `sdpa` and `sdpa_varlen`."""

    scale: float | None
    dropout_p: float
    softcap: float | None
    sinks: Tensor | None


#: Arguments that this attention does not support, each with the reason.
REFUSED = {
    "indices": "the model chooses keys for each query (sparse attention)",
    "block_indices": "the model chooses blocks of keys for each query (sparse attention)",
    "cache": "the keys are in the paged cache of continuous batching",
    "head_mask": "single heads are masked out",
    "output_attentions": "attention weights are requested, which no fused kernel stores",
}
#: The alternative to offsets for separating packed sequences.
_BY_POSITIONS = "position_ids that restart, and use_cache=False"

#: Keys of a growing cache are padded to a multiple of this, to avoid an exact-shape plan for each length.
ROUNDED_TO = 256


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    *,
    inspect_positions: bool = True,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention for a layer of transformers: query (B, Hq, Sq, D), key and value (B, Hkv, Skv, D) -> (B, Sq, Hq, Dv).

    A mask is None, which is a causal mask aligned top-left if the layer is causal and no mask otherwise, or a result of
    `masks`, or a boolean or float (additive) tensor. `s_aux` are sinks. If no mask separates packed sequences,
    `position_ids` that restart do; `inspect_positions` allows reading them, which waits for the GPU.

    Raises:
        UnsupportedError: cuDNN, this GPU or this library does not support it, with every reason.
    """
    if others:
        _refuse(others)
    options: Options = {
        "scale": scaling,
        "dropout_p": dropout,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    causal = query.shape[2] > 1 and _is_causal(module, is_causal)
    if others and not _separates_sequences(attention_mask):
        call = _Call(
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            position_bias=position_bias,
            is_causal=_is_causal(module, is_causal),
        )
        packed = _by_arguments(call, others, options, inspect=inspect_positions)
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
        structure = mask_encoding.structure(attention_mask, query)
        if isinstance(structure, mask_encoding.Packed):
            return _packed((query, key, value), structure, options), None
        out = _banded((query, key, value), attention_mask, structure, options)
    else:
        if query.shape[2] == 1 and _grows(module, is_causal, key) and not attention_mask.requires_grad:
            key, value, attention_mask = _padded_with_mask(attention_mask, key, value)
        if not attention_mask.is_floating_point() and attention_mask.dtype != torch.bool:
            hint = "Use attention_mask.bool() if 1 means to attend."
            raise DtypeError("attention_mask", str(attention_mask.dtype), "a boolean or float mask", hint)
        is_half = attention_mask.is_floating_point() and attention_mask.dtype != torch.float32
        mask = attention_mask.to(query.dtype) if is_half else attention_mask
        out = sdpa(query, key, value, attn_mask=mask, is_causal=causal and position_bias is not None, **options)
    return out.transpose(1, 2).contiguous(), None


def _banded(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor, band: mask_encoding.Band, options: Options) -> Tensor:
    query, key, value = qkv
    queries, keys = query.shape[2], key.shape[2]
    left, right, lengths = band
    is_square = lengths is None and queries == keys
    # cuDNN has no kernel for a single query with softcap and lengths, nor for dropout with a bottom-right band.
    is_refused = options["softcap"] is not None and lengths is not None and queries == 1
    if is_refused or (options["dropout_p"] and not is_square):
        return sdpa(query, key, value, attn_mask=mask_encoding.drawn(mask, query, keys), **options)
    is_full = left == mask_encoding.UNBOUNDED or (queries == 1 and keys <= left + 1)
    needs_no_mask = is_full and queries == 1 and right == 0  # a single query at the last key attends to all keys
    if needs_no_mask:
        return sdpa(query, key, value, seq_lens_kv=lengths, **options)
    return sdpa(
        query,
        key,
        value,
        is_causal=right == 0,
        causal_alignment=TOP_LEFT if is_square else BOTTOM_RIGHT,
        window_size=None if is_full else (left, right),
        seq_lens_kv=lengths,
        **options,
    )


def _packed(qkv: tuple[Tensor, Tensor, Tensor], packed: mask_encoding.Packed, options: Options) -> Tensor:
    """Causal attention among the tokens that are not padding, packed; padding rows are zeros."""
    query, _, value = qkv
    batch, heads, length, _ = query.shape
    q, k, v = (_token_major(x, length).index_select(0, packed.order) for x in qkv)
    out: Tensor = sdpa_varlen(
        q,
        k,
        v,
        cu_seqlens_q=packed.offsets,
        cu_seqlens_kv=packed.offsets,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        is_causal=True,
        **options,
    )
    return out.index_select(0, packed.packed_index).view(batch, length, heads, value.shape[3])


def _token_major(x: Tensor, length: int) -> Tensor:
    """The first tokens of all sequences, (B · length, H, D)."""
    batch, heads, _, dim = x.shape
    return x[:, :, :length].transpose(1, 2).reshape(batch * length, heads, dim)


def _separates_sequences(mask: Tensor | None) -> bool:
    return mask is not None and (mask.dtype != mask_encoding.DTYPE or mask_encoding.is_packed(mask))


class _Call(NamedTuple):
    """A layer's arguments if no mask separates packed sequences; the mask is None or a band."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    is_causal: bool


def _by_arguments(call: _Call, others: Arguments, options: Options, *, inspect: bool) -> Tensor | None:
    """Attention within packed sequences that offsets or positions separate; None if there are none."""
    if others.get("cu_seq_lens_q") is not None:
        return _by_offsets(call, others, options)
    positions = others.get("position_ids")
    if positions is None or call.query.shape[2] == 1:
        return None
    packed = documents(positions, call.query, may_read=inspect)
    return None if packed is None else _by_positions(call, packed, options)


def _by_offsets(call: _Call, others: Arguments, options: Options) -> Tensor:
    """Attention within the packed sequences of a batch of one, described by FlashAttention's arguments."""
    is_complete = all(others.get(name) is not None for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"))
    reasons = {
        "cu_seq_lens_q with a sliding window": call.mask is not None or others.get("sliding_window") is not None,
        "cu_seq_lens_q with a position bias": call.position_bias is not None,
        "cu_seq_lens_q in a batch of more than one": call.query.shape[0] != 1,
        "cu_seq_lens_q without cu_seq_lens_k, max_length_q and max_length_k": not is_complete,
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


def _by_positions(call: _Call, packed: Documents, options: Options) -> Tensor:
    """Attention within each document."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, _ = query.shape
    band = None if mask is None else cast(mask_encoding.Band, mask_encoding.structure(mask, query))
    # A static cache whose rows past the queries are empty, and masked by the causal mask.
    is_new_cache = mask is None and call.is_causal and length < key.shape[2]
    reasons = {
        "position_ids that restart, with earlier keys": key.shape[2] != length and not is_new_cache,
        "position_ids that restart, on a static cache": band is not None and band.seq_lens_kv is not None,
        "position_ids that restart, with a position bias": call.position_bias is not None,
    }
    _refuse_packed(reasons, SUGGESTION)
    q, k, v = (_token_major(x, length) for x in (query, key, value))
    causal, window = (call.is_causal, None) if band is None else (band.right == 0, (band.left, band.right))
    out: Tensor = sdpa_varlen(
        q,
        k,
        v,
        cu_seqlens_q=packed.offsets,
        cu_seqlens_kv=packed.offsets,
        max_seqlen_q=packed.max_length,
        max_seqlen_kv=packed.max_length,
        is_causal=causal,
        window_size=window,
        **options,
    )
    return out.view(batch, length, heads, value.shape[3])


def _refuse_packed(reasons: dict[str, bool], suggestion: str) -> None:
    true_reasons = [reason for reason, is_true in reasons.items() if is_true]
    if true_reasons:
        raise UnsupportedError("cudnn_sdpa in transformers", true_reasons, suggestion)


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _with_bias(mask: Tensor | None, position_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask is None:
        return position_bias
    if mask.dtype == mask_encoding.DTYPE:
        mask = mask_encoding.drawn(mask, query, key.shape[2])
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _grows(module: torch.nn.Module, is_causal: bool | None, key: Tensor) -> bool:
    """Whether a single query's keys are a growing cache, whose every length would need an exact-shape plan."""
    if torch.compiler.is_compiling():  # which would guard on the length
        return False
    return key.shape[2] % ROUNDED_TO != 0 and not key.requires_grad and _is_causal(module, is_causal)


def _padded_with_lengths(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values padded with zeros, and their actual sequence lengths, (B,).

    A growing cache has a new length in each step. transformers copies it in each step anyway, to append to it.
    """
    keys = key.shape[2]
    rest = (0, 0, 0, -keys % ROUNDED_TO)
    lengths = torch.full((key.shape[0],), keys, dtype=torch.int32, device=key.device)
    return pad(key, rest), pad(value, rest), lengths


def _padded_with_mask(mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = key.shape[2]
    if mask.shape[-1] != keys:
        return key, value, mask
    missing = -keys % ROUNDED_TO
    masked = -torch.inf if mask.is_floating_point() else False
    return pad(key, (0, 0, 0, missing)), pad(value, (0, 0, 0, missing)), pad(mask, (0, missing), value=masked)


def _refuse(others: Arguments) -> None:
    refused = [name for name in REFUSED if others.get(name) is not None and others[name] is not False]
    if refused:
        reasons = [REFUSED[name] for name in refused]
        raise UnsupportedError("cudnn_sdpa in transformers", reasons, 'attn_implementation="eager" for this model')
