"""The gradients of an operation's calls: the tensors that autograd saves, and the way of a backward call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, fallback, sharding, value_checks
from cudnn_sdpa.engine.call import Differentiable, Result, views_of_leaves
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, needs_operator, plain
from cudnn_sdpa.engine.fast_path import Entry, layout_signature
from cudnn_sdpa.engine.launch import PlainCall, Prepared, check_one_device
from cudnn_sdpa.engine.memory import MISALIGNED
from cudnn_sdpa.engine.native.calls import Differentiation, RepeatableCall
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.pipeline import Pipeline, alone, as_tuple, made
from cudnn_sdpa.graph.symbolic_shapes import is_compiling

#: Maximum number of signatures remembered as differentiable.
MAX_REMEMBERED = 8192


class SavedCall(Protocol):
    """The saved part of a call: autograd's `ctx`, or a `NativelySaved`.

    Attributes:
        saved_tensors: The tensors of the call, then the results that are saved.
        options: Its options.
        may_fall_back: Whether a fallback was in force.
    """

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]: ...

    @property
    def options(self) -> tuple[object, ...]: ...

    @property
    def may_fall_back(self) -> bool: ...


class NativelySaved(NamedTuple):
    """The part of a call that the native module has saved."""

    saved_tensors: tuple[Tensor | None, ...]
    options: tuple[object, ...]
    may_fall_back: bool


class Tracked(NamedTuple):
    """A call that autograd follows.

    Attributes:
        operation: Its operation.
        call: The call, with all results.
        entry: Its entry, if the fast path found it.
        returns_all: Whether all results are returned.
        by_reference: Whether it runs in plain PyTorch, on any device, as cuDNN declines it.
    """

    operation: Gradients[Any]
    call: object
    entry: Entry | None
    returns_all: bool
    by_reference: bool = False

    def forward(self, ctx: Any, _: tuple[object, ...]) -> Result:
        """Runs the call, and saves the tensors of the backward pass. Returning an unneeded result would cost 2 µs."""
        operation, call, entry, returns_all, by_reference = self
        run = operation._on_cpu if by_reference else operation.runner(call) if entry is None else entry.run
        found = as_tuple(run(call))
        if operation.differentiable:
            operation.save(ctx, call, found)
        ctx.tracked = _TrackedGradient(operation, by_reference)
        return alone(found if returns_all else operation._split(found)[0])


class _TrackedGradient(NamedTuple):
    """The state of a call on autograd's node, besides tensors and options."""

    operation: Gradients[Any]
    by_reference: bool

    def gradients(
        self, ctx: SavedCall, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """The gradient of each differentiable input."""
        return self.operation.gradients(ctx, grads, needs, by_reference=self.by_reference)


class NativeGradient:
    """Computes gradients of calls that the native module has launched; autograd's graph holds it, and so no plan."""

    __slots__ = ("operation",)

    def __init__(self, operation: Gradients[Any]) -> None:
        self.operation = operation

    def __call__(
        self,
        options: tuple[object, ...],
        grads: tuple[Tensor | None, ...],
        saved: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        *,
        may_fall_back: bool,
        numbers: tuple[float, ...],
        can_learn: bool,
    ) -> tuple[list[Tensor | None], RepeatableCall | None]:
        """See `Differentiation`."""
        context = NativelySaved(saved, options, may_fall_back)
        found = self.operation.gradients(context, grads, needs)
        return found, self.operation.repeatable_gradient(context, grads, needs) if can_learn else None


class Gradients(Pipeline[CallT]):
    """An operation with gradients."""

    def check_gradient(self, call: CallT) -> None:
        """Refuses a call whose gradients are known to be unsupported: now, and not when the loss is differentiated."""
        if not self.first_of(call).is_cuda:
            if self._is_for_cudnn(call):
                call.check_gradient()
            return
        name = self.signature(self.complete(call))
        if self._is_known_to_be_differentiable(name, call):
            return
        call.check_gradient()
        if len(self._known_to_be_differentiable) >= MAX_REMEMBERED:
            self._known_to_be_differentiable.clear()
        self._known_to_be_differentiable.add((name, self._which_require_grad(call)))

    def _is_known_to_be_differentiable(self, name: Hashable, call: CallT) -> bool:
        return (name, self._which_require_grad(call)) in self._known_to_be_differentiable

    def _which_require_grad(self, call: CallT) -> tuple[bool, ...]:
        return tuple([x is not None and x.requires_grad for x in self._differentiable_of(call)])

    def _differentiate(self, call: CallT, entry: Entry | None, *, by_operator: bool = False) -> Result:
        """The results of a call, differentiable by autograd."""
        try:
            if by_operator:  # the operator applies a function of PyTorch's
                _views = views_of_leaves(*self._differentiable_of(call))
                return self._wanted(call, as_tuple(self._by_operator(self.complete(call))))
            complete = self.call(*call[self._inputs_at], *self._wants_all)
            tracked = Tracked(self, complete, entry, self._is_complete(call))
            result: Result = Differentiable.apply(tracked, *self._differentiable_of(call))
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(call)
            raise
        return result

    def _differentiate_reference(self, call: CallT) -> tuple[Tensor, ...]:
        """All results in plain PyTorch, on any device, differentiable by autograd."""
        tracked = Tracked(self, call, None, returns_all=True, by_reference=True)
        return as_tuple(Differentiable.apply(tracked, *self._differentiable_of(call)))

    def save(self, ctx: Any, call: CallT, found: tuple[Tensor, ...]) -> None:
        """Saves the tensors and options of the backward pass.

        Args:
            ctx: Autograd's context.
            call: The call.
            found: All results.
        """
        ctx.save_for_backward(*self._tensors_of(call), *found[self._saved])
        ctx.options = self._options_of(call)
        ctx.may_fall_back = self.reference_call is not None and fallback.is_in_force()
        ctx.set_materialize_grads(False)

    def gradients(
        self,
        ctx: SavedCall,
        grads: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        *,
        by_reference: bool = False,
    ) -> list[Tensor | None]:
        """The gradient of each differentiable input, None where none is needed, from what `save` saved.

        Args:
            ctx: Where it was saved.
            grads: The gradients of the results that were returned.
            needs: Which gradients are needed.
            by_reference: Whether it runs in plain PyTorch.
        """
        if len(grads) > self._given:
            for name, grad in zip(self.auxiliary, grads[self._given :], strict=True):
                autograd_checks.refuse_gradient_of(name, grad)
            grads = grads[: self._given]
        given = [grad for grad in grads if grad is not None]
        is_intercepted = any(map(needs_operator, given))
        if is_intercepted:
            for grad in given:
                autograd_checks.refuse_batch(grad)
        if not given or not any(needs):
            return [None] * len(needs)
        saved = ctx.saved_tensors  # once: checkpoints let nothing be read twice
        call = self.call(*saved[: self._tensors], *ctx.options, *self._wants_all)
        backward = self._backward_call(*grads, *saved[self._tensors :], call, needs)
        tensors = self._given_of(backward)
        found: Sequence[Tensor]
        if by_reference:
            found = backward.reference()
        elif is_intercepted:
            found = self.operator("backward")(*tensors, *self.inputs_of(call), list(needs))
        elif not given[0].is_cuda:
            found = backward.fake_gradients() if given[0].is_meta else backward.reference()
        elif not ctx.may_fall_back:  # as in the forward pass: this may be another thread, of autograd
            found = self._gradients_on_gpu(backward)
        else:
            found = fallback.or_else(
                lambda: self._gradients_on_gpu(backward),
                backward.reference,
                call.log_key,
            )
        remaining = iter(found)
        return [next(remaining) if need else None for need in needs]

    def explicit_gradients(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of a backward call that a caller made, which nothing has checked. Autograd stays out.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: cuDNN has no kernel for it, or it is to be differentiated itself.
        """
        call, given = backward.call, self._given_names
        if sharding.has_dtensor(*self._tensors_of(call), *self._given_of(backward)):
            sharding.refuse(f"{self.function}_backward", "autograd differentiates calls on DTensors by itself")
        if not is_compiling():
            tensors = {name: getattr(backward, name) for name in given}
            backward = backward._replace(**{name: plain(x) for name, x in tensors.items() if isinstance(x, Tensor)})
        self._check_known(call)
        call.check_types()
        backward.check_types()
        names = (*(self.names.get(name, name) for name in self.fields[: self._tensors]), *given)
        tensors = dict(zip(names, (*self._tensors_of(call), *self._given_of(backward)), strict=True))
        function = f"{self.function}_backward"
        autograd_checks.check(function, None, loops=False, forward_mode=self.forward_mode, **tensors)
        autograd_checks.refuse_gradient_through(function, tensors)
        if is_compiling():  # a compiled graph checks the rest when it is traced, and again when it runs
            return self._backward_by_operator(backward)
        call = autograd_checks.resolved(call)
        backward = backward._replace(call=call)
        call.check_options()
        bypasses = can_bypass_dispatcher(*tensors.values())
        if self.reference_call is None or not fallback.is_in_force():
            backward.check()
            return self._run_backward(backward, bypasses)
        without_limits = backward._replace(call=made(self.reference_call, call))

        def run() -> list[Tensor]:
            fallback.check_or_decline(function, backward.check, without_limits.check)
            return self._run_backward(backward, bypasses)

        return fallback.or_else(run, without_limits.reference, call.log_key)

    def _backward_by_operator(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        tensors, inputs = self._given_of(backward), self.inputs_of(backward.call)
        found: list[Tensor] = self.operator("backward")(*tensors, *inputs, list(backward.needs))
        return found

    def _run_backward(self, backward: BackwardCall[CallT], bypasses: bool) -> list[Tensor]:
        """A checked backward call that a caller made, where its tensors are."""
        call, first = backward.call, self.first_of(backward.call)
        if first.is_cuda:
            if value_checks.enabled:
                call.check_values()
            call.check_strides()
            if bypasses:  # otherwise they may hold their memory elsewhere
                call.check_memory()
        elif not first.is_meta:
            if bypasses:
                call.check_values()
            backward.check_for_gpu()
            call.check_memory()
        if not bypasses:
            return self._backward_by_operator(backward)
        if first.is_cuda:
            return self._gradients_on_gpu(backward)
        return backward.fake_gradients() if first.is_meta else backward.reference()

    def _checked_fake_gradients(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of an unchecked call in compiled code, without memory."""
        if self.reference_call is not None:  # whose limits are those of the forward pass
            without_limits = backward._replace(call=made(self.reference_call, backward.call))
            without_limits.call.check_options()
            without_limits.check()
        return backward.fake_gradients()

    def repeatable_gradient(
        self, ctx: SavedCall, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> RepeatableCall | None:
        """A backward call that has just run, if the native module can repeat it."""
        if any(grad is None or needs_operator(grad) for grad in grads[: self._given]):
            return None
        call = self.call(*ctx.saved_tensors[: self._tensors], *ctx.options, *self._wants_all)
        backward = self._backward_call(*grads[: self._given], *ctx.saved_tensors[self._tensors :], call, needs)
        entry: Entry | None = self.table.get(self._signature_of_gradient(backward))
        if entry is None or not isinstance(entry.run, PlainCall):
            return None
        if any(x.data_ptr() & MISALIGNED for x in self._given_of(backward)):  # a copy has been read
            return None
        plain = entry.run
        return RepeatableCall(plain.bound, plain.tensors_of(backward), plain.returned)

    def _gradients_on_gpu(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of a backward call on the GPU."""
        readable = backward.make_readable()
        prepared = self._entry(self._signature_of_gradient(readable), lambda: self._bind_gradients(readable))
        return list(as_tuple(prepared.run(readable)))

    def gradients_from_dispatcher(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of an unchecked backward call from PyTorch's dispatcher, past all that intercepts it."""
        if self.table.get(self._signature_of_gradient(backward)) is None:
            backward.check()
        if not self.first_of(backward.call).is_cuda:
            return self._backward_by_operator(backward)
        return self._gradients_on_gpu(backward)

    def _bind_gradients(self, backward: BackwardCall[CallT]) -> Prepared:
        names = (*self.fields[: self._tensors], *self._given_names)
        tensors = (*self._tensors_of(backward.call), *self._given_of(backward))
        check_one_device(names, tensors)  # a saved-tensor hook may have moved them
        return backward.bind()

    def _signature_of_gradient(self, backward: BackwardCall[CallT]) -> Hashable:
        layouts = map(layout_signature, self._given_of(backward))
        return "backward", *layouts, backward.needs, self.signature(backward.call)

    def _differentiation(self, call: CallT) -> Differentiation[tuple[object, ...]]:
        return Differentiation(
            name=f"cudnn_sdpa::{self.name}",
            gradients=NativeGradient(self),
            options=self._options_of(call),
            inputs=self._differentiable_of(call),
            saved=self._tensors_of(call),
            results=range(self._saved.start, self._saved.stop),
            asks_for_fallback=self.reference_call is not None,
        )
