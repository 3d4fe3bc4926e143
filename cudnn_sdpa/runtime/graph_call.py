"""Calls of operations bound to their plans: tensors in, new tensors out."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.runtime.building import build_plan
from cudnn_sdpa.runtime.cache import next_use, plan_cache
from cudnn_sdpa.runtime.call_table import CallTable
from cudnn_sdpa.runtime.graph_op import GraphOp
from cudnn_sdpa.runtime.key import Operand, PlanKey, Role
from cudnn_sdpa.runtime.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.runtime.plan import allocate
from cudnn_sdpa.runtime.target import Target, live_target

#: Prepared calls, by all that decides one.
calls: CallTable[Any] = CallTable(None)


def describe(operand: Any) -> Hashable:
    """What of an operand decides a call: of a number, that there is one."""
    if isinstance(operand, Tensor):
        return operand.shape, operand.stride(), operand.dtype, operand.device
    return operand is None


def key_of(
    operation: GraphOp,
    names: Sequence[str],
    given: Sequence[Any],
    outputs: Sequence[Tensor],
    options: dict[str, Any],
    target: Target,
    device: int | None,
) -> PlanKey:
    """The key of the plan for operands and outputs that lie in memory as these do."""
    rank = max(x.dim() for x in given if isinstance(x, Tensor))
    number = TensorLayout.contiguous((1,) * rank, torch.float32)
    inputs = [
        Operand(name, TensorLayout.of(x)) if isinstance(x, Tensor) else Operand(name, number, Role.SCALAR)
        for name, x in zip(names, given, strict=True)
        if x is not None
    ]
    results = [Operand(f"output{number}", TensorLayout.of(x)) for number, x in enumerate(outputs)]
    return operation.key(inputs, results, options, target, device)


class GraphCall:
    """A call bound to its plan.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_layouts", "_names", "last", "plan")

    def __init__(
        self, operation: Any, given: Sequence[Any], outputs: Sequence[Tensor], options: dict[str, Any]
    ) -> None:
        device = next(x for x in given if isinstance(x, Tensor)).get_device()
        key = key_of(operation, operation.operands, given, outputs, options, live_target(device), device)
        self.plan = plan_cache.get(key, lambda key: build_plan(operation, key))
        self.last: Any = None
        self._names = operation.operands
        self._layouts = [(x.shape, x.stride(), x.dtype) for x in outputs]

    def __call__(self, given: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results, in new memory."""
        with torch.cuda.device(self.plan.device):
            outputs = tuple(allocate(tuple(layout[0]), tuple(layout[1]), layout[2]) for layout in self._layouts)
            numbers = [array("f", [x]) for x in given if isinstance(x, (int, float))]
            addresses = iter(numbers)
            pointers = []
            for name, x in zip(self._names, given, strict=True):
                if isinstance(x, Tensor):
                    pointers.append(_address(name, x))
                elif x is not None:
                    pointers.append(next(addresses).buffer_info()[0])
            self.plan.last_used = next_use()
            self.plan.launch([*pointers, *(x.data_ptr() for x in outputs)])
            return outputs


def _address(name: str, tensor: Tensor) -> int:
    address = tensor.data_ptr()
    if address % ALIGNMENT:
        got = f"memory at {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
        raise LayoutError(name, got, f"a multiple of {ALIGNMENT} bytes", f"Use {name}.clone().")
    return address
