"""Calls of operations bound to their plans: tensors in, new tensors out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.engine.memory import MISALIGNED, check_address, refuse_address
from cudnn_sdpa.errors import DeviceError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.cache import next_use
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

#: Shape, stride and dtype of a new tensor.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


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
        is_binary: Whether `run_binary` launches it: two tensors in, its first operands, and one out.
    """

    __slots__ = (
        *("_before", "_elsewhere", "_inputs", "_known", "_names", "_numbers", "_outputs", "_parts", "_places"),
        *("_template", "is_binary", "plan"),
    )

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[str],
        results: Sequence[Layout],
        numbers: Mapping[str, float | None],
        before: Callable[[Any, array[int], list[Tensor]], object] | None = None,
        arguments: Sequence[str] | None = None,
        parts: Mapping[str, tuple[str, int]] | None = None,
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
            parts: Operands and outputs that lie in the memory of another one: its name, and how many bytes they lie
                behind its address.
        """
        names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        parts = {} if parts is None else parts
        outputs = [names.index(x.name) for x in plan.key.outputs if x.name not in parts]
        self.plan = plan
        self._before = before
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._names = list(inputs if arguments is None else arguments)
        self._inputs = [names.index(name) for name in inputs]
        self._outputs = list(zip(outputs, results, strict=True))
        self._parts = [(name, names.index(name), names.index(whole), offset) for name, (whole, offset) in parts.items()]
        given = {name: value for name, value in numbers.items() if value is not None}
        self._places, self._known = [names.index(name) for name in given], tuple(given.values())
        self._numbers = array("f", self._known)  # numbers rarely change between calls, so their memory is kept
        self._template = array("Q", bytes(8 * len(names)))
        for name, constant in plan.constants.items():
            self._template[names.index(name)] = constant.data_ptr()
        self._point_to(self._numbers, self._template)
        self.is_binary = self._inputs == [0, 1] and len(outputs) == 1 and not parts and before is None

    def __call__(
        self, call: Any, tensors: Sequence[Tensor], out: Tensor | None = None, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Launches the plan and returns its outputs: new tensors, but for the first if `out` is given.

        Args:
            call: The call.
            tensors: The inputs.
            out: Where the first output goes.
            into: Where all outputs go.

        Raises:
            LayoutError: A tensor has no memory, or kernels cannot read its address.
        """
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self(call, tensors, out, into)
        pointers, outputs, kept = self.pointers_for(call, tensors, out, into)
        plan.last_used = next_use()
        plan.launch(pointers)
        del kept  # until now: its memory must not go to the plan's workspace
        return outputs

    def run(self, tensors: Sequence[Tensor], numbers: tuple[float, ...] | None = None) -> list[Tensor]:
        """The same for a plan without `before`, whose outputs are new: saves 0.3 µs.

        Args:
            tensors: The inputs.
            numbers: The values of the host scalars in this launch, if not those that it was bound with.
        """
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self.run(tensors, numbers)
        pointers, bits, kept = self._template[:], 0, None
        for place, tensor in zip(self._inputs, tensors):  # noqa: B905 - their number is fixed
            pointers[place] = address = tensor.data_ptr()
            bits |= address or MISALIGNED
        if bits & MISALIGNED:
            self._check_addresses(tensors)
        if numbers is not None and numbers != self._known:
            kept = self._with_numbers(numbers, pointers)
        outputs = []
        for place, layout in self._outputs:
            output = allocate(*layout)
            pointers[place] = output.data_ptr()
            outputs.append(output)
        for name, place, whole, offset in self._parts:
            pointers[place] = address = pointers[whole] + offset
            if address & MISALIGNED:
                refuse_address(name, address % ALIGNMENT)
        plan.last_used = next_use()
        plan.launch(pointers)
        del kept  # until now: cuDNN reads numbers at the launch
        return outputs

    def run_binary(self, x: Tensor, y: Tensor, *numbers: float) -> Tensor:
        """The output of a launch with two tensors, without loops over operands and outputs: saves 0.5 µs."""
        plan = self.plan
        if numbers != self._known or (self._elsewhere and current_device() != plan.device):
            return self.run((x, y), numbers)[0]
        pointers = self._template[:]
        pointers[0] = address_x = x.data_ptr()
        pointers[1] = address_y = y.data_ptr()
        if (address_x | address_y) & MISALIGNED or not (address_x and address_y):
            self._check_addresses((x, y))
        ((place, layout),) = self._outputs
        out = allocate(*layout)
        pointers[place] = out.data_ptr()
        plan.last_used = next_use()
        plan.launch(pointers)
        return out

    def pointers_for(
        self, call: Any, tensors: Sequence[Tensor], out: Tensor | None = None, into: Sequence[Tensor] | None = None
    ) -> tuple[array[int], list[Tensor], object]:
        """The pointers of a launch, its outputs, and what must live until then; the plan's device is current."""
        pointers, bits = self._template[:], 0  # of this call alone: many threads call at once
        for place, tensor in zip(self._inputs, tensors):  # noqa: B905 - their number is fixed
            pointers[place] = address = tensor.data_ptr()
            bits |= address or MISALIGNED
        if bits & MISALIGNED:
            self._check_addresses(tensors)
        outputs = []
        if into is not None:
            for (place, _), output in zip(self._outputs, into, strict=True):
                pointers[place] = output.data_ptr()
                outputs.append(output)
        else:
            for place, layout in self._outputs:
                output = allocate(*layout) if out is None else out
                out = None
                pointers[place] = output.data_ptr()
                outputs.append(output)
        kept = None if self._before is None else self._before(call, pointers, outputs)
        return pointers, outputs, kept

    def _with_numbers(self, numbers: tuple[float, ...], pointers: array[int]) -> array[float]:
        """New memory with these numbers, to which the pointers then point."""
        if len(numbers) != len(self._known):
            raise ValueError(f"{len(numbers)} numbers for a call of {len(self._known)}")
        memory = array("f", numbers)
        self._point_to(memory, pointers)
        return memory

    def _point_to(self, numbers: array[float], pointers: array[int]) -> None:
        first = numbers.buffer_info()[0]
        for number, place in enumerate(self._places):
            pointers[place] = first + numbers.itemsize * number

    def _check_addresses(self, tensors: Sequence[Tensor]) -> None:
        for name, tensor in zip(self._names, tensors, strict=True):
            check_address(name, tensor)
