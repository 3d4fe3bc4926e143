"""The order of all calls, forward and backward: which steps a call takes, and in which order.

1. The public function has asked the native module, which does not know the call.
2. A call whose signature is known is launched at once, if nothing must intercept it. The native module gets it.
3. Otherwise types and options are checked, autocast casts, differentiation is checked, random numbers are drawn, and
   negative bits are resolved.
4. Tensors are checked. If autograd follows the call, a gradient that is known to be unsupported raises now.
5. The call runs through autograd, through PyTorch's dispatcher if something intercepts operators, or at once: on the
   GPU its plan is found by its signature, or bound; on the CPU the reference runs; elsewhere there are only layouts.

A backward call that a caller makes takes the same steps, but autocast and autograd stay out. One that autograd makes is
of a call that has been checked: `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, fallback, sharding, value_checks
from cudnn_sdpa.engine.dispatch_state import (
    Differentiable,
    can_be_recognized,
    can_bypass_dispatcher,
    could_cast,
    has_subclass,
    is_autocasting,
    is_transformed,
    materialized,
    needs_gradient,
    needs_operator,
    views_of_leaves,
)
from cudnn_sdpa.engine.launch import (
    NOT_A_CALL,
    Prepared,
    Result,
    check_one_device,
    new_tensor,
)
from cudnn_sdpa.engine.operation import dtensors, native_way
from cudnn_sdpa.engine.operation.call import GIVEN, BackwardCall, CallT
from cudnn_sdpa.engine.operation.description import OperationDescription, alone, as_tuple
from cudnn_sdpa.engine.operation.native_way import NativeKey
from cudnn_sdpa.engine.tensor_checks import LOWEST, check_present
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.scalars import check_known, is_compiling
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.cache import plan_cache

#: Maximum number of signatures remembered as differentiable.
MAX_REMEMBERED = 8192

#: Replacements for options that depend on data.
_INSTEAD = {"scale": "Multiply q by it, and pass scale=1.0.", "is_causal": "torch.cond chooses between two calls."}


@dataclass(frozen=True)
class Checked(Generic[CallT]):
    """A call that is only described.

    Attributes:
        cast: As autocast casts it, with random numbers if it draws any.
        refused: Why its differentiation is refused; None if it is not.
    """

    call: CallT
    cast: CallT
    refused: UnsupportedError | None
    trains: bool


class Tracked(NamedTuple):
    """A call that autograd follows.

    Attributes:
        entry: Its entry, if the fast path found it.
        by_reference: Whether it runs in plain PyTorch, on any device, as cuDNN declines it.
    """

    operation: Pipeline[Any]
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
        return alone(found if returns_all else found[operation.given_at])


@dataclass(eq=False)
class Pipeline(OperationDescription[CallT]):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._known_to_be_differentiable: set[Hashable] = set()

    def __call__(self, call: CallT, asked: NativeKey | None = None) -> Any:
        """The results of a call whose arguments have not been checked yet: alone if it is one.

        Args:
            call: The call.
            asked: The arguments of a public function, of a call that the native module does not know.
        """
        if not is_compiling():
            names = providers.Setting.names
            run = self._find(call)
            if run is not None:
                if asked is not None and asked.calls.find is not None:
                    native_way.register(self, self.gradients, asked, call)
                    if providers.Setting.names is not names:  # asked once others see it
                        plan_cache.forget_calls()
                return run(call)
        tensors = (*call[self.tensors_at], call[-1] if self.takes_out else None)
        if has_subclass(*tensors) and sharding.has_dtensor(*tensors):
            return dtensors.run(self, self, call)
        return self._run_steps(call)

    def run_backward(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        """The needed gradients of a backward call that a caller made, which nothing has checked. Autograd stays out."""
        if not is_compiling():
            found = self._find_backward(backward)
            if found is not None:
                return found
        tensors = self._named_tensors(backward)
        if sharding.has_dtensor(*tensors.values()):
            sharding.refuse(f"{self.function}_backward", "autograd differentiates calls on DTensors by itself")
        if not is_compiling():  # gradients may be zeros without memory, which the checks of types refuse
            given = {name: tensors[name] for name in self.given_names}
            backward = backward._replace(**{k: materialized(x) for k, x in given.items() if isinstance(x, Tensor)})
        return self._run_steps(backward)  # type: ignore[no-any-return]

    def _run_steps(self, call: CallT | BackwardCall[CallT]) -> Any:
        """The results of a call, forward or backward, that the fast path does not know."""
        forward = forward_of(call)
        self._refuse_data_dependent(forward)
        call.check_types()
        if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
            forward.check_options()
        if not isinstance(call, BackwardCall):
            call = self.cast(call)
        self.check_differentiation(call)
        if not isinstance(call, BackwardCall) and self.draws(call) and getattr(call, "rng", None) is None:
            call = call._replace(rng=new_seed(self.first_of(call)))
        if is_compiling():
            return self._traced(call)
        forward = forward_of(call)
        if any(isinstance(x, Tensor) and x.is_neg() for x in forward[self.tensors_at]):
            call = _with_forward(call, autograd_checks.resolved(forward))
        falls_back = self.reference_call is not None and fallback.chosen.get() == fallback.TORCH
        if self.reference_call is None or not falls_back:
            call.check()
            return self._run(call)
        without_limits = _with_forward(call, self.reference_call._make(forward))

        def run() -> Any:
            fallback.check_or_decline(self._function_of(call), call.check, without_limits.check)
            return self._run(call)

        return fallback.or_else(run, lambda: self._alternative(without_limits), forward.log_key)

    def _run(self, call: CallT | BackwardCall[CallT]) -> Any:
        tensors = tuple(self._named_tensors(call).values())
        bypasses = can_bypass_dispatcher(*tensors)
        if isinstance(call, BackwardCall):  # whose operator checks nothing of this, as autograd's calls need none of it
            first = self.first_of(call.call)
            if first.is_cuda:
                self._check_on_gpu(call.call, has_memory=bypasses)
            elif not first.is_meta:
                self._check_on_cpu(call, has_memory=bypasses)
            return list(self.gradients_on(first, call)) if bypasses else self._gradients_through_dispatcher(call)
        if needs_gradient(*tensors):
            self.check_gradient(call)
            return self._differentiate(call, None, through_dispatcher=not bypasses)
        return self.runner(call)(call) if bypasses else self._through_dispatcher(call)

    def _traced(self, call: CallT | BackwardCall[CallT]) -> Any:
        """The call in compiled code, which differentiates all that a graph returns."""
        if isinstance(call, BackwardCall):
            return self._gradients_through_dispatcher(call)
        if not needs_gradient(*call[self.tensors_at], self.out_of(call)):
            return self._through_dispatcher(call)
        found, given = as_tuple(self._through_dispatcher(self.complete(call))), len(self.outputs)
        return self.select_outputs(call, (*found[:given], *(x.detach() for x in found[given:])))

    def _alternative(self, call: CallT | BackwardCall[CallT]) -> Any:
        """The results by PyTorch's own function if that has the options, otherwise by the reference."""
        if isinstance(call, BackwardCall):
            return call.reference()
        complete = self.complete(call)
        if self.out_of(call) is not None:
            call.check_memory()
            complete = complete._replace(out=None)
        result = call.by_pytorch()
        if result is not None:
            return self.into_out(call, (result,))[0]
        tracked = Tracked(self, complete, None, returns_all=True, by_reference=True)
        found = as_tuple(Differentiable.apply(tracked, *complete[self.differentiable_at]))
        return self.select_outputs(call, self.into_out(call, found))

    # The steps.

    def _refuse_data_dependent(self, call: CallT) -> None:
        """Refuses options that depend on data in compiled code; lengths and bounds may, which are symbols there."""
        for (name, kind), value in zip(self.types.items(), self.inputs_of(call), strict=True):
            if kind in ("float", "float?", "bool"):
                check_known(name, value, _INSTEAD.get(name, ""))
        if self.flag:
            check_known(f"return{self.flag.removeprefix('with')}", call[self.flag_at])

    def cast(self, call: CallT) -> CallT:
        changed = call.autocast() if is_compiling() or is_autocasting() else {}
        # Not by _replace: PyTorch 2.9 cannot compile a function that returns what that gives.
        return type(call)(**(dict(zip(self.fields, call, strict=True)) | changed))

    def check_differentiation(self, call: CallT | BackwardCall[CallT]) -> None:
        """Refuses calls whose results would be silently detached from their inputs."""
        is_backward, out = isinstance(call, BackwardCall), forward_of(call)[-1] if self.takes_out else None
        if is_backward or is_compiling() or is_transformed() or out is not None:
            tensors = {self.names.get(name, name): x for name, x in self._named_tensors(call).items()}
            if not is_backward and self.takes_out:
                del tensors["out"]
            loops = self.loops and not is_backward
            autograd_checks.check(self._function_of(call), out, loops=loops, forward_mode=self.forward_mode, **tensors)
            if is_backward:
                autograd_checks.refuse_gradient_through(self._function_of(call), tensors)
        if not self.differentiable and not isinstance(call, BackwardCall) and needs_gradient(*call[self.tensors_at]):
            call.check_gradient()

    def checked(self, call: CallT, cast: Callable[[CallT], CallT]) -> Checked[CallT]:
        """A call that is only described, checked in full, as it is before its launch.

        Args:
            call: The call as a caller made it.
            cast: What casts it as autocast does, without computing.
        """
        call.check_types()
        as_cast = cast(call)
        as_cast.check_options()
        if self.draws(call):
            as_cast = as_cast._replace(rng=torch.empty(2, dtype=torch.int64, device=self.first_of(call).device))
        as_cast.check()
        as_cast.check_strides()
        as_cast.check_memory()
        refused = UnsupportedError.of(self.check_differentiation, call)
        return Checked(call, as_cast, refused, needs_gradient(*call[self.differentiable_at]))

    def check_gradient(self, call: CallT) -> None:
        """Refuses a call whose gradients are known to be unsupported: now, and not when the loss is differentiated."""
        if not self.first_of(call).is_cuda:
            if type(call) is self.call:
                call.check_gradient()
            return
        name = self.signature(self.complete(call))
        if self._is_known_to_be_differentiable(name, call):
            return
        call.check_gradient()
        if len(self._known_to_be_differentiable) >= MAX_REMEMBERED:
            self._known_to_be_differentiable.clear()
        self._known_to_be_differentiable.add((name, self._which_require_grad(call), providers.Setting.names))

    def _is_known_to_be_differentiable(self, name: Hashable, call: CallT) -> bool:
        return (name, self._which_require_grad(call), providers.Setting.names) in self._known_to_be_differentiable

    def _which_require_grad(self, call: CallT) -> tuple[bool, ...]:
        return tuple([x is not None and x.requires_grad for x in call[self.differentiable_at]])

    # The parts of forward and backward calls.

    def _named_tensors(self, call: CallT | BackwardCall[CallT]) -> dict[str, Any]:
        forward = forward_of(call)
        found = dict(zip(self.fields, forward[self.tensors_at]))  # noqa: B905
        if isinstance(call, BackwardCall):
            return found | dict(zip(self.given_names, call[GIVEN], strict=True))
        return found | {"out": forward[-1]} if self.takes_out else found

    def _function_of(self, call: CallT | BackwardCall[CallT]) -> str:
        return f"{self.function}_backward" if isinstance(call, BackwardCall) else self.function

    # Launches.

    def runner(self, call: CallT) -> Callable[[CallT], Result]:
        """The method that runs a checked forward call on the device of its tensors."""
        first = self.first_of(call)
        return self.on_gpu if first.is_cuda else self.fake_results if first.is_meta else self.on_cpu

    def on_gpu(self, call: CallT) -> Result:
        """The results of a checked forward call on the GPU, whose plan is found by its signature, or bound."""
        self._check_on_gpu(call)
        out = self.out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        name = self.signature(call)
        known = self.table.get(name)
        if known is None:
            generation = plan_cache.generation
            known = self.add(name, call.bind())
            if plan_cache.generation != generation:  # asked once others see it
                self._forget(known)
        result: Result = known.run(call)
        return result

    def _forget(self, known: Prepared) -> None:
        """Forgets a binding that was made while all calls were forgotten: others might serve it now."""
        self.table.forget(lambda other: other is known)

    def on_cpu(self, call: CallT) -> Result:
        """The results of a checked forward call by the reference, if a GPU would run it."""
        self._check_on_cpu(call)
        return self.select_outputs(call, self.into_out(call, call.reference()))

    def fake_results(self, call: CallT) -> Result:
        device, out = self.first_of(call).device, self.out_of(call)
        found = tuple(new_tensor(layout, device) for layout in call.outputs())
        return self.select_outputs(call, found if out is None else (out, *found[1:]))

    # The checks before a launch that fake tensors would not pass. Tensors without plain memory may hold it elsewhere.

    def _check_on_gpu(self, call: CallT, *, has_memory: bool = True) -> None:
        if value_checks.enabled:
            call.check_values()
        call.check_strides()
        if has_memory:
            call.check_memory()

    def _check_on_cpu(self, call: CallT | BackwardCall[CallT], *, has_memory: bool = True) -> None:
        forward = forward_of(call)
        if has_memory:
            forward.check_values()
        if isinstance(call, BackwardCall) or type(call) is self.call:
            call.check_for_gpu()
        forward.check_memory()

    # Backward calls.

    def gradients_on(self, device: Tensor, backward: BackwardCall[CallT]) -> Sequence[Tensor]:
        if device.is_cuda:
            return self.gradients_on_gpu(backward)
        return backward.fake_gradients() if device.is_meta else backward.reference()

    def gradients_on_gpu(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        readable = backward.make_readable()
        name = self.signature_of_gradient(readable)
        known = self.table.get(name)
        if known is None:
            names = (*self.fields[self.tensors_at], *self.given_names)
            tensors = (*backward.call[self.tensors_at], *backward[GIVEN])
            check_one_device(names, tensors)  # a saved-tensor hook may have moved them
            generation = plan_cache.generation
            known = self.add(name, readable.bind())
            if plan_cache.generation != generation:
                self._forget(known)
        return list(as_tuple(known.run(readable)))

    # PyTorch's operators.

    def _through_dispatcher(self, call: CallT) -> Result:
        inputs, out = self.inputs_of(call), self.out_of(call)
        if out is not None:
            return self.select_outputs(call, (out, *as_tuple(self.operator("forward_out")(*inputs, out))))
        found: Result = self.operator("forward_all" if self.flag and self.is_complete(call) else "forward")(*inputs)
        return found

    def _gradients_through_dispatcher(self, backward: BackwardCall[CallT]) -> list[Tensor]:
        tensors, inputs = backward[GIVEN], self.inputs_of(backward.call)
        found: list[Tensor] = self.operator("backward")(*tensors, *inputs, list(backward.needs))
        return found

    # Autograd.

    def _differentiate(self, call: CallT, entry: Prepared | None, *, through_dispatcher: bool = False) -> Result:
        try:
            if through_dispatcher:  # the operator applies a function of PyTorch's
                _views = views_of_leaves(*call[self.differentiable_at])
                return self.select_outputs(call, as_tuple(self._through_dispatcher(self.complete(call))))
            complete = self.call(*call[self.inputs_at], *self.all_outputs)
            tracked = Tracked(self, complete, entry, self.is_complete(call))
            result: Result = Differentiable.apply(tracked, *call[self.differentiable_at])
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(dict(zip(self.fields, call, strict=True)))
            raise
        return result

    def save(self, ctx: Any, call: CallT, found: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*call[self.tensors_at], *found[self.saved_at])
        ctx.options = call[self.options_at]
        ctx.may_fall_back = self.reference_call is not None and fallback.chosen.get() == fallback.TORCH
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
        given_at = self.given_at
        if len(grads) > given_at.stop:
            for name, grad in zip(self.aux_outputs, grads[given_at.stop :], strict=True):
                autograd_checks.refuse_gradient_of(name, grad)
            grads = grads[given_at]
        given = [grad for grad in grads if grad is not None]
        is_intercepted = any(map(needs_operator, given))
        if is_intercepted:
            for grad in given:
                autograd_checks.refuse_batch(grad)
        if not given or not any(needs):
            return [None] * len(needs)
        backward = self.backward_of(ctx, grads, needs)
        found: Sequence[Tensor]
        if by_reference:
            found = backward.reference()
        elif is_intercepted:
            found = self._gradients_through_dispatcher(backward)
        elif not given[0].is_cuda or not ctx.may_fall_back:  # as in the forward pass, maybe of another thread
            found = self.gradients_on(given[0], backward)
        else:
            found = fallback.or_else(lambda: self.gradients_on_gpu(backward), backward.reference, backward.call.log_key)
        remaining = iter(found)
        return [next(remaining) if need else None for need in needs]

    # The fast path.

    def _find(self, call: CallT) -> Callable[[CallT], Result] | None:
        try:
            if value_checks.enabled or (self.flag and type(call[self.flag_at]) is not bool):
                return None
            dropout_p = call[self.group_at].dropout_p if self.can_draw else 0.0
            if type(dropout_p) is not float or dropout_p:
                return None
            out = call[-1] if self.takes_out else None  # `out_of` without its call
            tensors = [x for x in (*call[self.tensors_at], out) if x is not None]
            if not can_be_recognized(tensors, could_cast):
                return None
            trains = needs_gradient(*tensors)
            if trains and out is not None:
                return None
            name = self.signature(self.complete(call) if trains else call)
            entry = self.table.get(name)
            if entry is None or (trains and not self._is_known_to_be_differentiable(name, call)):
                return None
        except NOT_A_CALL:  # the checks name the wrong argument
            return None
        if trains:
            return partial(self._differentiate, entry=entry)
        return entry.run if out is None else partial(self._into_out, entry=entry)

    def _into_out(self, call: CallT, entry: Prepared) -> Result:
        """A known call whose result goes into a given tensor, which may overlap others in this call alone."""
        call.check_memory()
        out = self.out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        result: Result = entry.run(call)
        return result

    def _find_backward(self, backward: BackwardCall[CallT]) -> list[Tensor] | None:
        try:
            tensors = [x for x in (*backward[GIVEN], *backward.call[self.tensors_at]) if x is not None]
            if value_checks.enabled or needs_gradient(*tensors) or not can_be_recognized(tensors, could_cast):
                return None
            grad_out, out, *_ = given = backward[GIVEN]
            for name, x in zip(self.given_names, given, strict=True):
                if x is not None and x.data_ptr() < LOWEST:  # copied below, if kernels cannot read it
                    if x._is_zerotensor():
                        return None
                    check_present(name, x)
            if (grad_out.dtype, grad_out.device, grad_out.shape) != (out.dtype, out.device, out.shape):
                return None  # a copy that kernels can read would be converted to those of the output, unchecked
            readable = backward.make_readable()
            known = self.table.get(self.signature_of_gradient(readable))
        except NOT_A_CALL:  # the checks name the wrong argument
            return None
        return None if known is None else list(as_tuple(known.run(readable)))


def forward_of(call: CallT | BackwardCall[CallT]) -> CallT:
    found: Any = call.call if isinstance(call, BackwardCall) else call
    return found  # type: ignore[no-any-return]


def _with_forward(call: CallT | BackwardCall[CallT], forward: CallT) -> CallT | BackwardCall[CallT]:
    return call._replace(call=forward) if isinstance(call, BackwardCall) else forward
