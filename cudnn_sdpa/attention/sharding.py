"""How calls of attention may be divided among ranks: see `engine.sharding`.

Ranks may share the batch; heads, whole groups of query heads with their key head; and queries, where nothing depends
on a query's position. Attention to keys that ranks share needs communication: that is context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor

from cudnn_sdpa.attention.mask import UNBOUNDED
from cudnn_sdpa.engine.sharding import MAX, ShardingStrategy

#: The arguments that compare positions, or count queries from the first; windows are, too.
OF_POSITIONS = ("is_causal", "alibi", "seq_lens_q")

_ALIBI = "ALiBi's slopes depend on a head's number among all heads"
_KEYS = "each query needs all keys, and each rank has a part of them"
_CONTEXT_PARALLEL = "cudnn_sdpa.distributed.context_parallel"
_TOKENS = "the sequences span ranks, and each query needs all keys of its sequence"

_BATCH = {"q": 0, "k": 0, "v": 0, "seq_lens_q": 0, "seq_lens_kv": 0}
_PAGED_BATCH = {"q": 0, "page_table": 0, "page_table_v": 0, "seq_lens_q": 0, "seq_lens_kv": 0}
_HEADS = {"q": 1, "k": 1, "v": 1, "sinks": 0}
_ONE_KEY_HEAD = "query heads share keys, and their groups would be others among a part of them"


def dense(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `sdpa` and of the forward pass in FP8."""
    alibi = _ALIBI if arguments.get("alibi") else ""
    query_heads = alibi or ("" if _heads(arguments.get("k"), 1) == 1 else _ONE_KEY_HEAD)
    return [
        ShardingStrategy("the batch", {**_BATCH, "attn_mask": -4}, (0, 0)),
        ShardingStrategy("heads", {**_HEADS, "attn_mask": -3}, (1, 1), divisible=("k",), refused=alibi),
        ShardingStrategy(
            "query heads", {"q": 1, "sinks": 0, "attn_mask": -3}, (1, 1), non_empty=("q",), refused=query_heads
        ),
        ShardingStrategy("queries", {"q": 2, "attn_mask": -2}, (2, 2), refused=_depends_on_positions(arguments)),
        ShardingStrategy("keys", {"k": 2, "v": 2, "q": 2}, (2, 2), refused=_KEYS, alternative=_CONTEXT_PARALLEL),
        ShardingStrategy(
            "keys", {"k": 2, "v": 2, "attn_mask": -1}, (2, 2), refused=_KEYS, alternative=_CONTEXT_PARALLEL
        ),
    ]


def kernels(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `kernels.attention`."""
    query_heads = "" if _heads(arguments.get("k"), 1) == 1 else _ONE_KEY_HEAD
    return [
        ShardingStrategy("the batch", {"q": 0, "k": 0, "v": 0, "mask": -4}, (0, 0)),
        ShardingStrategy("heads", {"q": 1, "k": 1, "v": 1, "mask": -3}, (1, 1), divisible=("k",)),
        ShardingStrategy("query heads", {"q": 1, "mask": -3}, (1, 1), non_empty=("q",), refused=query_heads),
        ShardingStrategy("queries", {"q": 2, "mask": -2}, (2, 2), refused=_depends_on_positions(arguments)),
        ShardingStrategy("keys", {"k": 2, "v": 2, "q": 2}, (2, 2), refused=_KEYS),
        ShardingStrategy("keys", {"k": 2, "v": 2, "mask": -1}, (2, 2), refused=_KEYS),
    ]


def varlen(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `sdpa_varlen`."""
    query_heads = "" if _heads(arguments.get("k"), 1) == 1 else _ONE_KEY_HEAD
    tokens = {"q": 0, "k": 0, "v": 0}
    return [
        ShardingStrategy("heads", _HEADS, (1, 1), divisible=("k",)),
        ShardingStrategy("query heads", {"q": 1, "sinks": 0}, (1, 1), non_empty=("q",), refused=query_heads),
        ShardingStrategy("tokens", tokens, (0, 0), refused=_TOKENS, alternative=f"{_CONTEXT_PARALLEL}_varlen"),
    ]


def paged(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `sdpa_paged`: each rank has all pages, or its heads of all pages."""
    dim = 1 if arguments.get("page_layout") == "HND" else 2
    query_heads = "" if _heads(arguments.get("k_pages"), dim) == 1 else _ONE_KEY_HEAD
    heads = {"q": 1, "k_pages": dim, "v_pages": dim, "sinks": 0}
    return [
        ShardingStrategy("the batch", _PAGED_BATCH, (0, 0)),
        ShardingStrategy("heads", heads, (1, 1), divisible=("k_pages",)),
        ShardingStrategy("query heads", {"q": 1, "sinks": 0}, (1, 1), non_empty=("q",), refused=query_heads),
    ]


def fp8(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `sdpa_fp8`, whose amax values are the largest of all ranks'; with pages, those of `sdpa_paged`."""
    ways = dense(arguments)
    if arguments.get("page_table") is not None:
        ways = [way._replace(inputs=_PAGED_BATCH) if way.name == "the batch" else way for way in ways]
        ways = [way for way in ways if way.name != "keys"]
    return [way._replace(results=(way.result(0), MAX, MAX, way.result(0))) for way in ways]


def fp8_backward(_: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `sdpa_fp8_backward`: gradients in FP8 cannot be summed, so all of them are divided."""
    batch = {**_BATCH, "grad_out": 0, "out": 0, "lse": 0}
    heads = {"grad_out": 1, "q": 1, "k": 1, "v": 1, "out": 1, "lse": 1}
    return [
        ShardingStrategy("the batch", batch, (0, 0, 0, MAX, MAX, MAX, MAX)),
        ShardingStrategy("heads", heads, (1, 1, 1, MAX, MAX, MAX, MAX), divisible=("k",)),
    ]


def fp8_attention(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The ways of `fp8_attention`: each rank has the scales of its own part."""
    return [way for way in dense(arguments) if way.name in ("the batch", "heads", "keys")]


def _heads(k: object, dim: int) -> int:
    return k.shape[dim] if isinstance(k, Tensor) and k.dim() > dim else 0


def _depends_on_positions(arguments: Mapping[str, object]) -> str:
    """Why queries cannot be divided; empty if they can."""
    window = cast("Iterable[object] | None", arguments.get("window_size"))
    if window is None:
        window = arguments.get("window_left", UNBOUNDED), arguments.get("window_right", UNBOUNDED)
    given = {name: arguments.get(name) for name in OF_POSITIONS}
    named = [name for name, value in given.items() if isinstance(value, Tensor) or value]
    if tuple(window) != (UNBOUNDED, UNBOUNDED):
        named.append("window_size")
    return f"{' and '.join(named)} counts queries from the first of all ranks" if named else ""
