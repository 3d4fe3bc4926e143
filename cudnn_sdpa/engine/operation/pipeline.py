"""The way of a call through any operation: the order in which the methods of `call` are called.

1. The public function has asked the native module, which does not know the call.
2. A call whose signature is known is launched at once, if nothing must intercept it. The native module is taught it.
3. Otherwise types and options are checked, autocast casts, differentiation is checked, random numbers are drawn, and
   negative bits are resolved.
4. Tensors are checked. If autograd follows the call, a gradient that is known to be unsupported raises now.
5. The call runs through autograd, through PyTorch's dispatcher if something intercepts operators, or at once: on the
   GPU its plan is found by its signature, or prepared; on the CPU the reference runs; elsewhere there are only layouts.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, fallback, sharding, value_checks
from cudnn_sdpa.engine.autocast import could_cast
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.dispatch_state import (
    can_be_recognized,
    can_bypass_dispatcher,
    has_subclass,
    is_autocasting,
    is_transformed,
    needs_gradient,
)
from cudnn_sdpa.engine.fast_path import NOT_A_CALL, CallTable, Entry, layout_signature
from cudnn_sdpa.engine.launch import Layout, PlainCall, Prepared
from cudnn_sdpa.engine.native.calls import Differentiation, NativeCalls, RepeatableCall
from cudnn_sdpa.engine.operation.call import BackwardCall, Call, CallT
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.scalars import check_known
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.plans.plan import Plan

KindT = TypeVar("KindT")

#: Replacements for options that depend on data.
_INSTEAD = {"scale": "Multiply q by it, and pass scale=1.0.", "is_causal": "torch.cond chooses between two calls."}


class Asked(NamedTuple):
    """The arguments of a public function, which the native module learns.

    Attributes:
        calls: The function's calls that are launched natively.
        arguments: All arguments of the function.
    """

    calls: NativeCalls
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Checked(Generic[CallT]):
    """A call that is only described.

    Attributes:
        call: As the caller made it.
        cast: As autocast casts it, with random numbers if it draws any.
        refused: Why its differentiation is refused; None if it is not.
        trains: Whether autograd follows it.
    """

    call: CallT
    cast: CallT
    refused: UnsupportedError | None
    trains: bool


#: The types of fields in operators' schemas.
SCHEMA_TYPES: dict[object, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    bool: "bool",
    str: "str",
    float: "float",
    float | None: "float?",
    torch.dtype | None: "ScalarType?",
}


@dataclass(eq=False)
class Pipeline(Generic[CallT]):
    """The description of an operation, and the way of its calls.

    Attributes:
        name: Its operators are `cudnn_sdpa::NAME_forward`, `NAME_forward_X` with auxiliary results if the call has a
            field `with_X` (`NAME_forward_lse`), `NAME_forward_out` if it has `out`, and `NAME_backward`.
        function: Name of the public function, for messages.
        call: The class of a call.
        reference_call: The class of calls that only the reference runs, without cuDNN's limits; None without fallback.
        backward: The class of a backward call; None if no input can have a gradient.
        differentiable: The inputs that can have gradients; they are the first fields of a call.
        gives: The results that are always given, by name. `out` is written into the first.
        auxiliary: Those that are given if they are wanted, and saved for the backward pass.
        forward: Name of the forward operator, if not `NAME_forward`.
        names: What messages call the inputs, if not by the names of their fields.
        loops: Whether `torch.vmap` may run it once for each entry of a batch.
        forward_mode: What can be differentiated in forward mode instead.
        kernels: The first result by kernels of the library's own, for `fallback("kernels")`; None if they lack an
            option.
    """

    name: str
    function: str
    call: type[CallT]
    reference_call: type[CallT] | None = None
    backward: type[BackwardCall[CallT]] | None = None
    differentiable: tuple[str, ...] = ()
    gives: tuple[str, ...] = ("out",)
    auxiliary: tuple[str, ...] = ("lse",)
    forward: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    loops: bool = True
    forward_mode: str = "torch.nn.functional.scaled_dot_product_attention"
    kernels: Callable[[CallT], Tensor | None] | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(self.call)
        self.fields = self.call._fields
        flags = tuple(name for name in self.fields if name.startswith("with_"))
        self.takes_out = self.fields[-1] == "out"
        wanted = (*flags, "out") if self.takes_out else flags
        self._inputs = len(self.fields) - len(wanted)
        #: The class of the last input, if that holds options: they are inputs of the operators one by one.
        self._grouped = hints[self.fields[self._inputs - 1]]
        self._has_group = hasattr(self._grouped, "_fields")
        self._alone = self._inputs - self._has_group
        self._types = {name: SCHEMA_TYPES[hints[name]] for name in self.fields[: self._alone]}
        self._tensors = sum(kind.startswith("Tensor") for kind in self._types.values())
        if self._has_group:
            hints = typing.get_type_hints(self._grouped)
            names = [name for name in self._grouped._fields if name not in self.call.omitted]
            self._types |= {name: SCHEMA_TYPES[hints[name]] for name in names}
        self._group_names = tuple(self._types)[self._alone :]
        self._can_draw = "rng" in self._types
        self._has_extra_key = self.call.extra_key is not Call.extra_key
        self._gradients = len(self.differentiable)
        # Where, among the fields of a call, are its tensors, those that can have gradients, its options, both, all but
        # the tensors, and what recognizes it besides tensors. PyTorch's compiler takes slices for constants.
        self._tensors_at, self._differentiable_at = slice(self._tensors), slice(self._gradients)
        self._options_at, self._inputs_at = slice(self._tensors, self._inputs), slice(self._inputs)
        self._others_at = slice(self._tensors, None)
        self._recognized_at = slice(self._tensors, self._inputs + len(flags))
        self._alone_at = slice(self._alone)
        if self.fields[: self._gradients] != self.differentiable or self.fields[self._inputs :] != wanted:
            raise ValueError(f"{self.name}: fields in another order than {(*self.differentiable, '…', *wanted)}")
        if any(kind.startswith("Tensor") for kind in list(self._types.values())[self._tensors :]):
            raise ValueError(f"{self.name}: a tensor behind an option")
        if len(flags) != bool(self.auxiliary):
            raise ValueError(f"{self.name}: a field with_… is there if and only if there are auxiliary results")
        self._flag = flags[0] if flags else ""
        self._wants_all = (*(True for _ in flags), *(None for _ in wanted[len(flags) :]))
        forward = self.forward or f"{self.name}_forward"
        #: The names of the operators, by what they do.
        self.operators = {"forward": forward}
        if self._flag:
            self.operators["forward_all"] = forward + self._flag.removeprefix("with")
        if self.takes_out:
            self.operators["forward_out"] = f"{forward}_out"
        if self.backward is not None:
            self.operators["backward"] = f"{self.name}_backward"
            self._backward_call = self.backward  #: of operations that have one
            #: The tensors of a backward call besides those of the forward call.
            self._given_names = self.backward._fields[:-2]
            self._given, self._saved = len(self.gives), self._saved_results(self.backward._fields)
        #: The calls that are bound to their plans.
        self.table: CallTable[Entry] = CallTable()
        self._known_to_be_differentiable: set[Hashable] = set()

    def _saved_results(self, fields: tuple[str, ...]) -> slice:
        """Which results are saved: those that a backward call has.

        Raises:
            ValueError: A backward call has other fields than the results say.
        """
        gradients, results = tuple(f"grad_{name}" for name in self.gives), (*self.gives, *self.auxiliary)
        saved = fields[len(gradients) : -2]
        first = results.index(saved[0]) if saved else 0
        found = slice(first, first + len(saved))
        if fields != (*gradients, *results[found], "call", "needs"):
            raise ValueError(f"{self.name}: a backward call of other fields than {(*gradients, '…', 'call', 'needs')}")
        return found

    # The parts of a call.

    def _tensors_of(self, call: CallT) -> tuple[Tensor | None, ...]:
        return call[self._tensors_at]

    def _differentiable_of(self, call: CallT) -> tuple[Tensor | None, ...]:
        return call[self._differentiable_at]

    def flat(self, call: CallT) -> tuple[object, ...]:
        """All fields, those of a group of options one by one, as the native module describes them."""
        if not self._has_group:
            return call[:]
        return (*call[self._alone_at], *call[self._alone], *call[self._inputs :])

    def _options_of(self, call: CallT) -> tuple[object, ...]:
        return call[self._options_at]

    def inputs_of(self, call: CallT) -> tuple[object, ...]:
        """The inputs of the operators: the tensors and the options."""
        if not self._has_group:
            return call[self._inputs_at]
        group = call[self._alone]
        return (*call[self._alone_at], *[getattr(group, name) for name in self._group_names])

    def _others_of(self, call: CallT) -> tuple[object, ...]:
        """All but the tensors."""
        return call[self._others_at]

    def _given_of(self, backward: BackwardCall[CallT]) -> tuple[Tensor, ...]:
        """The tensors of a backward call besides those of the forward call."""
        return backward[:-2]

    # The wanted results.

    def complete(self, call: CallT, *, is_complete: bool = True) -> CallT:
        """The call with all results, or with those alone that are always given."""
        return call._replace(**{self._flag: is_complete}) if self._flag else call

    def _is_complete(self, call: CallT) -> bool:
        """Whether a call wants all results."""
        return not self._flag or bool(call[self._inputs])

    def first_of(self, call: CallT) -> Tensor:
        """The first tensor of a call, which says where it runs."""
        first: Tensor = call[0]
        return first

    def _draws(self, call: CallT) -> bool:
        """Whether a call needs random numbers."""
        return self._can_draw and bool(call[self._alone].dropout_p)

    def _out_of(self, call: CallT) -> Tensor | None:
        """Where the first result goes, if not into new memory."""
        return call[-1] if self.takes_out else None

    def _is_for_cudnn(self, call: CallT) -> bool:
        """Whether cuDNN's limits apply to a call."""
        return type(call) is self.call

    def _split(self, found: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of all results those that are always given, and the auxiliary ones."""
        return found[: len(self.gives)], found[len(self.gives) :]

    def _wanted(self, call: CallT, found: tuple[Tensor, ...]) -> Result:
        """Of all results those that a call wants: alone if it is one."""
        return alone(found if self._is_complete(call) else self._split(found)[0])

    def _into_out_of(self, call: CallT, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results, the first of them written into `out` if that is given."""
        out = self._out_of(call)
        return found if out is None else (out.copy_(found[0]), *found[1:])

    if TYPE_CHECKING:  # what the classes above have

        def operator(self, which: str) -> Any: ...
        def check_gradient(self, call: CallT) -> None: ...
        def _is_known_to_be_differentiable(self, name: Hashable, call: CallT) -> bool: ...
        def _differentiate(self, call: CallT, entry: Entry | None, *, by_operator: bool = False) -> Result: ...
        def _differentiate_reference(self, call: CallT) -> tuple[Tensor, ...]: ...
        def _differentiation(self, call: CallT) -> Differentiation[tuple[object, ...]]: ...
        def _on_dtensors(self, call: CallT) -> Result: ...

    # The way of a call.

    def __call__(self, call: CallT, asked: Asked | None = None) -> Any:
        """The results of a call whose arguments have not been checked yet: alone if it is one.

        Args:
            call: The call.
            asked: What the caller passed to a public function, which the native module does not know.
        """
        if not is_compiling():
            run = self._find(call)
            if run is not None:
                if asked is not None and asked.calls.is_used:
                    self._teach(asked, call)
                return run(call)
        tensors = (*self._tensors_of(call), self._out_of(call))
        if has_subclass(*tensors) and sharding.has_dtensor(*tensors):
            return self._on_dtensors(call)
        self._check_known(call)
        call.check_types()
        if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
            call.check_options()
        call = self.cast(call)
        self.check_differentiation(call)
        if self._draws(call) and getattr(call, "rng", None) is None:
            call = call._replace(rng=new_seed(self.first_of(call)))
        if is_compiling():
            return self._traced(call)
        if any(isinstance(x, Tensor) and x.is_neg() for x in self._tensors_of(call)):
            call = autograd_checks.resolved(call)
        instead = None if self.reference_call is None else fallback.chosen.get()
        if self.reference_call is not None and instead == fallback.TORCH:
            return self._run_with_fallback(call, self.reference_call)
        if self.reference_call is not None and self.kernels is not None and instead == fallback.KERNELS:
            return self._run_or_by_kernels(call, self.reference_call, self.kernels)
        call.check()
        return self._run(call)

    def _check_known(self, call: CallT) -> None:
        """Refuses options that depend on data in compiled code; lengths and bounds may, which are symbols there."""
        for (name, kind), value in zip(self._types.items(), self.inputs_of(call), strict=True):
            if kind in ("float", "float?", "bool"):
                check_known(name, value, _INSTEAD.get(name, ""))
        if self._flag:
            check_known(f"return{self._flag.removeprefix('with')}", call[self._inputs])

    def cast(self, call: CallT) -> CallT:
        """The call as autocast casts it."""
        changed = call.autocast() if is_compiling() or is_autocasting() else {}
        # Not by _replace: PyTorch 2.9 cannot compile a function that returns what that gives.
        return type(call)(**(dict(zip(self.fields, call, strict=True)) | changed))

    def check_differentiation(self, call: CallT) -> None:
        """Refuses calls whose results would be silently detached from their inputs.

        Raises:
            UnsupportedError: Such differentiation is asked for.
        """
        if is_compiling() or is_transformed() or self._out_of(call) is not None:
            tensors = {self.names.get(name, name): x for name, x in zip(self.fields, self._tensors_of(call))}  # noqa: B905
            autograd_checks.check(
                self.function, self._out_of(call), loops=self.loops, forward_mode=self.forward_mode, **tensors
            )
        if not self.differentiable and needs_gradient(*self._tensors_of(call)):
            call.check_gradient()

    def checked(self, call: CallT, cast: Callable[[CallT], CallT]) -> Checked[CallT]:
        """A call that is only described, checked in full, as it is before its launch.

        Args:
            call: The call as a caller made it.
            cast: What casts it as autocast does, without computing.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: The call is declined.
        """
        call.check_types()
        as_cast = cast(call)
        as_cast.check_options()
        if self._draws(call):
            as_cast = as_cast._replace(rng=torch.empty(2, dtype=torch.int64, device=self.first_of(call).device))
        as_cast.check()
        as_cast.check_strides()
        as_cast.check_memory()
        refused = UnsupportedError.of(self.check_differentiation, call)
        return Checked(call, as_cast, refused, needs_gradient(*self._differentiable_of(call)))

    def check_all(self, call: CallT) -> None:
        """All checks that read no address and no value, of a call that autocast has cast."""
        call.check_types()
        call.check_options()
        call.check()
        self.check_differentiation(call)

    def _run(self, call: CallT) -> Result:
        """Runs a checked call through autograd, through PyTorch's dispatcher, or at once."""
        tensors = (*self._tensors_of(call), self._out_of(call))
        bypasses = can_bypass_dispatcher(*tensors)
        if needs_gradient(*tensors):
            self.check_gradient(call)
            return self._differentiate(call, None, by_operator=not bypasses)
        if bypasses:
            return self.runner(call)(call)
        return self._by_operator(call)

    def _run_with_fallback(self, call: CallT, reference_call: type[CallT]) -> Result:
        """Checks and runs a call, in plain PyTorch if cuDNN declines it."""

        def run() -> Result:
            return self._run_or_decline(call, reference_call)

        return fallback.or_else(run, lambda: self._run_on_pytorch(call), call.log_key)

    def _run_or_by_kernels(
        self, call: CallT, reference_call: type[CallT], kernels: Callable[[CallT], Tensor | None]
    ) -> Result:
        """Checks and runs a call, by kernels of the library's own if cuDNN declines it and they can."""

        def run() -> Result:
            return self._run_or_decline(call, reference_call)

        return fallback.or_by_kernels(run, lambda: kernels(call), call.log_key)

    def _run_or_decline(self, call: CallT, reference_call: type[CallT]) -> Result:
        without_limits = made(reference_call, call)
        fallback.check_or_decline(self.function, call.check, without_limits.check)
        return self._run(call)

    def _traced(self, call: CallT) -> Result:
        """The call in compiled code, which differentiates all that a graph returns."""
        if not needs_gradient(*self._tensors_of(call), self._out_of(call)):
            return self._by_operator(call)
        given, auxiliary = self._split(as_tuple(self._by_operator(self.complete(call))))
        return self._wanted(call, (*given, *(x.detach() for x in auxiliary)))

    def _by_operator(self, call: CallT) -> Result:
        """The call through PyTorch's dispatcher."""
        inputs, out = self.inputs_of(call), self._out_of(call)
        if out is not None:
            return self._wanted(call, (out, *as_tuple(self.operator("forward_out")(*inputs, out))))
        found: Result = self.operator("forward_all" if self._flag and self._is_complete(call) else "forward")(*inputs)
        return found

    def runner(self, call: CallT) -> Callable[[CallT], Result]:
        """The method that runs a checked forward call on the device of its tensors."""
        first = self.first_of(call)
        return self.on_gpu if first.is_cuda else self.fake_results if first.is_meta else self._on_cpu

    def on_gpu(self, call: CallT) -> Result:
        """A checked forward call on the GPU: its plan is found or prepared, and launched."""
        if value_checks.enabled:
            call.check_values()
        call.check_strides()
        call.check_memory()
        out = self._out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        result: Result = self._entry(self.signature(call), call.bind).run(call)
        return result

    def _on_cpu(self, call: CallT) -> Result:
        """A checked forward call by the reference, if a GPU would run it."""
        call.check_values()
        if self._is_for_cudnn(call):
            call.check_for_gpu()
        call.check_memory()
        return self._wanted(call, self._into_out_of(call, call.reference()))

    def fake_results(self, call: CallT) -> Result:
        """The results of a call without memory: layouts alone."""
        self._check_operator(call)
        found = tuple(_new(self.first_of(call), layout) for layout in call.outputs())
        out = self._out_of(call)
        return self._wanted(call, found if out is None else (out, *found[1:]))

    def _run_on_pytorch(self, call: CallT) -> Result:
        """A checked call by PyTorch's own function or by the reference, on any device: what the fallback runs."""
        assert self.reference_call is not None
        call = made(self.reference_call, call)
        complete = self.complete(call)
        if self._out_of(call) is not None:
            call.check_memory()
            complete = complete._replace(out=None)
        result = call.alternative()
        if result is not None:
            return self._into_out_of(call, (result,))[0]
        found = self._differentiate_reference(complete)
        return self._wanted(call, self._into_out_of(call, found))

    # The fast path.

    def _find(self, call: CallT) -> Callable[[CallT], Result] | None:
        """The launch of a call with a known signature that nothing must intercept."""
        try:
            if value_checks.enabled or (self._flag and type(call[self._inputs]) is not bool):
                return None
            dropout_p = call[self._alone].dropout_p if self._can_draw else 0.0
            if type(dropout_p) is not float or dropout_p:
                return None
            out = call[-1] if self.takes_out else None  # `_out_of` without its call
            tensors = [x for x in (*call[self._tensors_at], out) if x is not None]
            if not can_be_recognized(tensors, could_cast):
                return None
            trains = needs_gradient(*tensors)
            if trains and out is not None:
                return None
            name = self.signature(self.complete(call) if trains else call)
            entry: Entry | None = self.table.get(name)
            if entry is None or (trains and not self._is_known_to_be_differentiable(name, call)):
                return None
        except NOT_A_CALL:  # the checks name the wrong argument
            return None
        if trains:
            return functools.partial(self._differentiate, entry=entry)
        return entry.run if out is None else functools.partial(self._into_out, entry=entry)

    def _into_out(self, call: CallT, entry: Entry) -> Result:
        """A known call whose result goes into a given tensor, which may overlap others in this call alone."""
        call.check_memory()
        out = self._out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        result: Result = entry.run(call)
        return result

    def signature(self, call: CallT) -> Hashable:
        """Everything that decides a call's plan and how it is bound."""
        layouts = [  # `layout_signature` without its calls
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[self._tensors_at]
        ]
        options = call[self._recognized_at]
        out = call[-1] if self.takes_out else None
        of_out = None if out is None else layout_signature(out)
        extra = call.extra_key() if self._has_extra_key else None
        types = map(type, (*options, *call[self._alone])) if self._has_group else map(type, options)
        return (*layouts, *options, *types, of_out, extra)

    def _entry(self, name: Hashable, bind: Callable[[], Prepared]) -> Entry | Prepared:
        """The prepared call of this signature, bound now if there is none."""
        entry: Entry | None = self.table.get(name)
        if entry is not None:
            return entry
        prepared = bind()
        return prepared if prepared.plan is None else self._add(name, prepared, prepared.plan)

    # The native way.

    def _teach(self, asked: Asked, call: CallT) -> None:
        """Teaches the native module calls like one that is known, if a launch is all there is to it."""
        tensors = self._tensors_of(call)
        trains = needs_gradient(*tensors)
        entry: Entry | None = self.table.get(self.signature(self.complete(call) if trains else call))
        if entry is None or not isinstance(entry.run, PlainCall) or self._out_of(call) is not None:
            return
        plain = entry.run
        returned, is_single = plain.returned, plain.is_single
        if trains and not self._is_complete(call):
            returned = returned[: len(self.gives)]
            is_single = len(returned) == 1
        native = RepeatableCall(plain.bound, plain.tensors_of(call), returned, is_single)
        if not trains:
            asked.calls.learn(asked.arguments, {}, native)
        elif not any(x is not None and x.is_inference() for x in tensors):
            asked.calls.learn(asked.arguments, {}, native, self._differentiation(call))

    def _add(self, name: Hashable, prepared: Prepared, plan: Plan) -> Entry:
        entry = Entry(prepared.run, plan)
        self.table.add(name, entry)
        if prepared.is_current is not None and not prepared.is_current():
            self.table.forget(lambda other: other is entry)
        return entry

    def remember(self, call: CallT, prepared: Prepared) -> None:
        """Binds calls with this one's signature anew."""
        assert prepared.plan is not None
        self._add(self.signature(call), prepared, prepared.plan)

    def runs(self, kind: type[KindT]) -> list[KindT]:
        """The launches of known calls that are of this type."""
        return [entry.run for entry in self.table.each(Entry) if isinstance(entry.run, kind)]

    def forget(self, kind: type) -> None:
        """Forgets the calls whose launches are of this type; they are bound again."""
        self.table.forget(lambda entry: isinstance(entry.run, kind))

    def _operator_on_gpu(self, call: CallT) -> Result:
        """A forward call from PyTorch's dispatcher, which nothing may have checked."""
        if self.table.get(self.signature(call)) is None:
            self._check_operator(call)
        return self.on_gpu(call)

    def _operator_on_cpu(self, call: CallT) -> Result:
        self._check_operator(call)
        return self._on_cpu(call)

    def _check_operator(self, call: CallT) -> None:
        """The checks of a call from PyTorch's dispatcher, which has checked the types."""
        call.check_options()
        call.check()


def _new(like: Tensor, layout: Layout) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def made(kind: type[CallT], values: Iterable[object]) -> CallT:
    """A call with these fields. In compiled code, PyTorch 2.9 knows the properties of what `_make` gives alone."""
    return kind._make(values)


def as_tuple(found: Result | None) -> tuple[Tensor, ...]:
    """The results of an operator or a plan, which are one tensor, several, or none, as a tuple."""
    return (found,) if isinstance(found, Tensor) else () if found is None else tuple(found)


def alone(found: tuple[Tensor, ...]) -> Result:
    """The results without a tuple, if there is one only: undoes `as_tuple`."""
    return found if len(found) > 1 else found[0]
