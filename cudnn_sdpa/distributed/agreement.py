"""Whether all ranks of a group make the same call, asked before its first collective.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So in each call, every rank leaves a note in the group's store, which is apart from the collectives, and reads
the notes of the others: the number of the call, and its summary. A rank that refuses its call leaves its error there
and does not wait. All ranks count the same calls, because each call has collectives.

A rank has one note, and writes it again and again. Another one that reads it late finds a later call: so a note also
says which call was the last that its rank agreed on, and which calls before had errors. While a CUDA graph is captured,
a rank leaves its note and does not read those of others. The graph asks nothing when it runs.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.errors import OptionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ResultT = TypeVar("ResultT")

#: What the name of a note begins with.
PREFIX = "cudnn_sdpa/context_parallel"

#: How many errors of earlier calls a note has.
MAX_ERRORS = 8

#: Seconds between two looks at the notes of others: at first, and at most.
POLLS = 0.0001, 0.01


class _Calls:
    """The calls of a group that this rank has made.

    Attributes:
        prefix: What the names of their notes begin with: others for a group of the same name that was made again,
            whose store may be the same.
        count: Their number.
        agreed: The number of the last one on which this rank found all others to agree; -1 if there is none.
        errors: Those of the last calls that raised, by number.
        written: Names of others' notes that have been in the store, and so can be read without waiting.
    """

    def __init__(self, name: str) -> None:
        _generations[name] += 1
        self.prefix = f"{PREFIX}/{_generations[name]}"
        self.count = 0
        self.agreed = -1
        self.errors: dict[int, str] = {}
        self.written: set[str] = set()

    def name(self, rank: int) -> str:
        """The name of a rank's note."""
        return f"{self.prefix}/{rank}"

    def remember(self, number: int, error: str) -> None:
        """Remembers the error of a call, for ranks that come to it late."""
        self.errors[number] = error
        while len(self.errors) > MAX_ERRORS:
            del self.errors[min(self.errors)]


class _Note(NamedTuple):
    """What a rank says about a call.

    Attributes:
        number: The number of the call.
        summary: What must be equal on all ranks.
        agreed: As in `_Calls`.
        errors: As in `_Calls`; with the call's own, if the rank refuses it.
    """

    number: int
    summary: str
    agreed: int
    errors: dict[int, str]

    def text(self) -> str:
        """As the store has it."""
        return json.dumps([self.number, self.summary, self.agreed, list(self.errors.items())])

    @classmethod
    def of(cls, text: str) -> _Note:
        """The note that has this text."""
        number, summary, agreed, errors = json.loads(text)
        return cls(number, summary, agreed, dict(errors))


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
    if store is None:
        return summarize()[1]
    try:
        summary, result = summarize()
        note = _write(store, place, calls, number=number, summary=summary)
    except BaseException as error:  # an interruption, too
        _tell(store, place, calls, number=number, error=error)
        raise
    if is_capturing():
        return result
    try:
        _compare(store, place, calls, note, function=function)
    except OptionError as error:
        calls.remember(number, str(error))  # the others find it too, or read of it in a later note
        raise
    except BaseException as error:
        _tell(store, place, calls, number=number, error=error)
        raise
    calls.agreed = number
    calls.errors.clear()  # all others have come to this call, and read of none before it
    return result


def _tell(store: Store, place: Place, calls: _Calls, *, number: int, error: BaseException) -> None:
    """Tells the others why this rank does not make a call."""
    calls.remember(number, f"{type(error).__name__}: {error}")
    with contextlib.suppress(RuntimeError):  # where the store has ended, the error matters more
        _write(store, place, calls, number=number, summary="")


def _write(store: Store, place: Place, calls: _Calls, *, number: int, summary: str) -> _Note:
    """Leaves this rank's note about a call."""
    note = _Note(number, summary, calls.agreed, calls.errors)
    store.set(calls.name(place.rank), note.text())
    return note


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


def _compare(store: Store, place: Place, calls: _Calls, own: _Note, *, function: str) -> None:
    """Waits for the notes of all other ranks about a call.

    Raises:
        OptionError: A note says otherwise than this rank's, or has not come within the group's timeout.
    """
    others = {calls.name(rank): rank for rank in range(place.ranks) if rank != place.rank}
    missing = dict(others)
    end, pause = time.monotonic() + seconds_to_wait(place), POLLS[0]
    while True:
        try:
            notes = _notes(store, calls, list(missing))
        except RuntimeError as error:  # the process that has the store has ended
            raise _no_answer(place, next(iter(missing.values())), own, function=function) from error
        for name, note in notes.items():
            if note.number >= own.number:
                _check(place, missing.pop(name), note, own, function=function)
        if not missing:
            break
        if time.monotonic() > end:
            gives_up = _no_answer(place, next(iter(missing.values())), own, function=function)
            calls.remember(own.number, str(gives_up))
            _write(store, place, calls, number=own.number, summary=own.summary)
            raise gives_up
        time.sleep(pause)
        pause = min(2 * pause, POLLS[1])
    if len(others) > 1:  # while this rank waited for one, another may have given up
        for name, note in _notes(store, calls, list(others)).items():
            _check(place, others[name], note, own, function=function)


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


def _check(place: Place, rank: int, note: _Note, own: _Note, *, function: str) -> None:
    """Compares the note of another rank with this rank's.

    Raises:
        OptionError: It says otherwise.
    """
    if own.number in note.errors:
        got = f"rank {rank} refused this call of {function}"
        raise OptionError("group", got, "no error there", note.errors[own.number])
    if note.number > own.number:
        if note.agreed >= own.number:  # it has compared this call, and gone on
            return
        got = f"call {note.number + 1} of rank {rank} at call {own.number + 1} of rank {place.rank}"
        hint = "One of them records a CUDA graph, or has gone on after many errors or an interruption."
        raise OptionError("group", got, "equally many calls on all ranks", hint)
    if note.summary != own.summary:
        ours, theirs = own.summary.split("; "), note.summary.split("; ")
        differing = [f"{mine} here, {other} there" for mine, other in zip(ours, theirs, strict=False) if mine != other]
        raise OptionError(
            "group",
            f"rank {rank} calls {function} otherwise than rank {place.rank}: {', '.join(differing) or note.summary}",
            "equal shapes, dtypes and options on all ranks",
        )
