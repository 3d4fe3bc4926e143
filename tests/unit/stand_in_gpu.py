"""A GPU that is none, for a process of its own: plans that read and write CPU memory at the addresses they are given.

The way of graph functions to their plans (signatures, guards, addresses, gradients) runs as it is on a GPU; what cuDNN
would compute is computed by the function's reference, in the layouts of the plan's key.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

from cudnn_sdpa.engine import launch
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.graph.key import Role
from cudnn_sdpa.plans.autotune_timing import tensor_at

CPU = torch.device("cpu")

#: The keys of all plans that were launched, in order.
launched = []


class StandInPlan:
    """Computes `operation` of `key` by its reference."""

    def __init__(self, operation, key):
        self.operation, self.key = operation, key
        self.held, self.device, self.last_used = True, 0, 0

    def launch(self, addresses):
        launched.append(self.key)
        names = [operand.name for operand in (*self.key.inputs, *self.key.outputs)]
        places = dict(zip(names, addresses, strict=True))
        inputs = {operand.name: operand for operand in self.key.inputs}
        given = [self._read(inputs.get(name), places.get(name)) for name in self.operation.operands]
        with torch.no_grad():
            results = torch_ops.as_tuple(self.operation.reference(*given, **self.key.option_values))
        for operand, result in zip(self.key.outputs, results, strict=True):
            tensor_at(places[operand.name], operand.layout, CPU).copy_(result)

    @staticmethod
    def _read(operand, address):
        if operand is None:
            return None
        assert address, f"a null pointer for {operand.name}"
        if operand.role is Role.SCALAR:
            return ctypes.c_float.from_address(address).value
        return tensor_at(address, operand.layout, CPU)


class StandInCache:
    """Keeps a plan for each key."""

    def __init__(self):
        self.plans = {}

    def get(self, key, build):
        if key not in self.plans:
            self.plans[key] = StandInPlan(build(key), key)
        return self.plans[key]


def install() -> None:
    """From now on CPU tensors are on a GPU, as far as graph functions see."""
    launch.live_target = lambda _: "a GPU that is none"
    launch.build_plan = lambda operation, _: operation
    launch.plan_cache = StandInCache()
    launch.allocate = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype).fill_(77)
    torch.cuda.device = lambda _: contextlib.nullcontext()
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "cpu")
    torch.Tensor.get_device = lambda _: 0
    install.library = torch.library.Library("cudnn_sdpa", "IMPL")
    install.library.impl("graph_function", torch_ops._decoded(torch_ops._on_gpu), "CPU", allow_override=True)
