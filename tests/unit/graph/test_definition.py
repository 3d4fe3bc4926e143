"""The identity of an operation: it changes with everything that its builder depends on."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import math
from textwrap import dedent

import pytest
import torch

from cudnn_sdpa.attention.dense.graphs import sdpa_forward
from cudnn_sdpa.fused import conv_graphs
from cudnn_sdpa.graph import definition, known_issues
from cudnn_sdpa.graph.definition import GraphDefinition, find_operation

_numbers = itertools.count()

RELU = "def build(g, x):\n    return g.relu(x)\n"


@pytest.fixture
def build(tmp_path):
    """Returns the function `build` of a module with this source."""

    def load(source: str):
        path = tmp_path / f"module_{next(_numbers)}.py"
        path.write_text(dedent(source))
        spec = importlib.util.spec_from_file_location("module", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.build

    return load


@pytest.fixture
def digest(build):
    """The digest of the operation whose builder is the function `build` of a module with this source."""
    return lambda source: GraphDefinition(build(source)).digest


def scaled_by(factor, *, power=1):
    def builder(g, x):
        return g.scale(x, factor**power)

    return builder


def test_the_same_source_has_the_same_digest(digest):
    assert digest(RELU) == digest(RELU)
    assert len(digest(RELU)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(RELU, RELU.replace("relu", "tanh"), id="source"),
        pytest.param(RELU, RELU.replace("g, x", "g, y").replace("(x)", "(y)"), id="parameter"),
        pytest.param("def build(g, x, n=2): return n\n", "def build(g, x, n=3): return n\n", id="default"),
        pytest.param("def build(g, *, n=2): return n\n", "def build(g, *, n=3): return n\n", id="keyword default"),
        pytest.param("N = 2\ndef build(g): return N\n", "N = 3\ndef build(g): return N\n", id="global"),
        pytest.param("N = 1\ndef build(g): return N\n", "N = True\ndef build(g): return N\n", id="global's type"),
        pytest.param("N = 1\ndef build(g): return N\n", "N = 1.0\ndef build(g): return N\n", id="global's other type"),
        pytest.param("N = (2, 3)\ndef build(g): return N\n", "N = (2, 4)\ndef build(g): return N\n", id="tuple"),
        pytest.param("N = 'a'\ndef build(g): return N\n", "N = b'a'\ndef build(g): return N\n", id="text and bytes"),
        pytest.param(
            "import math as m\ndef build(g): return m\n", "import cmath as m\ndef build(g): return m\n", id="module"
        ),
        pytest.param(
            "def helper(): return 2\ndef build(g): return helper()\n",
            "def helper(): return 3\ndef build(g): return helper()\n",
            id="helper",
        ),
        pytest.param(
            "N = 2\ndef helper(): return N\ndef build(g): return helper()\n",
            "N = 3\ndef helper(): return N\ndef build(g): return helper()\n",
            id="helper's global",
        ),
        pytest.param(
            "N = 2\ndef build(g): return [i * N for i in g]\n",
            "N = 3\ndef build(g): return [i * N for i in g]\n",
            id="global in a comprehension",
        ),
        pytest.param(
            "N = 2\ndef build(g):\n    def inner(): return N\n    return inner\n",
            "N = 3\ndef build(g):\n    def inner(): return N\n    return inner\n",
            id="global in an inner function",
        ),
    ],
)
def test_whatever_may_change_the_graph_changes_the_digest(digest, one, other):
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


@pytest.mark.parametrize(("one", "other"), [(2, 3), (1, True), (1, 1.0), (0.0, -0.0), (None, "None"), ((2,), (3,))])
def test_what_a_closure_holds_changes_the_digest(one, other):
    digests = [GraphDefinition(scaled_by(value)).digest for value in (one, other, one)]
    assert digests[0] == digests[2] != digests[1]


def test_unused_names_do_not_matter(digest):
    assert digest("N = 2\n" + RELU) == digest("N = [3]\n" + RELU)


def test_a_builder_without_a_source_file_has_a_digest_of_its_code():
    def typed(source):
        namespace = {}
        exec(source, namespace)  # noqa: S102 - as in the interactive prompt
        return GraphDefinition(namespace["build"]).digest

    assert typed(RELU) == typed(RELU)
    assert typed(RELU) != typed(RELU.replace("relu", "tanh"))
    inner = RELU.replace("g.relu(x)", "(lambda y: g.relu(y))(x)")
    assert typed(inner) == typed(inner)  # and not by the address of the inner function
    assert typed(inner) != typed(inner.replace("relu", "tanh"))


def test_code_passed_with_c_is_not_the_source_of_what_it_executes(run_python):
    code = f"""
from cudnn_sdpa.graph.definition import GraphDefinition
digests = set()
for name in ("relu", "tanh"):
    namespace = {{}}
    exec({RELU!r}.replace("relu", name), namespace)
    digests.add(GraphDefinition(namespace["build"]).digest)
print(len(digests))
"""
    assert run_python(code).stdout.strip() == "2"


@pytest.mark.parametrize("value", [2, 0.5, True, None, "text", b"bytes", (1, "a"), frozenset({3}), math, scaled_by])
def test_constants_modules_and_functions_may_be_closed_over(value):
    def builder():
        return value

    assert isinstance(GraphDefinition(builder), GraphDefinition)


class Opaque:
    pass


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, {1}, bytearray(b"a"), Opaque(), Opaque, (1, [2]), torch.ones(2), torch.float16, print],
    ids=lambda value: type(value).__name__,
)
def test_a_closure_over_anything_else_is_refused(value):
    def builder():
        return value

    with pytest.raises(TypeError, match=r"builder that uses 'value', a .* from outside.*as an option") as caught:
        GraphDefinition(builder)
    assert type(value).__name__ in str(caught.value)


@pytest.mark.parametrize("value", ["[1]", "{'a': 1}", "{1}", "object()", "(1, [2])"])
@pytest.mark.parametrize("use", ["return N", "return [N for _ in g]", "def inner(): return N\n    return inner"])
def test_a_global_of_any_other_kind_is_refused(build, value, use):
    with pytest.raises(TypeError, match="uses 'N'"):
        GraphDefinition(build(f"N = {value}\ndef build(g):\n    {use}\n"))


def test_helper_functions_have_the_same_restrictions(build):
    with pytest.raises(TypeError, match="helper: got a builder that uses 'N', a list"):
        GraphDefinition(build("N = [2]\ndef helper(): return N\ndef build(g): return helper()\n"))


def test_mutually_recursive_functions_terminate(digest):
    source = "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\n"
    assert len(digest(source + "def build(g): return even(g)\n")) == 16


def test_an_operation_is_found_by_its_name():
    assert sdpa_forward.name == "cudnn_sdpa.attention.dense.graphs:sdpa_forward"
    assert find_operation(sdpa_forward.name) is sdpa_forward
    assert "sdpa_forward" in repr(sdpa_forward)
    with pytest.raises(TypeError, match="not a graph_op"):
        find_operation("cudnn_sdpa.attention.dense.graphs:masks")


def test_the_operation_has_the_builders_docstring():
    assert "softmax" in sdpa_forward.__doc__


WRAPPED = """
import functools
def decorate(inner):
    @functools.wraps(inner)
    def outer(g, x): return {body}
    return outer
@decorate
def build(g, x): return g.relu(x)
"""


def test_a_decorator_around_the_builder_is_part_of_its_identity(digest):
    assert digest(WRAPPED.format(body="inner(g, x)")) != digest(WRAPPED.format(body="g.neg(inner(g, x))"))


def test_two_lambdas_on_one_line_are_two_operations(build):
    one, other = build("build = (lambda g, x: g.relu(x)), (lambda g, x: g.tanh(x))\n")
    assert GraphDefinition(one).digest != GraphDefinition(other).digest


def test_a_helper_function_defined_later_is_part_of_the_identity(build):
    source = (
        "from cudnn_sdpa.graph.definition import GraphDefinition\n@GraphDefinition\ndef build(g): return helper()\n"
    )
    one, other = (build(f"{source}def helper(): return {number}\n").digest for number in (2, 3))
    assert one != other


@pytest.mark.parametrize("default", ["[]", "{}", "object()"])
def test_a_default_of_a_mutable_kind_is_refused(build, default):
    function = build(f"def build(g, memory={default}): return memory\n")
    with pytest.raises(TypeError, match="memory"):
        GraphDefinition(function)


def test_a_bound_method_is_refused():
    class Builder:
        factor = 2

        def build(self, g, x):
            return g.scale(x, self.factor)

    with pytest.raises(TypeError):
        GraphDefinition(Builder().build)


@pytest.mark.slow
def test_digests_are_the_same_in_every_process(run_python, tmp_path):
    (tmp_path / "builders.py").write_text("N = frozenset({'a', 'bb', 'ccc', 'dddd'})\ndef build(g): return N\n")
    code = """
from builders import build
from cudnn_sdpa.attention.dense.graphs import sdpa_forward
from cudnn_sdpa.graph.definition import GraphDefinition
print(sdpa_forward.digest, GraphDefinition(build).digest)
"""
    one, other = (run_python(code, fresh=True, PYTHONHASHSEED=seed).stdout for seed in ("3", "11"))
    assert one == other
    assert one.split()[0] == sdpa_forward.digest


def test_the_version_of_the_package_is_part_of_every_digest(monkeypatch, digest):
    """The package's own functions stand for all that they call."""
    functions = (known_issues.check, scaled_by(2.0), torch.relu)
    before = digest(RELU), *map(definition.function_digest, functions)
    monkeypatch.setattr(definition, "__version__", "0.0.1")
    after = digest(RELU), *map(definition.function_digest, functions)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_the_digest_of_a_graph_function_of_the_package_changes_with_the_gradient_that_it_calls(monkeypatch):
    """Graphs that PyTorch has stored hold the gradient's name: after an edit it must not be asked for."""
    function = conv_graphs.convolution.backward
    before = definition.function_digest(function)
    lines = linecache.getlines(conv_graphs.__file__)
    edited = [line.replace("g.conv_wgrad(image=x", "g.conv_wgrad(image=-x") for line in lines]
    monkeypatch.setattr(linecache, "getlines", lambda *_, **__: edited)
    definition._file.cache_clear()
    after = definition.function_digest(function)
    definition._file.cache_clear()
    assert edited != lines
    assert after != before
