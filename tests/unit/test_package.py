"""The package as a whole: effects of importing it, its public names, and the imports between modules."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import flash4_stand_in as stand_in
import pytest

import cudnn_sdpa
from cudnn_sdpa.engine.explain import TARGET_VARIABLE

PACKAGE = Path(cudnn_sdpa.__file__).parent
#: Layers from the bottom up; a module imports its own layer and those below it.
LAYERS = [
    ("_version", "errors", "settings"),
    ("graph",),
    ("plans",),
    ("offline",),
    ("engine",),
    ("attention",),
    ("distributed",),
    ("kernels",),
    ("fused",),
    ("serving",),
    ("nn",),
    ("integrations",),
    ("compat",),
    ("planning",),
    ("doctor",),
    ("_start",),
    ("cli",),
    ("__main__",),
]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


@cache
def imported_modules(name: str) -> set[str]:
    """Full names of all imports of a module, also within functions."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found |= {
                submodule if (submodule := f"{node.module}.{alias.name}") in SOURCES else node.module
                for alias in node.names
            }
    return found


def own_imports(name: str) -> set[str]:
    return {other for other in imported_modules(name) if other.split(".")[0] == "cudnn_sdpa"}


def layer(name: str) -> int:
    part = name.split(".")[1]
    (index,) = [index for index, members in enumerate(LAYERS) if part in members]
    return index


MODULES = [name for name in SOURCES if name != "cudnn_sdpa"]

#: Calls by position of five values and more that stay so, by module and function, and why.
CALLS_BY_POSITION = {
    ("cudnn_sdpa.attention.arguments", "Softmax"): "on the way of known calls in Python; names would double its time",
}


@cache
def positional_parameters() -> dict[str, int]:
    """The number of named parameters of each function and class, by its name; the largest of those of one name."""
    found: dict[str, int] = {}
    for name in SOURCES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef):
                has_any_number = node.args.vararg is not None
                count = len(node.args.args) if has_any_number else 99
                found[node.name] = max(found.get(node.name, 0), count)
            elif isinstance(node, ast.ClassDef):
                found[node.name] = 99
    return found


def values_by_position(call: ast.Call) -> int:
    """How many values a call gives without names: those of `*(a, b)` too, but `*several` is one."""
    starred = [x.value for x in call.args if isinstance(x, ast.Starred)]
    return len(call.args) + sum(len(x.elts) - 1 for x in starred if isinstance(x, (ast.Tuple, ast.List)))


def own_calls(name: str) -> Iterator[ast.Call]:
    """The calls of functions and classes of the package in a module, as far as their names say so."""
    tree = tree_of(name)
    here, modules = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            here.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cudnn_sdpa"):
            here |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        while isinstance(function, ast.Attribute):
            function = function.value
        root = function.id if isinstance(function, ast.Name) else ""
        is_own = root in here if isinstance(node.func, ast.Name) else root not in modules
        if is_own:
            yield node


def test_neither_importing_nor_a_call_on_the_cpu_starts_cuda_or_loads_cudnn(run_python, tmp_path):
    """Nor does anything import what another provider's kernels are compiled with: `explain`, for example."""
    stand_in.write(tmp_path)
    result = run_python(
        """
import pathlib, sys, threading, torch, torch.utils.flop_counter, warnings  # this one imports triton since 2.14
before = set(sys.modules)
compilers = {"cutlass", "flash_attn", "nvidia_cutlass_dsl", "quack", "tvm_ffi"}
warnings.simplefilter("error")
import cudnn_sdpa
assert not torch.cuda.is_initialized()
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"cudnn", "nvidia", "triton", "numpy", "typer", "rich", *compilers}, new
maps = pathlib.Path("/proc/self/maps").read_text()
assert "libcudnn_graph" not in maps and "stand-in-driver" not in maps
assert threading.active_count() == 1
q = torch.randn(1, 2, 8, 16)
cudnn_sdpa.sdpa(q, q, q, is_causal=True, return_lse=True)
cudnn_sdpa.plan_cache.info()
assert "cudnn" not in sys.modules
assert not torch.cuda.is_initialized()
q = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")
with cudnn_sdpa.providers("fa4", "cudnn"):
    assert cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q, is_causal=True).provider == "fa4"
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & compilers, new
""",
        fresh=True,
        **{TARGET_VARIABLE: "h100"},
    )
    assert result.stdout == ""


@pytest.mark.slow
def test_importing_leaves_nothing_open(run_python):
    result = run_python("import torch, cudnn_sdpa", PYTHONWARNINGS="error::ResourceWarning")
    assert result.stderr == ""


def test_public_names_are_sorted_and_there():
    assert cudnn_sdpa.__all__ == sorted(cudnn_sdpa.__all__)
    assert all(hasattr(cudnn_sdpa, name) for name in cudnn_sdpa.__all__)


def test_the_root_has_no_public_names_that_are_not_exported():
    names = {name for name in dir(cudnn_sdpa) if name[0] != "_" and not inspect.ismodule(getattr(cudnn_sdpa, name))}
    assert names == set(cudnn_sdpa.__all__) - {"__version__"}


def test_type_checkers_see_what_the_first_access_to_a_name_gives():
    """The imports for type checkers, and the modules that are imported on demand."""
    root = ast.parse(Path(cudnn_sdpa.__file__).read_text())
    block = next(node for node in root.body if isinstance(node, ast.If))
    shown = {alias.name: node.module for node in block.body for alias in node.names if node.module != "cudnn_sdpa"}
    assert shown == cudnn_sdpa._MODULES
    assert sorted([*shown, "__version__"]) == cudnn_sdpa.__all__
    for name, module in shown.items():
        assert getattr(cudnn_sdpa, name) is getattr(sys.modules[module], name)


@pytest.mark.parametrize("name", [name for name in cudnn_sdpa.__all__ if name != "__version__"])
def test_public_names_are_documented(name):
    doc = inspect.getdoc(getattr(cudnn_sdpa, name))
    assert doc
    assert len(doc.splitlines()[0]) > 20


@pytest.mark.parametrize(
    "function",
    [
        cudnn_sdpa.sdpa,
        cudnn_sdpa.sdpa_backward,
        cudnn_sdpa.sdpa_varlen_backward,
        cudnn_sdpa.merge_states,
        cudnn_sdpa.sdpa_fp8,
        cudnn_sdpa.sdpa_fp8_backward,
        cudnn_sdpa.scaled_dot_product_attention,
        cudnn_sdpa.explain,
    ],
)
def test_docstrings_of_functions_name_every_parameter_and_have_an_example(function):
    doc = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^    \*{{0,2}}{name}: ", doc, re.MULTILINE), name
    for section in ("Args:", "Returns:", "Raises:", "Examples:"):
        assert section in doc
    assert ">>> " in doc


@pytest.mark.parametrize("name", cudnn_sdpa.__all__)
def test_public_names_and_their_public_methods_have_docstrings(name):
    public = getattr(cudnn_sdpa, name)
    if inspect.isclass(public) or inspect.isfunction(public):
        assert (public.__doc__ or "").strip()
    if inspect.isclass(public) and public.__module__.startswith("cudnn_sdpa"):
        for method, value in vars(public).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                assert inspect.getdoc(getattr(public, method)), method


def test_all_versions_agree():
    assert re.fullmatch(r"\d+\.\d+\.\d+([.-]?(a|b|rc|dev)\d*)?", cudnn_sdpa.__version__)


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_backend_imports_cudnn(name):
    text = SOURCES[name].read_text()
    imports = {module.split(".")[0] for module in imported_modules(name)}
    if name == "cudnn_sdpa.graph.backend":
        assert 'import_module("cudnn")' in text
    elif name == "cudnn_sdpa.attention.frontend.compiler":
        assert "cudnn" in imports, "a helper process's program, which compiles the frontend's kernels"
    else:
        assert "cudnn" not in imports
        assert not re.search(r"import_module\(.cudnn\b", text)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("cudnn_sdpa.fused")])
def test_no_fused_operation_imports_attention(name):
    assert not [other for other in own_imports(name) if other.startswith("cudnn_sdpa.attention")]


def test_no_folder_has_too_many_modules():
    rooms = Counter(path.parent for path in SOURCES.values() if path.name != "__init__.py")
    assert {room.name: count for room, count in rooms.items() if count > 15} == {}


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downward_only(name):
    assert not {other.split(".")[0] for other in imported_modules(name)} & {"benchmarks", "scripts", "tests"}
    for other in own_imports(name):
        assert other != "cudnn_sdpa", f"{name} imports the package root"
        assert layer(other) <= layer(name), f"{name} imports {other}"
        if layer(other) == layer(name):
            assert other.split(".")[1] == name.split(".")[1], f"{name} imports {other}"


def test_there_are_no_import_cycles():
    graph = {name: {other for other in own_imports(name) if other != name} for name in MODULES}
    assert set(TopologicalSorter(graph).static_order()) >= set(MODULES)


def test_calls_of_more_than_four_values_name_them():
    parameters, exceptions, found = positional_parameters(), set(), []
    for name in SOURCES:
        for call in own_calls(name):
            function = ast.unparse(call.func)
            count = min(values_by_position(call), parameters.get(function.split(".")[-1], 0))
            if (name, function) in CALLS_BY_POSITION and count > 4:
                exceptions.add((name, function))
            elif count > 4:
                found.append(f"{name}:{call.lineno}: {function} with {count} values by position")
    assert not found, "\n".join(found)
    assert exceptions == CALLS_BY_POSITION.keys(), "no longer needed"


@pytest.mark.parametrize("name", SOURCES)
def test_modules_have_docstrings(name):
    assert ast.get_docstring(tree_of(name)) or not tree_of(name).body


@pytest.mark.parametrize("name", [name for name in SOURCES if re.search(r"\.attention\.\w+\.graphs$", name)])
def test_builders_take_no_tensors(name):
    assert "torch" not in {module.split(".")[0] for module in imported_modules(name)}
