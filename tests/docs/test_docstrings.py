"""Every example in docstrings and pages runs, or compiles if it needs a GPU or another program."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention.varlen import specs
from cudnn_sdpa.compat import flashinfer

ROOT = Path(cudnn_sdpa.__file__).parent.parent
MODULES = ["cudnn_sdpa"] + [
    name
    for _, name, _ in pkgutil.walk_packages(cudnn_sdpa.__path__, "cudnn_sdpa.")
    if not name.endswith(("__main__", "_backend")) and name != "cudnn_sdpa.cli"
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages whose blocks are one script: each continues the one before.
SCRIPTS = {
    *("add_an_operation.md", "plans.md", "quickstart.md", "serving.md", "shapes.md", "training.md"),
    *("troubleshooting.md", "varlen.md", "fp8.md", "inference.md", "layouts.md", "masks.md", "modules.md"),
    *("transformers.md", "pytorch_backend.md", "compile.md", "context_parallel.md", "migration.md"),
}


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name in MODULES:
        for test in finder.find(importlib.import_module(name), name):
            if test.examples:
                found[test.name] = test
    return list(found.values())


EXAMPLES = examples()
PUBLIC = [
    *("sdpa", "sdpa_varlen", "scaled_dot_product_attention", "explain", "fallback"),
    *(
        "sdpa_paged",
        "sdpa_paged_varlen",
        "PagedKVCache",
        "no_plan_builds",
        "autotune",
        "shape_policy",
        "use_plan_store",
    ),
    *("graph_op", "rms_norm", "layer_norm", "silu_mul", "gelu_mul", "relu_squared", "conv1d", "conv2d", "conv3d"),
    *("fp8_attention", "Fp8Attention", "Fp8Scaling"),
]


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_docstring_examples_print_what_they_show(test):
    if torch.cuda.is_available() and "explain" in test.name:
        pytest.skip("shows what it answers on a machine without a GPU")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=output.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(output)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_a_tested_example(name):
    module = inspect.getmodule(getattr(cudnn_sdpa, name)).__name__
    assert f"{module}.{name}" in {test.name for test in EXAMPLES}


@pytest.fixture(autouse=True)
def nothing_stays():
    """A page may choose a plan store, and gets a separate one; it may make a process group, and fail before its end."""
    with cudnn_sdpa.use_plan_store("off"):
        yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_errors_in_the_readme_are_those_that_are_raised():
    """Each block of a Python session ends with an error, as Python prints it."""
    names = {"torch": torch, "cudnn_sdpa": cudnn_sdpa}
    sessions = re.findall(r"^```pycon\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(sessions) == 2
    for session in sessions:
        lines = session.splitlines()
        *before, call = [line.removeprefix(">>> ") for line in lines if line.startswith(">>> ")]
        shown = "\n".join(line for line in lines if not line.startswith(">>> "))
        exec("\n".join(before), names)  # noqa: S102
        with pytest.raises(cudnn_sdpa.CudnnSdpaError) as raised:
            eval(call, names)  # noqa: S307
        kind = type(raised.value)
        said = str(raised.value).replace(
            " (CPU tensors are checked for h200; CUDNN_SDPA_CPU_CHECKS=none lifts this)", ""
        )
        assert f"{kind.__module__}.{kind.__name__}: {said}" == shown


def blocks(page: Path) -> list[str]:
    """The Python code blocks of a page, also in tabs, where they are indented."""
    found = re.findall(r"^( *)```python[^\n]*\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in code.splitlines()) + "\n" for indent, code in found]


def drawings(page: Path) -> list[str]:
    """The masks shown on a page, which its code prints."""
    return [
        text for text in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) if "■" in text
    ]


def needs_a_gpu(code: str) -> bool:
    return "cuda" in code and "cuda.is_available()" not in code


@pytest.mark.sample(5)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_blocks_of_pages_run(page, capsys):
    namespace: dict[str, object] = {"__name__": "page"}
    torch.manual_seed(20)
    run = 0
    for number, code in enumerate(blocks(page)):
        compiled = compile(code, f"{page.name}, block {number}", "exec")
        if needs_a_gpu(code) and not torch.cuda.is_available():
            continue
        if page.name not in SCRIPTS:
            namespace = {"__name__": "page"}
        exec(compiled, namespace)  # noqa: S102 - code of the documentation
        run += 1
    assert run > 0
    output = capsys.readouterr().out
    assert "Error" not in output
    for drawing in drawings(page):
        assert drawing in output, f"{page.name} shows what was not printed:\n{drawing}"


@pytest.mark.parametrize("page", [page for page in PAGES if len(blocks(page)) > 1], ids=lambda page: page.name)
def test_pages_state_whether_their_blocks_are_one_script(page):
    assert bool(re.search(r"[Bb]locks\b[^.]*\bone\s+script", page.read_text())) is (page.name in SCRIPTS)


def test_pages_have_code_blocks():
    assert len(blocks(ROOT / "README.md")) >= 1
    assert len(blocks(ROOT / "docs" / "quickstart.md")) >= 7
    assert len(blocks(ROOT / "docs" / "masks.md")) >= 8
    assert len(drawings(ROOT / "docs" / "masks.md")) == 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_are_valid(page):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_only_existing_objects(page):
    text = page.read_text()
    for name in re.findall(r"\bcudnn_sdpa\.([A-Za-z_]\w*)\b(?!/)", text):
        assert hasattr(cudnn_sdpa, name) or importlib.util.find_spec(f"cudnn_sdpa.{name}"), name
    for path in re.findall(r"^::: (\S+)", text, re.MULTILINE):
        assert pkgutil.resolve_name(path) is not None, path


#: The public modules besides the package itself, its errors and its integrations.
ROOMS = ("cudnn_sdpa.nn", "cudnn_sdpa.kernels", "cudnn_sdpa.distributed")


def public_names() -> set[str]:
    """Everything public: the package, its errors, its `nn` modules, its kernels, and its functions for many GPUs."""
    modules = ("cudnn_sdpa", "cudnn_sdpa.errors", *ROOMS)
    return {name for module in modules for name in importlib.import_module(module).__all__} - {"__version__"}


#: The modules with other libraries' functions.
COMPAT = [f"cudnn_sdpa.compat.{name}" for name in ("flash_attn", "flash_attn_interface", "xformers")]

#: The public names of each integration, and of each module with the names of another library.
INTEGRATIONS = {
    "cudnn_sdpa.compat.flashinfer": [name for name in flashinfer.__all__ if not name.endswith("_return_lse")],
    "cudnn_sdpa.integrations.transformers": ["register"],
    "cudnn_sdpa.integrations.pytorch": ["register", "unregister"],
    "cudnn_sdpa.integrations.sglang": ["register"],
    "cudnn_sdpa.integrations.vllm": ["register"],
    "cudnn_sdpa.integrations.torchtitan": ["attention", "register"],
    "cudnn_sdpa.integrations.megatron": ["CoreAttention"],
    **{name: importlib.import_module(name).__all__ for name in COMPAT},
}


def documented() -> list[str]:
    """The import paths of what the reference documents."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    return [path for page in pages for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def test_objects_in_the_reference_can_be_imported_as_stated():
    text = (ROOT / "docs" / "api" / "index.md").read_text()
    assert "Everything here is imported from `cudnn_sdpa`, modules from `cudnn_sdpa.nn`," in text
    assert len(documented()) > 70
    for path in documented():
        module, _, name = path.rpartition(".")
        assert module == "cudnn_sdpa" or module in (*ROOMS, *INTEGRATIONS), path
        assert module in ("cudnn_sdpa", *INTEGRATIONS) or f"`{module}`" in text
        assert name in importlib.import_module(module).__all__, path


def test_every_public_name_is_in_the_reference_once():
    names = [path.rpartition(".")[2] for path in documented() if path.rpartition(".")[0] not in INTEGRATIONS]
    assert sorted(names) == sorted(public_names())
    of_integrations = [path for path in documented() if path.rpartition(".")[0] in INTEGRATIONS]
    assert sorted(of_integrations) == sorted(f"{m}.{name}" for m, names in INTEGRATIONS.items() for name in names)


@pytest.mark.parametrize(
    ("row", "rounded"),
    [
        ("sequences", specs.sequence_bucket),
        ("tokens", specs.row_bucket),
        ("longest length", lambda longest: specs.length_bucket(longest, 10**6, tight=False)),
        (
            "longest length, with softcap or deterministic",
            lambda longest: specs.length_bucket(longest, 10**6, tight=True),
        ),
    ],
)
def test_rounding_of_packed_calls_is_as_documented(row, rounded):
    cells = re.search(rf"^\| {row} \|.*\| (.*) \|$", (ROOT / "docs" / "varlen.md").read_text(), re.MULTILINE)[1]
    runs = [[int(value) for value in run.split(",") if value.strip()] for run in cells.replace(" ", "").split("…")]
    for run in filter(None, runs):
        every = dict.fromkeys(rounded(number) for number in range(1, run[-1] + 1))
        assert [value for value in every if value >= run[0]] == run


def test_the_error_in_the_readme_is_the_one_raised():
    q = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16)
    report = cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q, is_causal=True, alibi=True, softcap=50.0)
    text = "".join(f"  - {reason}\n" for reason in report.reasons) + f"What works: {report.suggestion}\n"
    assert report.reasons
    assert f"sdpa is not supported here:\n{text}```" in (ROOT / "README.md").read_text()


def test_the_way_of_a_call_names_existing_files_and_functions():
    text = (ROOT / "docs/how_a_call_works.md").read_text()
    for path in set(re.findall(r"[\w/]+/\w+\.(?:py|cu)\b", text)):
        found = [f for f in ("cudnn_sdpa", "cudnn_sdpa/attention", "") if (ROOT / f / path).exists()]
        assert found, f"{path} does not exist"
    for owner, name in set(re.findall(r"\b(Pipeline|Plan|BoundPlan)\.(\w+)", text)):
        defining = {"Pipeline": "engine/*/pipeline.py", "Plan": "plans/plan.py", "BoundPlan": "engine/launch.py"}
        files = (ROOT / "cudnn_sdpa").glob(defining[owner])
        assert any(f"def {name}(" in file.read_text() for file in files), f"{owner}.{name} does not exist"
    described = (ROOT / "cudnn_sdpa/engine/operation/call.py").read_text()
    for method in set(re.findall(r"`(check_\w+)`", text)):
        assert f"    def {method}(" in described, f"{method} does not exist"
