"""Which of cuDNN's kernels give the same bits in every run, as far as is known."""

from __future__ import annotations

#: Kernels for single queries, by their number, before cuDNN said of each kernel whether it cuts the keys (STREAM_K).
_SINGLE_QUERIES = 35

#: The engines of data-center Blackwell.
_BLACKWELL = ("eng3", "eng10")


def has_only_repeatable(sm: int, queries: int) -> bool:
    """Whether cuDNN has no other forward kernels for so many queries of a sequence, so that determinism costs nothing.

    Its kernels for single queries share the keys of a query among warps and blocks, whose sums meet in any order: seen
    on 9.19 with an H200, where 40 runs of 32 queries on 4,096 keys had two results, which differed in the last bit of
    one element. For more queries only data-center Blackwell has kernels that cut the keys.
    """
    return queries != 1 and sm // 10 != 10


def is_repeatable(engine: str, knobs: dict[str, int], *, single_query: bool) -> bool:
    """Whether a forward kernel adds in the same order in every run.

    Those of data-center Blackwell for single queries cut the keys whatever they say, and nobody has looked at the bits.
    """
    if single_query and engine in _BLACKWELL:
        return False
    return not knobs["STREAM_K"] if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") != _SINGLE_QUERIES
