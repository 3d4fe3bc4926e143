"""Every operation has an example, so that the whole suite runs over it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_sdpa
from contract.operations import OPERATIONS as EXAMPLES
from contract.operations import Example
from cudnn_sdpa.engine.operation import OPERATIONS
from cudnn_sdpa.fused.graph_op import _functions


class Operators(TorchDispatchMode):
    """Notes the package's operators, and which graph functions they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cudnn_sdpa":
            self.names.add(function._schema.name.partition("::")[2])
            self.names |= {x.partition("@")[0] for x in args if isinstance(x, str) and "@" in x}
        return function(*args, **(kwargs or {}))


def calls(example: Example) -> Iterator[None]:
    """The example's call in all its forms: for the LSE, into a given tensor, for all gradients and for each."""
    with torch.no_grad():
        out = example(example.tensors())
        if example.is_attention:
            yield example(example.tensors(), return_lse=True)
            yield example(example.tensors(), out=torch.empty_like(out))
    for name in ("", *example.differentiable):
        tensors = example.tensors(grad=not name)
        if name:
            tensors[name].requires_grad_()
        if example.differentiable:
            yield example.gradients(tensors)


@pytest.fixture(scope="module")
def operators() -> set[str]:
    """The operators and graph functions of all examples, run on tensors without memory."""
    found: set[str] = set()
    for example in EXAMPLES.values():
        with gpu_on_the_cpu(example.compute), cudnn_sdpa.cpu_checks(None), FakeTensorMode(), Operators() as seen:
            for _ in calls(example):
                pass
        found |= seen.names
    return found


def test_every_operator_has_an_example(operators):
    there_are = {name for operation in OPERATIONS.values() for name in operation.operators.values()}
    assert len(there_are) > 15
    assert there_are <= operators


def test_every_graph_function_has_an_example(operators):
    for package in ("cudnn_sdpa.attention", "cudnn_sdpa.fused", "cudnn_sdpa.kernels"):
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            importlib.import_module(module.name)
    names = {function.name for function in _functions.values()}
    there_are = {name for name in names if name.startswith("cudnn_sdpa.")}
    assert len(there_are) > 10
    assert there_are <= operators
