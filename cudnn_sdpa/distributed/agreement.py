"""Whether all ranks of a group make the same call, asked before its first collective.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So at the first call of each kind, every rank leaves a note of it in the group's store, which is beside the
collectives, and reads the notes of the others. A rank that refuses its call leaves its error there and waits for
nobody. Calls are counted, in step on all ranks, because each has collectives. Later calls of the same kind ask nothing:
where only some ranks make a call of a new kind, these say so after the group's timeout, and the others' collectives end
with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.errors import OptionError

ResultT = TypeVar("ResultT")

#: What the name of a note begins with.
PREFIX = "cudnn_sdpa/context_parallel"


class _Calls:
    """The calls of a group that this rank has made.

    Attributes:
        count: Their number.
        agreed: Those that all ranks make equally.
    """

    def __init__(self) -> None:
        self.count = 0
        self.agreed: set[Hashable] = set()


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
    calls = _calls.setdefault(place.group, _Calls())
    number, calls.count = calls.count, calls.count + 1
    try:
        description, result = describe()
    except Exception as error:
        _leave(place, number, f"error:{type(error).__name__}: {error}")
        raise
    if description not in calls.agreed:
        _ask(place, number, function, description)
        calls.agreed.add(description)
    return result


def _store(place: Place) -> Any:
    """The group's store; None if it has none, as groups of a fake backend."""
    found = getattr(place.group, "get_group_store", None)
    try:
        return None if found is None else found()
    except RuntimeError:
        return None


def _leave(place: Place, number: int, note: str) -> None:
    store = _store(place)
    if store is not None and place.ranks > 1:
        store.set(f"{PREFIX}/{number}/{place.rank}", note)


def _ask(place: Place, number: int, function: str, description: str) -> None:
    store = _store(place)
    if store is None or place.ranks == 1:
        return
    _leave(place, number, f"call:{description}")
    others = [rank for rank in range(place.ranks) if rank != place.rank]
    for rank in others:
        name = f"{PREFIX}/{number}/{rank}"
        try:
            store.wait([name])
        except RuntimeError as error:
            raise OptionError(
                "group",
                f"no answer of rank {rank} of {place.ranks} about call {number + 1} of {function}",
                "the same call on all ranks",
                "That rank has ended, is late by more than the group's timeout, or makes a call of another kind.",
            ) from error
        kind, _, text = store.get(name).decode().partition(":")
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
