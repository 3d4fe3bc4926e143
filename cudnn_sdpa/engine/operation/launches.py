"""The launches of an operation's calls, which have been checked: on a GPU by a plan, elsewhere by the reference."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.fast_path import CallTable, layout_signature
from cudnn_sdpa.engine.launch import Layout, Prepared, check_one_device
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.description import Description, as_tuple, made
from cudnn_sdpa.plans import shape_policy

KindT = TypeVar("KindT")


@dataclass(eq=False)
class Launches(Description[CallT]):
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
        found = tuple(_new(self.first_of(call), layout) for layout in call.outputs())
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
        if self._is_for_cudnn(forward_of(call)):
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
        """Everything that decides a call's plan and how it is bound."""
        layouts = [  # `layout_signature` without its calls
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[self._tensors_at]
        ]
        options = call[self._recognized_at]
        out = call[-1] if self.takes_out else None
        of_out = None if out is None else layout_signature(out)
        extra = call.extra_key() if self._has_extra_key else None
        return (*layouts, *options, *map(type, options), of_out, extra)

    def _signature_of_gradient(self, backward: BackwardCall[CallT]) -> Hashable:
        layouts = map(layout_signature, self._given_of(backward))
        return "backward", *layouts, backward.needs, self.signature(backward.call)

    def _add(self, name: Hashable, prepared: Prepared) -> Prepared:
        """Remembers a bound call, unless it has no plan, or is of a shape policy that has been changed."""
        self.table.add(name, prepared)
        if prepared.policy not in (None, shape_policy.active()):  # asked once others see it
            self.table.forget(lambda other: other is prepared)
        return prepared

    def remember(self, call: CallT, prepared: Prepared) -> None:
        """Binds calls with this one's signature anew."""
        self._add(self.signature(call), prepared)

    def runs(self, kind: type[KindT]) -> list[KindT]:
        return [prepared.run for prepared in self.table.each() if isinstance(prepared.run, kind)]

    def forget(self, kind: type) -> None:
        """Forgets the calls whose launches are of this type; they are bound again."""
        self.table.forget(lambda prepared: isinstance(prepared.run, kind))

    # PyTorch's operators.

    def _through_dispatcher(self, call: CallT) -> Result:
        inputs, out = self._inputs_of(call), self._out_of(call)
        if out is not None:
            return self._select_outputs(call, (out, *as_tuple(self.operator("forward_out")(*inputs, out))))
        found: Result = self.operator("forward_all" if self._flag and self._is_complete(call) else "forward")(*inputs)
        return found

    def _gradients_through_dispatcher(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        tensors, inputs = self._given_of(backward), self._inputs_of(backward.call)
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


def forward_of(call: CallT | BackwardCall[CallT]) -> CallT:
    found: Any = call.call if isinstance(call, BackwardCall) else call
    return found  # type: ignore[no-any-return]


def _new(like: Tensor, layout: Layout) -> Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)
