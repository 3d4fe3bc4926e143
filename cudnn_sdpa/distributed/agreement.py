"""Agreement of all ranks of a group on a call, checked before the first collective of calls with its signature.

Ranks that disagree about shapes or options would wait for each other in collectives, or read each other's memory
wrongly. So in the first call with a signature, every rank publishes a record in the group's store, without collectives,
and reads the records of the others: the signature of the call, or the error of a rank that refuses it, which does not
wait. Signatures on which all ranks have agreed are not compared again, except under `CUDNN_SDPA_DEBUG`; while a CUDA
graph is captured none is.

A signature holds everything that must be equal on all ranks, so all ranks remember the same signatures and count the
same rendezvous. The last rank to leave a rendezvous deletes its records.
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

from cudnn_sdpa.distributed.collectives import GroupRank
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.providers import CUDNN, DEFAULT, FASTEST, FLASH4, FRONTEND, OWN

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ResultT = TypeVar("ResultT")

#: First part of the name of a record.
PREFIX = "cudnn_sdpa/context_parallel"

#: Initial and maximum polling interval, in seconds.
POLLS = 0.0001, 0.01

#: Maximum number of signatures remembered for each group.
MAX_SIGNATURES = 4096


class _Agreements:
    def __init__(self) -> None:
        self.count = 0
        self.signatures: set[str] = set()

    def remember(self, signature: str) -> None:
        if len(self.signatures) >= MAX_SIGNATURES:  # in the same call on all ranks
            self.signatures.clear()
        self.signatures.add(signature)


class _Rendezvous:
    def __init__(self, store: Store, group_rank: GroupRank, number: int) -> None:
        self.store, self.group_rank = store, group_rank
        self.counter = f"{PREFIX}/{number}"
        self.names = [f"{self.counter}/{rank}" for rank in range(group_rank.ranks)]

    def publish(self, signature: str, error: str = "") -> None:
        self.store.set(self.names[self.group_rank.rank], json.dumps([signature, error]))

    def refuse(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # of an ended store; the refusal matters more
            self.publish("", f"{type(error).__name__}: {error}")
        self.leave()

    def records(self, function: str) -> list[list[str]]:
        """The signature or the error of each rank, once all have arrived; raises after the group's timeout."""
        end, pause = time.monotonic() + seconds_to_wait(self.group_rank), POLLS[0]
        try:
            while not self.store.check(self.names):
                if time.monotonic() > end:
                    missing = [rank for rank, name in enumerate(self.names) if not self.store.check([name])]
                    if missing:
                        raise _no_answer(f"rank {missing[0]} of {self.group_rank.ranks}", function)
                time.sleep(pause)
                pause = min(2 * pause, POLLS[1])
            return [json.loads(text) for text in self.store.multi_get(self.names)]
        except RuntimeError as error:  # the process that has the store has ended
            raise _no_answer("the group's store", function) from error

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self.store.add(self.counter, 1) == self.group_rank.ranks:
                for name in (*self.names, self.counter):
                    self.store.delete_key(name)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreements] = weakref.WeakKeyDictionary()


def in_agreement(group_rank: GroupRank, function: str, summarize: Callable[[], tuple[str, ResultT]]) -> ResultT:
    """The result of `summarize`, if its summaries and the installations of named providers are equal on all ranks.

    `summarize` checks the call, and returns everything else that must be equal on all ranks, as text, and the result.
    An error of it is published, so that no rank waits for this one.
    """
    store = _store(group_rank)
    if store is None or is_capturing():
        return summarize()[1]
    agreements = _agreements.setdefault(group_rank.group, _Agreements())
    rendezvous = _Rendezvous(store, group_rank, agreements.count)
    try:
        summary, result = summarize()
        signature = "; ".join([function, summary, *_installations()])
        if signature in agreements.signatures and not value_checks.enabled:
            return result
        rendezvous.publish(signature)
        records = rendezvous.records(function)
    except BaseException as error:  # an interruption, too
        agreements.count += 1
        rendezvous.refuse(error)
        raise
    # Before `_check` raises, so that all ranks count the same rendezvous.
    agreements.count += 1
    rendezvous.leave()
    for rank, record in enumerate(records):
        _check(group_rank, rank, record, signature, function=function)
    agreements.remember(signature)
    return result


def _installations() -> list[str]:
    """The installed versions of libraries whose kernels the providers in force may take."""
    names = providers.active()
    if {CUDNN, DEFAULT, OWN}.issuperset(names):
        return []
    from cudnn_sdpa.attention.flash4 import installed as flash4  # few programs name them
    from cudnn_sdpa.attention.frontend import installed as frontend

    of = {FLASH4: flash4, FASTEST: flash4, FRONTEND: frontend}
    found = {name: of[name].installed() for name in names if name in of}
    return [f"{name}={'unusable' if x.missing else x.identity}" for name, x in found.items()]


def _store(group_rank: GroupRank) -> Store | None:
    """The group's store; None in groups of a fake backend, or if no other rank would read it."""
    get_store = getattr(group_rank.group, "get_group_store", None)
    try:
        return None if get_store is None or group_rank.ranks == 1 else get_store()
    except RuntimeError:
        return None


def seconds_to_wait(group_rank: GroupRank) -> float:
    for device in getattr(group_rank.group, "_device_types", ()):
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend that has not been made, or has no options
            return float(group_rank.group._get_backend(device).options._timeout.total_seconds())
    store: Any = group_rank.group.get_group_store()
    return float(store.timeout.total_seconds())


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _no_answer(whose: str, function: str) -> OptionError:
    return OptionError(
        "group",
        f"no answer of {whose} about a call of {function}",
        "the same call on all ranks",
        "It has ended, is late by more than the group's timeout, or waits in another call, which ranks have agreed on "
        "before. CUDNN_SDPA_DEBUG=1 on all ranks compares every call.",
    )


def _check(group_rank: GroupRank, rank: int, record: list[str], own: str, *, function: str) -> None:
    signature, error = record
    if error:
        raise OptionError("group", f"rank {rank} refused this call of {function}", "no error there", error)
    if signature != own:
        pairs = zip(own.split("; "), signature.split("; "), strict=False)
        differing = ", ".join(f"{ours} here, {theirs} there" for ours, theirs in pairs if ours != theirs)
        raise OptionError(
            "group",
            f"rank {rank} calls {function} otherwise than rank {group_rank.rank}: {differing}",
            "equal shapes, dtypes and options on all ranks",
        )
