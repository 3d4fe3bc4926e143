"""Calls that Python recognizes: raw signatures map to bound plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan


class WithPlan(Protocol):
    """An entry of a `CallTable`: a plan bound to everything that a raw signature determines."""

    @property
    def plan(self) -> Plan | None: ...


EntryT = TypeVar("EntryT", bound=WithPlan)
ItemT = TypeVar("ItemT")


class CallTable(Generic[EntryT]):
    """First-level lookup from a raw signature, as cheap as possible, to a prepared call.

    Every plan in it is in the plan cache; evicting a plan removes its entries.

    Attributes:
        get: `get(signature)` gives the prepared call, or None.
    """

    def __init__(self, limit: int = 8192) -> None:
        self._calls: dict[Hashable, EntryT] = {}
        self._limit = limit
        self.get = self._calls.get
        plan_cache._tables.add(self)

    def add(self, signature: Hashable, call: EntryT) -> None:
        """Adds `call`, unless it has no plan, or its plan has been evicted in the meantime."""
        with plan_cache._lock:
            if call.plan is None or not call.plan.held:
                return
            while len(self._calls) >= self._limit:
                del self._calls[next(iter(self._calls))]
            self._calls[signature] = call

    def each(self) -> list[EntryT]:
        with plan_cache._lock:
            return list(self._calls.values())

    def forget(self, concerns: Callable[[EntryT], bool]) -> None:
        with plan_cache._lock:
            for signature in [s for s, call in self._calls.items() if concerns(call)]:
                del self._calls[signature]

    def _drop(self, plan: Plan | None) -> None:
        for signature in [s for s, call in self._calls.items() if plan is None or call.plan is plan]:
            del self._calls[signature]

    def __len__(self) -> int:
        return len(self._calls)


def layout_signature(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def type_of(option: object) -> object:
    """The type of an option: 1, 1.0 and True differ, and so do 0.0 and -0.0; in tuples too."""
    if type(option) is tuple:
        return tuple([type_of(item) for item in option])
    if isinstance(option, float) and not option:  # also one of numpy's
        return type(option), str(option)  # distinguishes -0.0 from 0.0
    return type(option)


#: What a look-up of something that is no call raises: arguments that are no tensors, have no memory or no hash.
NOT_A_CALL = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def items_of(places: Sequence[int]) -> Callable[[Sequence[object]], tuple[ItemT, ...]]:
    """What takes the items at these places out of a tuple, as a tuple."""
    if not places:
        return lambda _: ()
    if places == list(range(places[-1] + 1)):
        return itemgetter(slice(0, len(places)))
    if len(places) == 1:
        (place,) = places
        return itemgetter(slice(place, place + 1))
    return itemgetter(*places)


def kinds_of(options: Iterable[object]) -> tuple[object, ...]:
    return tuple([type_of(value) for value in options])
