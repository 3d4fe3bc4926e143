"""Plans with all that their launch needs, as data (`BoundPlan`), and calls that are bound to them.

A `SingleLaunch` is a call of one launch and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.tensor_checks import LOWEST, MISALIGNED, check_address, check_present, refuse_address
from cudnn_sdpa.errors import DeviceError
from cudnn_sdpa.graph.handles import FILLED_BYTES
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.cache import next_use
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import Plan, allocate, current_device, current_raw_stream, side_by_side

#: Shape, stride and dtype of a new tensor.
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Result = Tensor | tuple[Tensor, ...]  #: the results of a call: alone if it is one
#: Gives the results of a call of some kind, or the needed gradients of a backward call, in a tuple.
Run = Callable[..., Result]


def new_tensor(layout: Layout, device: torch.device | str) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def check_one_device(names: Sequence[str], given: Sequence[object]) -> None:
    """Checks that all tensors are on one device: an address on another would corrupt the CUDA context."""
    tensors = [(name, x) for name, x in zip(names, given, strict=False) if isinstance(x, Tensor)]
    first, x = tensors[0]
    for name, tensor in tensors[1:]:
        if tensor.device != x.device:
            raise DeviceError(name, str(tensor.device), f"{x.device}, the device of {first}")


def readable_gradient(tensor: Tensor) -> Tensor:
    """A gradient from autograd in a form that kernels can read: copied if it is expanded or misaligned."""
    return tensor.clone() if tensor.data_ptr() & MISALIGNED or 0 in tensor.stride() else tensor


class Address(NamedTuple):
    """An address that is known when a call is launched.

    Attributes:
        of: The operand, output or kernel's memory that it is in, by name.
        offset: Number of bytes behind the beginning of that.
    """

    of: str
    offset: int = 0


class OwnKernel:
    """A kernel of the library's own before a plan, for calls that look alike. It fills memory of its own.

    Attributes:
        name: What addresses call the memory that it fills.
        addresses: The addresses that are put into the argument at each launch, by place.
    """

    __slots__ = ("_device", "addresses", "blocks", "buffer_layout", "fields", "kernel", "name", "threads")

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        buffer_layout: Layout,
        *,
        blocks: int,
        threads: int,
        argument: Struct,
        values: Mapping[str, object],
        addresses: Mapping[str, Address],
        device: int,
    ) -> None:
        self.kernel = kernel.on(device)
        self.name, self.buffer_layout, self.blocks, self.threads = name, buffer_layout, blocks, threads
        self.fields = argument.filled(**values)
        self.addresses = dict(zip(argument.indices(*addresses), addresses.values(), strict=True))
        self._device = device

    def __call__(self, **addresses: int) -> Tensor:
        """Launches it on the current device and stream; returns the memory that it fills.

        Args:
            addresses: Addresses by name; 0 for what is left out.
        """
        made: Tensor = allocate(*self.buffer_layout)
        addresses[self.name] = made.data_ptr()
        places = [(place, addresses.get(x.of, 0), x.offset) for place, x in self.addresses.items()]
        self.launch([(place, address + offset) for place, address, offset in places if address])
        return made

    def launch(self, addresses: Iterable[tuple[int, int]]) -> None:
        fields = self.fields[:]  # of this call alone: many threads call at once
        for place, address in addresses:
            fields[place] = address
        self.kernel.launch(self.blocks, self.threads, fields, current_raw_stream(self._device))


@dataclass(frozen=True)
class LaunchExtras:
    """Optional operands and prologue kernels of a launch.

    Attributes:
        kernels: Kernels that run before the plan, in this order.
        addresses: The addresses of operands of the plan that are not the call's tensors themselves, by name.
        aligned: Addresses that kernels read in words of 16 bytes, of operands that may begin anywhere.
        copy_if_unaligned: Operands that are copied if kernels cannot read their address.
    """

    operands: tuple[str, ...] = ()
    kernels: tuple[OwnKernel, ...] = ()
    addresses: Mapping[str, Address] = field(default_factory=dict)
    aligned: tuple[Address, ...] = ()
    unaligned_ok: tuple[str, ...] = ()
    copy_if_unaligned: tuple[str, ...] = ()

    def __add__(self, other: LaunchExtras) -> LaunchExtras:
        return LaunchExtras(
            operands=self.operands + tuple(x for x in other.operands if x not in self.operands),
            kernels=self.kernels + other.kernels,
            addresses={**self.addresses, **other.addresses},
            aligned=self.aligned + other.aligned,
            unaligned_ok=self.unaligned_ok + other.unaligned_ok,
            copy_if_unaligned=self.copy_if_unaligned + other.copy_if_unaligned,
        )


NO_EXTRAS = LaunchExtras()
NOWHERE: Mapping[str, int] = {}
NO_ARRAYS: Mapping[str, array[int]] = {}

#: A place in a list of addresses, the number of what the address is of, and the offset.
_Pointer = tuple[int, int, int]


class BoundPlan:
    """A plan with all that its launch needs besides tensors, as data: what is allocated, and which address goes where.

    Attributes:
        operands: Names of the tensors that a launch gets, in its order.
        kernel_pointers: For each of them the addresses in its argument.
        prologue_scratch: Size of what they fill, if that may be in the memory of the thread's slot; otherwise 0.
        offsets: Where in that each of them fills what it fills.
        template: The addresses of its operands and outputs, as far as they are always the same.
        arrays: The host arrays, kept as long as there are launches.
    """

    def __init__(
        self,
        plan: Plan,
        operands: Sequence[str],
        results: Sequence[Layout],
        numbers: Mapping[str, float | None],
        extras: LaunchExtras = NO_EXTRAS,
        unaligned_plan: Callable[..., list[Tensor]] | None = None,
        arguments: Mapping[str, str] | None = None,
        fixed: Mapping[str, int] = NOWHERE,
        arrays: Mapping[str, array[int]] = NO_ARRAYS,
    ) -> None:
        """Binds it.

        Args:
            plan: The plan.
            operands: Names of the operands that a launch gets as tensors, in its order; those of `extras` follow.
            results: Layouts of the plan's outputs, as the caller sees them; without those in another's memory.
            numbers: The host scalars, by operand; None for those that the plan lacks.
            extras: Optional operands and prologue kernels.
            unaligned_plan: Launches calls with an address that this plan cannot read.
            arguments: What the caller calls operands, if not by their names.
            fixed: Addresses of operands that are the same in all launches; 0 for an operand that the call lacks.
            arrays: The host arrays, by operand, which each launch reads. They have 64-bit values and keep their length.
        """
        names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        outputs = [x.name for x in plan.key.outputs if extras.addresses.get(x.name, Address(x.name)).of == x.name]
        self.plan, self.results, self.kernels = plan, list(results), extras.kernels
        self.operands = (*operands, *extras.operands)
        self._unaligned_plan, self._copied = unaligned_plan, extras.copy_if_unaligned
        self._arguments = [(arguments or {}).get(name, name) for name in self.operands]
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        slots = [*self.operands, *outputs, *(kernel.name for kernel in self.kernels)]
        if len(outputs) != len(self.results) or len(set(slots)) != len(slots):
            raise ValueError(f"{plan.key.name}: layouts for {outputs}, and names that differ")

        def pointer(place: int, address: Address) -> _Pointer:
            return place, slots.index(address.of), address.offset

        own = {name: Address(name) for name in slots if name in names}
        self.pointers = [pointer(names.index(name), x) for name, x in (own | dict(extras.addresses)).items()]
        self.kernel_pointers = [
            [pointer(place, x) for place, x in kernel.addresses.items() if x.of in slots] for kernel in self.kernels
        ]
        offsets, prologue_scratch = list[int](), 0
        if self.kernels:
            offsets, prologue_scratch = side_by_side(_bytes_of(x.buffer_layout) for x in self.kernels)
        if prologue_scratch > FILLED_BYTES or type(plan) is not Plan:  # one that is tuned launches many
            prologue_scratch = 0
        self.offsets, self.prologue_scratch = offsets, prologue_scratch
        read = {name: Address(name) for name in self.operands if name not in extras.unaligned_ok}
        for name, x in extras.addresses.items():
            if x.offset % ALIGNMENT and x.of in read:
                read[name] = x
            elif x.offset % ALIGNMENT and x.of in outputs:
                refuse_address(name, x.offset % ALIGNMENT)
        read |= {x.of: x for x in extras.aligned}
        self.aligned = [pointer(0, x) for x in read.values()]
        self._aligned_names = [(arguments or {}).get(name, name) for name in read]
        given = {name: value for name, value in numbers.items() if value is not None}
        self.number_places, self.numbers = [names.index(name) for name in given], tuple(given.values())
        self._memory = array("f", self.numbers)  # numbers rarely change between calls, so their memory is kept
        self.template = array("Q", bytes(8 * len(names)))
        for name, constant in plan.constants.items():
            self.template[names.index(name)] = constant.data_ptr()
        for name, address in fixed.items():
            self.template[names.index(name)] = address
        self.arrays = dict(arrays)
        self._point_to_arrays()
        self._point_to(self._memory, self.template)
        self.recipe: object = ...  #: its native form; None if it has none, and an ellipsis until that is known
        if not loader.Native.is_started:
            loader.start()

    def __call__(
        self,
        tensors: Sequence[Tensor],
        out: Tensor | None = None,
        into: Sequence[Tensor] | None = None,
        numbers: tuple[float, ...] | None = None,
    ) -> list[Tensor]:
        """Launches the plan and returns its outputs: new tensors, but for the first if `out` is given.

        Args:
            tensors: The operands.
            out: Where the first output goes.
            into: Where all outputs go.
            numbers: The values of the host scalars in this launch, if not those that it was bound with.

        Raises:
            LayoutError: A tensor has no memory, or kernels cannot read its address.
        """
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self(tensors, out, into, numbers)
        addresses, bits = [x.data_ptr() for x in tensors], 0
        for _, slot, offset in self.aligned:
            bits |= addresses[slot] + offset
        if bits & MISALIGNED or min(addresses) < LOWEST:
            if bits & MISALIGNED and self._unaligned_plan is not None:
                return self._unaligned_plan(tensors, out, into, numbers)
            tensors = self._readable(tensors)
            addresses = [x.data_ptr() for x in tensors]
        outputs = [] if into is None else list(into)
        if into is None:
            for layout in self.results:
                outputs.append(allocate(*layout) if out is None else out)
                out = None
        for output in outputs:
            addresses.append(output.data_ptr())
        if self.kernels:
            self._launch_kernels(addresses, numbers)
        else:
            self._launch(addresses, numbers)
        del tensors  # until now: their memory must not go to the plan's workspace
        return outputs

    def sizes_of_outputs(self) -> list[int]:
        """Bytes that the plan may write to, from each output's address.

        A packed output has as many rows as the caller's tensor, in which sequences begin anywhere. Its layout in the
        key is a batch of sequences of the maximum length, which may be less.
        """
        inputs, sizes = len(self.plan.key.inputs), []
        of = {place: (slot - len(self.operands), offset) for place, slot, offset in self.pointers}
        for place, output in enumerate(self.plan.key.outputs, inputs):
            x = output.layout
            size = _bytes_of((x.shape, x.stride, x.dtype))
            if output.ragged:
                result, offset = of.get(place, (-1, 0))
                if not 0 <= result < len(self.results):
                    raise ValueError(f"{output.name} is packed, and not in memory of its own")
                size = _bytes_of(self.results[result]) - offset
            sizes.append(size)
        return sizes

    def _launch_kernels(self, addresses: list[int], numbers: tuple[float, ...] | None) -> None:
        slot = self.plan.take_filled() if self.prologue_scratch else None
        try:
            made = [] if slot else [allocate(*kernel.buffer_layout) for kernel in self.kernels]
            addresses += [slot.filled + at for at in self.offsets] if slot else [memory.data_ptr() for memory in made]
            for kernel, places in zip(self.kernels, self.kernel_pointers, strict=True):
                kernel.launch([(place, addresses[number] + offset) for place, number, offset in places])
            self._launch(addresses, numbers)
            del made  # not before: it must not go to the plan's workspace
        finally:
            if slot:
                slot.taken[0] = 0

    def _launch(self, addresses: Sequence[int], numbers: tuple[float, ...] | None) -> None:
        plan = self.plan
        pointers, memory = self.template[:], None  # of this call alone: many threads call at once
        for place, slot, offset in self.pointers:
            pointers[place] = addresses[slot] + offset
        if numbers is not None and numbers != self.numbers:
            memory = self._with_numbers(numbers, pointers)
        plan.last_used = next_use()
        plan.launch(pointers)
        del memory  # not before: cuDNN reads it at the launch

    def _readable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The operands, with copies of those that may be copied; refuses others that kernels cannot read."""
        aligned = {slot for _, slot, offset in self.aligned if not offset}
        found = []
        for slot, (name, argument, tensor) in enumerate(zip(self.operands, self._arguments, tensors, strict=True)):
            check_present(argument, tensor)
            if slot in aligned and tensor.data_ptr() & MISALIGNED:
                if name not in self._copied:
                    check_address(argument, tensor)
                # With the plan's strides, perhaps with gaps, which a clone would close.
                made: Tensor = allocate(tuple(tensor.shape), tensor.stride(), tensor.dtype)
                tensor = made.copy_(tensor)  # noqa: PLW2901 - where kernels can read it
            found.append(tensor)
        for name, (_, slot, offset) in zip(self._aligned_names, self.aligned, strict=True):
            if (address := found[slot].data_ptr() + offset) & MISALIGNED:
                refuse_address(name, address % ALIGNMENT)
        return found

    def _with_numbers(self, numbers: tuple[float, ...], pointers: array[int]) -> array[float]:
        if len(numbers) != len(self.numbers):
            raise ValueError(f"{len(numbers)} numbers for a call of {len(self.numbers)}")
        memory = array("f", numbers)
        self._point_to(memory, pointers)
        return memory

    def _point_to_arrays(self) -> None:
        for place, operand in enumerate(self.plan.key.inputs):
            if operand.role is Role.HOST:
                words = self.arrays[operand.name]
                if words.itemsize != 8 or len(words) != operand.layout.shape[0]:
                    raise ValueError(f"{operand}, of 64-bit values, and not {len(words)} of {8 * words.itemsize} bits")
                self.template[place] = words.buffer_info()[0]

    def _point_to(self, numbers: array[float], pointers: array[int]) -> None:
        first = numbers.buffer_info()[0]
        for number, place in enumerate(self.number_places):
            pointers[place] = first + numbers.itemsize * number


def _bytes_of(layout: Layout) -> int:
    shape, strides, dtype = layout
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (1 + last) * dtype.itemsize if all(shape) else 0


class SingleLaunch:
    """Runs calls of one kind that are one launch of a bound plan and nothing else."""

    __slots__ = ("_is_backward", "bound", "operands", "returned", "single_output", "tensors_of")

    def __init__(
        self, bound: BoundPlan, returned: Sequence[int] | None = None, *, of: Mapping[str, str] | None = None
    ) -> None:
        """Makes it.

        Args:
            bound: The bound plan.
            returned: Which of its results are given; all of them in a tuple, or one alone, if not said.
            of: Where operands are in a backward call, whose `out` is one of them.
        """
        self.bound = bound
        self._is_backward = of is not None
        self.operands = tuple([(of or {}).get(name, name) for name in bound.operands])
        self.returned = tuple(range(len(bound.results))) if returned is None else tuple(returned)
        self.single_output = returned is None and len(self.returned) == 1
        self.tensors_of = items_by_name(self.operands)

    def __call__(self, call: object) -> Result:
        """The results of a call; of a forward call into its `out`, if it has one."""
        out = None if self._is_backward else getattr(call, "out", None)
        outputs = self.bound(self.tensors_of(call), out)
        return outputs[0] if self.single_output else tuple([outputs[place] for place in self.returned])


class Prepared(NamedTuple):
    """A call bound to its plan.

    Attributes:
        plan: The plan; None if the binding is not to be remembered, as for empty tensors, which need no plan.
        policy: The shape policy under which the binding may be remembered; None if it always may.
    """

    run: Run
    plan: Plan | None
    policy: str | None = None


def items_by_name(names: Sequence[str]) -> Callable[[object], tuple[Tensor, ...]]:
    if not names:
        return lambda _: ()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda of: (only(of),)
    return attrgetter(*names)


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
