"""Operations are described by data: what is done with a call is a method of its class."""

import dataclasses

import pytest
from contract.operations import OPERATIONS as EXAMPLES

from cudnn_sdpa.engine.operation import OPERATIONS, Operation
from cudnn_sdpa.engine.operation.call import BackwardCall, Call

assert EXAMPLES  # whose import makes the operations of samples


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_description_of_an_operation_is_data(name):
    operation = OPERATIONS[name]
    values = {field.name: getattr(operation, field.name) for field in dataclasses.fields(Operation)}
    functions = {name for name, value in values.items() if callable(value) and not isinstance(value, type)}
    assert functions <= {"kernels"}, "a method of the call's class can be followed"


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_have_what_is_asked_of_them(name):
    operation = OPERATIONS[name]
    kinds = [(operation.call, Call), (operation.reference_call, Call), (operation.backward, BackwardCall)]
    for kind, base in kinds:
        if kind is not None:
            assert issubclass(kind, base)
            assert not hasattr(kind(*[None] * len(kind._fields)), "__dict__"), "calls are tuples and nothing else"
            for method in ("reference", "bind", "keys"):
                assert getattr(kind, method) is not getattr(base, method)
