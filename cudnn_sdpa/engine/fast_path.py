"""Calls that Python recognizes: raw signatures map to bound plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from cudnn_sdpa.engine.dispatch_state import (
    Guard,
    can_bypass_dispatcher,
    is_autocasting,
    is_batch,
    is_deterministic,
    is_observed,
    needs_gradient,
    tensor_guard,
)
from cudnn_sdpa.engine.launch import Run
from cudnn_sdpa.engine.memory import MISALIGNED
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.plan import Plan


class PreparedCall(Protocol):
    """An entry of a `CallTable`: a plan bound to everything that a raw signature determines."""

    last: KnownCall | None

    @property
    def plan(self) -> Plan: ...


EntryT = TypeVar("EntryT", bound=PreparedCall)
LastT = TypeVar("LastT")
KindT = TypeVar("KindT")
ItemT = TypeVar("ItemT")
OperandT = TypeVar("OperandT")
OptionsT = TypeVar("OptionsT", bound="Options")


class CallTable(Generic[EntryT, LastT]):
    """First-level lookup from a raw signature, as cheap as possible, to a prepared call.

    Every plan in it is in the plan cache; evicting a plan removes its entries.

    Attributes:
        get: `get(signature)` gives the prepared call, or None.
        last: What the table's owner keeps of the calls served last; `nothing` when its plan has gone. Replaced as a
            whole, so that a thread sees the old one or the new one.
    """

    def __init__(self, nothing: LastT, limit: int = 8192) -> None:
        self._calls: dict[Hashable, EntryT] = {}
        self._limit = limit
        self._nothing = nothing
        self.get = self._calls.get
        self.last = nothing
        plan_cache._tables.add(self)

    def add(self, signature: Hashable, call: EntryT) -> None:
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

    def forget(self, concerns: Callable[[EntryT], bool]) -> None:
        """Removes the calls for which `concerns` is true."""
        with plan_cache._lock:
            for signature in [s for s, call in self._calls.items() if concerns(call)]:
                self._forget(signature)
            self.last = self._nothing

    def remember_last(self, last: LastT, *plans: Plan) -> None:
        """Sets `last`, which refers to `plans`, unless one of them has been evicted in the meantime."""
        self.last = last
        if not all(plan.held for plan in plans):  # checked afterwards: later evictions reset `last` themselves
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


def layout_signature(tensor: Tensor | None) -> Hashable:
    """The part of a tensor that determines a call."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def type_of(option: object) -> object:
    """The type of an option: 1, 1.0 and True differ, and so do 0.0 and -0.0; in tuples too."""
    if type(option) is tuple:
        return tuple([type_of(item) for item in option])
    if isinstance(option, float) and not option:  # also one of numpy's
        return type(option), str(option)  # distinguishes -0.0 from 0.0
    return type(option)


#: Types whose values equal no value of another type, so that comparing them is enough.
_UNMISTAKABLE = (str, type(None))

#: Number of calls that are recognized without a signature: those of a model's layers, in turn.
MAX_RECENT = 4

#: The options of a call, by name, or in the order of its fields.
Options = Mapping[str, object] | tuple[object, ...]


@dataclass(slots=True)
class KnownCall:
    """A call that may be repeated, and what recognizes another like it.

    Attributes:
        plan: Its plan.
        count: Number of its operands.
        others: Place and type of each operand that is no tensor: numbers, and None for those that are left out.
        options: Its options.
        kinds: The types of its options; None if comparing the values is enough.
        grad_mode: Whether gradients were enabled.
        deterministic: Whether `torch.use_deterministic_algorithms` was in force.
        tensors_of: Gives its tensors, out of its operands.
        is_like: Guard for the tensors, which also sees whether they require grad.
        run: Runs such a call.
    """

    plan: Plan
    count: int
    others: tuple[tuple[int, type], ...]
    options: Options
    kinds: tuple[object, ...] | None
    grad_mode: bool
    deterministic: bool
    tensors_of: Callable[[tuple[object, ...]], Sequence[Tensor]]
    is_like: Guard
    run: Run

    def has_others(self, operands: tuple[object, ...]) -> bool:
        """Whether the operands that are no tensors here are of the same types."""
        for place, kind in self.others:  # noqa: SIM110 - saves 0.3 µs over `all`
            if type(operands[place]) is not kind:
                return False
        return True

    def has_options(self, options: Options) -> bool:
        """Whether options that equal these have their types, too: 1, 1.0 and True are equal."""
        if self.kinds is None:
            return True
        if isinstance(options, tuple) or isinstance(self.options, tuple):
            return self.kinds == tuple(map(type, options))
        if all(map(is_, options.values(), self.options.values())):  # saves 1 µs for a norm, 7 for a convolution
            return True
        return self.kinds == kinds_of([options[name] for name in self.options])


class KnownCalls(Generic[EntryT, OperandT, OptionsT]):
    """The calls of one function whose plans are bound, by operands and options as the caller passes them.

    The last few are recognized by a guard each, one C call; any other is found by its signature.

    Attributes:
        table: The bound calls by signature, and the last few.
    """

    def __init__(
        self,
        look_up: Callable[[tuple[OperandT, ...], OptionsT, bool], EntryT | None],
        runs: Callable[[EntryT, tuple[OperandT, ...], OptionsT, bool], Run],
        could_cast: Callable[[Sequence[Tensor]], bool],
    ) -> None:
        """Makes a table without calls.

        Args:
            look_up: Gives the bound call for operands, options, and whether autograd follows it; None if it is unknown.
            runs: Gives what runs such calls.
            could_cast: Whether autocast, which is on, could cast one of these tensors in a call.
        """
        self.table: CallTable[EntryT, tuple[KnownCall, ...]] = CallTable(())
        self._look_up, self._runs, self._could_cast = look_up, runs, could_cast

    def find(self, operands: tuple[OperandT, ...], options: OptionsT) -> Run | None:
        """What runs a call at once, if calls like it are known and nothing must intercept it."""
        try:
            for known in self.table.last:
                if known.count != len(operands) or known.options != options:
                    continue
                if known.others and not known.has_others(operands):
                    continue
                tensors: Sequence[Tensor] = operands  # type: ignore[assignment]
                if known.others:  # saves 0.1 µs for all other calls
                    tensors = known.tensors_of(operands)
                try:
                    for tensor in tensors:
                        if tensor.is_nested:  # a guard would end the process
                            return None
                except AttributeError:  # this call leaves out a tensor that the known one has
                    continue
                if (
                    known.is_like(*tensors)
                    and known.grad_mode is is_grad_enabled()
                    and known.deterministic is is_deterministic()
                    and (known.kinds is None or known.has_options(options))
                    and not is_observed()
                    and forward_ad._current_level < 0
                ):
                    return known.run
            return self._find_by_signature(operands, options)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None  # not tensors, without memory, not hashable: the checks say so

    def _find_by_signature(self, operands: tuple[OperandT, ...], options: OptionsT) -> Run | None:
        tensors = [x for x in operands if isinstance(x, Tensor)]
        for tensor in tensors:
            if tensor.is_nested or is_batch(tensor):
                return None
        autocasts = is_autocasting()
        if not can_bypass_dispatcher(*tensors, may_cast=autocasts and self._could_cast(tensors)):
            return None
        trains = needs_gradient(*tensors)
        entry = self._look_up(operands, options, trains)
        if entry is None:
            return None
        if autocasts:  # to a dtype that no guard sees
            return self._runs(entry, operands, options, trains)
        others = tuple([(place, type(x)) for place, x in enumerate(operands) if not isinstance(x, Tensor)])
        known: KnownCall | None = entry.last
        if (
            known is None
            or known.others != others
            or known.options != options
            or not known.has_options(options)
            or known.grad_mode is not is_grad_enabled()
            or known.deterministic is not is_deterministic()
            or not known.is_like(*tensors)
        ):
            run = self._runs(entry, operands, options, trains)
            if len(set(map(id, tensors))) != len(tensors):  # a guard takes no tensor twice
                return run
            kinds = tuple(map(type, options)) if isinstance(options, tuple) else kinds_of(options.values())
            known = entry.last = KnownCall(
                plan=entry.plan,
                count=len(operands),
                others=others,
                options=options,
                kinds=None if all(kind in _UNMISTAKABLE for kind in kinds) else kinds,
                grad_mode=is_grad_enabled(),
                deterministic=is_deterministic(),
                tensors_of=items_of([place for place, x in enumerate(operands) if isinstance(x, Tensor)]),
                is_like=tensor_guard(*tensors),
                run=run,
            )
        recent = (known, *[other for other in self.table.last if other is not known][: MAX_RECENT - 1])
        self.table.remember_last(recent, *(each.plan for each in recent))
        return known.run


class Entry:
    """A prepared call of an operation in a `CallTable`, forward or backward.

    Attributes:
        run: See `Prepared`.
        plan: Its plan.
        last_gradient: What recognizes the last backward call of this call.
        last: The last such call, to recognize another; reset by the table.
    """

    __slots__ = ("__weakref__", "last", "last_gradient", "plan", "run")

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run = run
        self.plan = plan
        self.last_gradient = LastGradient()
        self.last: KnownCall | None = None


class LastGradient:
    """Recognizes a backward call like the last one of the same forward call; autograd's graph holds this and no plan.

    Attributes:
        cached: The last backward call.
    """

    __slots__ = ("cached",)

    def __init__(self) -> None:
        self.cached: CachedGradient | None = None

    def find(self, needs: tuple[bool, ...], inputs: Sequence[Tensor | None], given: Sequence[Tensor]) -> Entry | None:
        """The prepared call of the last backward call, if this one is like it and kernels can read it.

        Args:
            needs: Which gradients are needed.
            inputs: The tensors of the forward call.
            given: The gradients of results, and the saved results.
        """
        known = self.cached
        if known is None or known.needs != needs or not known.is_like(*_present(inputs, given)):
            return None
        addresses = 0  # which no guard sees; those of the inputs were checked in the forward pass, or raise
        for tensor in given:
            addresses |= tensor.data_ptr()
        return None if addresses & MISALIGNED else known.entry()

    def remember(
        self, needs: tuple[bool, ...], inputs: Sequence[Tensor | None], given: Sequence[Tensor], entry: Entry
    ) -> None:
        """Remembers a backward call of which nothing was copied for kernels to read it."""
        tensors = _present(inputs, given)
        if len(set(map(id, tensors))) == len(tensors):  # a guard takes no tensor twice
            self.cached = CachedGradient(tensor_guard(*tensors), needs, weakref.ref(entry))


class CachedGradient(NamedTuple):
    """The last backward call of a call, and what recognizes another like it.

    Attributes:
        is_like: Guard for its tensors: hooks on saved tensors may change layouts.
        needs: Which gradients were needed.
        entry: The prepared call; a weak reference, as autograd's graph must keep no plan.
    """

    is_like: Guard
    needs: tuple[bool, ...]
    entry: weakref.ref[Entry]


def _present(inputs: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in (*inputs, *given) if x is not None]


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
    """The types of options; see `type_of`."""
    return tuple([type_of(value) for value in options])
