"""Calls that the native module launches; public functions look there first.

Python registers each kind of calls with the module, once it knows everything about one: the recipe of its bound plan,
the positions of the tensors among the caller's arguments, and the object that computes its gradients.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine import dispatch_state, fallback
from cudnn_sdpa.engine.launch import BoundPlan, Layout, OwnKernel
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.graph import handles
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import native_uses, plan_cache
from cudnn_sdpa.plans.kernel_plan import KernelPlan
from cudnn_sdpa.plans.nvrtc import LoadedKernel
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import ProgramPlan

_log = logging.getLogger("cudnn_sdpa")

#: What `NativeCalls.find` gives for a call that the module does not know.
MISSED = object()

#: PyTorch's functions, which C++ finds by itself, and tests replace.
_OF_PYTORCH = (plans.allocate, plans.current_raw_stream, plans.current_device)


class NativelySaved(NamedTuple):
    """The saved part of a call that the native module has launched, in place of autograd's `ctx`.

    Attributes:
        saved_tensors: The tensors of the call, then the results that are saved.
        options: The options of its `Differentiation`.
        may_fall_back: Whether a fallback was in force.
        numbers: The operands of the call that are numbers.
    """

    saved_tensors: tuple[Tensor | None, ...]
    options: tuple[object, ...]
    may_fall_back: bool
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Differentiation:
    """The gradients of a kind of calls, for the native module.

    Attributes:
        gradients: Computes them: called with what was saved, the gradients of the returned results, and which gradients
            are needed. Gives a gradient or None for each input; and a function that gives the backward call, if it can
            be repeated. It must hold no plan.
        inputs: The differentiable inputs; None for those that are left out.
        asks_for_fallback: Whether it wants to know if a fallback is in force.
    """

    name: str
    gradients: RunBackward
    options: tuple[object, ...]
    inputs: Sequence[Tensor | None]
    saved: Sequence[Tensor | None]
    results: range
    asks_for_fallback: bool = False


class RepeatableCall(NamedTuple):
    """A call that the module can repeat: one launch of a bound plan, and nothing else.

    Attributes:
        returned: The results that the caller gets, by place.
        out: The caller's tensor that the first result is written to; None if that is a new tensor.
        written: The operands that are written to.
    """

    bound: BoundPlan
    tensors: Sequence[Tensor]
    returned: Sequence[int]
    single_output: bool = False
    out: Tensor | None = None
    written: Sequence[Tensor] = ()


RunBackward = Callable[
    [NativelySaved, tuple[Tensor | None, ...], tuple[bool, ...]],
    tuple[Sequence[Tensor | None], Callable[[], RepeatableCall | None]],
]


class NativeCalls:
    """The calls of one public function that the native module launches.

    Attributes:
        find: Called with all arguments of the function as it got them: gives its results, or `MISSED`. None as long as
            the module is not asked.
    """

    def __init__(self, *, numbers: int = 0, with_extra_key: Sequence[int] = (), extra_key: str = "") -> None:
        """Makes a table without calls.

        Args:
            numbers: How many of the positional arguments, the first ones, are data if they are floats.
            with_extra_key: Positions of arguments with an attribute that is part of the signature.
            extra_key: Name of the attribute.
        """
        self.find: Any = None
        self._options = numbers, sum(1 << place for place in with_extra_key), extra_key
        _tables.add(self)
        plan_cache._tables.add(self)
        loader.when_loaded(partial(_use_if_alive, weakref.ref(self)))

    def use(self, module: ModuleType | None) -> None:
        self.find = None if module is None else module.Calls(*self._options)

    def register(
        self,
        arguments: Sequence[object],
        options: Mapping[str, object],
        call: RepeatableCall,
        differentiation: Differentiation | None = None,
    ) -> bool:
        """Registers calls like this one with the module, given its arguments as the function got them."""
        module, table = _module(), self.find
        if table is None or module is None or not call.bound.plan.held:
            return False
        places = {id(x): place for place, x in reversed(list(enumerate((*arguments, *options.values()))))}

        def place_of(tensor: Tensor | None) -> int:
            return -1 if tensor is None else places[id(tensor)]

        try:
            operands, written = ([place_of(x) for x in tensors] for tensors in (call.tensors, call.written))
            out, of = place_of(call.out), None
            if differentiation is not None:
                of = module.Differentiation(
                    name=differentiation.name,
                    gradients=_Gradients(differentiation.gradients),
                    options=differentiation.options,
                    setting=fallback.chosen if differentiation.asks_for_fallback else None,
                    in_force=fallback.TORCH,
                    differentiable=[place_of(x) for x in differentiation.inputs],
                    saved=[place_of(x) for x in differentiation.saved],
                    first_result=differentiation.results.start,
                    last_result=differentiation.results.stop,
                    returned=len(call.returned),
                )
        except KeyError:  # a tensor that was made of an argument
            return False
        plan, count = call.bound.plan, self._options[0]
        numbers = [place for place, x in enumerate(arguments[:count]) if type(x) is float]
        if len(numbers) != len(call.bound.numbers) and numbers:
            return False
        recipe = recipe_of(call.bound, module)
        if recipe is None:
            return False
        known = table.register(
            arguments=tuple(arguments),
            options=dict(options),
            recipe=recipe,
            plan=plan,
            operands=operands,
            written=written,
            numbers=numbers,
            out=out,
            returned=call.returned,
            is_tuple=not call.single_output,
            differentiation=of,
        )
        if not plan.held:  # evicted in the meantime
            table.forget(plan)
        return bool(known)

    def _drop(self, plan: Plan | None) -> None:
        if self.find is not None:
            self.find.forget(plan)

    def __len__(self) -> int:
        return 0 if self.find is None else len(self.find)


def _use_if_alive(of: weakref.ref[NativeCalls], module: ModuleType) -> None:
    """Has a table use the module, once it is loaded."""
    module.set_missed(MISSED)
    dispatch_state.set_observer_predicate(module.is_observed)
    table = of()
    if table is not None and not _is_switched_off:
        table.use(module)


_tables: weakref.WeakSet[NativeCalls] = weakref.WeakSet()
_is_switched_off = False


def _module() -> ModuleType | None:
    return None if _is_switched_off else loader.module()


def switch(*, on: bool) -> None:
    """Has calls take the native way, if the module is loaded, or Python's; for tests and benchmarks."""
    global _is_switched_off  # noqa: PLW0603
    _is_switched_off = not on
    for table in list(_tables):
        table.use(_module())


class _Computed(NamedTuple):
    """Gradients that Python has computed for the module.

    Attributes:
        recipe: Launches such a backward call from now on; None if Python does.
        operands: The places of its operands among the gradients of the results and what was saved.
        returned: Which of its results are the needed gradients.
    """

    gradients: Sequence[Tensor | None]
    recipe: object = None
    operands: Sequence[int] = ()
    returned: Sequence[int] = ()


class _Gradients:
    """Runs the backward pass in Python, and returns what the native module can replay."""

    __slots__ = ("_gradients",)

    def __init__(self, gradients: RunBackward) -> None:
        self._gradients = gradients

    def __call__(
        self,
        options: tuple[object, ...],
        grads: tuple[Tensor | None, ...],
        saved: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        *,
        may_fall_back: bool,
        numbers: tuple[float, ...],
        can_register: bool,
    ) -> _Computed:
        found, repeatable = self._gradients(NativelySaved(saved, options, may_fall_back, numbers), grads, needs)
        call, module = repeatable() if can_register else None, _module()
        if call is None or module is None or not call.bound.plan.held:
            return _Computed(found)
        given = [(place, x) for place, x in enumerate((*grads, *saved)) if x is not None]
        places = {id(x): place for place, x in given}
        operands = [places.get(id(x), -1) for x in call.tensors]
        if -1 in operands or len(places) < len(given):  # in other calls, two that are one here may be two
            return _Computed(found)
        return _Computed(found, recipe_of(call.bound, module), operands, call.returned)


def recipe_of(bound: BoundPlan, module: ModuleType) -> object:
    """The native form of a bound plan, which keeps it; None if the module cannot launch it."""
    if bound.recipe is ...:
        try:
            bound.recipe = module.Recipe(_data_of(bound) | _recorded(bound, module))
        except ValueError as error:  # more operands, or a kernel with more fields, than it has room for
            _log.debug("%s is launched in Python: %s", bound.plan.key.name, error)
            bound.recipe = None
    return bound.recipe


def _data_of(bound: BoundPlan) -> dict[str, object]:
    plan = bound.plan
    data = {
        "operands": len(bound.operands),
        "aligned": bound.aligned,
        "results": [_as_lists(layout) for layout in bound.results],
        "buffers": [_as_lists(kernel.buffer_layout) for kernel in bound.kernels],
        "prologue_scratch": bound.prologue_scratch,
        "offsets": bound.offsets,
        "kernels": [_prologue(*each) for each in zip(bound.kernels, bound.kernel_pointers, strict=True)],
        "pointers": list(bound.template),
        "places": bound.pointers,
        "number_places": bound.number_places,
        "numbers": list(bound.numbers),
        "arrays": bound.arrays,
        "stream": plans.current_raw_stream,
        "is_pytorchs_stream": plans.current_raw_stream in _OF_PYTORCH,
        "device": plan.device,
        "has_one_device": torch.cuda.device_count() <= 1,
        "plan": plan,
        "launch": plan.launch,
        "uses": native_uses,
        "last_use": plan.native_use,
    }
    if plans.current_device not in _OF_PYTORCH:
        data["current_device"] = plans.current_device
    if plans.allocate not in _OF_PYTORCH:
        data["allocate"] = plans.allocate
    if type(plan) is Plan:
        data |= {
            "execute": plan._execute,
            "count": plan.count,
            "slots": _slot,
            "capturing": torch._C._cuda_isCurrentStreamCapturing,
            "keep": plan.keep_for_graphs,
            "refused": plan.refuse,
            "workspace": ([plan.workspace], [1], torch.uint8),
            "scratch": handles.SCRATCH_BYTES,
        }
    elif type(plan) is KernelPlan:
        data |= {
            "program": [_kernel(*each) for each in plan.kernels],
            "fields": _words(plan.fields),
            "copied": plan.places,
            "scratch_places": plan.scratch_places,
            "workspace": ([plan.workspace // 4], [1], torch.float32),
        }
    elif isinstance(plan, ProgramPlan):
        data |= plan.native_form()
    return data


def _recorded(bound: BoundPlan, module: ModuleType) -> dict[str, object]:
    """The recorded launches of a plan, for the module; nothing of own kernels, or if recording is off."""
    plan = bound.plan
    if not plan.can_be_recorded or loader.recorded_mode() == loader.OFF:
        return {}
    from cudnn_sdpa.engine.recorded.recorder import recorder_of  # which other processes need not import

    recorder = recorder_of(plan, module)
    watch = partial(recorder.watch, sizes=bound.sizes_of_outputs())
    return {"recorded": recorder.native, "watch": watch, "zeros": handles.ZEROS_BYTES}


def _as_lists(layout: Layout) -> tuple[list[int], list[int], torch.dtype]:
    shape, stride, dtype = layout
    return list(shape), list(stride), dtype


def _slot(device: int) -> handles.Slot:
    return handles.thread.slots[device]


class _Kernel(NamedTuple):
    """A kernel of the library's own, for the module.

    Attributes:
        launch_ex: Address of `cuLaunchKernelEx`; 0 if `launch` launches the kernel.
        is_capturing: Address of `cuStreamIsCapturing`.
        launch: Launches it, given its argument and a stream.
    """

    launch_ex: int
    is_capturing: int
    function: int
    shared: int
    overlaps: bool
    blocks: int
    threads: int
    launch: Callable[[list[int], int], None]


def _kernel(kernel: LoadedKernel, blocks: int, threads: int) -> _Kernel:
    def launch(fields: list[int], stream: int) -> None:
        kernel.launch(blocks, threads, array("Q", fields), stream)

    launch_ex, is_capturing, function, shared, overlaps = getattr(kernel, "native", (0, 0, 0, 0, False))
    return _Kernel(
        launch_ex=launch_ex,
        is_capturing=is_capturing,
        function=function,
        shared=shared,
        overlaps=overlaps,
        blocks=blocks,
        threads=threads,
        launch=launch,
    )


class _Prologue(NamedTuple):
    """A kernel before a plan, for the module.

    Attributes:
        pointers: The addresses that are put into the argument.
    """

    kernel: _Kernel
    fields: list[int]
    pointers: Sequence[tuple[int, int, int]]


def _prologue(own: OwnKernel, pointers: Sequence[tuple[int, int, int]]) -> _Prologue:
    return _Prologue(_kernel(own.kernel, own.blocks, own.threads), _words(own.fields), pointers)


def _words(fields: array[int]) -> list[int]:
    return [field & (2**64 - 1) for field in fields]
