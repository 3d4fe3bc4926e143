"""Whether all ranks of a group make the same call, asked before its first collective.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So in each call, every rank leaves a note in the group's store, which is apart from the collectives, and reads
the notes of the others: the number of the call, and its summary. A rank that refuses its call leaves its error there
and does not wait. All ranks count the same calls, because each call has collectives.

A rank has two notes, for even and for odd calls, and writes them again and again. That is enough: no rank is more than
one call ahead, as it has read the notes of all others. While a CUDA graph is captured, a rank leaves its note and does
not read those of others. The graph asks nothing when it runs.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.errors import OptionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ResultT = TypeVar("ResultT")

#: What the name of a note begins with.
PREFIX = "cudnn_sdpa/context_parallel"

#: Seconds between two looks at the notes of others: at first, and at most.
POLLS = 0.0001, 0.01


class _Calls:
    """The calls of a group that this rank has made.

    Attributes:
        prefix: What the names of their notes begin with: others for a group of the same name that was made again,
            whose store may be the same.
        count: Their number.
        written: Names of others' notes that have been in the store, and so can be read without waiting.
    """

    def __init__(self, name: str) -> None:
        _generations[name] += 1
        self.prefix = f"{PREFIX}/{_generations[name]}"
        self.count = 0
        self.written: set[str] = set()

    def name(self, rank: int, number: int) -> str:
        """The name of a rank's note about a call."""
        return f"{self.prefix}/{rank}/{number % 2}"


class _Note(NamedTuple):
    """What a rank says about a call.

    Attributes:
        number: The number of the call.
        error: Why the rank refuses it; empty if it does not.
        summary: What must be equal on all ranks.
    """

    number: int
    error: str
    summary: str

    def text(self) -> str:
        """As the store has it."""
        return f"{self.number}:" + (f"error:{self.error}" if self.error else f"call:{self.summary}")

    @classmethod
    def of(cls, text: str) -> _Note:
        """The note that has this text."""
        number, kind, rest = text.split(":", 2)
        return cls(int(number), rest, "") if kind == "error" else cls(int(number), "", rest)


_generations: Counter[str] = Counter()
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()


def in_agreement(place: Place, function: str, summarize: Callable[[], tuple[str, ResultT]]) -> ResultT:
    """What `summarize` gives with the summary of a call, if all ranks give the same summary.

    Args:
        place: The group, and this process's place in it.
        function: The function's name, for messages.
        summarize: Checks the call, and gives a text of what must be equal on all ranks, with the result.

    Raises:
        Exception: What `summarize` raises; the other ranks are told.
        OptionError: Ranks disagree, or one did not come.
    """
    calls = _calls.get(place.group)
    if calls is None:
        calls = _calls[place.group] = _Calls(str(getattr(place.group, "group_name", "")))
    number, calls.count = calls.count, calls.count + 1
    store = _store(place)
    try:
        summary, result = summarize()
    except Exception as error:
        if store is not None:
            note = _Note(number, f"{type(error).__name__}: {error}", "")
            store.set(calls.name(place.rank, number), note.text())
        raise
    if store is not None:
        note = _Note(number, "", summary)
        store.set(calls.name(place.rank, number), note.text())
        if not is_capturing():
            _compare(store, place, calls, note, function=function)
    return result


def _store(place: Place) -> Store | None:
    """The group's store; None if it has none, as groups of a fake backend, or if no other rank would read it."""
    found = getattr(place.group, "get_group_store", None)
    try:
        return None if found is None or place.ranks == 1 else found()
    except RuntimeError:
        return None


def seconds_to_wait(store: Store) -> float:
    """The timeout of a group's store, which is that of its group."""
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return timeout.total_seconds()


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _compare(store: Store, place: Place, calls: _Calls, own: _Note, function: str) -> None:
    """Waits for the notes of all other ranks about a call.

    Raises:
        OptionError: A note says otherwise than this rank's, or has not come within the store's timeout.
    """
    missing = {calls.name(rank, own.number): rank for rank in range(place.ranks) if rank != place.rank}
    end, pause = time.monotonic() + seconds_to_wait(store), POLLS[0]
    while True:
        try:
            notes = _notes(store, calls, list(missing))
        except RuntimeError as error:  # the process that has the store has ended
            raise _no_answer(place, next(iter(missing.values())), own, function=function) from error
        for name, note in notes.items():
            if note.number >= own.number:
                _check(place, missing.pop(name), note, own, function=function)
        if not missing:
            return
        if time.monotonic() > end:
            gives_up = _no_answer(place, next(iter(missing.values())), own, function=function)
            store.set(calls.name(place.rank, own.number), own._replace(error=str(gives_up)).text())
            raise gives_up
        time.sleep(pause)
        pause = min(2 * pause, POLLS[1])


def _notes(store: Store, calls: _Calls, names: list[str]) -> dict[str, _Note]:
    """The notes of these names that there are, perhaps about an earlier call."""
    calls.written.update(name for name in names if name not in calls.written and store.check([name]))
    present = [name for name in names if name in calls.written]
    texts = store.multi_get(present) if present else []
    return {name: _Note.of(text.decode()) for name, text in zip(present, texts, strict=True)}


def _no_answer(place: Place, rank: int, own: _Note, function: str) -> OptionError:
    return OptionError(
        "group",
        f"no answer of rank {rank} of {place.ranks} about call {own.number + 1} of {function}",
        "the same call on all ranks",
        "That rank has ended, or is late by more than the group's timeout.",
    )


def _check(place: Place, rank: int, note: _Note, own: _Note, function: str) -> None:
    """Compares the note of another rank with this rank's.

    Raises:
        OptionError: It says otherwise.
    """
    if note.error:
        raise OptionError("group", f"rank {rank} refused this call of {function}", "no error there", note.error)
    if note.number != own.number:
        got = f"call {note.number + 1} of rank {rank} at call {own.number + 1} of rank {place.rank}"
        hint = "A rank has gone on after an error that said that another one is late."
        raise OptionError("group", got, "equally many calls on all ranks", hint)
    if note.summary != own.summary:
        ours, theirs = own.summary.split("; "), note.summary.split("; ")
        differing = [f"{mine} here, {other} there" for mine, other in zip(ours, theirs, strict=False) if mine != other]
        raise OptionError(
            "group",
            f"rank {rank} calls {function} otherwise than rank {place.rank}: {', '.join(differing) or note.summary}",
            "equal shapes, dtypes and options on all ranks",
        )
