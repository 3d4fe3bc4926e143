"""The attention function for Hugging Face Transformers.

Packed documents that only `position_ids` separate begin where positions do not increase. DeepSpeed's sequence
parallelism and padding-free collators use this, also with a cache, where transformers' own masks do not check
positions. Reading positions waits for the GPU, so they are read once for all layers. Where they cannot be read, a
device assertion checks that there is one document: otherwise documents would silently attend to each other.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.paged.append import write_tokens
from cudnn_sdpa.attention.paged.arguments import NHD
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.varlen import same_offsets
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.errors import ArgumentError, DtypeError, UnsupportedError, raise_if_unsupported
from cudnn_sdpa.graph.scalars import is_true
from cudnn_sdpa.integrations import masks
from cudnn_sdpa.integrations.model_errors import of_a_layer


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
    "cache": "the layer has not written its keys into the paged cache of continuous batching, as it does since 5.24",
    "head_mask": "single heads are masked out",
    "output_attentions": "attention weights are requested, which no fused kernel stores",
}
#: Arguments for every case, named in errors.
SUGGESTION = "use_cache=False, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"

#: Messages of device assertions have at most 255 characters.
_MESSAGE = (
    f"cudnn_sdpa in transformers: position_ids restart, where they may not be read (compiled, captured, or "
    f"inspect_padding=False). Use {SUGGESTION}."
)
#: The alternative to offsets for separating packed sequences.
_BY_POSITIONS = "position_ids that restart, and use_cache=False"

#: Keys of a growing cache are padded to a multiple of this, to avoid an exact-shape plan for each length.
ROUNDED_TO = 256


def attention(module: torch.nn.Module, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """`_attend`; what it cannot do raises in terms of the layer and its model."""
    try:
        return _attend(module, query, *args, **options)
    except (ArgumentError, UnsupportedError) as error:
        if torch.compiler.is_compiling():
            raise
        raise of_a_layer(error, module, query, in_batches="block_table" in options) from error


def _attend(
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
    """
    if others:
        asked = {reason: not (others.get(x) is None or others[x] is False) for x, reason in REFUSED.items()}
        raise_if_unsupported("cudnn_sdpa in transformers", asked, 'attn_implementation="eager" for this model')
    options: Options = {
        "scale": scaling,
        "dropout_p": dropout,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    causal = query.shape[2] > 1 and _is_causal(module, is_causal)
    if others and not _separates_sequences(attention_mask):
        call = _Call((query, key, value), attention_mask, position_bias, _is_causal(module, is_causal))
        if others.get("cu_seq_lens_q") is not None:
            return _by_offsets(call, others, options), None
        packed = (
            None if query.shape[2] == 1 else documents(others.get("position_ids"), query, may_read=inspect_positions)
        )
        if packed is not None:
            return _by_positions(call, packed, options), None
    if position_bias is not None:
        causal = causal and attention_mask is None
        attention_mask = _with_bias(attention_mask, position_bias, query, key)
    if attention_mask is None:
        lengths = None
        if query.shape[2] == 1 and not (dropout or softcap) and _grows(module, is_causal, key):
            key, value, lengths = _padded_with_lengths(key, value)
        out = sdpa(query, key, value, is_causal=causal, seq_lens_kv=lengths, **options)
    elif attention_mask.dtype == masks.DTYPE:
        structure = masks.structure(attention_mask, query)
        if isinstance(structure, masks.Packed):
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


def _banded(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor, band: masks.Band, options: Options) -> Tensor:
    query, key, value = qkv
    queries, keys = query.shape[2], key.shape[2]
    left, right, lengths = band
    is_square = lengths is None and queries == keys
    # cuDNN has no kernel for a single query with softcap and lengths, nor for dropout with a bottom-right band.
    is_refused = options["softcap"] is not None and lengths is not None and queries == 1
    if is_refused or (options["dropout_p"] and not is_square):
        return sdpa(query, key, value, attn_mask=masks.drawn(mask, query, keys), **options)
    is_full = left == masks.UNBOUNDED or (queries == 1 and keys <= left + 1)
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


def _packed(qkv: tuple[Tensor, Tensor, Tensor], packed: masks.Packed, options: Options) -> Tensor:
    """Causal attention among the tokens that are not padding, packed; padding rows are zeros."""
    query, _, value = qkv
    batch, heads, length, _ = query.shape
    rows = [_token_major(x, length).index_select(0, packed.order) for x in qkv]
    offsets, lengths = (packed.offsets, packed.offsets), (length, length)
    out = _on_packed(rows, offsets, lengths, options=options, is_causal=True)
    return out.index_select(0, packed.packed_index).view(batch, length, heads, value.shape[3])


def _on_packed(
    rows: list[Tensor], offsets: tuple[Tensor, Tensor], lengths: tuple[int, int], options: Options, **mask: Any
) -> Tensor:
    """Attention over packed sequences, given the offsets and the greatest lengths of queries and of keys."""
    q, k, v = rows
    out: Tensor = sdpa_varlen(
        q,
        k,
        v,
        cu_seqlens_q=offsets[0],
        cu_seqlens_kv=offsets[1],
        max_seqlen_q=lengths[0],
        max_seqlen_kv=lengths[1],
        **mask,
        **options,
    )
    return out


def _token_major(x: Tensor, length: int) -> Tensor:
    """The first tokens of all sequences, (B · length, H, D)."""
    batch, heads, _, dim = x.shape
    return x[:, :, :length].transpose(1, 2).reshape(batch * length, heads, dim)


def _separates_sequences(mask: Tensor | None) -> bool:
    return mask is not None and (mask.dtype != masks.DTYPE or masks.is_packed(mask))


class _Call(NamedTuple):
    """A layer's arguments if no mask separates packed sequences; the mask is None or a band."""

    qkv: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    position_bias: Tensor | None
    is_causal: bool


def _by_offsets(call: _Call, others: dict[str, Any], options: Options) -> Tensor:
    if others.get("block_table") is not None:
        return _by_block_table(call, others, options)
    is_complete = all(others.get(name) is not None for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"))
    reasons = {
        "cu_seq_lens_q with a position bias": call.position_bias is not None,
        "cu_seq_lens_q in a batch of more than one": call.qkv[0].shape[0] != 1,
        "cu_seq_lens_q without cu_seq_lens_k, max_length_q and max_length_k": not is_complete,
        "cu_seq_lens_q on a static cache": call.mask is not None and call.mask.shape[0] != 0,
    }
    raise_if_unsupported("cudnn_sdpa in transformers", reasons, _BY_POSITIONS)
    rows = [x.transpose(1, 2)[0] for x in call.qkv]
    ends_q, ends_k = others["cu_seq_lens_q"], others["cu_seq_lens_k"]
    if options["dropout_p"]:  # transformers' collators make two tensors
        ends_k = same_offsets.of_keys(ends_q, ends_k)
    of_queries = ends_q.int()
    offsets = of_queries, of_queries if ends_k is ends_q else ends_k.int()
    lengths = int(others["max_length_q"]), int(others["max_length_k"])
    window = _window(call, others)
    return _on_packed(rows, offsets, lengths, options=options, is_causal=call.is_causal, window_size=window)[None]


def _window(call: _Call, others: dict[str, Any]) -> tuple[int, int] | None:
    """The window of a layer that has none in its mask, since continuous batching makes no masks."""
    if call.mask is not None:
        band = cast(masks.Band, masks.structure(call.mask, call.qkv[0]))
        return band.left, band.right
    size = others.get("sliding_window")
    return None if size is None else (size - 1, 0 if call.is_causal else size - 1)


def _by_block_table(call: _Call, others: dict[str, Any], options: Options) -> Tensor:
    """A decode step of continuous batching: a token of each sequence, whose key and value go into their page first.

    Sequences that pad the batch of a CUDA graph have neither a token nor keys.
    """
    reasons = {
        "a block table with a position bias": call.position_bias is not None,
        "a block table with dropout": options["dropout_p"] != 0,
    }
    raise_if_unsupported("cudnn_sdpa in transformers", reasons, "max_blocks_per_request=0, which makes no block tables")
    query, key, value = (x[0].transpose(0, 1).unsqueeze(2) for x in call.qkv)
    pages, table = (others["k_cache"], others["v_cache"]), others["block_table"]
    tokens, lengths = others["cu_seq_lens_q"].diff(), others["cu_seq_lens_k"].diff()
    write_tokens(key, value, *pages, None, table, lengths, tokens, None, None, NHD, 1)
    out = sdpa_paged(
        query,
        *pages,
        table,
        lengths,
        page_layout=NHD,
        window_size=_window(call, others),
        scale=options["scale"],
        softcap=options["softcap"],
        sinks=options["sinks"],
    )
    return out.permute(2, 0, 1, 3)


def _by_positions(call: _Call, packed: Documents, options: Options) -> Tensor:
    (query, key, value), mask = call.qkv, call.mask
    batch, heads, length, _ = query.shape
    band = None if mask is None else cast(masks.Band, masks.structure(mask, query))
    # A static cache whose rows past the queries are empty, and masked by the causal mask.
    is_new_cache = mask is None and call.is_causal and length < key.shape[2]
    reasons = {
        "position_ids that restart, with earlier keys": key.shape[2] != length and not is_new_cache,
        "position_ids that restart, on a static cache": band is not None and band.seq_lens_kv is not None,
        "position_ids that restart, with a position bias": call.position_bias is not None,
    }
    raise_if_unsupported("cudnn_sdpa in transformers", reasons, SUGGESTION)
    rows = [_token_major(x, length) for x in call.qkv]
    causal, window = (call.is_causal, None) if band is None else (band.right == 0, (band.left, band.right))
    offsets, lengths = (packed.offsets, packed.offsets), (packed.max_length, packed.max_length)
    out = _on_packed(rows, offsets, lengths, options=options, is_causal=causal, window_size=window)
    return out.view(batch, length, heads, value.shape[3])


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _with_bias(mask: Tensor | None, position_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask is None:
        return position_bias
    if mask.dtype == masks.DTYPE:
        mask = masks.drawn(mask, query, key.shape[2])
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _grows(module: torch.nn.Module, is_causal: bool | None, key: Tensor) -> bool:
    """A growing cache would need an exact-shape plan for each of its lengths."""
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


class Documents(NamedTuple):
    """Offsets (N + 1,) int32 of the documents of all sequences, packed, and the length of the longest one."""

    offsets: Tensor
    max_length: int


_last = threading.local()  #: the last positions, as a weak reference, with their version and options, and the result


def documents(positions: object, query: Tensor, *, may_read: bool) -> Documents | None:
    """The documents that positions (B or 1, S) separate among queries (B, Hq, S, D); None if there is one per sequence.

    Positions of other shapes have another meaning and are ignored. Reading positions waits for the GPU.
    """
    batch, length = query.shape[0], query.shape[2]
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.is_floating_point():
        return None
    rows = 1 if positions.dim() == 1 else positions.shape[0]
    if not is_true(positions.shape[-1] == length) or not (is_true(rows == 1) or is_true(rows == batch)):
        return None
    if torch.compiler.is_compiling() or not is_plain_memory(positions) or _is_captured(positions):
        _assert_one_document(positions)
        return None
    version = None if positions.is_inference() else positions._version
    state = version, batch, may_read
    last: tuple[weakref.ref[Tensor], object, Documents | None] | None = getattr(_last, "read", None)
    if last is not None and version is not None and last[0]() is positions and last[1] == state:
        return last[2]
    result = None
    if may_read:
        result = _read_documents(positions.expand(batch, length))
    else:
        _assert_one_document(positions)
    _last.read = weakref.ref(positions), state, result
    return result


def _read_documents(positions: Tensor) -> Documents | None:
    """The documents in positions (B, S); waits for the GPU."""
    begins = positions.diff(dim=1) < 1
    if not bool(begins.any()):
        return None
    begins = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    starts = begins.nonzero().flatten().to(torch.int32)
    offsets = torch.cat([starts, starts.new_full((1,), begins.shape[0])])
    return Documents(offsets, int(offsets.diff().max()))


def _assert_one_document(positions: Tensor) -> None:
    torch._assert_async((positions.diff(dim=-1) > 0).all(), _MESSAGE)


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
