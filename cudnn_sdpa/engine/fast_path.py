"""First-level lookup: raw call signatures map to bound plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan


class PreparedCall(Protocol):
    """An entry of a `CallTable`: a plan bound to everything that a raw signature determines."""

    last: Any

    @property
    def plan(self) -> Plan: ...


LastT = TypeVar("LastT")
KindT = TypeVar("KindT")


class CallTable(Generic[LastT]):
    """First-level lookup from a raw signature, as cheap as possible, to a prepared call.

    Every plan in it is in the plan cache; evicting a plan removes its entries.

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
        """Adds `call`, unless its plan has been evicted in the meantime."""
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
        """Removes the calls for which `concerns` is true."""
        with plan_cache._lock:
            for signature in [s for s, call in self._calls.items() if concerns(call)]:
                self._forget(signature)
            self.last = self._nothing

    def remember_last(self, last: LastT, plan: Plan) -> None:
        """Sets `last`, which refers to `plan`, unless that has been evicted in the meantime."""
        self.last = last
        if not plan.held:  # checked afterwards: later evictions reset `last` themselves
            self.last = self._nothing

    def _drop(self, plan: Plan | None) -> None:
        """Removes the calls of `plan`, or all calls."""
        for signature in [s for s, call in self._calls.items() if plan is None or call.plan is plan]:
            self._forget(signature)
        self.last = self._nothing

    def _forget(self, signature: Hashable) -> None:
        self._calls.pop(signature).last = None  # which refers back to the call: no cycle may keep its plan

    def __len__(self) -> int:
        return len(self._calls)


def describe(tensor: Tensor | None) -> Hashable:
    """The part of a tensor that determines a call."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
