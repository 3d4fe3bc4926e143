"""`graph_op`: custom fused cuDNN operations, called like any function of tensors.

All graph functions share one torch operator, `graph_function`: users define them at run time, and compiled graphs that
PyTorch keeps on disk must find them again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa.engine import autograd_checks, cpu_target, sharding
from cudnn_sdpa.engine.dispatch_state import (
    Differentiable,
    can_be_recognized,
    can_bypass_dispatcher,
    cast_tensor,
    could_cast,
    is_batch,
    is_deterministic_mode,
    is_lazy,
    materialized,
    needs_gradient,
    views_of_leaves,
)
from cudnn_sdpa.engine.explain import Description
from cudnn_sdpa.engine.launch import (
    NOT_A_CALL,
    Address,
    BoundPlan,
    LaunchExtras,
    Layout,
    Result,
    check_one_device,
    new_tensor,
    readable_gradient,
    type_of,
)
from cudnn_sdpa.engine.native.calls import MISSED, Differentiation, NativeCalls, NativelySaved, RepeatableCall
from cudnn_sdpa.engine.tensor_checks import without_memory
from cudnn_sdpa.engine.torch_ops import SCHEMAS, Implementations, implement
from cudnn_sdpa.errors import DtypeError, ExecutionError, LayoutError, OptionError, UnsupportedError
from cudnn_sdpa.fused import large
from cudnn_sdpa.fused.checks import check_offsets, check_savable, check_strided, shown
from cudnn_sdpa.fused.encoding import Options, Value, checked_option, decoded_options, encoded, joined, operand_kinds
from cudnn_sdpa.graph.definition import GraphDefinition, find_operation, function_digest
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES, TensorLayout, is_expanded, layouts_of
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans.cache import CallTable, build_plan, plan_cache
from cudnn_sdpa.plans.plan import Plan

Outputs: TypeAlias = tuple[Tensor, ...]

#: Results of a reference, and of a backward.
Results: TypeAlias = Tensor | tuple[Tensor, ...] | list[Tensor]
Gradients: TypeAlias = "Tensor | tuple[Tensor | None, ...] | list[Tensor | None] | GraphCall | None"

ResultT = TypeVar("ResultT", Tensor, Tensor | None)

#: Operands, results and options as the graph reads and writes them.
Views = tuple[Sequence[Value], Sequence[Tensor], Options]

#: Launches a call, given its tensors and, by name, its numbers.
Run = Callable[..., Sequence[Tensor]]

#: All graph functions of this process by their tokens. They are never removed: a gradient may be computed after all
#: other references to its function are gone, and no other function may get its token.
_functions: dict[str, GraphFunction] = {}


class _BoundCall(NamedTuple):
    """A call bound to its plan, with all its options; `trains` if autograd follows it."""

    bound: BoundPlan
    plan: Plan
    static: Options
    trains: bool


class GraphFunction(GraphDefinition):
    """A fused cuDNN operation as a function of tensors; made by `graph_op`.

    A call like an earlier one is launched at once, in C++ or in Python. Any other is bound to the builder's parameters,
    cast, checked, and given tensors that kernels can read. Then it runs through autograd, through PyTorch's dispatcher
    if something intercepts operators, or at once: on the GPU its plan is found or built, on the CPU the reference runs,
    elsewhere there are only layouts.

    A backward pass is a Python function, which may call other graph functions: its plans are theirs.

    Attributes:
        operands: Names of the builder's tensors and numbers, in its order.
        options: The static options with their defaults; `inspect.Parameter.empty` where there is none.
        ways: Divisions of a call, among ranks or because it is large; None if none is declared.
        token: The name by which the torch operator finds the function.
        own: The call as own kernels read and write it, the key of its plan by them, which is None where cuDNN serves
            it, and why.
        calls: The native module's calls. A function with a signature of its own may try them before `run`, if Dynamo
            does not trace.
    """

    def __init__(self, builder: Callable[..., object], declared: graph_op) -> None:
        super().__init__(builder)
        self.reference, self.backward, self.check = declared.reference, declared.backward, declared.check
        self.readable, self.views, self.reads = declared.readable, declared.views, declared.reads
        self.auxiliary, self.autocast, self.flops = declared.auxiliary, declared.autocast, declared.flops
        self.materialize_grads, self._outputs = declared.materialize_grads, declared.outputs or declared.reference
        if self._outputs is None:
            expected = "reference=, the function in plain PyTorch, or outputs=, which returns empty results"
            raise OptionError(f"graph_op {builder.__name__}", "neither reference= nor outputs=", expected)
        self.__name__, self.__qualname__, self.__module__ = builder.__name__, builder.__qualname__, builder.__module__
        if type(self.auxiliary) is not int or self.auxiliary < 0:
            expected = "the number of results that are for backward= alone"
            raise OptionError(f"auxiliary of {builder.__name__}", shown(self.auxiliary), expected)
        keeps = declared.keeps_results
        if type(keeps) not in (bool, slice):
            raise OptionError(f"keeps_results of {builder.__name__}", shown(keeps), "a bool, or a slice of the results")
        self.kept = keeps if isinstance(keeps, slice) else slice(None if keeps else 0)
        self.read_options = [] if self.reads is None else _keyword_only(self.reads)
        self.takes_needs = self.backward is not None and "needs" in inspect.signature(self.backward).parameters
        parameters = list(inspect.signature(builder).parameters.values())[1:]
        self.operands = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        if unknown := [name for name in self.read_options if name not in self.options]:
            expected = f"options alone: {', '.join(self.options) or 'it has none'}"
            raise OptionError(f"reads of {builder.__name__}", f"keyword-only {', '.join(unknown)}", expected)
        for p in parameters:
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None):
                got, hint = f"the default {shown(p.default)}", f"Make {p.name!r} keyword-only."
                raise OptionError(f"{p.name} of {builder.__name__}", got, "an operand without a default but None", hint)
        self._optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is None}
        if len(self.operands) + len(self.options) != len(parameters):
            got = "a * parameter or a positional-only one"
            raise OptionError(f"the graph builder {builder.__name__}", got, "no * parameters, and names for all others")
        if not self.operands:
            expected = "a function of the graph and of one operand or more, such as (g, x)"
            raise OptionError(f"the graph builder {builder.__name__}", "no operand", expected)
        shard = declared.shard
        if isinstance(shard, Mapping):
            _check_shard(shard, self.operands)
            shard = sharding.along(shard)
        self.ways = shard
        functions = (builder, self.backward, self.reference, declared.outputs, self.readable, self.views, self.reads)
        self.token = register(self, function_digest(*functions))
        self._could_cast = could_cast if self.autocast else lambda _: False
        self.table: CallTable[_BoundCall] = CallTable()
        self.calls = NativeCalls(numbers=len(self.operands))
        self.own: Callable[..., tuple[Views, PlanKey | None, str]] | None = None

    def __reduce__(self) -> str:
        """Pickled and copied by name, as functions are."""
        return self.__qualname__

    def __call__(self, *operands: Value, **options: object) -> Any:
        """Results for these operands: tensors, numbers, or None for optional ones.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: cuDNN has no plan for it, or tensors are not on a GPU and there is no reference.
        """
        return self.run(operands, options)

    def run(self, operands: tuple[Value, ...], options: Mapping[str, object]) -> Any:
        """`__call__` for a tuple of operands and a dictionary of options: saves 0.2 µs."""
        if options and not options.keys() <= self.options.keys():
            operands, options = self._in_order(operands, options)
        if not is_compiling():
            find = self.calls.find
            if find is not None:
                known = find(*operands, **options) if options else find(*operands)
                if known is not MISSED:
                    return known
            entry = self._find(operands, options)
            if entry is not None:
                if self.calls.find is not None:
                    self._register(operands, options, entry)
                if entry.trains:
                    return self._differentiate(self._completed(operands), entry.static, entry.bound)
                return self._returned(entry.bound(_tensors(operands), numbers=_numbers(operands)), trains=False)
        return self._first(operands, options)

    def call(self, *operands: Value, **options: object) -> GraphCall:
        """A call to be made later, returned by the `backward` of another function.

        Its results are the gradients of the first operands of that function, in their order;
        `call(...).of("x", "weight")` says that they are those of other operands.

        Examples:
            >>> import torch, cudnn_sdpa
            >>> @cudnn_sdpa.graph_op(reference=lambda grad, y: grad * (1 - y * y))
            ... def tanh_gradient(g, grad, y):
            ...     return g.sub(a=grad, b=g.mul(a=grad, b=g.mul(a=y, b=y)))
            >>> def backward(grads, operands, results):
            ...     return tanh_gradient.call(grads[0].contiguous(), results[0])
            >>> @cudnn_sdpa.graph_op(reference=torch.tanh, backward=backward)
            ... def tanh(g, x):
            ...     return g.tanh(input=x)
            >>> x = torch.zeros(1, 2, 8, requires_grad=True)
            >>> torch.autograd.grad(tanh(x).sum(), x)[0].sum()
            tensor(16.)
        """
        values, static = self._in_order(operands, options)
        return GraphCall(self, values, static)

    def _first(self, operands: tuple[Value, ...], options: Mapping[str, object]) -> Result:
        if sharding.has_dtensor(*operands):
            return self._on_dtensors(operands, options)
        values, static = self.arguments(operands, options)
        trains = needs_gradient(*_tensors(values))
        if trains and self.backward is None:
            raise self._without_gradients()
        values = self.as_readable(values, static)
        if is_compiling():
            return self._returned(self._by_operator(values, static), trains=trains)
        values = tuple(materialized(x) if isinstance(x, Tensor) and is_lazy(x) else x for x in values)
        tensors = _tensors(values)
        first = tensors[0]
        # `arguments` has cast for autocast already; references on the CPU run below it, as they do in the dispatcher.
        bypasses = can_bypass_dispatcher(*tensors, may_cast=not first.is_cuda) and not any(map(is_batch, tensors))
        if not bypasses or not (first.is_cuda or first.is_cpu or first.is_meta):
            _views = views_of_leaves(*tensors) if trains else []  # the operator applies a function of PyTorch's
            return self._returned(self._by_operator(values, static), trains=trains)
        run: Run = partial(self._run_elsewhere, values, static)
        if first.is_cuda and not any(x.numel() == 0 for x in tensors):
            run = self.prepared(values, static)
            # The signature is of the caller's operands. A plan for casts or copies of them, or for operands that
            # `readable` fills in, would not fit.
            given = self._completed(operands)
            is_as_given = all(x is y or isinstance(y, int) for x, y in zip(values, given, strict=True))
            if is_as_given and isinstance(run, BoundPlan):
                self.table.add(self.signature(operands, options, trains), _BoundCall(run, run.plan, static, trains))
        if trains:
            return self._differentiate(values, static, run)
        return self._returned(run(tensors, numbers=_numbers(values)), trains=False)

    def _by_operator(self, values: Sequence[Value], static: Options) -> Sequence[Tensor]:
        results: Sequence[Tensor] = torch.ops.cudnn_sdpa.graph_function(self.token, *encoded(values, static))
        return results

    def _without_gradients(self) -> UnsupportedError:
        is_ours = self.__module__.partition(".")[0] == __name__.partition(".")[0]
        why = "it is for inference" if is_ours else "the operation has no backward="
        reason = f"an operand requires grad, and {why}"
        return UnsupportedError(f"the gradient of {self.__name__.removesuffix('_rows')}", [reason], "torch.no_grad()")

    def _on_dtensors(self, operands: tuple[Value, ...], options: Mapping[str, object]) -> Result:
        tensors = self._named(self.arguments(operands, options)[0])

        def on_local_tensors(local: dict[str, Any], _: object) -> Result:
            result: Result = self.run(tuple([local[name] for name in self.operands]), options)
            return result

        ways = None if self.ways is None else self.ways(tensors)
        return sharding.run(self.__name__.removesuffix("_rows"), ways, tensors, on_local_tensors)

    def _find(self, operands: tuple[Value, ...], options: Mapping[str, object]) -> _BoundCall | None:
        try:
            tensors = _tensors(operands)
            if not can_be_recognized(tensors, self._could_cast):
                return None
            trains = needs_gradient(*tensors)
            if trains and any(x.is_inference() for x in tensors):  # which autograd cannot save
                return None
            return self.table.get(self.signature(operands, options, trains))
        except NOT_A_CALL:  # the checks name the wrong argument
            return None

    def signature(self, operands: tuple[Value, ...], options: Mapping[str, object], trains: bool) -> Hashable:
        """Everything that determines a call's plan and its binding; of numbers, which are data, the type."""
        layouts = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in operands]
        return (trains, is_deterministic_mode(), *layouts, *options.items(), *map(type_of, options.values()))

    def _named(self, values: Sequence[Value]) -> dict[str, Value]:
        return dict(zip(self.operands, values, strict=True))

    def _completed(self, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        return (*operands, *(None,) * (len(self.operands) - len(operands)))

    def _in_order(
        self, operands: tuple[Value, ...], options: Mapping[str, Any]
    ) -> tuple[tuple[Value, ...], Mapping[str, object]]:
        rest = self.operands[len(operands) :]
        for name in options:
            if name not in self.options and name not in rest:
                got = "a second value" if name in self.operands else "an argument that does not exist"
                raise OptionError(name, got, f"{self.__name__}({', '.join((*self.operands, *self.options))})")
        given = [place for place, name in enumerate(rest, start=1) if name in options]
        named = [options.get(name) for name in rest[: max(given, default=0)]]
        return (*operands, *named), {name: value for name, value in options.items() if name in self.options}

    def _register(self, operands: tuple[Value, ...], options: Mapping[str, object], entry: _BoundCall) -> None:
        if any(isinstance(x, int) for x in operands):
            return
        layouts = entry.bound.results
        count = len(layouts) - (self.auxiliary if entry.trains else 0)
        call = RepeatableCall(entry.bound, _tensors(operands), range(count), single_output=count == 1)
        differentiation = None
        if entry.trains:
            values = self._completed(operands)
            differentiation = Saved(self, entry.static, values, _requiring(values)).differentiation(values, layouts)
        self.calls.register(operands, options, call, differentiation)

    def _differentiate(self, values: tuple[Value, ...], static: Options, run: Run) -> Result:
        result: Result = Differentiable.apply(_Tracked(run, Saved(self, static, values, _requiring(values))), *values)
        return result

    def _returned(self, results: Sequence[Tensor], *, trains: bool) -> Result:
        returned = self.without_auxiliary(results, trains=trains)
        return returned[0] if len(returned) == 1 else tuple(returned)

    def without_auxiliary(self, results: Sequence[Tensor], *, trains: bool) -> Sequence[Tensor]:
        """Results without those for `backward` alone."""
        return results[: len(results) - self.auxiliary] if trains else results

    def _run_elsewhere(self, values: Sequence[Value], static: Options, *_: object, **__: object) -> Outputs:
        """Runs a call without a plan: on the CPU, on tensors without memory or without elements."""
        tensors = _tensors(values)
        if any(x.is_meta for x in tensors):
            return _fake_results(self, values, static)
        results = _run_reference(self, values, static)
        if cpu_target.active_name() is not None and not any(x.is_cuda or x.numel() == 0 for x in tensors):
            parts = self._parts(values, results, self._viewed(values, results, static))
            check_offsets(self._named(values), {name: x.offset for name, x in parts.items()})
        return results

    # The arguments.

    def arguments(
        self, operands: tuple[Value, ...], options: Mapping[str, object]
    ) -> tuple[tuple[Value, ...], Options]:
        """All operands in the builder's order, cast for autocast, numbers as floats; and all options; both checked."""
        if len(operands) > len(self.operands):
            got = f"{len(operands)} of them"
            raise OptionError(f"operands of {self.__name__}", got, f"no more than {', '.join(self.operands)}")
        values, static = self._completed(operands), {**self.options, **options}
        if static.get("trains") is inspect.Parameter.empty:
            static["trains"] = needs_gradient(*_tensors(values))
        for name, value in static.items():
            if value is inspect.Parameter.empty:
                raise OptionError(name, "nothing", f"a value: {self.__name__} has no default for this option")
        first = next(iter(_tensors(values)), None)
        if self.autocast and first is not None:
            values = tuple(cast_tensor(x, first) if isinstance(x, Tensor) else x for x in values)
        if self.check is not None:
            self.check(*values, **static)
        static = {name: checked_option(name, value) for name, value in static.items()}
        _check_operands(self._named(values), self._optional)
        autograd_checks.refuse_tangents(self._named(values))
        autograd_checks.refuse_transforms(self.__name__.removesuffix("_rows"), *values, loops=False)
        return tuple([float(x) if isinstance(x, int) else x for x in values]), static

    def as_readable(self, values: Sequence[Value], static: Options) -> tuple[Value, ...]:
        """The operands, with copies of those that kernels cannot read."""
        return tuple(values) if self.readable is None else tuple(self.readable(*values, **static))

    # Plans.

    def outputs(self, values: Sequence[Value], static: Options) -> Outputs:
        """Meta tensors like the results."""
        assert self._outputs is not None
        meta = [without_memory(x) if isinstance(x, Tensor) else x for x in values]
        with torch.no_grad():
            results = as_tuple(self._outputs(*meta, **static))
        for number, result in enumerate(results):
            if is_expanded(result.shape, result.stride()):
                got = f"result {number} with strides {result.stride()}"
                raise LayoutError("outputs", got, "an address of its own for every element", "Use .contiguous().")
        if (split := self.split(meta, results)) is not None:
            self.outputs(split.part(self._named(meta), 0), static)  # raises if the parts are too large, too
        return results

    def split(self, values: Sequence[Value], results: Sequence[Tensor]) -> large.Split | None:
        """The parts of a call that is too large for one plan; None for others."""
        return large.split_of(self.__name__, self.ways, self._named(values), results)

    def _viewed(self, values: Sequence[Value], results: Sequence[Tensor], static: Options) -> Views:
        return (values, results, static) if self.views is None else self.views(values, results, static)

    def _key(self, given: Views, target: Target, device: int | None) -> tuple[PlanKey, Mapping[str, Address]]:
        """The key of a call's plan, and the places of operands and results that are parts of others."""
        values, results, static = given
        if self.own is not None:
            read, key, _ = self.own(self.operands, given, target=target, device=device)
            if key is not None:
                return key, self._parts(values, results, read)
        viewed = self._viewed(values, results, static)
        return self._cudnn_key(viewed, target, device), self._parts(values, results, viewed)

    def _cudnn_key(self, viewed: Views, target: Target, device: int | None) -> PlanKey:
        values, results, static = viewed
        rank = max(x.dim() for x in _tensors(values))
        number = TensorLayout.contiguous((1,) * rank, torch.float32)
        layouts = iter(layouts_of([*_tensors(values), *results], channels_last=self.channels_last))
        inputs = [
            Operand(name, next(layouts)) if isinstance(x, Tensor) else Operand(name, number, Role.SCALAR)
            for name, x in zip(self.operands, values, strict=True)
            if x is not None
        ]
        outputs = [Operand(f"output{index}", layout) for index, layout in enumerate(layouts)]
        return self.key(inputs, outputs, static, target, device=device, deterministic=is_deterministic_mode())

    def prepared(self, values: tuple[Value, ...], static: Options) -> BoundPlan | large.LargeCall:
        """A call, with all operands and options and tensors that kernels can read, bound to its plan or split."""
        signature = self.signature(values, static, False)
        entry: _BoundCall | None = self.table.get(signature)
        if entry is not None:
            return entry.bound
        check_one_device(self.operands, values)
        results, named = self.outputs(values, static), self._named(values)
        layouts = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in results]
        if (split := self.split(values, results)) is not None:
            bind = partial(self.prepared, static=static)
            return large.LargeCall(bind, split, self.operands, operand_kinds(values), results=layouts)
        device = _tensors(values)[0].get_device()
        with torch.cuda.device(device):
            key, addresses = self._key((values, results, static), live_target(device), device)
            bound = BoundPlan(
                plan=plan_cache.get(key, partial(build_plan, self)),
                operands=[name for name, x in named.items() if isinstance(x, Tensor)],
                results=layouts,
                numbers={name: x for name, x in named.items() if isinstance(x, float)},
                extras=LaunchExtras(addresses=addresses),
            )
        self.table.add(signature, _BoundCall(bound, bound.plan, static, trains=False))
        return bound

    def _parts(self, values: Sequence[Value], results: Sequence[Tensor], viewed: Views) -> dict[str, Address]:
        """Operands and results of the views beyond the call's: parts of the operand before, or of the first result."""
        read, written, _ = viewed
        parts = {}
        for index, (x, view) in enumerate(zip(values, read, strict=True)):
            whole = values[index - 1]
            if x is None and isinstance(view, Tensor) and isinstance(whole, Tensor):
                parts[self.operands[index]] = Address(self.operands[index - 1], view.data_ptr() - whole.data_ptr())
        for index, view in enumerate(written[len(results) :], start=len(results)):
            parts[f"output{index}"] = Address("output0", int(view.storage_offset()) * view.element_size())
        return parts

    def describe(self, *operands: Value, **options: object) -> Description:
        """The description of a call with these arguments on a GPU, and of its gradient.

        The gradient's plan is that of the first graph function that `backward` calls; the others are notes.
        """
        checked, static = self.arguments(*self._in_order(operands, options))
        if sharding.has_dtensor(*checked):
            local = sharding.local_arguments(self.__name__, self.ways, self._named(checked))
            checked = tuple(local.values())
        tensors = _tensors(checked)
        trains = needs_gradient(*tensors)
        if trains and self.backward is None:
            return Description.refused(
                self, self._without_gradients(), tensors[0].get_device() if tensors[0].is_cuda else None
            )
        values = tuple(without_memory(x) if isinstance(x, Tensor) else x for x in checked)
        with torch.no_grad():
            forward = self._describe(values, static, tensors[0].get_device() if tensors[0].is_cuda else None)
            if not trains or forward.is_empty:
                return replace(forward, backward=forward if trains else None)
            values = self.as_readable(values, static)
            results = self.outputs(values, static)
            grads, kept = self.without_auxiliary(results, trains=True), results[self.kept]
            with _Recorder() as recorder:
                gradients(self, grads, values, results=kept, static=static, needs=_requiring(checked))
            if not recorder.calls:
                return forward
            (function, operands, options), *others = recorder.calls
            backward = function._describe(operands, options, forward.device)
        notes = [f"{other.__name__}, a separate plan" for other, *_ in others]
        return replace(forward, backward=replace(backward, extra_kernels=backward.extra_kernels + notes))

    def _describe(self, values: tuple[Value, ...], static: Options, device: int | None) -> Description:
        if any(x.numel() == 0 for x in _tensors(values)):
            return Description(self, _no_key, device, is_empty=True)
        values = self.as_readable(values, static)
        results, notes = self.outputs(values, static), []
        while (split := self.split(values, results)) is not None:
            notes.append(f"the same in {split.parts - 1} other parts of {split.way.name}")
            values = split.part(self._named(values), 0)
            results = self.outputs(values, static)
        given = values, results, static
        described = Description(self, lambda *at: self._key(given, *at)[0], device, extra_kernels=notes)
        if self.own is None:
            return described
        own = partial(self.own, self.operands, given, device=device)
        return replace(described, choose=lambda target: own(target=target)[2])


@dataclass(frozen=True)
class GraphCall:
    """A call of a graph function, returned unrun by a `backward`; made by `GraphFunction.call`.

    Calling it runs the function.

    Attributes:
        names: The operands whose gradients the results are, in the order of the results; None for the first operands.
    """

    function: GraphFunction
    operands: tuple[Value, ...]
    options: Mapping[str, object]
    names: tuple[str, ...] | None = None

    def of(self, *names: str) -> GraphCall:
        """A call whose results are the gradients of these operands of the differentiated function."""
        return replace(self, names=names)

    def __call__(self) -> Any:
        return self.function.run(self.operands, self.options)

    def gradients(self, function: GraphFunction) -> tuple[Tensor | None, ...]:
        """Runs the call, whose results are gradients of another function: one for each operand of that."""
        results: tuple[Tensor, ...] = as_tuple(self())
        by_name = dict(zip(self._names_in(function, len(results)), results, strict=True))
        return tuple([by_name.get(name) for name in function.operands])

    def _names_in(self, function: GraphFunction, count: int) -> tuple[str, ...]:
        """The operands of the differentiated function whose gradients the results are, of this number."""
        names = function.operands[:count] if self.names is None else self.names
        if len(names) != count or len(set(names)) != count or not set(names) <= set(function.operands):
            named = "" if self.names is None else f" as the gradients of {', '.join(names) or 'nothing'}"
            got = f"a call of {self.function.__name__} with {count} result{'s' * (count != 1)}{named}"
            raise OptionError("backward", got, f"a result for each operand named, of {', '.join(function.operands)}")
        return names

    def repeatable(self, function: GraphFunction, needs: Sequence[bool]) -> RepeatableCall | None:
        """The call, which has run, if it was one launch with all needed gradients of another function."""
        entry = self.function._find(self.operands, self.options)
        if entry is None or entry.trains or entry.bound.numbers:
            return None
        names = self._names_in(function, len(entry.bound.results))
        needed = [name for name, need in zip(function.operands, needs, strict=True) if need]
        if not set(needed) <= set(names):
            return None
        return RepeatableCall(entry.bound, _tensors(self.operands), [names.index(name) for name in needed])


def gradients(
    function: GraphFunction,
    grads: Sequence[Tensor | None],
    values: Sequence[Value],
    *,
    results: Sequence[Tensor],
    static: Options,
    needs: tuple[bool, ...],
) -> tuple[tuple[Tensor | None, ...], GraphCall | None]:
    """The needed gradients by a function's backward, one for each operand, and the call that it returned, if any."""
    if function.backward is None:
        raise UnsupportedError(f"the gradient of {function.__name__}", ["the operation has no backward="])
    needed = {"needs": needs} if function.takes_needs else {}
    returned = function.backward(tuple(grads), tuple(values), results, **needed, **static)
    call, grad_inputs = (
        (returned, returned.gradients(function)) if isinstance(returned, GraphCall) else (None, as_tuple(returned))
    )
    if len(grad_inputs) != len(values):
        expected = f"{len(values)}, one for each operand, None where there is none"
        raise OptionError("backward", f"{len(grad_inputs)} gradients", expected)
    return tuple([x if need else None for x, need in zip(grad_inputs, needs, strict=True)]), call


class Saved:
    """State of a call for its backward pass, given which operands require a gradient.

    Autograd's graph holds this and no plan.
    """

    __slots__ = ("_kinds", "_static", "_unread", "function")

    def __init__(
        self, function: GraphFunction, static: Options, values: Sequence[Value], needs: tuple[bool, ...]
    ) -> None:
        self.function, self._static = function, static
        options = {name: static[name] for name in function.read_options}
        reads = [True] * len(values) if function.reads is None else function.reads(values, needs, **options)
        unread = {index: x for index, x in enumerate(values) if isinstance(x, Tensor) and not reads[index]}
        self._unread = [(index, (x.shape, x.stride(), x.dtype)) for index, x in unread.items()]
        self._kinds = operand_kinds([None if index in unread else x for index, x in enumerate(values)])

    def save(self, ctx: Any, values: Sequence[Value], results: Sequence[Tensor]) -> None:
        """Saves the values of a call in `ctx`: the operands that `backward` reads, the kept results, the numbers."""
        ctx.save_for_backward(*self._read(values), *results[self.function.kept])
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.function, ctx.numbers = self.gradients, self.function, _numbers(values)
        returned = self.function.without_auxiliary(results, trains=True)
        if len(returned) > 1 and self.function.materialize_grads:  # one of several may have none: zeros like these
            ctx.options = tuple([(x.shape, x.dtype, x.device) for x in returned])

    def _read(self, values: Sequence[Value]) -> list[Tensor]:
        return [x for x, kind in zip(values, self._kinds, strict=True) if kind == "t" and isinstance(x, Tensor)]

    def gradients(self, ctx: Any, grads: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        return self._gradients_and_call(ctx, grads, needs)[0]

    def _gradients_and_call(
        self, ctx: Any, grads: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> tuple[Sequence[Tensor | None], GraphCall | None]:
        if not [grad for grad in grads if grad is not None]:
            return (None,) * len(needs), None
        saved = ctx.saved_tensors  # read once: hooks may load them, and checkpointing counts accesses
        values = list(joined(self._kinds, saved, ctx.numbers))
        for index, layout in self._unread:
            values[index] = new_tensor(layout, "meta")
        given = [self._given(ctx, index, grad) for index, grad in enumerate(grads)]
        results = saved[self._kinds.count("t") :]
        try:
            return gradients(self.function, given, values, results=results, static=self._static, needs=needs)
        except (ExecutionError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # plain PyTorch may compute a batch of gradients, cuDNN cannot
            if any(grad is not None and is_batch(grad) for grad in given):
                raise autograd_checks.refusal_of_batch() from error
            raise

    def _given(self, ctx: Any, index: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of a result as an argument of `backward`."""
        if grad is None and self.function.materialize_grads:
            shape, dtype, device = ctx.options[index]
            return torch.zeros(shape, dtype=dtype, device=device)
        return readable_gradient(grad) if type(grad) is Tensor and not is_batch(grad) else grad

    def differentiation(self, values: tuple[Value, ...], results: Sequence[Layout]) -> Differentiation:
        returned = results[: len(results) - self.function.auxiliary]
        device = _tensors(values)[0].device
        return Differentiation(
            name=f"cudnn_sdpa::{self.function.__name__}",
            gradients=self.native_gradients,
            options=tuple([(shape, dtype, device) for shape, _, dtype in returned]),
            inputs=[x if isinstance(x, Tensor) else None for x in values],
            saved=self._read(values),
            results=range(len(results))[self.function.kept],
        )

    def native_gradients(
        self, saved: NativelySaved, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> tuple[Sequence[Tensor | None], Callable[[], RepeatableCall | None]]:
        """Gradients of calls that the native module has launched; see `Differentiation`."""
        found, call = self._gradients_and_call(saved, grads, needs)
        return found, lambda: None if call is None else call.repeatable(self.function, needs)


class _Tracked(NamedTuple):
    run: Run
    saved: Saved

    def forward(self, ctx: Any, values: tuple[Value, ...]) -> Result:
        run, saved = self
        results = run(_tensors(values), numbers=_numbers(values))
        saved.save(ctx, values, results)
        return saved.function._returned(results, trains=True)


# The operator.


def register(function: GraphFunction, digest: str) -> str:
    """Registers a graph function; returns its token: import path, digest, and a number if that is taken.

    The digest covers everything that a compiled graph depends on: PyTorch stores compiled graphs on disk, and must not
    load one that was made with another gradient.
    """
    name, number = f"{function.name}@{digest}", 1
    token = name
    while token in _functions:
        number += 1
        token = f"{name}#{number}"
    _functions[token] = function
    return token


def find(token: str) -> GraphFunction:
    """The graph function with this token; its module is imported if necessary."""
    function = _functions.get(token)
    if function is None:
        with contextlib.suppress(AttributeError, ImportError, TypeError):
            find_operation(token.partition("@")[0])
        function = _functions.get(token)
    if function is None:
        got, expected = "another builder, reference or gradient", "the same as when this graph was compiled"
        hint = "Compile again: torch.compiler.reset() forgets; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 reads no file."
        raise OptionError(f"the graph function {token}", got, expected, hint)
    return function


def run_on_gpu(function: GraphFunction, values: Sequence[Value], static: Options) -> Sequence[Tensor]:
    if any(x.numel() == 0 for x in _tensors(values)) and function.reference is not None:
        return _run_reference(function, values, static)  # cuDNN has no empty tensors
    # In a compiled function, gradients from autograd may be misaligned, and tensors differ in strides from the trace.
    named = function._named(values).items()
    values = [readable_gradient(x) if name.startswith("grad") and isinstance(x, Tensor) else x for name, x in named]
    values = function.as_readable(values, static)
    return function.prepared(values, static)(_tensors(values), numbers=_numbers(values))


def _run_reference(function: GraphFunction, values: Sequence[Value], static: Options) -> Outputs:
    if function.reference is None:
        reasons = ["its operands are not on an NVIDIA GPU, and it has no reference="]
        raise UnsupportedError(function.__name__, reasons, "tensors on a GPU")
    results, like = as_tuple(function.reference(*values, **static)), _fake_results(function, values, static)
    found, wanted = ([tuple(x.shape) if isinstance(x, Tensor) else x for x in each] for each in (results, like))
    if found != wanted:
        raise OptionError(
            f"reference of {function.__name__}", f"results of shapes {found}", f"those of outputs=, {wanted}"
        )
    return tuple([x.copy_(y) for x, y in zip(like, results, strict=True)])


def _fake_results(function: GraphFunction, values: Sequence[Value], static: Options) -> Outputs:
    device = _tensors(values)[0].device
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in function.outputs(values, static)
    )


def _decode(
    token: str,
    kinds: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    symbols: Sequence[int] | None,
    options: str,
) -> tuple[GraphFunction, tuple[Value, ...], Options]:
    function = find(token)
    static = zip(function.options, decoded_options(options, symbols or (), numbers), strict=True)
    return function, joined(kinds, tensors, numbers), dict(static)


def decoded(implementation: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: list(implementation(*_decode(*arguments)))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of graph functions while active, as (function, operands, options)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[GraphFunction, tuple[Value, ...], Options]] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if function is torch.ops.cudnn_sdpa.graph_function.default:
            self.calls.append(_decode(*args))
        return function(*args, **(kwargs or {}))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    function, values, static = _decode(*inputs)
    Saved(function, static, values, (True,) * len(values)).save(ctx, values, output)
    _, kinds, _, numbers, *_ = inputs
    ctx.kinds, ctx.has_numbers = kinds, bool(numbers)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[object, ...]:
    _, _, tensors_need, *_ = ctx.needs_input_grad  # in the order of the schema: name, kinds, tensors, ...
    needed = iter(tensors_need)
    needs = tuple(kind == "t" and bool(next(needed)) for kind in ctx.kinds)  # numbers never do
    grad_inputs = ctx.gradients(ctx, ctx.function.without_auxiliary(grads, trains=True), needs)
    tensor_gradients = [gradient for gradient, kind in zip(grad_inputs, ctx.kinds, strict=True) if kind == "t"]
    # One for each argument of the operator: token, kinds, tensors, numbers, symbols, options. PyTorch takes an empty
    # list of numbers for a list of tensors.
    return None, None, tensor_gradients, None if ctx.has_numbers else [], None, None


def _count_flops(*inputs: Any, out_val: object = None, **_: object) -> int:
    del out_val
    function, values, static = _decode(*inputs)
    return 0 if function.flops is None else function.flops(*values, **static)


implement(
    "graph_function",
    SCHEMAS[__name__][0],
    Implementations(
        cuda=decoded(run_on_gpu),
        cpu=decoded(_run_reference),
        fake=decoded(_fake_results),
        flops=_count_flops,
        backward=_backward,
        setup_context=_setup_context,
    ),
)


def as_tuple(results: ResultT | tuple[ResultT, ...] | list[ResultT]) -> tuple[ResultT, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _no_key(*_: object) -> NoReturn:
    raise AssertionError("a call without elements has no plan")


def _keyword_only(function: Callable[..., object]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _tensors(values: Sequence[object]) -> list[Tensor]:
    return [x for x in values if isinstance(x, Tensor)]


def _requiring(values: Sequence[Value]) -> tuple[bool, ...]:
    return tuple([isinstance(x, Tensor) and x.requires_grad for x in values])


def _check_operands(operands: Mapping[str, object], optional: Container[str]) -> None:
    tensors = {name: x for name, x in operands.items() if isinstance(x, Tensor)}
    if not tensors:
        raise OptionError(next(iter(operands)), "no tensor at all", "a tensor among the operands")
    check_strided(tensors)
    check_one_device(list(tensors), list(tensors.values()))
    for name, value in operands.items():
        if value is None and name not in optional:
            raise OptionError(name, "None", "a tensor or a number")
        if isinstance(value, Tensor):
            if value.dtype not in CUDNN_DTYPE_NAMES:
                raise DtypeError(name, str(value.dtype), "a dtype that cuDNN supports")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise OptionError(name, type(value).__name__, "a tensor or a number")
        elif isinstance(value, int):
            _check_number(name, value)
    check_savable(**tensors)


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    numbers = [x for x in values if isinstance(x, (int, float))]
    for number in numbers:
        if isinstance(number, int):
            _check_number("an operand", number)
    return tuple([float(x) for x in numbers])


def _check_shard(shard: Mapping[str, int], operands: Sequence[str]) -> None:
    for name, whole in shard.items():
        if name not in operands or isinstance(whole, bool) or not isinstance(whole, int) or whole < 0:
            got, names = f"{name!r}: {shown(whole)}", ", ".join(operands)
            raise OptionError("shard", got, f"operands, of {names}, each with a number of dimensions of at least 0")
    if not shard:
        raise OptionError("shard", "no operand", "operands with numbers of dimensions, or None")


def _check_number(name: str, value: int) -> None:
    if abs(value) > 2**127:  # larger ones overflow float32
        raise OptionError(name, shown(value), "a number that float32 can represent")


@dataclass(frozen=True, eq=False)
class graph_op:  # noqa: N801 - a decorator, called like a function
    """Makes a function of tensors from a function that builds a cuDNN graph.

    The builder is called as `builder(g, *operands, **options)`. `g` is cuDNN's graph with every operation as a method,
    and `g.types` its enumerations; operands are symbolic tensors; options, the builder's keyword-only parameters, are
    plain values. It returns one symbol or a tuple of them, the results. It runs once for each combination of layouts,
    dtypes and options; the plan is cached, stored, tuned, warmed up and explained like any other.

    Call the function with tensors in the builder's order. A parameter whose default is None may be left out; the
    builder then gets None. A number in place of a tensor is data: one float32 that cuDNN reads at each launch, and no
    part of the plan. The function works in eager mode, in CUDA graphs, and under `torch.compile` as one operator.

    The builder must depend on nothing but its arguments, so that a plan can be cached: it may use constants, other
    functions, and modules of Python, torch and numpy; anything else is refused. Define it at a module's top level, so
    that helper processes can import it.

    Args:
        builder: None: the builder follows, `graph_op(reference=...)(builder)`, as a decorator does.
        reference: The same function in plain PyTorch. It serves tensors that are not on a GPU. Unless `outputs` is
            given, it is also run on meta tensors to get the shapes, strides and dtypes of the results.
        outputs: Returns empty tensors like the results, for the same arguments.
        backward: `backward(grads, operands, results, **options)` returns one gradient for each operand, None where
            there is none. It may call other graph functions. A keyword-only parameter `needs` gets which operands
            require a gradient. Without `backward`, operands must not require grad.
            Where one call of a graph function gives all gradients, it may return that call, which it has not made:
            `return f.call(...)`, if the results of `f` are the gradients of the first operands in their order, and
            `return f.call(...).of("weight", ...)` if they are those of other operands. Like passes then launch the
            call in C++, and do not ask `backward` again. So its choice must depend on layouts, options, numbers
            and `needs` alone, and it must have no other effect.
        keeps_results: Whether `backward` gets the results. Otherwise `results` is empty, less memory is saved, and the
            results may be modified in place. A slice says which it gets: `slice(1, None)` all but the first.
        auxiliary: How many of the results, the last ones, are for `backward` alone, such as the statistics of a norm:
            the function does not return them. Builder, `reference` and the others take a keyword-only parameter
            `trains`, whether a gradient is wanted, and give them only then.
        check: `check(*operands, **options)` raises for wrong arguments. A call like an earlier one is not checked.
        readable: `readable(*operands, **options)` returns the operands with copies of those that the graph cannot read,
            made with differentiable functions of PyTorch.
        views: `views(operands, results, options)` returns the three as the graph reads and writes them: the same memory
            in other shapes, for which cuDNN has a kernel or a faster one. It is called when a plan is needed.
        reads: `reads(operands, needs)` returns which operands `backward` reads, given which require a gradient; the
            others are not saved, and it gets tensors without memory in their place. Keyword-only parameters get the
            options of these names.
        autocast: Whether autocast casts the operands, as it does for PyTorch's convolutions.
        materialize_grads: Whether `backward` gets zeros, and not None, for a result without gradient. If no result has
            one, it is not called.
        shard: The operands that ranks may share if they are DTensors, by name, each with the number of its last
            dimensions that a rank needs whole: `{"x": 1}` for rows of x. They are sharded alike, in any other
            dimension, and so are the results. The other operands are replicated, and their gradients are `Partial()`.
            Or a function of all operands and options by name that gives the divisions of a call, the usual one first:
            a convolution has `[cudnn_sdpa.engine.sharding.ShardingStrategy("the batch", {"x": 0}, 0)]`, for a part of
            dimension 0 of x and of the result on each rank. A call that extends over more than 2³¹ elements is split
            in the same way, into parts that run one after another. None refuses both.
        flops: `flops(*operands, **options)` returns how many floating-point operations `FlopCounterMode` counts for a
            call; it is given tensors without memory, too. None is none.

    Returns:
        A decorator that makes the function of its builder.

    Raises:
        OptionError: The builder is not a plain function, depends on something from outside, or neither `reference` nor
            `outputs` is given.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> def reference(x, bias, scale):
        ...     return torch.relu(x * scale + bias)
        >>> @cudnn_sdpa.graph_op(reference=reference)
        ... def scale_bias_relu(g, x, bias, scale):
        ...     return g.relu(input=g.add(a=g.mul(a=x, b=scale), b=bias))
        >>> scale_bias_relu(torch.ones(1, 2, 8), torch.zeros(1, 1, 8), 3.0).sum()
        tensor(48.)

    cuDNN's documentation of its graph operations lists what it can fuse.
    """

    builder: InitVar[None] = None
    _: KW_ONLY
    reference: Callable[..., Results] | None = None
    outputs: Callable[..., Results] | None = None
    backward: Callable[..., Gradients] | None = None
    keeps_results: bool | slice = True
    auxiliary: int = 0
    check: Callable[..., None] | None = None
    readable: Callable[..., Sequence[Value]] | None = None
    views: Callable[..., Views] | None = None
    reads: Callable[..., Sequence[bool]] | None = None
    autocast: bool = False
    materialize_grads: bool = True
    shard: Mapping[str, int] | sharding.Strategies | None = None
    flops: Callable[..., int] | None = None

    def __post_init__(self, builder: object) -> None:
        if builder is not None:
            got, expected = "a builder as an argument", "options: @graph_op(reference=...) above the builder"
            raise OptionError("graph_op", got, expected)

    def __call__(self, builder: Callable[..., object]) -> GraphFunction:
        return GraphFunction(builder, self)
