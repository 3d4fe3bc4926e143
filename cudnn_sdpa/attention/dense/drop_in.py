"""The drop-in `scaled_dot_product_attention`: PyTorch's own signature and meaning."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from cudnn_sdpa.attention.arguments import check_flag, softmax_of
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA, sdpa
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.autograd_checks import PYTORCHS, refuse_context_parallel
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_present, is_causal_bias, shape_of
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph.scalars import as_bool, is_compiling

_calls = NativeCalls()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by cuDNN: same signature, same meaning.

    Args:
        query: (…, Hq, L, E), of rank 2 or more; dimensions before the heads are batch. Head dims are multiples of 8.
        key: (…, H, S, E), of the query's rank. Batch and heads broadcast.
        value: (…, H, S, Ev).
        attn_mask: Broadcastable to (…, Hq, L, S): boolean, True for keys that take part, or float (additive), or a
            `CausalBias` of `torch.nn.attention.bias`. Not with `is_causal`.
        dropout_p: Dropout probability.
        is_causal: Mask later keys, with the diagonal at the top left.
        scale: Softmax scale; None is 1/sqrt(E).
        enable_gqa: Allow Hq to be a multiple of H, which may differ between key and value.

    Returns:
        (…, Hq, L, Ev), in the query's memory order.

    Raises:
        ArgumentError: An argument is wrong.
        UnsupportedError: cuDNN has no kernel for it.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import scaled_dot_product_attention
        >>> q = k = v = torch.randn(4, 16, 64, dtype=torch.bfloat16)  # (heads, sequence, head dim)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([4, 16, 64])
    """
    given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    is_pytorchs = functional.scaled_dot_product_attention is PYTORCHS
    if is_pytorchs and not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    try:
        if attn_mask is None and _is_plain_call(query, key, value, enable_gqa):
            if not is_pytorchs:
                refuse_context_parallel("sdpa")
            softmax = softmax_of(is_causal, TOP_LEFT, None, scale, dropout_p=dropout_p)
            call = SdpaCall(query, key, value, softmax=softmax)
            return SDPA(call, NativeKey(_calls, given))  # type: ignore[no-any-return]
        query, key, value = lifted(query, key, value, attn_mask)
        q, k, v, mask = drop_in_tensors(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        out: Tensor = sdpa(q, k, v, is_causal=is_causal, scale=scale, attn_mask=mask, dropout_p=dropout_p)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed({"q": "query", "k": "key", "v": "value"}) from None
    rank = query.dim()
    if rank > 4:
        return out.view(*_batch_of(query, key, value), *out.shape[1:])
    for _ in range(rank, 4):
        out = out.squeeze(0)
    return out


def lifted(query: Tensor, key: Tensor, value: Tensor, attn_mask: object) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, expanded along the batch that a mask of a higher rank adds, as PyTorch's scores are."""
    given = query, key, value
    if not all(isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided for x in (*given, attn_mask)):
        return given  # the checks name what is wrong
    assert isinstance(attn_mask, Tensor)
    more = attn_mask.dim() - query.dim()
    if more <= 0 or query.dim() < 2 or is_causal_bias(attn_mask):
        return given
    if not is_compiling():
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_present(name, x)  # there are no views of freed storage
    batch = attn_mask.shape[:more]
    return query.expand(*batch, *query.shape), key.expand(*batch, *key.shape), value.expand(*batch, *value.shape)


def _is_plain_call(query: object, key: object, value: object, enable_gqa: object) -> bool:
    """Whether a call needs no broadcast or reshape and can be passed to `sdpa` unchanged: saves 8 µs."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if forward_ad._current_level >= 0:
        return False
    try:
        shape_q, shape_k, shape_v = query.shape, key.shape, value.shape
    except RuntimeError:  # nested tensors have none
        return False
    return (
        len(shape_q) == len(shape_k) == len(shape_v) == 4
        and type(enable_gqa) is bool
        and shape_q[0] == shape_k[0] == shape_v[0]
        and shape_k[1] == shape_v[1]
        and (enable_gqa is True or shape_q[1] == shape_k[1])
    )


def drop_in_tensors(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, is_causal: object, enable_gqa: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask of the equivalent `sdpa` call."""
    try:
        return _reshaped(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    except RuntimeError:  # there are no views of freed storage
        for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
            if isinstance(tensor, Tensor):
                check_present(name, tensor)
        raise


def _reshaped(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, is_causal: object, enable_gqa: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        check_is_tensor(name, tensor)
        if tensor.dim() < 2 or tensor.dim() != query.dim():
            got = shape_of(tensor)
            got += "" if name == "query" else f" and query {tuple(query.shape)}"
            raise ShapeError(name, got, "rank 2 or more, the same for query, key and value")
    enable_gqa, is_causal = as_bool(enable_gqa), as_bool(is_causal)
    check_flag("enable_gqa", enable_gqa)
    batch = _batch_of(query, key, value)
    heads = {name: tensor.shape[-3] if tensor.dim() > 2 else 1 for name, tensor in named.items()}
    heads_q, heads_kv = heads["query"], max(heads["key"], heads["value"])
    if not enable_gqa:
        heads_q = heads_kv = max(heads_q, heads_kv)
    elif min(heads.values()) > 0 and heads_q % heads["key"] == heads_q % heads["value"] == 0:
        # PyTorch repeats key and value to the heads of the query; here only to the heads that both need.
        heads_kv = heads_kv if heads_kv % min(heads["key"], heads["value"]) == 0 else heads_q
    for name, count in (("query", heads_q), ("key", heads_kv), ("value", heads_kv)):
        is_grouped = enable_gqa and name != "query" and heads[name] > 0 and count % heads[name] == 0
        if heads[name] not in (1, count) and not is_grouped:
            hint = "" if enable_gqa else "Or pass enable_gqa=True."
            raise ShapeError(name, f"{heads[name]} heads", f"1 or {count}, as another of the three has", hint)
    if enable_gqa and 1 < heads["key"] != heads["value"] > 1:
        key, value = (_with_heads(x, heads[name], heads_kv) for x, name in ((key, "key"), (value, "value")))
    q = _to_four(query, batch, heads_q)
    k, v = _to_four(key, batch, heads_kv), _to_four(value, batch, heads_kv)
    full = (*batch, heads_q, query.shape[-2], key.shape[-2])
    return q, k, v, _mask(attn_mask, is_causal, full)


def _mask(attn_mask: object, is_causal: object, full: tuple[int, ...]) -> Tensor | None:
    """The mask with one batch dimension; flattening several may copy. `full` is the shape of the scores."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        raise OptionError("attn_mask", type(attn_mask).__name__, "a torch.Tensor or None")
    if not isinstance(is_causal, bool):
        got = "a tensor" if isinstance(is_causal, Tensor) else reprlib.repr(is_causal)
        raise OptionError("is_causal", got, "True or False")
    if is_causal:
        raise OptionError(
            "is_causal", "True in addition to attn_mask", "one of the two", "Add the causal mask to attn_mask."
        )
    if (
        is_causal_bias(attn_mask)
        or attn_mask.is_nested
        or attn_mask.layout != torch.strided
        or len(full) <= 4
        or attn_mask.dim() <= 3
    ):
        return attn_mask  # `sdpa` checks it
    sizes = zip(reversed(attn_mask.shape), reversed(full), strict=False)
    if attn_mask.dim() > len(full) or any(size not in (1, wanted) for size, wanted in sizes):
        raise ShapeError("attn_mask", shape_of(attn_mask), f"a shape that broadcasts to (…, Hq, L, S) = {full}")
    return attn_mask.expand(*full[:-3], *attn_mask.shape[-3:]).flatten(0, -4)


def _batch_of(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    try:
        shapes = [tensor.shape[:-3] for tensor in (query, key, value)]
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        got = ", ".join(str(tuple(tensor.shape)) for tensor in (key, value))
        raise ShapeError("key", f"shapes {got}", f"batches like query's, shape {tuple(query.shape)}") from None


def _with_heads(tensor: Tensor, heads: int, count: int) -> Tensor:
    """Keys or values with each of their heads repeated to `count` heads."""
    return tensor if heads == count else tensor.repeat_interleave(count // heads, -3)


def _to_four(tensor: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """A tensor of rank 4, expanded along batch and heads; flattening several batch dimensions may copy."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() == 4 and tensor.shape[1] == heads and tensor.shape[:1] == batch:
        return tensor
    expanded = tensor.expand(*(batch or (1,)), heads, -1, -1)
    return expanded.flatten(0, -4) if expanded.dim() > 4 else expanded
