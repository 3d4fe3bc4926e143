"""The description of an operation, as data, and the launches of its checked calls.

On a GPU a call is launched by a plan, elsewhere the reference computes it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.fallback import TORCH
from cudnn_sdpa.engine.launch import CallTable, Prepared, check_one_device, layout_signature, new_tensor
from cudnn_sdpa.engine.operation.call import BackwardCall, Call, CallT
from cudnn_sdpa.plans import shape_policy

KindT = TypeVar("KindT")

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
class OperationDescription(Generic[CallT]):
    """An operation as data.

    Attributes:
        name: Its operators are `cudnn_sdpa::NAME_forward`, `NAME_forward_X` with auxiliary results if the call has a
            field `with_X` (`NAME_forward_lse`), `NAME_forward_out` if it has `out`, and `NAME_backward`.
        reference_call: The class of calls that only the reference runs, without cuDNN's limits; None without fallback.
        backward: The class of a backward call; None if no input can have a gradient.
        differentiable: The inputs that can have gradients; they are the first fields of a call.
        outputs: The results that are always given, by name. `out` is written into the first.
        aux_outputs: Those that are given if they are wanted, and saved for the backward pass.
        forward: Name of the forward operator, if not `NAME_forward`.
        names: What messages call the inputs, if not by the names of their fields.
        loops: Whether `torch.vmap` may run it once for each entry of a batch.
        forward_mode: What can be differentiated in forward mode instead.
        fallbacks: The settings of `fallback` that its calls follow, if there is a `reference_call`.
    """

    name: str
    function: str
    call: type[CallT]
    reference_call: type[CallT] | None = None
    backward: type[BackwardCall[CallT]] | None = None
    differentiable: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    aux_outputs: tuple[str, ...] = ("lse",)
    forward: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    loops: bool = True
    forward_mode: str = "torch.nn.functional.scaled_dot_product_attention"
    fallbacks: tuple[str, ...] = (TORCH,)

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
        if len(flags) != bool(self.aux_outputs):
            raise ValueError(f"{self.name}: a field with_… is there if and only if there are auxiliary results")
        self._flag = flags[0] if flags else ""
        self._all_outputs = (*(True for _ in flags), *(None for _ in wanted[len(flags) :]))
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
            self._given, self._saved = len(self.outputs), self._saved_results(self.backward._fields)

    def _saved_results(self, fields: tuple[str, ...]) -> slice:
        """Which results are saved: those that a backward call has.

        Raises:
            ValueError: A backward call has other fields than the results say.
        """
        gradients, results = tuple(f"grad_{name}" for name in self.outputs), (*self.outputs, *self.aux_outputs)
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

    def _given_of(self, backward: BackwardCall[CallT]) -> tuple[Tensor, ...]:
        return backward[:-2]

    # The wanted results.

    def complete(self, call: CallT, *, is_complete: bool = True) -> CallT:
        """The call with all results, or with those alone that are always given."""
        return call._replace(**{self._flag: is_complete}) if self._flag else call

    def _is_complete(self, call: CallT) -> bool:
        return not self._flag or bool(call[self._inputs])

    def first_of(self, call: CallT) -> Tensor:
        """The first tensor of a call, which says where it runs."""
        first: Tensor = call[0]
        return first

    def _draws(self, call: CallT) -> bool:
        return self._can_draw and bool(call[self._alone].dropout_p)

    def _out_of(self, call: CallT) -> Tensor | None:
        return call[-1] if self.takes_out else None

    def _is_for_cudnn(self, call: CallT) -> bool:
        return type(call) is self.call

    def _split_outputs(self, found: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of all results those that are always given, and the auxiliary ones."""
        return found[: len(self.outputs)], found[len(self.outputs) :]

    def _select_outputs(self, call: CallT, found: tuple[Tensor, ...]) -> Result:
        """Of all results those that a call wants: alone if it is one."""
        return alone(found if self._is_complete(call) else self._split_outputs(found)[0])

    def _into_out_of(self, call: CallT, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results, the first of them written into `out` if that is given."""
        out = self._out_of(call)
        return found if out is None else (out.copy_(found[0]), *found[1:])

    def operator(self, which: str) -> Any:
        """One of the operators: "forward", "forward_all", "forward_out" or "backward"."""
        return getattr(torch.ops.cudnn_sdpa, self.operators[which])


@dataclass(eq=False)
class Launches(OperationDescription[CallT]):
    def __post_init__(self) -> None:
        super().__post_init__()
        #: The calls that are bound to their plans.
        self.table: CallTable[Prepared] = CallTable()

    def runner(self, call: CallT) -> Callable[[CallT], Result]:
        """The method that runs a checked forward call on the device of its tensors."""
        first = self.first_of(call)
        return self.on_gpu if first.is_cuda else self.fake_results if first.is_meta else self.on_cpu

    def on_gpu(self, call: CallT) -> Result:
        """The results of a checked forward call on the GPU, whose plan is found by its signature, or bound."""
        self._check_on_gpu(call)
        out = self._out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        name = self.signature(call)
        known = self.table.get(name)
        result: Result = (known or self._add(name, call.bind())).run(call)
        return result

    def on_cpu(self, call: CallT) -> Result:
        """The results of a checked forward call by the reference, if a GPU would run it."""
        self._check_on_cpu(call)
        return self._select_outputs(call, self._into_out_of(call, call.reference()))

    def fake_results(self, call: CallT) -> Result:
        self._check_operator(call)
        found = tuple(new_tensor(layout, self.first_of(call).device) for layout in call.outputs())
        out = self._out_of(call)
        return self._select_outputs(call, found if out is None else (out, *found[1:]))

    # The checks before a launch that fake tensors would not pass. Tensors without plain memory may hold it elsewhere.

    def _check_on_gpu(self, call: CallT | BackwardCall[CallT], *, has_memory: bool = True) -> None:
        if value_checks.enabled:
            call.check_values()
        call.check_strides()
        if has_memory:
            call.check_memory()

    def _check_on_cpu(self, call: CallT | BackwardCall[CallT], *, has_memory: bool = True) -> None:
        if has_memory:
            call.check_values()
        if isinstance(call, BackwardCall) or self._is_for_cudnn(call):
            call.check_for_gpu()
        call.check_memory()

    # Backward calls.

    def gradients_on(self, device: Tensor, backward: BackwardCall[CallT]) -> Sequence[Tensor]:
        if device.is_cuda:
            return self._gradients_on_gpu(backward)
        return backward.fake_gradients() if device.is_meta else backward.reference()

    def _gradients_on_gpu(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        readable = backward.make_readable()
        name = self._signature_of_gradient(readable)
        known = self.table.get(name)
        if known is None:
            names = (*self.fields[: self._tensors], *self._given_names)
            tensors = (*self._tensors_of(backward.call), *self._given_of(backward))
            check_one_device(names, tensors)  # a saved-tensor hook may have moved them
            known = self._add(name, readable.bind())
        return list(as_tuple(known.run(readable)))

    def _checked_fake_gradients(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of an unchecked call in compiled code, without memory."""
        if self.reference_call is not None:  # whose limits are those of the forward pass
            without_limits = backward._replace(call=made(self.reference_call, backward.call))
            without_limits.check_options()
            without_limits.check()
        return backward.fake_gradients()

    # The table of bound calls.

    def signature(self, call: CallT) -> Hashable:
        layouts = [  # `layout_signature` without its calls
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[self._tensors_at]
        ]
        options = call[self._recognized_at]
        out = call[-1] if self.takes_out else None
        of_out = None if out is None else layout_signature(out)
        extra = call.extra_key() if self._has_extra_key else None
        types = map(type, (*options, *call[self._alone])) if self._has_group else map(type, options)
        return (*layouts, *options, *types, of_out, extra)

    def _signature_of_gradient(self, backward: BackwardCall[CallT]) -> Hashable:
        layouts = map(layout_signature, self._given_of(backward))
        return "backward", *layouts, backward.needs, self.signature(backward.call)

    def _add(self, name: Hashable, prepared: Prepared) -> Prepared:
        """Remembers a bound call, unless it has no plan, or is of a shape policy that has been changed."""
        self.table.add(name, prepared)
        if prepared.policy is not None and prepared.policy != shape_policy.active():  # asked once others see it
            self.table.forget(lambda other: other is prepared)
        return prepared

    def remember(self, call: CallT, prepared: Prepared) -> None:
        self._add(self.signature(call), prepared)

    def runs(self, kind: type[KindT]) -> list[KindT]:
        return [prepared.run for prepared in self.table.each() if isinstance(prepared.run, kind)]

    def forget(self, kind: type) -> None:
        """Forgets the calls whose launches are of this type; they are bound again."""
        self.table.forget(lambda prepared: isinstance(prepared.run, kind))

    # PyTorch's operators.

    def _through_dispatcher(self, call: CallT) -> Result:
        inputs, out = self.inputs_of(call), self._out_of(call)
        if out is not None:
            return self._select_outputs(call, (out, *as_tuple(self.operator("forward_out")(*inputs, out))))
        found: Result = self.operator("forward_all" if self._flag and self._is_complete(call) else "forward")(*inputs)
        return found

    def _gradients_through_dispatcher(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        tensors, inputs = self._given_of(backward), self.inputs_of(backward.call)
        found: list[Tensor] = self.operator("backward")(*tensors, *inputs, list(backward.needs))
        return found

    def _operator_on_gpu(self, call: CallT) -> Result:
        """A forward call from PyTorch's dispatcher, which nothing may have checked."""
        if self.table.get(self.signature(call)) is None:
            self._check_operator(call)
        return self.on_gpu(call)

    def _operator_on_cpu(self, call: CallT) -> Result:
        self._check_operator(call)
        return self.on_cpu(call)

    def _check_operator(self, call: CallT) -> None:
        """The checks of a call from PyTorch's dispatcher, which has checked the types."""
        call.check_options()
        call.check()


def made(kind: type[CallT], values: Iterable[object]) -> CallT:
    """A call with these fields. In compiled code, PyTorch 2.9 knows the properties of what `_make` gives alone."""
    return kind._make(values)


def as_tuple(found: Result | None) -> tuple[Tensor, ...]:
    """The results of an operator or a plan, which are one tensor, several, or none, as a tuple."""
    return (found,) if isinstance(found, Tensor) else () if found is None else tuple(found)


def alone(found: tuple[Tensor, ...]) -> Result:
    """The results without a tuple, if there is one only: undoes `as_tuple`."""
    return found if len(found) > 1 else found[0]
