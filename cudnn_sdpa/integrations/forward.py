"""The attention function of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_sdpa.attention.dense import NO_DROPOUT, sdpa
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.varlen import sdpa_varlen
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.integrations import hidden
from cudnn_sdpa.runtime.eager import is_compiling

#: Arguments by which models choose keys, or ask for more than the output, that this attention does not know.
REFUSED = {
    "indices": "the model chooses keys for each query (sparse attention)",
    "block_indices": "the model chooses blocks of keys for each query (sparse attention)",
    "cache": "the keys lie in the paged cache of continuous batching",
    "head_mask": "single heads are masked out",
}
#: Keys of a growing cache are filled up to a multiple of this where a plan of their own would be built for each length.
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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for a layer of transformers: query (B, Hq, Sq, D), key and value (B, Hkv, Skv, D) -> (B, Sq, Hq, Dv).

    A mask is None, for a causal mask aligned top-left if the layer is causal and nothing otherwise, or what `masks`
    makes, or a tensor of booleans or numbers. `s_aux` are sinks.

    Raises:
        UnsupportedError: cuDNN, this GPU or this library has nothing for it, with every reason.
    """
    if others:
        _refuse(others)
    sinks = None if s_aux is None else s_aux.float()
    dropout = dropout or NO_DROPOUT  # the object by which plain calls are known
    if attention_mask is None and position_bias is None:
        causal = query.shape[2] > 1 and _is_causal(module, is_causal)
        out = sdpa(
            *(query, key, value), is_causal=causal, scale=scaling, dropout_p=dropout, softcap=softcap, sinks=sinks
        )
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None and attention_mask.dtype == hidden.DTYPE and position_bias is None:
        return _structured(query, key, value, attention_mask, scaling, dropout, softcap, sinks), None
    causal = False
    if attention_mask is None:
        causal, attention_mask = query.shape[2] > 1 and _is_causal(module, is_causal), position_bias
    elif attention_mask.dtype == hidden.DTYPE:
        attention_mask = hidden.drawn(attention_mask, query, key.shape[2])
    if position_bias is not None and attention_mask is not position_bias:
        attention_mask = _sum(attention_mask, position_bias)
    if query.shape[2] == 1 and not is_compiling() and _is_causal(module, is_causal):
        key, value, attention_mask = _rounded(key, value, attention_mask)
    return _masked(query, key, value, attention_mask, causal, scaling, dropout, softcap, sinks), None


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if mask is not None and mask.is_floating_point() and mask.dtype not in (query.dtype, torch.float32):
        mask = mask.to(query.dtype)
    out = sdpa(
        *(query, key, value),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=sinks,
    )
    return out.transpose(1, 2).contiguous()


def _structured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention under what `hidden` says."""
    found = hidden.structure(mask, query)
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(found, hidden.Packed):
        return _packed(query, key, value, found, scaling, dropout, softcap, sinks)
    left, right, lengths = found
    is_square = lengths is None and queries == keys
    # cuDNN has no kernel for a single query with a soft cap and lengths, nor for dropout with a band that ends last.
    if (softcap is not None and lengths is not None and queries == 1) or (dropout and not is_square):
        seen = hidden.drawn(mask, query, keys)
        return _masked(query, key, value, seen, False, scaling, dropout, softcap, sinks)
    is_full = left == hidden.UNBOUNDED or (queries == 1 and lengths is not None and keys <= left + 1)
    is_bare = is_full and queries == 1 and right == 0  # a single query on the last key sees all of them
    out = sdpa(
        *(query, key, value),
        is_causal=right == 0 and not is_bare,
        causal_alignment=TOP_LEFT if is_square or is_bare else BOTTOM_RIGHT,
        window=None if is_full else (left, right),
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=sinks,
        seq_lens_kv=lengths,
    )
    return out.transpose(1, 2).contiguous()


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: hidden.Packed,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention among tokens that are not padding, packed; the rows of the others are zeros."""
    batch, heads, length, _ = query.shape
    q, k, v = (
        x[:, :, :length].transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]).index_select(0, found.order)
        for x in (query, key, value)
    )
    out = sdpa_varlen(
        *(q, k, v, found.offsets, found.offsets, length, length),
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        softcap=softcap,
        sinks=sinks,
    )
    return out.index_select(0, found.place).view(batch, length, heads, value.shape[3])


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _sum(mask: Tensor, position_bias: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _rounded(key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values filled up with hidden zeros: a cache that grows has a new length in each step."""
    keys = key.shape[2]
    missing = -keys % ROUNDED_TO
    if missing == 0 or mask is None or mask.requires_grad or mask.shape[-1] != keys:
        return key, value, mask
    rest = (0, 0, 0, missing)
    hides = False if mask.dtype == torch.bool else -torch.inf
    return pad(key, rest), pad(value, rest), pad(mask, (0, missing), value=hides)


def _refuse(others: dict[str, Any]) -> None:
    if any(others.get(name) is not None for name in REFUSED):
        reasons = [why for name, why in REFUSED.items() if others.get(name) is not None]
        raise UnsupportedError("cudnn_sdpa in transformers", reasons, 'attn_implementation="eager" for this model')
