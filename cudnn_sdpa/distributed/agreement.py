"""Whether all ranks of a group make the same call, asked before its first collective.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So at the first call of each kind, every rank leaves a note of it in the group's store, which is beside the
collectives, and reads the notes of the others. A rank that refuses its call leaves its error there and waits for
nobody. Calls are counted, in step on all ranks, because each has collectives. Later calls of the same kind ask nothing,
and only leave their number and kind, a message without an answer. So where some ranks make a call of a new kind, and
others repeat one that is agreed and wait in its collectives, the former see it at once.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.errors import OptionError

ResultT = TypeVar("ResultT")

#: What the name of a note begins with.
PREFIX = "cudnn_sdpa/context_parallel"

#: Seconds between two looks at the notes of others: at first, and at most.
POLLS = 0.0005, 0.1


class _Calls:
    """The calls of a group that this rank has made.

    Attributes:
        prefix: What the names of their notes begin with: others for a group of the same name that was made again,
            whose store may be the same.
        count: Their number.
        agreed: Those that all ranks make equally.
    """

    def __init__(self, name: str) -> None:
        _generations[name] += 1
        self.prefix = f"{PREFIX}/{_generations[name]}"
        self.count = 0
        self.agreed: set[Hashable] = set()


_generations: Counter[str] = Counter()
_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


def in_agreement(place: Place, function: str, describe: Callable[[], tuple[str, ResultT]]) -> ResultT:
    """What `describe` gives beside the description of a call, if all ranks describe theirs equally.

    Args:
        place: The group, and this process's place in it.
        function: The function's name, for messages.
        describe: Checks the call, and describes what must be equal on all ranks.

    Raises:
        Exception: What `describe` raises; other ranks that ask about this call are told.
        OptionError: Ranks disagree, or one did not come.
    """
    calls = _calls.get(place.group)
    if calls is None:
        calls = _calls[place.group] = _Calls(str(getattr(place.group, "group_name", "")))
    number, calls.count = calls.count, calls.count + 1
    try:
        description, result = describe()
    except Exception as error:
        _leave(place, calls, number, f"error:{type(error).__name__}: {error}")
        raise
    if description not in calls.agreed:
        _ask(place, calls, number, function, description)
        calls.agreed.add(description)
    else:
        _pass(place, calls, number, description)
    return result


def _store(place: Place) -> Any:
    """The group's store; None if it has none, as groups of a fake backend."""
    found = getattr(place.group, "get_group_store", None)
    try:
        return None if found is None else found()
    except RuntimeError:
        return None


def _leave(place: Place, calls: _Calls, number: int, note: str) -> None:
    store = _store(place)
    if store is not None and place.ranks > 1:
        store.set(f"{calls.prefix}/{number}/{place.rank}", note)


def _pass(place: Place, calls: _Calls, number: int, description: str) -> None:
    """Leaves the number and the kind of an agreed call, in place of the last one: nobody waits for it."""
    store = _store(place)
    if store is not None and place.ranks > 1 and not _is_a_log(store):
        store.set(f"{calls.prefix}/agreed/{place.rank}", f"{number}:{description}")


def _is_a_log(store: Any) -> bool:
    """Whether a store keeps all that was ever written, as one in a file does."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return type(store).__name__ == "FileStore"


def _wait(store: Any, prefix: str, number: int, rank: int) -> str:
    """What a rank says about a call.

    Raises:
        TimeoutError: It has said nothing within the store's timeout.
    """
    name, agreed = f"{prefix}/{number}/{rank}", f"{prefix}/agreed/{rank}"
    end, pause = time.monotonic() + store.timeout.total_seconds(), POLLS[0]
    while not store.check([name]):
        if store.check([agreed]):
            at, _, kind = store.get(agreed).decode().partition(":")
            if int(at) >= number and not store.check([name]):  # it has not asked, and will not
                return f"call:{kind}"
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(pause)
        pause = min(2 * pause, POLLS[1])
    return str(store.get(name).decode())


def _ask(place: Place, calls: _Calls, number: int, function: str, description: str) -> None:
    store = _store(place)
    if store is None or place.ranks == 1:
        return
    _leave(place, calls, number, f"call:{description}")
    others = [rank for rank in range(place.ranks) if rank != place.rank]
    for rank in others:
        try:
            said = _wait(store, calls.prefix, number, rank)
        except (RuntimeError, TimeoutError) as error:
            raise OptionError(
                "group",
                f"no answer of rank {rank} of {place.ranks} about call {number + 1} of {function}",
                "the same call on all ranks",
                "That rank has ended, or is late by more than the group's timeout.",
            ) from error
        kind, _, text = said.partition(":")
        if kind == "error":
            raise OptionError("group", f"rank {rank} refused this call of {function}", "no error there", text)
        if text != description:
            ours, theirs = description.split("; "), text.split("; ")
            differing = [
                f"{mine} here, {other} there" for mine, other in zip(ours, theirs, strict=False) if mine != other
            ]
            raise OptionError(
                "group",
                f"rank {rank} calls {function} otherwise than rank {place.rank}: {', '.join(differing) or text}",
                "equal shapes, dtypes and options on all ranks",
            )
