"""Which of cuDNN's kernels give the same bits in every run, as far as is known."""

from __future__ import annotations

#: Kernels for single queries, by their number, before cuDNN told them apart by whether they cut the keys (STREAM_K).
_SINGLE_QUERIES = 35

#: Their engines on data-center Blackwell cut keys as well, whatever they say, and nobody has looked at the bits.
_UNKNOWN = ("eng3", "eng10")


def is_repeatable(engine: str, knobs: dict[str, int]) -> bool:
    """Whether a kernel that computes one query adds in the same order in every run.

    The kernels that decode share the keys of a query among warps and blocks, whose sums meet in any order: seen on 9.19
    with an H200, where 40 runs of 32 queries on 4,096 keys had two results, which differed in the last bit of one
    element.
    """
    if engine in _UNKNOWN:
        return False
    return not knobs["STREAM_K"] if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") != _SINGLE_QUERIES
