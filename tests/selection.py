"""Which tests run: by hashes of their names, the same in every process and on every machine."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any


def hash_of(*names: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest(), "big")


def is_quick(call: Any) -> bool:
    """Whether a parametrization is not marked `slow`."""
    return all(mark.name != "slow" for mark in call.marks)


def spread(test: str, calls: Sequence[Any], number: int) -> Iterator[Any]:
    """That many of a test's parametrizations, each with as many values as possible that none before it has."""
    left, seen = sorted(calls, key=lambda call: hash_of(test, call.id)), set()
    for _ in range(min(number, len(left))):
        call = max(left, key=lambda call: len(call.indices.items() - seen))
        left = [other for other in left if other is not call]  # == may compare tensors
        seen |= call.indices.items()
        yield call


def is_of_shard(node_id: str, shard: tuple[int, int]) -> bool:
    """Whether a parametrization is of a shard (number from 1, count).

    Those of one test are in all shards: some tests have hundreds of long ones.
    """
    number, count = shard
    return hash_of(node_id) % count == number - 1


def shard_of(text: str) -> tuple[int, int]:
    """Number and count of a shard.

    Raises:
        ArgumentTypeError: It is none.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected NUMBER/COUNT with a number from 1 to the count, such as 1/2"
        )
    return int(number), int(count)
