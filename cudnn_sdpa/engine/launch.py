"""Calls of operations bound to their plans: tensors in, new tensors out."""

from __future__ import annotations

import copy
import weakref
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.engine.fast_path import CallTable
from cudnn_sdpa.engine.memory import MISALIGNED, check_address
from cudnn_sdpa.errors import DeviceError, LayoutError
from cudnn_sdpa.graph.definition import GraphOp
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, layouts_of
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

#: Shape, stride and dtype of a new tensor.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

#: Bound calls, by everything that determines one.
calls: CallTable[None] = CallTable(None)

#: Bound calls of gradients, by their operands as autograd gives them.
_gradient_calls: CallTable[None] = CallTable(None)


def describe(operand: object) -> Hashable:
    """The part of an operand that determines a call; for a number, only its presence."""
    if isinstance(operand, Tensor):
        return operand.shape, operand.stride(), operand.dtype, operand.device
    return operand is None


def type_of(option: Any) -> Any:
    """The type of an option: 1, 1.0 and True differ, and so do 0.0 and -0.0; in tuples too."""
    kind = type(option)
    if kind is tuple:
        return tuple([type_of(item) for item in option])
    if not option and isinstance(option, float):  # also one of numpy's
        return kind, str(option)  # distinguishes -0.0 from 0.0
    return kind


def key_of(
    operation: GraphOp,
    names: Sequence[str],
    given: Sequence[object],
    outputs: Sequence[Tensor],
    options: Mapping[str, object],
    target: Target,
    device: int | None,
    *,
    deterministic: bool,
) -> PlanKey:
    """The key of the plan for operands and outputs with these layouts."""
    rank = max(x.dim() for x in given if isinstance(x, Tensor))
    number = TensorLayout.contiguous((1,) * rank, torch.float32)
    tensors = [x for x in (*given, *outputs) if isinstance(x, Tensor)]
    layouts = iter(layouts_of(tensors, channels_last=operation.channels_last))
    inputs = [
        Operand(name, next(layouts)) if isinstance(x, Tensor) else Operand(name, number, Role.SCALAR)
        for name, x in zip(names, given, strict=True)
        if x is not None
    ]
    results = [Operand(f"output{place}", layout) for place, layout in enumerate(layouts)]
    return operation.key(
        inputs=inputs, outputs=results, options=options, target=target, device=device, deterministic=deterministic
    )


def check_one_device(names: Sequence[str], given: Sequence[object]) -> None:
    """Checks that all tensors are on one device: an address on another would corrupt the CUDA context.

    Raises:
        DeviceError: They are on different devices.
    """
    tensors = [(name, x) for name, x in zip(names, given, strict=False) if isinstance(x, Tensor)]
    first, x = tensors[0]
    for name, tensor in tensors[1:]:
        if tensor.device != x.device:
            raise DeviceError(name, str(tensor.device), f"{x.device}, the device of {first}")


def readable(tensor: Tensor) -> Tensor:
    """A gradient from autograd in a form that kernels can read: copied if it is expanded or misaligned."""
    return tensor.clone() if tensor.data_ptr() & MISALIGNED or 0 in tensor.stride() else tensor


class BoundPlan:
    """A plan with all that its launch needs besides tensors: host numbers, constants, and where each pointer goes.

    Attributes:
        plan: The plan.
    """

    __slots__ = ("_before", "_elsewhere", "_inputs", "_names", "_numbers", "_outputs", "_template", "plan")

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[str],
        results: Sequence[Layout],
        numbers: Mapping[str, float | None],
        before: Callable[[Any, array[int], list[Tensor]], object] | None = None,
        arguments: Sequence[str] | None = None,
    ) -> None:
        """Binds it.

        Args:
            plan: The plan.
            inputs: Names of the operands that a launch gets as tensors, in its order.
            results: Shape, stride and dtype of the plan's outputs, as the caller sees them.
            numbers: The host scalars, by operand; None for those that the plan lacks.
            before: Fills in the pointers that are computed for each call, given the call, all pointers by place, and
                the outputs; returns what must live until the launch.
            arguments: What the caller calls the inputs, if not by the operands' names.
        """
        names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        self.plan = plan
        self._before = before
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._names = list(inputs if arguments is None else arguments)
        self._inputs = [names.index(name) for name in inputs]
        self._outputs = [(names.index(x.name), layout) for x, layout in zip(plan.key.outputs, results, strict=True)]
        self._numbers = {name: array("f", [value]) for name, value in numbers.items() if value is not None}
        fixed = {name: number.buffer_info()[0] for name, number in self._numbers.items()}
        fixed |= {name: constant.data_ptr() for name, constant in plan.constants.items()}
        self._template = array("Q", [fixed.get(name, 0) for name in names])

    def __call__(self, call: Any, tensors: Sequence[Tensor], out: Tensor | None = None) -> list[Tensor]:
        """Launches the plan and returns its outputs; the first is `out` if that is given, the others are new.

        Raises:
            LayoutError: A tensor has no memory, or kernels cannot read its address.
        """
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self(call, tensors, out)
        pointers, outputs, kept = self.pointers_for(call, tensors, out)
        plan.last_used = next_use()
        plan.launch(pointers)
        del kept  # until now: its memory must not go to the plan's workspace
        return outputs

    def pointers_for(
        self, call: Any, tensors: Sequence[Tensor], out: Tensor | None = None
    ) -> tuple[array[int], list[Tensor], object]:
        """The pointers of a launch, its outputs, and what must live until then; the plan's device is current."""
        pointers, bits = self._template[:], 0  # of this call alone: many threads call at once
        for place, tensor in zip(self._inputs, tensors):  # noqa: B905 - their number is fixed
            pointers[place] = address = tensor.data_ptr()
            bits |= address or MISALIGNED
        if bits & MISALIGNED:
            for name, tensor in zip(self._names, tensors, strict=True):
                check_address(name, tensor)
        outputs = []
        for place, layout in self._outputs:
            output = allocate(*layout) if out is None else out
            out = None
            pointers[place] = output.data_ptr()
            outputs.append(output)
        kept = None if self._before is None else self._before(call, pointers, outputs)
        return pointers, outputs, kept


class LastGradient:
    """Finds the last backward call of a forward call; autograd's graph holds this and no plan."""

    __slots__ = ("_cached",)

    def __init__(self) -> None:
        self._cached: tuple[Hashable, weakref.ref[GraphCall]] | None = None

    def find(self, signature: Hashable) -> GraphCall | None:
        """The bound call of a backward pass with this signature, if there is one."""
        cached = self._cached
        if cached is not None and cached[0] == signature:
            call = cached[1]()
            if call is not None:
                return call
        found: GraphCall | None = _gradient_calls.get(signature)
        if found is not None:
            self._cached = signature, weakref.ref(found)
        return found

    def add(self, signature: Hashable, call: GraphCall) -> None:
        """Adds the bound call of a backward pass; `signature` is everything that determines it."""
        _gradient_calls.add(signature, call)
        self._cached = signature, weakref.ref(call)


class GraphCall:
    """A call bound to its plan.

    Attributes:
        plan: The plan.
        last_gradient: Finds the last backward call of this call.
        last: Reset by `CallTable`.
    """

    __slots__ = (
        *("_elsewhere", "_held", "_is_binary", "_known", "_names", "_numbers", "_results", "_template", "_tensors"),
        *("__weakref__", "last", "last_gradient", "plan"),
    )

    def __init__(
        self,
        operation: Any,
        given: Sequence[Tensor | float | None],
        outputs: Sequence[Tensor],
        options: Mapping[str, object],
        *,
        deterministic: bool,
    ) -> None:
        check_one_device(operation.operands, given)
        device = next(x for x in given if isinstance(x, Tensor)).get_device()
        where = live_target(device), device
        key = key_of(operation, operation.operands, given, outputs, options, *where, deterministic=deterministic)
        self.plan = plan_cache.get(key, lambda key: build_plan(operation, key))
        self.last: object = None
        self.last_gradient = LastGradient()
        self._elsewhere = torch.cuda.device_count() > 1
        present = [x for x in given if x is not None]
        self._names = [operand.name for operand in key.inputs]
        self._tensors = [place for place, x in enumerate(present) if isinstance(x, Tensor)]
        self._numbers = [place for place, x in enumerate(present) if not isinstance(x, Tensor)]
        layouts: list[Layout] = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in outputs]
        self._results = list(enumerate(layouts, start=len(present)))
        self._is_binary = self._tensors == [0, 1] and len(layouts) == 1
        self._template = array("Q", bytes(8 * (len(present) + len(outputs))))
        self._known = tuple([float(x) for x in present if not isinstance(x, Tensor)])
        self._held = array("f", self._known)  # scalars rarely change between calls, so their memory is kept
        self._point_to(self._held, self._template)

    def shaped(self, *layouts: Layout) -> GraphCall:
        """The same call with results viewed in other shapes."""
        result = copy.copy(self)
        result.last_gradient = LastGradient()
        result._results = [(place, layout) for (place, _), layout in zip(self._results, layouts, strict=True)]
        return result

    def __call__(self, tensors: Sequence[Tensor], numbers: tuple[float, ...] = ()) -> list[Tensor]:
        """Launches the plan and returns new result tensors."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self(tensors, numbers)
        operands, bits, held = self._template[:], 0, None  # local to this call: many threads call at once
        for place, tensor in zip(self._tensors, tensors):  # noqa: B905 - the signature fixes their number
            operands[place] = address = tensor.data_ptr()
            bits |= address or MISALIGNED
        if bits & MISALIGNED:
            self._refuse(tensors)
        if numbers != self._known:
            if len(numbers) != len(self._known):
                raise ValueError(f"{len(numbers)} numbers for a call of {len(self._known)}")
            held = array("f", numbers)
            self._point_to(held, operands)
        outputs = []
        for place, layout in self._results:
            out = allocate(*layout)
            operands[place] = out.data_ptr()
            outputs.append(out)
        self.plan.last_used = next_use()
        self.plan.launch(operands)
        del held  # kept alive until here: cuDNN reads scalars at launch
        return outputs

    def run_binary(self, x: Tensor, y: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """The first result of a call with two tensors, without loops over operands and results: saves 0.5 µs."""
        plan = self.plan
        elsewhere = self._elsewhere and current_device() != plan.device
        if elsewhere or not self._is_binary or (numbers is not self._known and numbers != self._known):
            return self((x, y), numbers)[0]
        operands = self._template[:]
        operands[0] = address_x = x.data_ptr()
        operands[1] = address_y = y.data_ptr()
        if (address_x | address_y) & MISALIGNED or not (address_x and address_y):
            self._refuse((x, y))
        place, layout = self._results[0]
        out: Tensor = allocate(*layout)
        operands[place] = out.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return out

    def write(self, tensors: Sequence[Tensor], numbers: tuple[float, ...], addresses: Sequence[int]) -> None:
        """The same on the current device, writing the results to these addresses."""
        operands, held = self._template[:], array("f", numbers)
        for place, tensor in zip(self._tensors, tensors, strict=True):
            operands[place] = tensor.data_ptr()
            if operands[place] & MISALIGNED or not operands[place]:
                self._refuse(tensors)
        self._point_to(held, operands)
        for (place, _), address in zip(self._results, addresses, strict=True):
            operands[place] = address
        self.plan.last_used = next_use()
        self.plan.launch(operands)
        del held

    def _point_to(self, numbers: array[float], operands: array[int]) -> None:
        first = numbers.buffer_info()[0]
        for number, place in enumerate(self._numbers):
            operands[place] = first + 4 * number

    def _refuse(self, tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(self._tensors, tensors, strict=True):
            name, past = self._names[place], tensor.data_ptr() % ALIGNMENT
            if not tensor.data_ptr():
                hint = "Its storage was freed or resized to zero, as sharded training does with unused weights."
                raise LayoutError(name, "a tensor without memory (address 0)", "memory that holds its elements", hint)
            if past:
                got = f"memory at {past} bytes past a multiple of {ALIGNMENT}"
                raise LayoutError(name, got, f"a multiple of {ALIGNMENT} bytes", f"Use {name}.clone().")
