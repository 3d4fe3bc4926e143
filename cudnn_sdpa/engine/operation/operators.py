"""PyTorch's operators of an operation, with their schemas, which follow from the fields of its calls."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.launches import SCHEMA_TYPES, alone, as_tuple
from cudnn_sdpa.engine.operation.pipeline import Pipeline
from cudnn_sdpa.engine.torch_ops import Implementations, implement


@dataclass(eq=False)
class Operation(Pipeline[CallT]):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_forward()
        if self.backward is not None:
            self._register_backward(self.backward)
        OPERATIONS[self.name] = self

    def call_of(self, inputs: Sequence[object], *, is_complete: bool = False, out: Tensor | None = None) -> CallT:
        wanted = [is_complete] * bool(self._flag) + [out] * self.takes_out
        if not self._has_group:
            return self.call(*inputs, *wanted)
        group = self._grouped(**dict(zip(self._group_names, inputs[self._alone :], strict=True)))
        return self.call(*inputs[: self._alone], group, *wanted)

    def forward_implementations(self, run: Callable[[CallT], Result]) -> dict[str, Callable[..., Result | None]]:
        """The forward operators as `run` implements them, by what they do."""

        def plain(*inputs: object) -> Result:
            return run(self.call_of(inputs))

        def with_all(*inputs: object) -> Result:
            return run(self.call_of(inputs, is_complete=True))

        def into_out(*inputs: Any) -> Result | None:
            *others, out = inputs
            auxiliary = as_tuple(run(self.call_of(others, is_complete=True, out=out)))[1:]
            return alone(auxiliary) if auxiliary else None

        found = {"forward": plain, "forward_all": with_all, "forward_out": into_out}
        return {which: run for which, run in found.items() if which in self.operators}

    def backward_implementation(
        self, run: Callable[[BackwardCall[CallT]], Sequence[Tensor]]
    ) -> Callable[..., Sequence[Tensor]]:
        given = len(self._given_names)

        def implementation(*arguments: Any) -> Sequence[Tensor]:
            *others, needs = arguments
            call = self.call_of(others[given:], is_complete=True)
            return run(self._backward_call(*others[:given], call, tuple(needs)))

        return implementation

    def _register_forward(self) -> None:
        inputs = ", ".join(f"{kind} {name}" for name, kind in self._types.items())
        given, auxiliary = len(self.outputs), len(self.aux_outputs)
        schemas = {
            "forward": (inputs, _tensors(given)),
            "forward_all": (inputs, _tensors(given + auxiliary)),
            "forward_out": (f"{inputs}, Tensor(a!) out", _tensors(given + auxiliary - 1)),
        }
        runs = self._operator_on_gpu, self._operator_on_cpu, self.fake_results
        cuda, cpu, fake = map(self.forward_implementations, runs)
        for which, on_gpu in cuda.items():
            schema, returned = schemas[which]
            name = self.operators[which]
            found = Implementations(cuda=on_gpu, cpu=cpu[which], fake=fake[which], flops=self._count_forward)
            if self.backward is not None and which != "forward_out":
                found = self._with_gradient(found, which)
            implement(name, f"{name}({schema}) -> {returned}", found)

    def _with_gradient(self, found: Implementations, which: str) -> Implementations:
        """A forward operator's implementations with what autograd runs for it."""
        if which == "forward" and self._flag:
            return found._replace(backward=autograd_checks.no_log_sum_exp)

        def save_inputs(ctx: Any, inputs: tuple[object, ...], output: Result) -> None:
            self.save(ctx, self.call_of(inputs, is_complete=True), as_tuple(output))

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needs = tuple(ctx.needs_input_grad[: self._gradients])
            others = (None,) * (len(self._types) - self._gradients)
            return (*self.gradients(ctx, grads, needs), *others)

        return found._replace(backward=differentiate, setup_context=save_inputs)

    def _register_backward(self, backward: type[BackwardCall[CallT]]) -> None:
        hints = typing.get_type_hints(backward)
        given = {name: SCHEMA_TYPES[hints[name]] for name in self._given_names}
        inputs = ", ".join(f"{kind} {name}" for name, kind in (given | self._types).items())
        runs = self._gradients_on_gpu, backward.reference, self._checked_fake_gradients
        cuda, cpu, fake = map(self.backward_implementation, runs)
        name = self.operators["backward"]
        schema = f"{name}({inputs}, bool[] needs) -> Tensor[]"
        refuse = autograd_checks.no_gradient_of_gradient
        found = Implementations(cuda=cuda, cpu=cpu, fake=fake, flops=self._count_backward, backward=refuse)
        implement(name, schema, found)

    def _count_forward(self, *inputs: object, **_: object) -> int:
        return self.call_of(inputs[: len(self._types)]).flops()[0]

    def _count_backward(self, *inputs: object, **_: object) -> int:
        given = len(self._given_names)
        return self.call_of(inputs[given : given + len(self._types)]).flops()[1]


#: All operations, by name.
OPERATIONS: dict[str, Operation[Any]] = {}


def _tensors(number: int) -> str:
    return "Tensor" if number == 1 else f"({', '.join(['Tensor'] * number)})"
