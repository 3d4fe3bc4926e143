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

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks, fallback, sharding, value_checks
from cudnn_sdpa.engine.autocast import could_cast
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.dispatch_state import (
    can_be_recognized,
    can_bypass_dispatcher,
    has_subclass,
    is_autocasting,
    is_transformed,
    materialized,
    needs_gradient,
)
from cudnn_sdpa.engine.launch import NOT_A_CALL, Prepared, SingleLaunch
from cudnn_sdpa.engine.native.calls import NativeCalls, RepeatableCall
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.gradients import Gradients
from cudnn_sdpa.engine.operation.launches import as_tuple, made
from cudnn_sdpa.engine.tensor_checks import LOWEST, check_present, without_memory
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.scalars import check_known, is_compiling

#: Replacements for options that depend on data.
_INSTEAD = {"scale": "Multiply q by it, and pass scale=1.0.", "is_causal": "torch.cond chooses between two calls."}


class NativeKey(NamedTuple):
    """The arguments of a public function, by which the native module recognizes its calls.

    Attributes:
        calls: The function's calls that are launched natively.
    """

    calls: NativeCalls
    arguments: tuple[object, ...]


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


@dataclass(eq=False)
class Pipeline(Gradients[CallT]):
    def __call__(self, call: CallT, asked: NativeKey | None = None) -> Any:
        """The results of a call whose arguments have not been checked yet: alone if it is one.

        Args:
            call: The call.
            asked: The arguments of a public function, of a call that the native module does not know.
        """
        if not is_compiling():
            run = self._find(call)
            if run is not None:
                if asked is not None and asked.calls.find is not None:
                    self._register(asked, call)
                return run(call)
        tensors = (*call[self._tensors_at], call[-1] if self.takes_out else None)
        if has_subclass(*tensors) and sharding.has_dtensor(*tensors):
            return self._on_dtensors(call)
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
            given = {name: tensors[name] for name in self._given_names}
            backward = backward._replace(**{k: materialized(x) for k, x in given.items() if isinstance(x, Tensor)})
        return self._run_steps(backward)  # type: ignore[no-any-return]

    def _run_steps(self, call: CallT | BackwardCall[CallT]) -> Any:
        """The results of a call, forward or backward, that the fast path does not know."""
        self._refuse_data_dependent(forward_of(call))
        call.check_types()
        if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
            call.check_options()
        if not isinstance(call, BackwardCall):
            call = self.cast(call)
        self.check_differentiation(call)
        if not isinstance(call, BackwardCall) and self._draws(call) and getattr(call, "rng", None) is None:
            call = call._replace(rng=new_seed(self.first_of(call)))
        if is_compiling():
            return self._traced(call)
        forward = forward_of(call)
        if any(isinstance(x, Tensor) and x.is_neg() for x in forward[self._tensors_at]):
            call = self._with_forward(call, autograd_checks.resolved(forward))
        to = fallback.chosen.get()
        is_declined = to == fallback.KERNELS and isinstance(call, BackwardCall)  # kernels have no such function
        if self.reference_call is None or to not in self.fallbacks or is_declined:
            call.check()
            return self._run(call)
        without_limits = self._with_forward(call, made(self.reference_call, forward_of(call)))

        def run() -> Any:
            fallback.check_or_decline(self._function_of(call), call.check, without_limits.check)
            return self._run(call)

        return fallback.or_else(run, lambda: self._alternative(without_limits, str(to)), call.log_key, str(to))

    def _run(self, call: CallT | BackwardCall[CallT]) -> Any:
        tensors = tuple(self._named_tensors(call).values())
        bypasses = can_bypass_dispatcher(*tensors)
        if isinstance(call, BackwardCall):  # whose operator checks nothing of this, as autograd's calls need none of it
            first = self.first_of(call.call)
            if first.is_cuda:
                self._check_on_gpu(call, has_memory=bypasses)
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
        if not needs_gradient(*self._tensors_of(call), self._out_of(call)):
            return self._through_dispatcher(call)
        given, auxiliary = self._split_outputs(as_tuple(self._through_dispatcher(self.complete(call))))
        return self._select_outputs(call, (*given, *(x.detach() for x in auxiliary)))

    def _alternative(self, call: CallT | BackwardCall[CallT], to: str) -> Any:
        """The results of a call that cuDNN declines, by the first alternative that has its options.

        They are an operator of PyTorch's or of our own kernels, and for PyTorch the reference; None if there is none.
        """
        if isinstance(call, BackwardCall):
            return call.reference()
        if to == fallback.KERNELS:
            return call.alternative(to)
        complete = self.complete(call)
        if self._out_of(call) is not None:
            call.check_memory()
            complete = complete._replace(out=None)
        result = call.alternative(to)
        if result is not None:
            return self._into_out_of(call, (result,))[0]
        found = self._differentiate_reference(complete)
        return self._select_outputs(call, self._into_out_of(call, found))

    # The steps.

    def _refuse_data_dependent(self, call: CallT) -> None:
        """Refuses options that depend on data in compiled code; lengths and bounds may, which are symbols there."""
        for (name, kind), value in zip(self._types.items(), self.inputs_of(call), strict=True):
            if kind in ("float", "float?", "bool"):
                check_known(name, value, _INSTEAD.get(name, ""))
        if self._flag:
            check_known(f"return{self._flag.removeprefix('with')}", call[self._inputs])

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
        if not self.differentiable and not isinstance(call, BackwardCall) and needs_gradient(*call[self._tensors_at]):
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
        if self._draws(call):
            as_cast = as_cast._replace(rng=torch.empty(2, dtype=torch.int64, device=self.first_of(call).device))
        as_cast.check()
        as_cast.check_strides()
        as_cast.check_memory()
        refused = UnsupportedError.of(self.check_differentiation, call)
        return Checked(call, as_cast, refused, needs_gradient(*self._differentiable_of(call)))

    def check_all(self, call: CallT) -> None:
        """All checks that read no address and no value, of a call that autocast has cast."""
        call.check_types()
        call.check_options()
        call.check()
        self.check_differentiation(call)

    # The parts of forward and backward calls.

    def _named_tensors(self, call: CallT | BackwardCall[CallT]) -> dict[str, Any]:
        """The tensors of a call, with those of its forward call and `out`."""
        forward = forward_of(call)
        found = dict(zip(self.fields, forward[self._tensors_at]))  # noqa: B905
        if isinstance(call, BackwardCall):
            return found | dict(zip(self._given_names, self._given_of(call), strict=True))
        return found | {"out": forward[-1]} if self.takes_out else found

    def _with_forward(self, call: CallT | BackwardCall[CallT], forward: CallT) -> CallT | BackwardCall[CallT]:
        return call._replace(call=forward) if isinstance(call, BackwardCall) else forward

    def _function_of(self, call: CallT | BackwardCall[CallT]) -> str:
        return f"{self.function}_backward" if isinstance(call, BackwardCall) else self.function

    # The fast path.

    def _find(self, call: CallT) -> Callable[[CallT], Result] | None:
        try:
            if value_checks.enabled or (self._flag and type(call[self._inputs]) is not bool):
                return None
            dropout_p = call[self._alone].dropout_p if self._can_draw else 0.0
            if type(dropout_p) is not float or dropout_p:
                return None
            out = call[-1] if self.takes_out else None  # `_out_of` without its call
            tensors = [x for x in (*call[self._tensors_at], out) if x is not None]
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
            return functools.partial(self._differentiate, entry=entry)
        return entry.run if out is None else functools.partial(self._into_out, entry=entry)

    def _into_out(self, call: CallT, entry: Prepared) -> Result:
        """A known call whose result goes into a given tensor, which may overlap others in this call alone."""
        call.check_memory()
        out = self._out_of(call)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        result: Result = entry.run(call)
        return result

    def _find_backward(self, backward: BackwardCall[CallT]) -> list[Tensor] | None:
        try:
            tensors = [x for x in (*self._given_of(backward), *self._tensors_of(backward.call)) if x is not None]
            if value_checks.enabled or needs_gradient(*tensors) or not can_be_recognized(tensors, could_cast):
                return None
            grad_out, out, *_ = given = self._given_of(backward)
            for name, x in zip(self._given_names, given, strict=True):
                if x is not None and x.data_ptr() < LOWEST:  # copied below, if kernels cannot read it
                    if x._is_zerotensor():
                        return None
                    check_present(name, x)
            if (grad_out.dtype, grad_out.device, grad_out.shape) != (out.dtype, out.device, out.shape):
                return None  # a copy that kernels can read would be converted to those of the output, unchecked
            readable = backward.make_readable()
            known = self.table.get(self._signature_of_gradient(readable))
        except NOT_A_CALL:  # the checks name the wrong argument
            return None
        return None if known is None else list(as_tuple(known.run(readable)))

    # The native way.

    def _register(self, asked: NativeKey, call: CallT) -> None:
        """Registers calls like a known one with the native module, if they are one launch and nothing else."""
        tensors = self._tensors_of(call)
        trains = needs_gradient(*tensors)
        entry: Prepared | None = self.table.get(self.signature(self.complete(call) if trains else call))
        if entry is None or not isinstance(entry.run, SingleLaunch) or self._out_of(call) is not None:
            return
        launch = entry.run
        returned, single_output = launch.returned, launch.single_output
        if trains and not self._is_complete(call):
            returned = returned[: len(self.outputs)]
            single_output = len(returned) == 1
        native = RepeatableCall(launch.bound, launch.tensors_of(call), returned, single_output)
        if not trains:
            asked.calls.register(asked.arguments, {}, native)
        elif not any(x is not None and x.is_inference() for x in tensors):
            asked.calls.register(asked.arguments, {}, native, self._differentiation(call))

    # Calls on DTensors.

    def _on_dtensors(self, call: CallT) -> Result:
        """The results of a call on DTensors: each rank runs its part of the call.

        The whole call is checked first, so that all ranks raise the same.
        """
        if self._out_of(call) is not None:
            reasons = ["out would have to be sharded as the result is, which each call decides"]
            raise UnsupportedError(f"{self.function} with out on DTensors", reasons, "the call without out")
        call.check_types()
        if not is_compiling():
            call.check_options()
        layouts = [None if x is None else without_memory(x) for x in self._tensors_of(call)]
        whole = made(self.reference_call or self.call, (*layouts, *call[self._others_at]))
        if self._draws(call):
            whole = whole._replace(rng=torch.empty(2, dtype=torch.int64, device="meta"))
        try:
            whole.check()
        except (ArgumentError, UnsupportedError) as error:
            raise error.renamed({"meta": self.first_of(call).device.type}) from None

        def run_part(arguments: Mapping[str, object], sharded: sharding.ShardedCall) -> Result:
            local = made(self.call, [arguments[name] for name in self.fields])
            found: Result = self(self._with_own_random_numbers(local, sharded))
            return found

        arguments = dict(zip(self.fields, call, strict=True))
        try:
            return sharding.run(self.function, call.strategies(), arguments, run_part)
        except UnsupportedError as error:
            raise (error.renamed(self.names) if self.names else error) from None

    def _with_own_random_numbers(self, call: CallT, sharded: sharding.ShardedCall) -> CallT:
        """A rank's part of a call, with random numbers of its own, also where ranks share a seed."""
        if not self._draws(call):
            return call
        reasons = []
        if sharded.is_replicated:
            reasons.append("ranks that compute the same would draw different random numbers")
        if self.reference_call is not None and fallback.is_in_force():
            reasons.append("PyTorch's own attention, which the fallback may run, draws the same in each rank")
        if reasons:
            suggestion = "tensors sharded over all mesh dimensions and no fallback, or dropout_p=0.0"
            raise UnsupportedError(f"{self.function} with dropout_p on DTensors like these", reasons, suggestion)
        return call._replace(rng=new_seed(self.first_of(call)) + sharded.part())


def forward_of(call: CallT | BackwardCall[CallT]) -> CallT:
    found: Any = call.call if isinstance(call, BackwardCall) else call
    return found  # type: ignore[no-any-return]
