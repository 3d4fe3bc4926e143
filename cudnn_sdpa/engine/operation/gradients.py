"""The gradients of an operation's calls as autograd asks for them: the tensors that it saves, and the backward call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, fallback
from cudnn_sdpa.engine.call import Differentiable, Result, views_of_leaves
from cudnn_sdpa.engine.dispatch_state import needs_operator
from cudnn_sdpa.engine.launch import Prepared, SingleLaunch
from cudnn_sdpa.engine.native.calls import Differentiation, NativelySaved, RepeatableCall
from cudnn_sdpa.engine.operation.call import CallT
from cudnn_sdpa.engine.operation.launches import Launches, alone, as_tuple
from cudnn_sdpa.engine.tensor_checks import MISALIGNED

#: Maximum number of signatures remembered as differentiable.
MAX_REMEMBERED = 8192


class Tracked(NamedTuple):
    """A call that autograd follows.

    Attributes:
        entry: Its entry, if the fast path found it.
        by_reference: Whether it runs in plain PyTorch, on any device, as cuDNN declines it.
    """

    operation: Gradients[Any]
    call: object
    entry: Prepared | None
    returns_all: bool
    by_reference: bool = False

    def forward(self, ctx: Any, _: tuple[object, ...]) -> Result:
        """Runs the call, and saves the tensors of the backward pass. Returning an unneeded result would cost 2 µs."""
        operation, call, entry, returns_all, by_reference = self
        run = operation.on_cpu if by_reference else operation.runner(call) if entry is None else entry.run
        found = as_tuple(run(call))
        if operation.differentiable:
            operation.save(ctx, call, found)
        ctx.gradients = partial(operation.gradients, by_reference=by_reference)
        return alone(found if returns_all else operation._split_outputs(found)[0])


@dataclass(eq=False)
class Gradients(Launches[CallT]):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._known_to_be_differentiable: set[Hashable] = set()

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

    def _differentiate(self, call: CallT, entry: Prepared | None, *, through_dispatcher: bool = False) -> Result:
        try:
            if through_dispatcher:  # the operator applies a function of PyTorch's
                _views = views_of_leaves(*self._differentiable_of(call))
                return self._select_outputs(call, as_tuple(self._through_dispatcher(self.complete(call))))
            complete = self.call(*call[self._inputs_at], *self._all_outputs)
            tracked = Tracked(self, complete, entry, self._is_complete(call))
            result: Result = Differentiable.apply(tracked, *self._differentiable_of(call))
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(dict(zip(self.fields, call, strict=True)))
            raise
        return result

    def _differentiate_reference(self, call: CallT) -> tuple[Tensor, ...]:
        """All results in plain PyTorch, on any device, differentiable by autograd."""
        tracked = Tracked(self, call, None, returns_all=True, by_reference=True)
        return as_tuple(Differentiable.apply(tracked, *self._differentiable_of(call)))

    def save(self, ctx: Any, call: CallT, found: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*self._tensors_of(call), *found[self._saved])
        ctx.options = self._options_of(call)
        ctx.may_fall_back = self.reference_call is not None and fallback.is_in_force()
        ctx.set_materialize_grads(False)

    def gradients(
        self,
        ctx: Any,
        grads: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        *,
        by_reference: bool = False,
    ) -> list[Tensor | None]:
        """The gradient of each differentiable input, None where none is needed, from what `save` saved.

        Args:
            ctx: Where it was saved: autograd's context, or a `NativelySaved`.
            grads: The gradients of the results that were returned.
            needs: Which gradients are needed.
            by_reference: Whether it runs in plain PyTorch.
        """
        if len(grads) > self._given:
            for name, grad in zip(self.aux_outputs, grads[self._given :], strict=True):
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
        call = self.call(*saved[: self._tensors], *ctx.options, *self._all_outputs)
        backward = self._backward_call(*grads, *saved[self._tensors :], call, needs)
        found: Sequence[Tensor]
        if by_reference:
            found = backward.reference()
        elif is_intercepted:
            found = self._gradients_through_dispatcher(backward)
        elif not given[0].is_cuda or not ctx.may_fall_back:  # as in the forward pass, maybe of another thread
            found = self.gradients_on(given[0], backward)
        else:
            found = fallback.or_else(lambda: self._gradients_on_gpu(backward), backward.reference, call.log_key)
        remaining = iter(found)
        return [next(remaining) if need else None for need in needs]

    def native_gradients(
        self, saved: NativelySaved, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> tuple[list[Tensor | None], Callable[[], RepeatableCall | None]]:
        return self.gradients(saved, grads, needs), partial(self.repeatable_gradient, saved, grads, needs)

    def repeatable_gradient(
        self, ctx: NativelySaved, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> RepeatableCall | None:
        """A backward call that has just run, if the native module can repeat it."""
        if any(grad is None or needs_operator(grad) for grad in grads[: self._given]):
            return None
        call = self.call(*ctx.saved_tensors[: self._tensors], *ctx.options, *self._all_outputs)
        backward = self._backward_call(*grads[: self._given], *ctx.saved_tensors[self._tensors :], call, needs)
        known = self.table.get(self._signature_of_gradient(backward))
        if known is None or not isinstance(known.run, SingleLaunch):
            return None
        if any(x.data_ptr() & MISALIGNED for x in self._given_of(backward)):  # a copy has been read
            return None
        launch = known.run
        return RepeatableCall(launch.bound, launch.tensors_of(backward), launch.returned)

    def _differentiation(self, call: CallT) -> Differentiation:
        return Differentiation(
            name=f"cudnn_sdpa::{self.name}",
            gradients=self.native_gradients,
            options=self._options_of(call),
            inputs=self._differentiable_of(call),
            saved=self._tensors_of(call),
            results=range(self._saved.start, self._saved.stop),
            asks_for_fallback=self.reference_call is not None,
        )
