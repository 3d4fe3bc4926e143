"""Threads that begin together, and what they give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[int], T], count: int, seconds: float = 60.0) -> list[T]:
    """The results of `work(0)` to `work(count - 1)`, each in a thread of its own; raises the first error."""
    gate, results, errors = threading.Barrier(count), dict[int, T](), list[BaseException]()

    def run(number: int) -> None:
        gate.wait()
        try:
            results[number] = work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert len(results) == count, "a thread waits for what nobody gives it"
    return [results[number] for number in range(count)]
