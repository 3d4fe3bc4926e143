"""PyTorch's operators of an operation, with their schemas, which follow from the fields of its calls."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.launch import Result
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.description import SCHEMA_TYPES, alone, as_tuple
from cudnn_sdpa.engine.operation.pipeline import Pipeline
from cudnn_sdpa.engine.torch_ops import Implementations, implement


@dataclass(eq=False)
class Operation(Pipeline[CallT]):
    """An operation with operators of PyTorch's, which its definition registers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _register_forward(self)
        if self.backward is not None:
            _register_backward(self, self.backward)
        OPERATIONS[self.name] = self


#: All operations, by name.
OPERATIONS: dict[str, Operation[Any]] = {}


def forward_implementations(
    operation: Operation[CallT], run: Callable[[CallT], Result]
) -> dict[str, Callable[..., Result | None]]:
    """The forward operators as `run` implements them, by what they do."""

    def plain(*inputs: object) -> Result:
        return run(operation.call_of(inputs))

    def with_all(*inputs: object) -> Result:
        return run(operation.call_of(inputs, is_complete=True))

    def into_out(*inputs: Any) -> Result | None:
        *others, out = inputs
        auxiliary = as_tuple(run(operation.call_of(others, is_complete=True, out=out)))[1:]
        return alone(auxiliary) if auxiliary else None

    found = {"forward": plain, "forward_all": with_all, "forward_out": into_out}
    return {which: run for which, run in found.items() if which in operation.operators}


def backward_implementation(
    operation: Operation[CallT], run: Callable[[BackwardCall[CallT]], Sequence[Tensor]]
) -> Callable[..., Sequence[Tensor]]:
    given = len(operation.given_names)

    def implementation(*arguments: Any) -> Sequence[Tensor]:
        *others, needs = arguments
        call = operation.call_of(others[given:], is_complete=True)
        return run(operation.backward_call(*others[:given], call, tuple(needs)))

    return implementation


def _register_forward(operation: Operation[CallT]) -> None:
    """PyTorch's dispatcher has checked the types of a call, and nothing else."""

    def on_gpu(call: CallT) -> Result:
        if operation.table.get(operation.signature(call)) is None:
            _check(call)
        return operation.on_gpu(call)

    def on_cpu(call: CallT) -> Result:
        _check(call)
        return operation.on_cpu(call)

    def on_fake_tensors(call: CallT) -> Result:
        _check(call)
        return operation.fake_results(call)

    def count(*inputs: object, **_: object) -> int:
        return operation.call_of(inputs[: len(operation.types)]).flops()[0]

    inputs = ", ".join(f"{kind} {name}" for name, kind in operation.types.items())
    given, auxiliary = len(operation.outputs), len(operation.aux_outputs)
    schemas = {
        "forward": (inputs, _tensors(given)),
        "forward_all": (inputs, _tensors(given + auxiliary)),
        "forward_out": (f"{inputs}, Tensor(a!) out", _tensors(given + auxiliary - 1)),
    }
    cuda, cpu, fake = [forward_implementations(operation, run) for run in (on_gpu, on_cpu, on_fake_tensors)]
    for which, implementation in cuda.items():
        schema, returned = schemas[which]
        name = operation.operators[which]
        found = Implementations(cuda=implementation, cpu=cpu[which], fake=fake[which], flops=count)
        if operation.backward is not None and which != "forward_out":
            found = _with_gradient(operation, found, which)
        implement(name, f"{name}({schema}) -> {returned}", found)


def _with_gradient(operation: Operation[CallT], found: Implementations, which: str) -> Implementations:
    """A forward operator's implementations with what autograd runs for it."""
    if which == "forward" and operation.flag:
        return found._replace(backward=autograd_checks.no_log_sum_exp)

    def save_inputs(ctx: Any, inputs: tuple[object, ...], output: Result) -> None:
        operation.save(ctx, operation.call_of(inputs, is_complete=True), as_tuple(output))

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[operation.differentiable_at])
        return (*operation.gradients(ctx, grads, needs), *[None] * (len(operation.types) - len(needs)))

    return found._replace(backward=differentiate, setup_context=save_inputs)


def _register_backward(operation: Operation[CallT], backward: type[BackwardCall[CallT]]) -> None:
    def fake_gradients(call: BackwardCall[CallT]) -> list[Tensor]:
        if operation.reference_call is not None:  # whose limits are those of the forward pass
            without_limits = call._replace(call=operation.reference_call._make(call.call))
            without_limits.call.check_options()
            without_limits.check()
        return call.fake_gradients()

    def count(*inputs: object, **_: object) -> int:
        first = len(operation.given_names)
        return operation.call_of(inputs[first : first + len(operation.types)]).flops()[1]

    hints = typing.get_type_hints(backward)
    given = {name: SCHEMA_TYPES[hints[name]] for name in operation.given_names}
    inputs = ", ".join(f"{kind} {name}" for name, kind in (given | operation.types).items())
    runs = operation.gradients_on_gpu, backward.reference, fake_gradients
    cuda, cpu, fake = [backward_implementation(operation, run) for run in runs]
    name = operation.operators["backward"]
    refuse = autograd_checks.no_gradient_of_gradient
    found = Implementations(cuda=cuda, cpu=cpu, fake=fake, flops=count, backward=refuse)
    implement(name, f"{name}({inputs}, bool[] needs) -> Tensor[]", found)


def _check(call: CallT) -> None:
    call.check_options()
    call.check()


def _tensors(number: int) -> str:
    return "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"
