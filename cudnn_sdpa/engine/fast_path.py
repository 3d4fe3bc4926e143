"""The first level of look-up: raw signatures of calls lead to plans with all that a call needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan


class PreparedCall(Protocol):
    """What a `CallTable` holds: a plan with all that a raw signature decides."""

    last: Any

    @property
    def plan(self) -> Plan: ...  # noqa: D102


LastT = TypeVar("LastT")
KindT = TypeVar("KindT")


class CallTable(Generic[LastT]):
    """The first level of look-up: a raw signature, as cheap to make as possible, leads to a prepared call.

    Every plan in it is in the plan cache; when the cache lets a plan go, its entries go too.

    Attributes:
        get: `get(signature)` gives the prepared call, or None.
        last: What the table's owner keeps of the call served last; `nothing` when its plan has gone. Replaced as a
            whole, so that a thread sees the old one or the new one.
    """

    def __init__(self, nothing: LastT, limit: int = 8192) -> None:
        self._calls: dict[Hashable, Any] = {}
        self._limit = limit
        self._nothing = nothing
        self.get = self._calls.get
        self.last = nothing
        plan_cache._tables.add(self)

    def add(self, signature: Hashable, call: PreparedCall) -> None:
        """Remembers `call`, unless its plan has left the cache in the meantime."""
        with plan_cache._lock:
            if not call.plan.held:
                return
            if signature in self._calls:
                self._forget(signature)
                self.last = self._nothing
            while len(self._calls) >= self._limit:
                self._forget(next(iter(self._calls)))
            self._calls[signature] = call

    def each(self, kind: type[KindT]) -> list[KindT]:
        """The calls of one kind."""
        with plan_cache._lock:
            return [call for call in self._calls.values() if isinstance(call, kind)]

    def forget(self, concerns: Callable[[Any], bool]) -> None:
        """Forgets the calls of which `concerns` says so."""
        with plan_cache._lock:
            for signature in [s for s, call in self._calls.items() if concerns(call)]:
                self._forget(signature)
            self.last = self._nothing

    def remember_last(self, last: LastT, plan: Plan) -> None:
        """Sets `last`, which is about a call of `plan`, unless the plan has left the cache in the meantime."""
        self.last = last
        if not plan.held:  # asked afterwards: what leaves from now on resets `last` itself
            self.last = self._nothing

    def _drop(self, plan: Plan | None) -> None:
        """Forgets the calls of `plan`, or all."""
        for signature in [s for s, call in self._calls.items() if plan is None or call.plan is plan]:
            self._forget(signature)
        self.last = self._nothing

    def _forget(self, signature: Hashable) -> None:
        self._calls.pop(signature).last = None  # which refers back to the call: no cycle may keep its plan

    def __len__(self) -> int:
        return len(self._calls)


def describe(tensor: Tensor | None) -> Hashable:
    """What of a tensor decides a call."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
