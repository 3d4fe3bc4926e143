"""How calls of attention may be divided among ranks: see `engine.sharding`.

Ranks may share the batch; heads, whole groups of query heads with their key head; and queries, where nothing depends
on a query's position. Attention to keys that ranks share needs communication: that is context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor

from cudnn_sdpa.attention.arguments import DENSE_AXES
from cudnn_sdpa.attention.mask import UNBOUNDED
from cudnn_sdpa.attention.varlen.arguments import PACKED_AXES
from cudnn_sdpa.engine.sharding import MAX, ShardingStrategy

#: The arguments that compare positions, or count queries from the first; windows are, too.
OF_POSITIONS = ("is_causal", "alibi", "seq_lens_q")

_ALIBI = "ALiBi's slopes depend on a head's number among all heads"
_KEYS = "each query needs all keys, and each rank has a part of them"
_CONTEXT_PARALLEL = "cudnn_sdpa.distributed.context_parallel"
_TOKENS = "the sequences span ranks, and each query needs all keys of its sequence"

_PAGED_BATCH = {"q": 0, "page_table": 0, "page_table_v": 0, "seq_lens_q": 0, "seq_lens_kv": 0}
_ONE_KEY_HEAD = "query heads share keys, and their groups would be others among a part of them"


def dense(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa` and of the forward pass in FP8."""
    alibi = _ALIBI if arguments.get("alibi") else ""
    return [
        ShardingStrategy("the batch", DENSE_AXES.entries, (0, 0)),
        *_of_heads(arguments, DENSE_AXES.heads, refused=alibi),
        ShardingStrategy("queries", {"q": 2, "attn_mask": -2}, (2, 2), refused=_depends_on_positions(arguments)),
        ShardingStrategy("keys", {"k": 2, "v": 2, "q": 2}, (2, 2), refused=_KEYS, alternative=_CONTEXT_PARALLEL),
        ShardingStrategy(
            "keys", {"k": 2, "v": 2, "attn_mask": -1}, (2, 2), refused=_KEYS, alternative=_CONTEXT_PARALLEL
        ),
    ]


def kernels(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `kernels.attention`."""
    return [
        ShardingStrategy("the batch", {"q": 0, "k": 0, "v": 0, "mask": -4}, (0, 0)),
        *_of_heads(arguments, {"q": 1, "mask": -3}),
        ShardingStrategy("queries", {"q": 2, "mask": -2}, (2, 2), refused=_depends_on_positions(arguments)),
        ShardingStrategy("keys", {"k": 2, "v": 2, "q": 2}, (2, 2), refused=_KEYS),
        ShardingStrategy("keys", {"k": 2, "v": 2, "mask": -1}, (2, 2), refused=_KEYS),
    ]


def varlen(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa_varlen`."""
    tokens = {"q": 0, "k": 0, "v": 0}
    return [
        *_of_heads(arguments, PACKED_AXES.heads),
        ShardingStrategy("tokens", tokens, (0, 0), refused=_TOKENS, alternative=f"{_CONTEXT_PARALLEL}_varlen"),
    ]


def paged(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa_paged`: each rank has all pages, or its heads of all pages."""
    heads = _of_heads(arguments, DENSE_AXES.heads, kv=_pages_of_heads(arguments))
    return [ShardingStrategy("the batch", _PAGED_BATCH, (0, 0)), *heads]


def paged_varlen(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa_paged_varlen`: each rank has its heads of all pages."""
    return [
        *_of_heads(arguments, PACKED_AXES.heads, kv=_pages_of_heads(arguments)),
        ShardingStrategy("tokens", {"q": 0, "tree_mask": 0}, (0, 0), refused=_TOKENS),
    ]


def _pages_of_heads(arguments: Mapping[str, object]) -> dict[str, int]:
    """The dimension of key heads in pages and in their scales, which may be those of heads."""
    dim = 1 if arguments.get("page_layout") == "HND" else 2
    return {"k_pages": dim, "v_pages": dim, "k_scale": -1, "v_scale": -1}


def fp8(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa_fp8`, whose amax is the largest of all ranks'; with pages, those of `sdpa_paged`."""
    ways = dense(arguments)
    if arguments.get("page_table") is not None:
        ways = [way._replace(inputs=_PAGED_BATCH) if way.name == "the batch" else way for way in ways]
        ways = [way for way in ways if way.name != "keys"]
    return [way._replace(results=(way.result(0), MAX, MAX, way.result(0))) for way in ways]


def fp8_backward(_: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `sdpa_fp8_backward`: gradients in FP8 cannot be summed, so all of them are divided."""
    batch = {**DENSE_AXES.entries, "grad_out": 0, "out": 0, "lse": 0}
    heads = {"grad_out": 1, "q": 1, "k": 1, "v": 1, "out": 1, "lse": 1}
    return [
        ShardingStrategy("the batch", batch, (0, 0, 0, MAX, MAX, MAX, MAX)),
        ShardingStrategy("heads", heads, (1, 1, 1, MAX, MAX, MAX, MAX), divisible=("k",)),
    ]


def fp8_attention(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
    """The strategies of `fp8_attention`: each rank has the scales of its own part."""
    return [way for way in dense(arguments) if way.name in ("the batch", "heads", "keys")]


def _of_heads(
    arguments: Mapping[str, object],
    of_q: Mapping[str, int],
    *,
    kv: Mapping[str, int] = DENSE_AXES.heads_kv,
    refused: str = "",
) -> list[ShardingStrategy]:
    """The strategies along heads: of queries and keys, or of the queries alone where they have one key head."""
    (name, dim), *_ = kv.items()
    k = arguments.get(name)
    has_one = isinstance(k, Tensor) and k.dim() > dim and k.shape[dim] == 1
    why = refused or ("" if has_one else _ONE_KEY_HEAD)
    return [
        ShardingStrategy("heads", {"q": of_q["q"], **kv, **of_q}, (1, 1), divisible=(name,), refused=refused),
        ShardingStrategy("query heads", of_q, (1, 1), non_empty=("q",), refused=why),
    ]


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
