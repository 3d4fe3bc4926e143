"""Operations are described by data: what is done with a call is a method of its class."""

import ast
import dataclasses
from pathlib import Path

import pytest
from contract.operations import OPERATIONS as EXAMPLES

import cudnn_sdpa
from cudnn_sdpa.engine.operation import OPERATIONS, Operation
from cudnn_sdpa.engine.operation.call import BackwardCall, Call

assert EXAMPLES  # whose import makes the operations of samples


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_description_of_an_operation_is_data(name):
    operation = OPERATIONS[name]
    values = {field.name: getattr(operation, field.name) for field in dataclasses.fields(Operation)}
    functions = {name for name, value in values.items() if callable(value) and not isinstance(value, type)}
    assert not functions, "a method of the call's class can be followed"


#: Annotations of functions: the types, and their aliases in the package.
FUNCTIONS = {"Callable", "Run", "Implementation", "RunBackward", "Strategies"}

#: The fields that hold functions, and why.
HOLD_FUNCTIONS = {
    "engine/launch.py Prepared.run": "the launch itself, where a call ends",
    "engine/torch_ops.py Implementations": "registered with PyTorch, which calls them",
    "engine/native/calls.py Differentiation.gradients": "called by C++",
    "engine/native/calls.py _Kernel.launch": "called by C++",
    "engine/explain.py Description": "only explain asks for them",
    "attention/support/rules.py Rule.applies": "a rule is a condition",
}


def test_no_field_on_the_way_of_a_call_holds_a_function():
    """A parameter can be followed from the public function to the launch without running anything."""
    package, found = Path(cudnn_sdpa.__file__).parent, set()
    for path in sorted([*package.glob("engine/**/*.py"), *package.glob("attention/**/*.py")]):
        for kind in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]:
            if not any("dataclass" in ast.unparse(x) or "NamedTuple" in ast.unparse(x) for x in _marks(kind)):
                continue
            for field in [x for x in kind.body if isinstance(x, ast.AnnAssign)]:
                if FUNCTIONS & {x.id for x in ast.walk(field.annotation) if isinstance(x, ast.Name)}:
                    place = f"{path.relative_to(package).as_posix()} {kind.name}"
                    found.add(place if place in HOLD_FUNCTIONS else f"{place}.{ast.unparse(field.target)}")
    assert found == set(HOLD_FUNCTIONS)


def _marks(kind):
    return [*kind.bases, *kind.decorator_list]


def test_no_class_is_too_long_to_read():
    """In lines. Those of the engine; a longer one has several concepts."""
    package = Path(cudnn_sdpa.__file__).parent
    for path in package.glob("engine/**/*.py"):
        for kind in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]:
            assert kind.end_lineno - kind.lineno < 450, (path, kind.name)


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
