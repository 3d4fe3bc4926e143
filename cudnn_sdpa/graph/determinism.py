"""cuDNN kernels known to be bitwise deterministic, or known not to be."""

from __future__ import annotations

#: KERNEL_CFG of single-query kernels, for versions without the STREAM_K knob, which shows a split of the keys.
_SINGLE_QUERIES = 35

#: Engines of data-center Blackwell.
_BLACKWELL = ("eng3", "eng10")


def has_only_repeatable(sm: int, queries: int) -> bool:
    """Whether all forward kernels for this many queries are deterministic, so that determinism costs nothing.

    Single-query kernels split the keys of a query among warps and blocks, and add the partial sums in any order: on
    9.19 with an H200, 40 runs of 32 queries on 4,096 keys gave two results that differ in the last bit of one element.
    For more queries only data-center Blackwell has kernels that split the keys.
    """
    return queries != 1 and sm // 10 != 10


def is_repeatable_convolution(engine: str, sm: int, version: int) -> bool:
    """Whether a kernel that cuDNN calls deterministic is so: pytorch#188288, pytorch#188318.

    Engine 5 of 9.23 is not on SM 8.6: seen with 9.23.1, fixed in 9.24 (pytorch#189483).
    """
    return not (engine == "eng5" and sm == 86 and 92300 <= version < 92400)


def is_repeatable(engine: str, knobs: dict[str, int], *, single_query: bool) -> bool:
    """Whether a forward kernel sums in the same order in every run.

    Single-query kernels of data-center Blackwell split the keys whatever their knobs say; their results are untested.
    """
    if single_query and engine in _BLACKWELL:
        return False
    return not knobs["STREAM_K"] if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") != _SINGLE_QUERIES
