"""The calls of an operation that the native module repeats: those that are one launch and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import needs_gradient, needs_operator
from cudnn_sdpa.engine.launch import SingleLaunch
from cudnn_sdpa.engine.native.calls import Differentiation, NativeCalls, NativelySaved, RepeatableCall
from cudnn_sdpa.engine.operation.call import GIVEN, CallT
from cudnn_sdpa.engine.operation.description import OperationDescription
from cudnn_sdpa.engine.tensor_checks import MISALIGNED

#: The gradients of a call, from what was saved, the gradients of its results, and which are needed.
Gradients = Callable[..., list[Tensor | None]]


class NativeKey(NamedTuple):
    """The arguments of a public function, by which the native module recognizes its calls.

    Attributes:
        calls: The function's calls that are launched natively.
    """

    calls: NativeCalls
    arguments: tuple[object, ...]


def register(operation: OperationDescription[CallT], gradients: Gradients, asked: NativeKey, call: CallT) -> None:
    """Registers calls like a known one with the native module; `gradients` computes theirs in Python."""
    tensors, out = call[operation.tensors_at], operation.out_of(call)
    trains = needs_gradient(*tensors)
    entry = operation.table.get(operation.signature(operation.complete(call) if trains else call))
    if entry is None or not isinstance(entry.run, SingleLaunch) or (trains and out is not None):
        return
    launch = entry.run
    returned, single_output = launch.returned, launch.single_output
    if trains and not operation.is_complete(call):
        returned = returned[operation.given_at]
        single_output = len(returned) == 1
    operands = launch.tensors_of(call)
    native = RepeatableCall(launch.bound, operands, returned, single_output=single_output, out=out)
    if not trains:
        asked.calls.register(asked.arguments, {}, native)
    elif not any(x is not None and x.is_inference() for x in tensors):
        asked.calls.register(asked.arguments, {}, native, _differentiation(operation, gradients, call))


def _differentiation(operation: OperationDescription[CallT], gradients: Gradients, call: CallT) -> Differentiation:
    return Differentiation(
        name=f"cudnn_sdpa::{operation.name}",
        gradients=lambda *given: (gradients(*given), partial(_repeatable_gradient, operation, *given)),
        options=call[operation.options_at],
        inputs=call[operation.differentiable_at],
        saved=call[operation.tensors_at],
        results=range(operation.saved_at.start, operation.saved_at.stop),
        asks_for_fallback=operation.reference_call is not None,
    )


def _repeatable_gradient(
    operation: OperationDescription[CallT],
    ctx: NativelySaved,
    grads: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
) -> RepeatableCall | None:
    grads = grads[operation.given_at]
    if any(grad is None or needs_operator(grad) for grad in grads):
        return None
    backward = operation.backward_of(ctx, grads, needs)
    known = operation.table.get(operation.signature_of_gradient(backward))
    if known is None or not isinstance(known.run, SingleLaunch):
        return None
    if any(x.data_ptr() & MISALIGNED for x in backward[GIVEN]):  # a copy has been read
        return None
    launch = known.run
    return RepeatableCall(launch.bound, launch.tensors_of(backward), launch.returned)
