"""Whether all ranks of a group make the same call, asked before the first collective of a kind of calls.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So in the first call of a kind, every rank publishes a record in the group's store, which is apart from the
collectives, and reads the records of the others: the kind of its call, or the error by which the rank refuses it. A
rank that refuses its call does not wait. What all ranks have agreed on is not asked again, except under
`CUDNN_SDPA_DEBUG`. While a CUDA graph is captured nothing is asked.

A kind is what must be equal on all ranks, so all ranks know the same kinds, and count the same rendezvous. The last
rank to leave a rendezvous deletes its records.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.errors import OptionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ResultT = TypeVar("ResultT")

#: First part of the name of a record.
PREFIX = "cudnn_sdpa/context_parallel"

#: Initial and maximum polling interval, in seconds.
POLLS = 0.0001, 0.01

#: Maximum number of kinds that are remembered for each group.
MAX_KINDS = 4096


class _Agreements:
    """What ranks of a group have agreed on.

    Attributes:
        count: Number of rendezvous.
        kinds: Kinds of calls that all ranks have made.
    """

    def __init__(self) -> None:
        self.count = 0
        self.kinds: set[str] = set()

    def remember(self, kind: str) -> None:
        if len(self.kinds) >= MAX_KINDS:  # in the same call on all ranks
            self.kinds.clear()
        self.kinds.add(kind)


class _Rendezvous:
    """The records of all ranks about one call."""

    def __init__(self, store: Store, place: Place, number: int) -> None:
        self.store, self.place = store, place
        self.counter = f"{PREFIX}/{number}"
        self.names = [f"{self.counter}/{rank}" for rank in range(place.ranks)]

    def publish(self, kind: str, error: str = "") -> None:
        self.store.set(self.names[self.place.rank], json.dumps([kind, error]))

    def refuse(self, error: BaseException) -> None:
        """Publishes an error, and leaves."""
        with contextlib.suppress(RuntimeError):  # where the store has ended, the error matters more
            self.publish("", f"{type(error).__name__}: {error}")
        self.leave()

    def records(self, function: str) -> list[list[str]]:
        """The kind or the error of each rank, once all have arrived.

        Raises:
            OptionError: One has not within the group's timeout.
        """
        end, pause = time.monotonic() + seconds_to_wait(self.place), POLLS[0]
        try:
            while not self.store.check(self.names):
                if time.monotonic() > end:
                    missing = [rank for rank, name in enumerate(self.names) if not self.store.check([name])]
                    if missing:
                        raise _no_answer(f"rank {missing[0]} of {self.place.ranks}", function)
                time.sleep(pause)
                pause = min(2 * pause, POLLS[1])
            return [json.loads(text) for text in self.store.multi_get(self.names)]
        except RuntimeError as error:  # the process that has the store has ended
            raise _no_answer("the group's store", function) from error

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self.store.add(self.counter, 1) == self.place.ranks:
                for name in (*self.names, self.counter):
                    self.store.delete_key(name)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreements] = weakref.WeakKeyDictionary()


def in_agreement(place: Place, function: str, summarize: Callable[[], tuple[str, ResultT]]) -> ResultT:
    """What `summarize` gives with the summary of a call, if all ranks give the same summary.

    Args:
        place: The group, and this process's place in it.
        function: The function's name.
        summarize: Checks the call, and gives a text of what must be equal on all ranks, with the result.

    Raises:
        Exception: What `summarize` raises. It is published.
        OptionError: Ranks disagree, or one did not arrive.
    """
    store = _store(place)
    if store is None or is_capturing():
        return summarize()[1]
    agreements = _agreements.setdefault(place.group, _Agreements())
    rendezvous = _Rendezvous(store, place, agreements.count)
    try:
        summary, result = summarize()
        kind = f"{function}; {summary}"
        if kind in agreements.kinds and not value_checks.enabled:
            return result
        rendezvous.publish(kind)
        records = rendezvous.records(function)
    except BaseException as error:  # an interruption, too
        agreements.count += 1
        rendezvous.refuse(error)
        raise
    agreements.count += 1
    rendezvous.leave()
    for rank, record in enumerate(records):
        _check(place, rank, record, kind, function=function)
    agreements.remember(kind)
    return result


def _store(place: Place) -> Store | None:
    """The group's store; None if it has none, as groups of a fake backend, or if no other rank would read it."""
    found = getattr(place.group, "get_group_store", None)
    try:
        return None if found is None or place.ranks == 1 else found()
    except RuntimeError:
        return None


def seconds_to_wait(place: Place) -> float:
    """The timeout of a group: that of its backend, or else of its store, which groups share."""
    for device in getattr(place.group, "_device_types", ()):
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend that has not been made, or has no options
            return float(place.group._get_backend(device).options._timeout.total_seconds())
    store: Any = place.group.get_group_store()
    return float(store.timeout.total_seconds())


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _no_answer(whose: str, function: str) -> OptionError:
    return OptionError(
        "group",
        f"no answer of {whose} about a call of {function}",
        "the same call on all ranks",
        "It has ended, is late by more than the group's timeout, or waits in another call, which ranks have agreed on "
        "before. CUDNN_SDPA_DEBUG=1 on all ranks compares every call.",
    )


def _check(place: Place, rank: int, record: list[str], own: str, *, function: str) -> None:
    """Compares the record of a rank with this rank's.

    Raises:
        OptionError: They differ.
    """
    kind, error = record
    if error:
        raise OptionError("group", f"rank {rank} refused this call of {function}", "no error there", error)
    if kind != own:
        pairs = zip(own.split("; "), kind.split("; "), strict=False)
        differing = ", ".join(f"{ours} here, {theirs} there" for ours, theirs in pairs if ours != theirs)
        raise OptionError(
            "group",
            f"rank {rank} calls {function} otherwise than rank {place.rank}: {differing}",
            "equal shapes, dtypes and options on all ranks",
        )
