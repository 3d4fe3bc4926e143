"""An operation as data: the class of its calls, the places of their parts among the fields, and the bound calls."""

from __future__ import annotations

import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.engine.launch import Prepared, Result, layout_signature
from cudnn_sdpa.engine.operation.call import GIVEN, BackwardCall, Call, CallT
from cudnn_sdpa.plans import shape_policy
from cudnn_sdpa.plans.cache import CallTable

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

    def __post_init__(self) -> None:
        #: The calls that are bound to their plans.
        self.table: CallTable[Prepared] = CallTable()
        hints = typing.get_type_hints(self.call)
        self.fields = self.call._fields
        flags = tuple(name for name in self.fields if name.startswith("with_"))
        self.takes_out = self.fields[-1] == "out"
        wanted = (*flags, "out") if self.takes_out else flags
        self._inputs = len(self.fields) - len(wanted)
        #: The class of the last input, if that holds options: they are inputs of the operators one by one.
        self._grouped = hints[self.fields[self._inputs - 1]]
        self.has_group = hasattr(self._grouped, "_fields")
        self.group_at = self._inputs - self.has_group
        #: The inputs of the operators, with their types in schemas.
        self.types = {name: SCHEMA_TYPES[hints[name]] for name in self.fields[: self.group_at]}
        tensors = sum(kind.startswith("Tensor") for kind in self.types.values())
        if self.has_group:
            hints = typing.get_type_hints(self._grouped)
            names = [name for name in self._grouped._fields if name not in self.call.omitted]
            self.types |= {name: SCHEMA_TYPES[hints[name]] for name in names}
        self._group_names = tuple(self.types)[self.group_at :]
        self.can_draw = "rng" in self.types
        self.has_extra_key = self.call.extra_key is not Call.extra_key
        # Where, among the fields of a call, are its tensors, those that can have gradients, its options, both, all but
        # the tensors, and what recognizes it besides tensors. PyTorch's compiler takes slices for constants.
        self.tensors_at, self.differentiable_at = slice(tensors), slice(len(self.differentiable))
        self.options_at, self.inputs_at = slice(tensors, self._inputs), slice(self._inputs)
        self.others_at, self.recognized_at = slice(tensors, None), slice(tensors, self._inputs + len(flags))
        self._alone_at = slice(self.group_at)
        if self.fields[self.differentiable_at] != self.differentiable or self.fields[self._inputs :] != wanted:
            raise ValueError(f"{self.name}: fields in another order than {(*self.differentiable, '…', *wanted)}")
        if any(kind.startswith("Tensor") for kind in list(self.types.values())[tensors:]):
            raise ValueError(f"{self.name}: a tensor behind an option")
        if len(flags) != bool(self.aux_outputs):
            raise ValueError(f"{self.name}: a field with_… is there if and only if there are auxiliary results")
        #: The field that wants the auxiliary results, if there are any.
        self.flag, self.flag_at = "".join(flags), self._inputs
        self.all_outputs = (*(True for _ in flags), *(None for _ in wanted[len(flags) :]))
        #: Which of all results are always given, and which are saved if a gradient is needed.
        self.given_at = slice(len(self.outputs))
        #: The names of the operators, by what they do.
        self.operators = {"forward": self.forward or f"{self.name}_forward"}
        if self.flag:
            self.operators["forward_all"] = self.operators["forward"] + self.flag.removeprefix("with")
        if self.takes_out:
            self.operators["forward_out"] = f"{self.operators['forward']}_out"
        if self.backward is not None:
            self.operators["backward"] = f"{self.name}_backward"
            self.backward_call = self.backward  #: of operations that have one
            #: The tensors of a backward call besides those of the forward call.
            self.given_names = self.backward._fields[GIVEN]
            self.saved_at = self._saved_results(self.backward._fields)

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

    # A call and its parts.

    def call_of(self, inputs: Sequence[object], *, is_complete: bool = False, out: Tensor | None = None) -> CallT:
        """The call with these inputs, as operators have them."""
        wanted = [is_complete] * bool(self.flag) + [out] * self.takes_out
        if not self.has_group:
            return self.call(*inputs, *wanted)
        group = self._grouped(**dict(zip(self._group_names, inputs[self.group_at :], strict=True)))
        return self.call(*inputs[self._alone_at], group, *wanted)

    def inputs_of(self, call: CallT) -> tuple[object, ...]:
        """The inputs of the operators: the tensors and the options."""
        if not self.has_group:
            return call[self.inputs_at]
        group = call[self.group_at]
        return (*call[self._alone_at], *[getattr(group, name) for name in self._group_names])

    def flat(self, call: CallT) -> tuple[object, ...]:
        """All fields, those of a group of options one by one, as the native module describes them."""
        if not self.has_group:
            return call[:]
        return (*call[self._alone_at], *call[self.group_at], *call[self._inputs :])

    def first_of(self, call: CallT) -> Tensor:
        """The first tensor of a call, which says where it runs."""
        first: Tensor = call[0]
        return first

    def out_of(self, call: CallT) -> Tensor | None:
        return call[-1] if self.takes_out else None

    def draws(self, call: CallT) -> bool:
        return self.can_draw and bool(call[self.group_at].dropout_p)

    def backward_of(self, ctx: Any, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> BackwardCall[CallT]:
        """The backward call, from what `save` saved. It is read once: checkpoints let nothing be read twice."""
        saved = ctx.saved_tensors
        call = self.call(*saved[self.tensors_at], *ctx.options, *self.all_outputs)
        return self.backward_call(*grads, *saved[self.others_at], call, needs)

    # The wanted results.

    def complete(self, call: CallT, *, is_complete: bool = True) -> CallT:
        """The call with all results, or with those alone that are always given."""
        return call._replace(**{self.flag: is_complete}) if self.flag else call

    def is_complete(self, call: CallT) -> bool:
        return not self.flag or bool(call[self.flag_at])

    def select_outputs(self, call: CallT, found: tuple[Tensor, ...]) -> Result:
        """Of all results those that a call wants: alone if it is one."""
        return alone(found if self.is_complete(call) else found[self.given_at])

    def into_out(self, call: CallT, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results, the first of them written into `out` if that is given."""
        out = self.out_of(call)
        return found if out is None else (out.copy_(found[0]), *found[1:])

    def operator(self, which: str) -> Any:
        """One of the operators: "forward", "forward_all", "forward_out" or "backward"."""
        return getattr(torch.ops.cudnn_sdpa, self.operators[which])

    # The table of bound calls.

    def signature(self, call: CallT) -> Hashable:
        layouts = [  # `layout_signature` without its calls
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[self.tensors_at]
        ]
        options = call[self.recognized_at]
        out = call[-1] if self.takes_out else None
        of_out = None if out is None else layout_signature(out)
        extra = call.extra_key() if self.has_extra_key else None
        types = map(type, (*options, *call[self.group_at])) if self.has_group else map(type, options)
        return (*layouts, *options, *types, of_out, extra)

    def signature_of_gradient(self, backward: BackwardCall[CallT]) -> Hashable:
        layouts = map(layout_signature, backward[GIVEN])
        return "backward", *layouts, backward.needs, self.signature(backward.call)

    def add(self, name: Hashable, prepared: Prepared) -> Prepared:
        """Remembers a bound call, unless it has no plan, or is of a shape policy that has been changed."""
        self.table.add(name, prepared)
        if prepared.policy is not None and prepared.policy != shape_policy.active():  # asked once others see it
            self.table.forget(lambda other: other is prepared)
        return prepared

    def remember(self, call: CallT, prepared: Prepared) -> None:
        self.add(self.signature(call), prepared)

    def runs(self, kind: type[KindT]) -> list[KindT]:
        return [prepared.run for prepared in self.table.each() if isinstance(prepared.run, kind)]

    def forget(self, kind: type) -> None:
        """Forgets the calls whose launches are of this type; they are bound again."""
        self.table.forget(lambda prepared: isinstance(prepared.run, kind))


def as_tuple(found: Result | None) -> tuple[Tensor, ...]:
    """The results of an operator or a plan, which are one tensor, several, or none, as a tuple."""
    return (found,) if isinstance(found, Tensor) else () if found is None else tuple(found)


def alone(found: tuple[Tensor, ...]) -> Result:
    """The results without a tuple, if there is one only: undoes `as_tuple`."""
    return found if len(found) > 1 else found[0]
