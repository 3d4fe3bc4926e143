"""An operation, described once: what is done with a call of it follows from the description.

A call is a NamedTuple: the tensors first, then the options, and last what is wanted of it (`with_lse`, `out`). From the
description of an operation follow PyTorch's operators with their schemas, the autograd rule, the fast path, the checks
and their order, the fallback, and the operator's part in `explain`, `record_plans` and `torch.compile`.

The order of things, for all operations:

1. A call like the last one, or one whose signature is known, is launched at once, if nothing must intercept it.
2. Otherwise types are checked, autocast casts, negative bits are resolved, options and differentiation are checked, and
   random numbers are drawn.
3. Tensors are checked. If a gradient may be asked for, what is known against it raises now.
4. The call runs through autograd, through PyTorch's dispatcher if something intercepts operators, or at once: on the
   GPU its plan is found by its signature, or prepared; on the CPU the reference runs; elsewhere there are only layouts.
"""

from __future__ import annotations

import functools
import typing
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from cudnn_sdpa.engine import autograd_checks, fallback
from cudnn_sdpa.engine.autocast import is_deterministic
from cudnn_sdpa.engine.autograd_checks import CallT
from cudnn_sdpa.engine.dispatch_state import (
    Guard,
    can_bypass_dispatcher,
    is_profiling,
    needs_gradient,
    needs_operator,
    tensor_guard,
)
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.engine.launch import Layout, check_one_device
from cudnn_sdpa.engine.memory import MISALIGNED, like_in_memory
from cudnn_sdpa.engine.torch_ops import define, library, new_seed
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans.plan import Plan

Result = Tensor | tuple[Tensor, Tensor]  #: the output, and the LSE if it is wanted

#: The last fields of every call: what is wanted of it. They are no arguments of operators.
WANTED = ("with_lse", "out")

#: Maximum number of kinds of calls remembered as differentiable.
MAX_REMEMBERED = 8192

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    bool: "bool",
    str: "str",
    float: "float",
    float | None: "float?",
}


class GradientCall(NamedTuple):
    """A backward call.

    Attributes:
        grad_out: The gradient of the output.
        out: The output.
        lse: The LSE.
        call: The forward call, with the tensors as they were saved.
        needs: Which of the operation's differentiable inputs need a gradient.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: Any
    needs: tuple[bool, ...]


class Prepared(NamedTuple):
    """A call bound to its plan.

    Attributes:
        run: Runs a call with the same signature: gives its result, or for a backward call the needed gradients.
        plan: The plan; None if none is needed, as for empty tensors.
    """

    run: Callable[[Any], Any]
    plan: Plan | None


class _LastGradient:
    """Holds what recognizes the last backward call; autograd's graph holds this and no plan.

    Attributes:
        cached: The last backward call.
    """

    __slots__ = ("cached",)

    def __init__(self) -> None:
        self.cached: _CachedGradient | None = None


class _Entry:
    """A prepared call in a `CallTable`.

    Attributes:
        run: See `Prepared`.
        plan: Its plan.
        last_gradient: What recognizes the last backward call of this call.
        last: Reset by the table; see `CallTable`.
    """

    __slots__ = ("__weakref__", "last", "last_gradient", "plan", "run")

    def __init__(self, run: Callable[[Any], Any], plan: Plan) -> None:
        self.run = run
        self.plan = plan
        self.last_gradient = _LastGradient()
        self.last: None = None


class _Tracked(NamedTuple):
    """A call that autograd follows.

    Attributes:
        operation: Its operation.
        call: The call, with an LSE.
        entry: Its entry, if the fast path found it.
        returns_lse: Whether the LSE is a result.
    """

    operation: Operation[Any]
    call: Any
    entry: _Entry | None
    returns_lse: bool


class _CachedCall(NamedTuple):
    """The last call, and what recognizes another like it.

    Attributes:
        options: Its options.
        types: The types of all its fields: they say which tensors are given, and distinguish 1, 1.0 and True.
        grad_mode: Whether gradients were enabled.
        is_like: Guard for its tensors, which also sees whether they require grad.
        mark: See `Operation`.
        run: Runs such a call.
    """

    options: tuple[Any, ...]
    types: tuple[type, ...]
    grad_mode: bool
    is_like: Guard
    mark: Hashable
    run: Callable[[Any], Result]


class _CachedGradient(NamedTuple):
    """The last backward call of a call, and what recognizes another like it.

    Attributes:
        is_like: Guard for its tensors: hooks on saved tensors may change layouts.
        needs: Which gradients were needed.
        entry: The prepared call; a weak reference, as autograd's graph must keep no plan.
    """

    is_like: Guard
    needs: tuple[bool, ...]
    entry: weakref.ref[_Entry]


def _no_gradients(*_: Any) -> NoReturn:
    raise AssertionError("an operation without differentiable inputs has no backward call")


@dataclass(eq=False)
class Operation(Generic[CallT]):
    """One operation, described once.

    Attributes:
        name: Its operators are `cudnn_sdpa::NAME_forward`, `NAME_forward_lse`, `NAME_forward_out`, `NAME_backward`.
        function: Name of the public function, for messages.
        call: The NamedTuple of a call.
        reference_call: The same for calls that only the reference runs, without cuDNN's limits.
        differentiable: The inputs that can have gradients; they are the first fields.
        autocast: The inputs as autocast casts them, if it is on, by name.
        is_cacheable: Whether calls like this one may be recognized: no random numbers, no checks of values.
        kind: What the fallback logs once for each reason.
        check_types: Checks what the operators' schemas would refuse as well, but without naming the argument.
        check_options: Checks of options.
        check: Checks of tensors and options that read no address and no value, so fake tensors pass.
        check_values: Checks of values, such as lengths.
        check_strides: Checks that kernels can read the strides.
        check_memory: Checks of addresses.
        checks_values: Whether values are checked on the GPU, too, which waits for it.
        check_for_gpu: Refuses a call on the CPU that a GPU would refuse.
        check_gradient: Refuses a call whose gradients are known to be unsupported: any, if nothing is differentiable.
        results: Layouts of the output and the LSE.
        reference: Both results in plain PyTorch.
        prepare: Binds a forward call to its plan.
        keys: The keys of the plans of a forward call, on a target.
        flops: Floating-point operations of a forward call, and of its backward call.
        reference_gradients: The needed gradients in plain PyTorch. This and the next three are for operations with
            differentiable inputs.
        readable: A backward call as kernels can read it: copies what they cannot.
        prepare_gradients: Binds a backward call that kernels can read to its plan.
        gradient_keys: The keys of the plans of a backward call, on a target.
        mark: What decides how a call is bound, besides layouts and options; None for nothing.
    """

    name: str
    function: str
    call: type[CallT]
    reference_call: type[CallT]
    differentiable: tuple[str, ...]
    autocast: Callable[[CallT], dict[str, Any]]
    is_cacheable: Callable[[CallT], bool]
    kind: Callable[[CallT], Hashable]
    check_types: Callable[[CallT], None]
    check_options: Callable[[CallT], None]
    check: Callable[[CallT], None]
    check_values: Callable[[CallT], None]
    check_strides: Callable[[CallT], None]
    check_memory: Callable[[CallT], None]
    checks_values: Callable[[], bool]
    check_for_gpu: Callable[[CallT], None]
    check_gradient: Callable[[CallT], None]
    results: Callable[[CallT], tuple[Layout, Layout]]
    reference: Callable[[CallT], tuple[Tensor, Tensor]]
    prepare: Callable[[CallT], Prepared]
    keys: Callable[[CallT, Target, int | None], Iterator[Any]]
    flops: Callable[[CallT], tuple[int, int]]
    reference_gradients: Callable[[GradientCall], list[Tensor]] = _no_gradients
    readable: Callable[[GradientCall], GradientCall] = _no_gradients
    prepare_gradients: Callable[[GradientCall], Prepared] = _no_gradients
    gradient_keys: Callable[[GradientCall, Target, int | None], Iterator[Any]] = _no_gradients
    mark: Callable[[CallT], Hashable] | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(self.call)
        self.fields: tuple[str, ...] = self.call._fields
        self._types = {name: _SCHEMA_TYPES[hints[name]] for name in self.fields if name not in WANTED}
        self._tensors = sum(kind.startswith("Tensor") for kind in self._types.values())
        self._inputs = len(self._types)
        self._gradients = len(self.differentiable)
        if self.fields[: self._gradients] != self.differentiable or self.fields[self._inputs :] != WANTED:
            raise ValueError(f"{self.name}: fields in another order than {(*self.differentiable, '…', *WANTED)}")
        if any(kind.startswith("Tensor") for kind in list(self._types.values())[self._tensors :]):
            raise ValueError(f"{self.name}: a tensor behind an option")
        self.table: CallTable[_CachedCall | None] = CallTable(None)
        self._known_to_be_differentiable: set[Hashable] = set()
        self._register_operators()
        if self.differentiable:
            self._register_gradients()
        OPERATIONS[self.name] = self

    # The way of a call.

    def __call__(self, call: CallT) -> Result:
        """Runs a call whose arguments have not been checked yet."""
        if not is_compiling():
            run = self._find(call)
            if run is not None:
                return run(call)
        self.check_types(call)
        call = self.cast(call)
        if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
            call = autograd_checks.resolved(call)
            self.check_options(call)
        self.check_differentiation(call)
        if "rng" in self._types and call.dropout_p:
            call = call._replace(rng=new_seed(call[0]))
        return fallback.or_else(lambda: self._run(call), lambda: self._run_on_pytorch(call), lambda: self.kind(call))

    def cast(self, call: CallT) -> CallT:
        """The call as autocast casts it, with the setting of deterministic algorithms that it follows."""
        tensors = self.autocast(call)
        found: CallT = call._replace(**tensors, deterministic=is_deterministic(call.deterministic))
        return found

    def check_differentiation(self, call: CallT) -> None:
        """Refuses calls whose results would be silently detached from their inputs.

        Raises:
            UnsupportedError: Such differentiation is asked for.
        """
        tensors = zip(self.fields, call[: self._tensors])  # noqa: B905 - the first fields
        autograd_checks.check(self.function, call.out, **dict(tensors))
        if not self.differentiable and needs_gradient(*call[: self._tensors]):
            self.check_gradient(call)

    def check_all(self, call: CallT) -> None:
        """All checks that read no address and no value, of a call that autocast has cast."""
        self.check_types(call)
        self.check_options(call)
        self.check(call)
        self.check_differentiation(call)

    def _run(self, call: CallT) -> Result:
        """Runs a call through autograd, through PyTorch's dispatcher, or at once."""
        if is_compiling():
            return self._traced(call)
        fallback.check_or_decline(
            self.function, lambda: self.check(call), lambda: self.check(self.reference_call._make(call))
        )
        tensors = (*call[: self._tensors], call.out)
        bypasses = can_bypass_dispatcher(*tensors)
        if needs_gradient(*tensors):
            self._check_gradient(call)
            return self._differentiate(call, None, by_operator=not bypasses)
        if bypasses:
            return self.runner(call)(call)
        return self._by_operator(call, with_lse=call.with_lse)

    def _traced(self, call: CallT) -> Result:
        """The call in compiled code, which differentiates all that a graph returns."""
        trains = needs_gradient(*call[: self._tensors], call.out)
        result = self._by_operator(call, with_lse=call.with_lse or trains)
        if not (trains and isinstance(result, tuple)):
            return result
        return (result[0], result[1].detach()) if call.with_lse else result[0]

    def _by_operator(self, call: CallT, *, with_lse: bool) -> Result:
        """The call through PyTorch's dispatcher."""
        inputs = call[: self._inputs]
        if call.out is not None:
            lse = self.operator("forward_out")(*inputs, call.out)
            return (call.out, lse) if call.with_lse else call.out
        if not with_lse:
            result: Result = self.operator("forward")(*inputs)
            return result
        out, lse = self.operator("forward_lse")(*inputs)
        return (out, lse) if call.with_lse or is_compiling() else out

    def runner(self, call: CallT) -> Callable[[CallT], Result]:
        """What runs a checked forward call where its tensors are."""
        return self.on_gpu if call[0].is_cuda else self.fake_results if call[0].is_meta else self._on_cpu

    def on_gpu(self, call: CallT) -> Result:
        """A checked forward call on the GPU: its plan is found or prepared, and launched."""
        if self.checks_values():
            self.check_values(call)
        self.check_strides(call)
        self.check_memory(call)
        if call.out is not None and not call.out.is_inference():
            torch.autograd.graph.increment_version(call.out)
        result: Result = self._entry(self.signature(call), call, self.prepare).run(call)
        return result

    def _on_cpu(self, call: CallT) -> Result:
        """A checked forward call by the reference, if a GPU would run it."""
        self.check_values(call)
        if call.is_for_cudnn:
            self.check_for_gpu(call)
        self.check_memory(call)
        out, lse = self.reference(call)
        out = out if call.out is None else call.out.copy_(out)
        return (out, lse) if call.with_lse else out

    def fake_results(self, call: CallT) -> Result:
        """What the results of a call look like, without memory."""
        self.check(call)
        out, lse = (_new(call[0], layout) for layout in self.results(call))
        out = out if call.out is None else call.out
        return (out, lse) if call.with_lse else out

    def _run_on_pytorch(self, call: CallT) -> Result:
        """A checked call by the reference, on any device: what the fallback runs."""
        call = self.reference_call._make(call)
        if call.out is not None:
            self.check_memory(call)
        tracked = _Tracked(self, call._replace(out=None, with_lse=True), None, True)
        out, lse = _ByReference.apply(tracked, *call[: self._gradients])  # type: ignore[no-untyped-call]
        out = out if call.out is None else call.out.copy_(out)
        return (out, lse) if call.with_lse else out

    # The fast path.

    def _find(self, call: CallT) -> Callable[[CallT], Result] | None:
        """What runs a call at once, if calls like it are known and nothing must intercept it."""
        try:
            if not self.is_cacheable(call):
                return None
            options, types, last = call[self._tensors : -1], tuple(map(type, call)), self.table.last
            tensors = []
            for tensor in call[: self._tensors]:
                if tensor is not None:
                    if tensor.is_nested:  # a guard would end the process
                        return None
                    tensors.append(tensor)
            if (
                last is not None
                and last.types == types
                and last.options == options
                and last.grad_mode is torch.is_grad_enabled()
                and last.is_like(*tensors)
                and (self.mark is None or last.mark == self.mark(call))
                and not is_profiling()
                and forward_ad._current_level < 0
            ):
                return last.run
            return self._find_by_signature(call, options, types, tensors)
        except (AttributeError, IndexError, TypeError, RuntimeError):  # not tensors, not hashable: the checks say so
            return None

    def _find_by_signature(
        self, call: CallT, options: tuple[Any, ...], types: tuple[type, ...], tensors: list[Tensor]
    ) -> Callable[[CallT], Result] | None:
        out = call.out
        trains = needs_gradient(*tensors, out)
        if type(call.with_lse) is not bool or not can_bypass_dispatcher(*tensors, out):
            return None
        name = self.signature(call._replace(with_lse=True) if trains else call)
        entry: _Entry | None = self.table.get(name)
        if entry is None or (trains and (name not in self._known_to_be_differentiable or out is not None)):
            return None
        if out is not None:
            return functools.partial(self._into_out, entry=entry)
        run = functools.partial(self._differentiate, entry=entry) if trains else entry.run
        if len(set(map(id, tensors))) == len(tensors):  # a guard takes no tensor twice
            last = _CachedCall(
                options=options,
                types=types,
                grad_mode=torch.is_grad_enabled(),
                is_like=tensor_guard(*tensors),
                mark=None if self.mark is None else self.mark(call),
                run=run,
            )
            self.table.remember_last(last, entry.plan)
        return run

    def _into_out(self, call: CallT, entry: _Entry) -> Result:
        """A known call whose result goes into a given tensor, which may overlap others in this call alone."""
        self.check_memory(call)
        if not call.out.is_inference():
            torch.autograd.graph.increment_version(call.out)
        result: Result = entry.run(call)
        return result

    def signature(self, call: CallT) -> Hashable:
        """Everything that decides a call's plan and how it is bound."""
        tensors = map(describe, call[: self._tensors])
        mark = None if self.mark is None else self.mark(call)
        return (*tensors, *call[self._tensors : -1], *map(type, call[self._tensors : -1]), describe(call.out), mark)

    def _entry(self, name: Hashable, call: Any, prepare: Callable[[Any], Prepared]) -> _Entry | Prepared:
        """The prepared call of this signature, prepared now if there is none."""
        entry: _Entry | None = self.table.get(name)
        if entry is not None:
            return entry
        prepared = prepare(call)
        if prepared.plan is None:
            return prepared
        entry = _Entry(prepared.run, prepared.plan)
        self.table.add(name, entry)
        return entry

    # Gradients.

    def _check_gradient(self, call: CallT) -> None:
        """Refuses a call whose gradients are known to be unsupported: now, and not when the loss is differentiated."""
        if not call[0].is_cuda:
            if call.is_for_cudnn:
                self.check_gradient(call)
            return
        name = self.signature(call._replace(with_lse=True))
        if name in self._known_to_be_differentiable:
            return
        self.check_gradient(call)
        if len(self._known_to_be_differentiable) >= MAX_REMEMBERED:
            self._known_to_be_differentiable.clear()
        self._known_to_be_differentiable.add(name)

    def _differentiate(self, call: CallT, entry: _Entry | None, *, by_operator: bool = False) -> Result:
        """The results of a call, differentiable by autograd."""
        try:
            if by_operator:
                return self._by_operator(call, with_lse=True)
            both = self.call_of(call[: self._inputs], with_lse=True)
            tracked = _Tracked(self, both, entry, call.with_lse)
            result: Result = _Differentiable.apply(tracked, *call[: self._gradients])  # type: ignore[no-untyped-call]
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(call)
            raise
        return result

    def save(self, ctx: Any, call: CallT, out: Tensor, lse: Tensor) -> None:
        """Saves what the backward pass needs."""
        ctx.save_for_backward(*call[: self._tensors], out, lse)
        ctx.options = call[self._tensors : self._inputs]
        ctx.may_fall_back = fallback.is_in_force()
        ctx.set_materialize_grads(False)

    def gradients(
        self,
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        needs: tuple[bool, ...],
        last: _LastGradient | None = None,
        *,
        by_reference: bool = False,
    ) -> list[Tensor | None]:
        """The gradient of each differentiable input, None where none is needed, from what `save` saved."""
        if grad_lse is not None:
            autograd_checks.refuse_gradient_of_lse(grad_lse)
        autograd_checks.refuse_batch(grad_out)
        if grad_out is None or not any(needs):
            return [None] * len(needs)
        *tensors, out, lse = ctx.saved_tensors  # once: checkpoints let nothing be read twice
        call = self.call._make((*tensors, *ctx.options, True, None))
        backward = GradientCall(grad_out, out, lse, call, needs)
        if by_reference:
            found = self.reference_gradients(backward)
        elif needs_operator(grad_out):
            found = self.operator("backward")(grad_out, out, lse, *call[: self._inputs], list(needs))
        elif last is not None and (entry := self._find_gradient(backward, last)) is not None:
            found = entry.run(backward)
        elif not out.is_cuda:
            found = (self.fake_gradients if out.is_meta else self.reference_gradients)(backward)
        else:
            found = fallback.or_else(
                lambda: self._gradients_on_gpu(backward, last),
                lambda: self.reference_gradients(backward),
                lambda: self.kind(call),
                ctx.may_fall_back,
            )
        remaining = iter(found)
        return [next(remaining) if need else None for need in needs]

    def _gradients_on_gpu(self, backward: GradientCall, last: _LastGradient | None = None) -> list[Tensor]:
        """The needed gradients of a backward call on the GPU, which `last` remembers."""
        readable = self.readable(backward)
        prepared = self._entry(self._signature_of_gradient(readable), readable, self._prepare_gradients)
        if last is not None and readable is backward and isinstance(prepared, _Entry):
            tensors = self._tensors_of_gradient(backward)
            if len(set(map(id, tensors))) == len(tensors):  # a guard takes no tensor twice
                last.cached = _CachedGradient(tensor_guard(*tensors), backward.needs, weakref.ref(prepared))
        gradients: list[Tensor] = prepared.run(readable)
        return gradients

    def _prepare_gradients(self, backward: GradientCall) -> Prepared:
        names = (*backward.call._fields[: self._tensors], "out", "lse", "grad_out")
        tensors = (*backward.call[: self._tensors], backward.out, backward.lse, backward.grad_out)
        check_one_device(names, tensors)  # a saved-tensor hook may have moved them
        return self.prepare_gradients(backward)

    def _find_gradient(self, backward: GradientCall, last: _LastGradient) -> _Entry | None:
        """The backward call before this one, if it was like this one and `readable` would copy nothing."""
        known = last.cached
        if known is None or known.needs != backward.needs or not known.is_like(*self._tensors_of_gradient(backward)):
            return None
        # Addresses, which no guard sees: those of the other tensors were checked in the forward pass, or raise.
        return None if (backward.grad_out.data_ptr() | backward.lse.data_ptr()) & MISALIGNED else known.entry()

    def _tensors_of_gradient(self, backward: GradientCall) -> list[Tensor]:
        return [
            *[x for x in backward.call[: self._tensors] if x is not None],
            backward.out,
            backward.lse,
            backward.grad_out,
        ]

    def _signature_of_gradient(self, backward: GradientCall) -> Hashable:
        return (
            "backward",
            *map(describe, (backward.grad_out, backward.out, backward.lse)),
            backward.needs,
            self.signature(backward.call),
        )

    def fake_gradients(self, backward: GradientCall) -> list[Tensor]:
        """What the needed gradients look like, without memory."""
        tensors = zip(backward.call[: self._gradients], backward.needs, strict=True)
        return [like_in_memory(x) for x, need in tensors if need and x is not None]

    # PyTorch's operators.

    def operator(self, suffix: str) -> Any:
        """One of the operators: "forward", "forward_lse", "forward_out" or "backward"."""
        return getattr(torch.ops.cudnn_sdpa, f"{self.name}_{suffix}")

    def call_of(self, inputs: Sequence[Any], *, with_lse: bool = False, out: Tensor | None = None) -> CallT:
        """The call with an operator's inputs."""
        found: CallT = self.call._make((*inputs, with_lse, out))
        return found

    def forward_implementations(self, run: Callable[[CallT], Any]) -> dict[str, Callable[..., Any]]:
        """The forward operators as `run` implements them, by suffix."""

        def plain(*inputs: Any) -> Any:
            return run(self.call_of(inputs))

        def with_lse(*inputs: Any) -> Any:
            return run(self.call_of(inputs, with_lse=True))

        def into_out(*inputs: Any) -> Any:
            *others, out = inputs
            return run(self.call_of(others, with_lse=True, out=out))[1]

        return {"forward": plain, "forward_lse": with_lse, "forward_out": into_out}

    def backward_implementation(self, run: Callable[[GradientCall], Any]) -> Callable[..., Any]:
        """The backward operator as `run` implements it."""

        def implementation(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> Any:
            *others, needs = inputs
            call = self.call_of(others, with_lse=True)
            return run(GradientCall(grad_out, out, lse, call, tuple(needs)))

        return implementation

    def _register_operators(self) -> None:
        inputs = ", ".join(f"{kind} {name}" for name, kind in self._types.items())
        schemas = {
            "forward": (inputs, "Tensor"),
            "forward_lse": (inputs, "(Tensor, Tensor)"),
            "forward_out": (f"{inputs}, Tensor(a!) out", "Tensor"),
        }
        runs = self._operator_on_gpu, self._operator_on_cpu, self.fake_results
        cuda, cpu, fake = map(self.forward_implementations, runs)
        for suffix, (arguments, returns) in schemas.items():
            name = f"{self.name}_{suffix}"
            define(name, arguments, returns, cuda[suffix], cpu[suffix], fake[suffix])
            register_flop_formula(self.operator(suffix), get_raw=True)(self._count_forward)

    def _operator_on_gpu(self, call: CallT) -> Result:
        """A forward call from PyTorch's dispatcher, which nothing may have checked."""
        if self.table.get(self.signature(call)) is None:
            self.check(call)
        return self.on_gpu(call)

    def _operator_on_cpu(self, call: CallT) -> Result:
        self.check(call)
        return self._on_cpu(call)

    def _count_forward(self, *inputs: Any, **_: Any) -> int:
        return self.flops(self.call_of(inputs[: self._inputs]))[0]

    def _count_backward(self, *inputs: Any, **_: Any) -> int:
        return self.flops(self.call_of(inputs[3 : 3 + self._inputs]))[1]

    def _register_gradients(self) -> None:
        def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            self.save(ctx, self.call_of(inputs, with_lse=True), *output)

        def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
            needs = tuple(ctx.needs_input_grad[: self._gradients])
            others = (None,) * (self._inputs - self._gradients)
            return (*self.gradients(ctx, grad_out, grad_lse, needs), *others)

        inputs = ", ".join(f"{kind} {name}" for name, kind in self._types.items())
        arguments = f"Tensor grad_out, Tensor out, Tensor lse, {inputs}, bool[] needs"
        runs = self._gradients_on_gpu, self.reference_gradients, self.fake_gradients
        define(f"{self.name}_backward", arguments, "Tensor[]", *map(self.backward_implementation, runs))
        register_flop_formula(self.operator("backward"), get_raw=True)(self._count_backward)
        register = torch.library.register_autograd
        name = f"cudnn_sdpa::{self.name}"
        register(f"{name}_forward_lse", backward, setup_context=save_inputs, lib=library)
        register(f"{name}_forward", autograd_checks.no_log_sum_exp, lib=library)
        register(f"{name}_backward", autograd_checks.no_gradient_of_gradient, lib=library)


#: All operations, by name.
OPERATIONS: dict[str, Operation[Any]] = {}


class _Differentiable(torch.autograd.Function):
    """A call that autograd follows, in eager mode. Its result has an LSE only if that is wanted, which saves 2 µs."""

    @staticmethod
    def forward(ctx: Any, tracked: _Tracked, *_: Any) -> Any:
        """Runs the forward pass; the other inputs are those that autograd tracks."""
        operation, call, entry, returns_lse = tracked
        out, lse = (operation.runner(call) if entry is None else entry.run)(call)
        operation.save(ctx, call, out, lse)
        ctx.operation, ctx.last_gradient = operation, None if entry is None else entry.last_gradient
        return (out, lse) if returns_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        """The gradients of the tensors, None for the other input."""
        _, *needs = ctx.needs_input_grad
        return None, *ctx.operation.gradients(ctx, grad_out, grad_lse, tuple(needs), ctx.last_gradient)


class _ByReference(torch.autograd.Function):
    """The same by the reference in plain PyTorch, on any device, for calls that cuDNN declines."""

    @staticmethod
    def forward(ctx: Any, tracked: _Tracked, *_: Any) -> Any:
        """Runs the reference."""
        operation, call, _entry, _returns_lse = tracked
        out, lse = operation._on_cpu(call)
        operation.save(ctx, call, out, lse)
        ctx.operation = operation
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """The gradients of the tensors, None for the other input."""
        _, *needs = ctx.needs_input_grad
        return None, *ctx.operation.gradients(ctx, grad_out, grad_lse, tuple(needs), by_reference=True)


def _new(like: Tensor, layout: Layout) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
