"""Attention with tokens before heads, as FlashAttention and xFormers have it, and KV caches of FlashAttention.

A contiguous cache (B, S, Hkv, D) is a cache of B pages of S tokens, so one way serves both of FlashAttention's kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged.append import AppendCall, write_tokens
from cudnn_sdpa.attention.paged.arguments import NHD
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen
from cudnn_sdpa.attention.varlen import same_offsets
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.tensor_checks import check_tensor, shape_of
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError, raise_if_unsupported
from cudnn_sdpa.fused.rotary.rope import rope
from cudnn_sdpa.graph.scalars import is_compiling

#: FlashAttention's names of our arguments.
NAMES = {
    "is_causal": "causal",
    "scale": "softmax_scale",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "sdpa_varlen": "flash_attn_varlen_func",
}

#: FlashAttention's names of the arguments of pages.
NAMES_OF_PAGES = NAMES | {
    "k_pages": "k",
    "v_pages": "v",
    "page_table": "block_table",
    "seq_lens_kv": "cu_seqlens_k",
    "sdpa_paged_varlen": "flash_attn_varlen_func with block_table",
}

#: Of functions without an autograd history, as `missing` takes it.
PRIVATE = (
    "it returns the states that gradients of FlashAttention's own kernels need",
    "the public functions; `cudnn_sdpa.sdpa` with return_lse=True and `sdpa_backward`, or those of `sdpa_varlen`",
)

Result = tuple[Tensor, Tensor | None]
Qkv = tuple[Tensor, Tensor, Tensor]


def options_of(softmax_scale: float | None, causal: bool, window_size: Any, softcap: float) -> dict[str, Any]:
    """Our options, of FlashAttention's. Bounds of a window may be tensors with one number, as its own may."""
    if isinstance(window_size, (tuple, list, Tensor)):
        window_size = tuple(x.item() if isinstance(x, Tensor) else x for x in window_size)
    return {
        "scale": softmax_scale,
        "is_causal": causal,
        "causal_alignment": "bottom_right",
        "window_size": window_size,
        "softcap": softcap if softcap > 0 else None,
    }


def dense(
    qkv: Qkv,
    options: Mapping[str, Any],
    names: Mapping[str, str] = NAMES,
    *,
    alibi_slopes: Tensor | None = None,
    **more: Any,
) -> Result:
    """The output (B, Sq, Hq, Dv) and the LSE (B, Hq, Sq) of q, k, v (B, S, H, D)."""
    _check_ranks(zip("qkv", qkv, (("batch", "sequence", *_HEADS),) * 3, strict=True))
    q, k, v = (x.transpose(1, 2) for x in _padded(qkv))
    if alibi_slopes is not None:
        more["attn_mask"] = _alibi(alibi_slopes, *qkv[:2])
    try:
        found = sdpa(q, k, v, **_scaled(options, qkv), **more)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(names) from None
    out, lse = _pair(found)
    return _unpadded(out.transpose(1, 2), qkv), lse


def packed(
    qkv: Qkv,
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[int, int],
    options: Mapping[str, Any],
    *,
    names: Mapping[str, str] = NAMES,
    **more: Any,
) -> Result:
    """The output (T, Hq, Dv) and the LSE (Hq, T) of packed sequences (T, H, D)."""
    _check_ranks(zip("qkv", qkv, (("tokens", *_HEADS),) * 3, strict=True))
    q, k, v = _padded(qkv)
    if more.get("dropout_p"):
        offsets = offsets[0], same_offsets.of_keys(*offsets)
    try:
        found = sdpa_varlen(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=offsets[0],
            cu_seqlens_kv=offsets[1],
            max_seqlen_q=int(lengths[0]),
            max_seqlen_kv=int(lengths[1]),
            **_scaled(options, qkv),
            **more,
        )
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(names) from None
    out, lse = _pair(found)
    return _unpadded(out, qkv), _by_heads(lse)


def packed_on_pages(qkv: tuple[Tensor, ...], names: Mapping[str, str] = NAMES_OF_PAGES, **options: Any) -> Result:
    """As `packed`, for keys and values in pages (P, page size, Hkv, D)."""
    of_pages = "pages", "page size", *_HEADS
    _check_ranks(zip("qkv", qkv, (("tokens", *_HEADS), of_pages, of_pages), strict=True))
    q, k, v = qkv
    try:
        found = sdpa_paged_varlen(_with_dense_rows(q), k, v, page_layout=NHD, **options)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(names) from None
    out, lse = _pair(found)
    return out, _by_heads(lse)


def _padded(qkv: Qkv) -> Iterable[Tensor]:
    """Tensors with contiguous rows, of head dims that are multiples of 8; not of queries and keys that differ."""
    is_padded = qkv[0].shape[-1] == qkv[1].shape[-1]
    return (pad(x, (0, -x.shape[-1] % 8)) if is_padded and x.shape[-1] % 8 else _with_dense_rows(x) for x in qkv)


def _unpadded(out: Tensor, qkv: Qkv) -> Tensor:
    dim = qkv[2].shape[-1]
    return out if out.shape[-1] == dim else out[..., :dim]


def _scaled(options: Mapping[str, Any], qkv: Qkv) -> dict[str, Any]:
    """Options with the scale of the head dim before it is padded."""
    dim = qkv[0].shape[-1]
    return {**options, "scale": dim**-0.5} if options["scale"] is None and dim % 8 else {**options}


class Rotary(NamedTuple):
    """Rotary embeddings: tables (positions, rotary dim / 2), and where new tokens begin, if not behind the cached."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    begins: Tensor | None

    def check(self, room: int, batch: int, tokens: int) -> None:
        """Checks that the tables have the positions of a cache with this room, as FlashAttention does."""
        for name, table in (("rotary_cos", self.cos), ("rotary_sin", self.sin)):
            _check_ranks([(name, table, ("positions", "rotary dim / 2"))])
            if table.shape[0] < room:
                raise ShapeError(name, shape_of(table), f"as many rows as a sequence has room in the cache, {room}")
        if self.begins is not None:
            _check_ranks([("rotary_seqlens", self.begins, ("batch",))])
            if len(self.begins) != batch:
                raise ShapeError("rotary_seqlens", shape_of(self.begins), f"({batch},), the batch of q")
            if not is_compiling():
                value_checks.check_lengths("rotary_seqlens", self.begins, self.cos.shape[0], tokens)

    def rotate(self, x: Tensor, lengths: Tensor, *, advances: bool) -> Tensor:
        """Tokens (B, S, H, D) at positions that advance, or all at the first one."""
        first = (lengths if self.begins is None else self.begins).unsqueeze(1)
        steps = torch.arange(x.shape[1], device=x.device) * advances
        at = (first + steps).clamp(0, self.cos.shape[0] - 1)  # numbers on the GPU are not checked
        cos, sin = (table[at].float() for table in (self.cos, self.sin))
        return rope(x.transpose(1, 2), None, cos, sin, interleaved=self.interleaved)[0].transpose(1, 2)


class Cache(NamedTuple):
    """A KV cache and new tokens for it, as `flash_attn_with_kvcache` takes them."""

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    page_table: Tensor | None
    table_name: str
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    def pages(self) -> dict[str, Any]:  # no property: Dynamo of PyTorch 2.9 reads none of a tuple that it has made
        k_scale, v_scale = self.scales
        common = {"k_scale": k_scale, "v_scale": v_scale, "page_layout": NHD}
        return {"k_pages": self.k_cache, "v_pages": self.v_cache, **common}

    def check_ranks(self) -> None:
        """Ranks alone: the calls of this library check the rest."""
        new, of_rows = ("batch", "new tokens", *_HEADS), ("pages or batch", "tokens", *_HEADS)
        optional = [("k", self.k, new), ("v", self.v, new), ("cache_batch_idx", self.cache_batch_idx, ("batch",))]
        optional += [(self.table_name, self.page_table, ("batch", "pages"))]
        _check_ranks([("k_cache", self.k_cache, of_rows), ("v_cache", self.v_cache, of_rows)])
        _check_ranks(x for x in optional if x[1] is not None)

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of our arguments."""
        table = "cache_batch_idx" if self.page_table is None else self.table_name
        more = {"k_pages": "k_cache", "v_pages": "v_cache", "page_table": table, "seq_lens_kv": "cache_seqlens"}
        functions = dict.fromkeys(("sdpa_paged", "sdpa_paged_varlen", "a PagedKVCache"), "flash_attn_with_kvcache")
        return NAMES | more | functions | {"k_scale": "k_descale", "v_scale": "v_descale"}

    def lengths(self, batch: int) -> Tensor:
        """The number of keys of each sequence, without the new ones."""
        given = self.cache_seqlens
        if given is None:
            if self.k is not None:
                raise OptionError("cache_seqlens", "None", "the numbers of keys before those of k, as k is given")
            given = (1 if self.page_table is None else self.page_table.shape[1]) * self.k_cache.shape[1]
        if isinstance(given, int):
            return torch.full((batch,), given, dtype=torch.int32, device=self.k_cache.device)
        _check_ranks([("cache_seqlens", given, ("batch",))])
        return given

    def table(self, batch: int) -> Tensor:
        rows, index = self.page_table, self.cache_batch_idx
        if rows is not None and index is not None:
            if self.table_name == "block_table":
                instead = "None: block_table says which pages a sequence has"
                raise OptionError("cache_batch_idx", "a tensor in addition to block_table", instead)
            of_batch: dict[str, Any] = {"dtype": torch.int32, "shape": (batch,), "meaning": "(batch,)"}
            check_tensor("cache_batch_idx", index, self.k_cache, of="k_cache", **of_batch)
            value_checks.check_lengths("cache_batch_idx", index, len(rows) - 1, what="rows of page_table")
            return rows.index_select(0, index)
        if rows is not None:
            return rows
        if index is not None:
            return index.unsqueeze(-1)
        if self.k_cache.shape[0] < batch:
            raise ShapeError("k_cache", f"a batch of {self.k_cache.shape[0]}", f"{batch}, as q has, or more")
        return torch.arange(batch, dtype=torch.int32, device=self.k_cache.device).unsqueeze(-1)

    def check_room(self, lengths: Tensor, table: Tensor) -> None:
        """Room for the new keys, if there are any, before the first one is written or rotated."""
        if self.k is not None and not is_compiling():
            room = table.shape[1] * self.k_cache.shape[1]
            value_checks.check_lengths("cache_seqlens", lengths, room, self.k.shape[1])

    def append(self, lengths: Tensor, table: Tensor, rotary: Rotary | None) -> Tensor:
        """Writes the new keys and values, if there are any; the numbers of keys with them."""
        if self.k is None or self.v is None:
            if self.k is not self.v:
                name, other = ("v", "k") if self.v is None else ("k", "v")
                raise OptionError(name, "None", f"a tensor, as {other} is one")
            return lengths
        k, v = _with_dense_rows(self.k), _with_dense_rows(self.v)
        if rotary is not None:
            k = rotary.rotate(k, lengths, advances=True)
        count = k.shape[1]
        total, new = lengths + count, torch.full_like(lengths, count)
        call = AppendCall(
            k=k.transpose(1, 2),
            v=v.transpose(1, 2),
            slot_mapping=None,
            page_table=table,
            seq_lens_kv=total,
            seq_lens_q=new,
            tokens=count,
            **self.pages(),
        )
        write_tokens(*call)
        return total


def on_cache(
    q: Tensor,
    cache: Cache,
    options: Mapping[str, Any],
    *,
    rotary: Rotary | None,
    num_splits: int,
    return_lse: bool,
    offsets: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Result:
    """Appends new keys and values to a cache and attends to it.

    Queries are (B, S, Hq, D), or packed with their offsets, (T, Hq, D); the LSE is (B, Hq, S) or (Hq, T).
    """
    try:
        return _on_cache(
            q,
            cache,
            options,
            rotary=rotary,
            is_invariant=num_splits == 1,
            return_lse=return_lse,
            offsets=offsets,
            max_seqlen_q=max_seqlen_q,
        )
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(cache.names) from None


def _on_cache(
    q: Tensor,
    cache: Cache,
    options: Mapping[str, Any],
    *,
    rotary: Rotary | None,
    is_invariant: bool,
    return_lse: bool,
    offsets: Tensor | None,
    max_seqlen_q: int | None,
) -> Result:
    _check_ranks([("q", q, ("batch", "new tokens", *_HEADS) if offsets is None else ("tokens", *_HEADS))])
    cache.check_ranks()
    reason = f"head dims are multiples of 8, not {q.shape[-1]}, as a whole cache would be copied to be padded"
    raise_if_unsupported("flash_attn_with_kvcache", {reason: q.shape[-1] % 8 != 0}, "a cache with padded head dims")
    if offsets is not None:
        _check_ranks([("cu_seqlens_q", offsets, ("sequences + 1",))])
        if max_seqlen_q is None:
            expected = "the length of the longest sequence of q, as cu_seqlens_q is given"
            raise OptionError("max_seqlen_q", "None", expected)
    q = _with_dense_rows(q)
    batch = q.shape[0] if offsets is None else offsets.shape[0] - 1
    table, lengths = cache.table(batch), cache.lengths(batch)
    cache.check_room(lengths, table)
    if rotary is not None:
        if cache.k is None or offsets is not None:
            got = "a tensor without k" if cache.k is None else "a tensor in addition to cu_seqlens_q"
            raise OptionError("rotary_cos", got, "None", "Rotate q before the call.")
        rotary.check(table.shape[1] * cache.k_cache.shape[1], batch, max(q.shape[1], cache.k.shape[1]))
        is_local = options["window_size"] not in (None, (-1, -1))
        q = rotary.rotate(q, lengths, advances=options["is_causal"] or is_local)
    total = cache.append(lengths, table, rotary)
    of_keys = {"page_table": table, "seq_lens_kv": total, "return_lse": return_lse, **cache.pages(), **options}
    if offsets is None and not is_invariant:
        out, lse = _pair(sdpa_paged(q.transpose(1, 2), **of_keys))
        return out.transpose(1, 2), lse
    tokens = q.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens if offsets is None else offsets
    found = sdpa_paged_varlen(
        q.flatten(0, 1) if offsets is None else q,
        cu_seqlens_q=ends,
        max_seqlen_q=tokens if max_seqlen_q is None else max_seqlen_q,
        batch_invariant=is_invariant,
        **of_keys,
    )
    out, lse = _pair(found)
    if offsets is None:
        out = out.view(batch, tokens, *out.shape[1:])
        lse = None if lse is None else lse.view(batch, tokens, -1)
    return out, _by_heads(lse)


def rotary_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool, begins: Tensor | None = None) -> Rotary | None:
    """The rotary embedding of `rotary_cos` and `rotary_sin`, which are both there or both not."""
    if cos is None or sin is None:
        if cos is not sin:
            name = "rotary_sin" if sin is None else "rotary_cos"
            raise OptionError(name, "None", "a tensor, as the other of rotary_cos and rotary_sin is one")
        return None
    return Rotary(cos, sin, interleaved, begins)


def unbound(name: str, packed: Tensor, dim: int) -> tuple[Tensor, ...]:
    """The parts of packed queries, keys and values, or of keys and values, as views."""
    parts = 3 if name == "qkv" else 2
    if packed.dim() != dim + 3 or packed.shape[dim] != parts:
        sizes = ("batch, sequence" if dim == 2 else "tokens", f"{parts}, heads, head dim")
        raise ShapeError(name, shape_of(packed), f"({', '.join(sizes)})")
    return packed.unbind(dim)


def _pair(found: Tensor | tuple[Tensor, Tensor]) -> Result:
    return found if isinstance(found, tuple) else (found, None)


def _by_heads(lse: Tensor | None) -> Tensor | None:
    """An LSE with heads before tokens."""
    return None if lse is None else lse.transpose(-1, -2).contiguous()


def _alibi(slopes: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias (1 or B, Hq, Sq, Skv) of slopes, in float32."""
    if slopes.shape not in ((q.shape[2],), (q.shape[0], q.shape[2])):
        raise ShapeError("alibi_slopes", shape_of(slopes), f"({q.shape[2]},) or ({q.shape[0]}, {q.shape[2]})")
    columns = torch.arange(k.shape[1], device=q.device)
    diagonal = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + (k.shape[1] - q.shape[1])
    return -slopes.float().view(-1, q.shape[2], 1, 1) * (diagonal - columns).abs()


_HEADS = "heads", "head dim"


def _check_ranks(given: Iterable[tuple[str, object, Sequence[str]]]) -> None:
    for name, x, shape in given:
        if not isinstance(x, Tensor):
            raise OptionError(name, type(x).__name__, "a torch.Tensor")
        if x.dim() != len(shape):
            raise ShapeError(name, shape_of(x), f"rank {len(shape)}: ({', '.join(shape)})")


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
