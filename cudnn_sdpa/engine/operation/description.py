"""The description of an operation: data, and the parts of its calls, which follow from the fields."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.fallback import TORCH
from cudnn_sdpa.engine.operation.call import BackwardCall, Call, CallT

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
class Description(Generic[CallT]):
    """An operation as data.

    Attributes:
        name: Its operators are `cudnn_sdpa::NAME_forward`, `NAME_forward_X` with auxiliary results if the call has a
            field `with_X` (`NAME_forward_lse`), `NAME_forward_out` if it has `out`, and `NAME_backward`.
        function: Name of the public function, for messages.
        call: The class of a call.
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
        self._types = {name: SCHEMA_TYPES[hints[name]] for name in self.fields if name not in wanted}
        self._tensors = sum(kind.startswith("Tensor") for kind in self._types.values())
        self._inputs = len(self._types)
        self._can_draw = "rng" in self._types
        self._has_extra_key = self.call.extra_key is not Call.extra_key
        self._gradients = len(self.differentiable)
        # Where, among the fields of a call, are its tensors, those that can have gradients, its options, both, all but
        # the tensors, and what recognizes it besides tensors. PyTorch's compiler takes slices for constants.
        self._tensors_at, self._differentiable_at = slice(self._tensors), slice(self._gradients)
        self._options_at, self._inputs_at = slice(self._tensors, self._inputs), slice(self._inputs)
        self._others_at = slice(self._tensors, None)
        self._recognized_at = slice(self._tensors, self._inputs + len(flags))
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

    def _options_of(self, call: CallT) -> tuple[object, ...]:
        return call[self._options_at]

    def _inputs_of(self, call: CallT) -> tuple[object, ...]:
        return call[self._inputs_at]

    def _others_of(self, call: CallT) -> tuple[object, ...]:
        return call[self._others_at]

    def _given_of(self, backward: BackwardCall[CallT]) -> tuple[Tensor, ...]:
        """The tensors of a backward call besides those of the forward call."""
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
        return self._can_draw and bool(getattr(call, "dropout_p", 0.0))

    def _out_of(self, call: CallT) -> Tensor | None:
        """Where the first result goes, if not into new memory."""
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


def made(kind: type[CallT], values: Iterable[object]) -> CallT:
    """A call with these fields. In compiled code, PyTorch 2.9 knows the properties of what `_make` gives alone."""
    return kind._make(values)


def as_tuple(found: Result | None) -> tuple[Tensor, ...]:
    """The results of an operator or a plan, which are one tensor, several, or none, as a tuple."""
    return (found,) if isinstance(found, Tensor) else () if found is None else tuple(found)


def alone(found: tuple[Tensor, ...]) -> Result:
    """The results without a tuple, if there is one only: undoes `as_tuple`."""
    return found if len(found) > 1 else found[0]
