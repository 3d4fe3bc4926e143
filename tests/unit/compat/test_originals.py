"""Functions of `cudnn_sdpa.compat` have the parameters of their originals, of which `originals.json` keeps notes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_sdpa.compat import flash_attn, flash_attn_interface, xformers

NOTES = Path(__file__).parent / "originals.json"
ROOT = Path(__file__).parents[3]
MODULES = {"flash_attn": flash_attn, "flash_attn_interface": flash_attn_interface, "xformers": xformers}
ORIGINALS = {module: of["signatures"] for module, of in json.loads(NOTES.read_text()).items()}
FUNCTIONS = [
    (module, name)
    for module, of in ORIGINALS.items()
    for name in of
    if name.partition(".")[0] in MODULES[module].__all__
]

#: Functions and biases that the originals have and these modules do not.
MISSING = {
    "flash_attn_combine",
    *(f"memory_efficient_attention_{x}" for x in ("backward", "forward_requires_grad", "partial")),
    *(f"memory_efficient_attention_forward_{x}" for x in ("meta", "torch_wrapper")),
}


def parameters_of(function):
    """As the notes have them."""
    found, star = [], ["*"]
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            found, star = found + star, []
        found.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return [x for x in found if x not in ("self", "cls")]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=[".".join(x) for x in FUNCTIONS])
def test_parameters_are_those_of_the_original(module, name):
    function = MODULES[module]
    for part in name.split("."):
        function = getattr(function, part)
    assert parameters_of(function) == ORIGINALS[module][name]


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_missing_or_added(module):
    functions = {name for name in ORIGINALS[module] if "." not in name}
    ours = {name for name in MODULES[module].__all__ if not inspect.isclass(getattr(MODULES[module], name))}
    assert functions - MISSING == ours


def test_notes_are_those_of_the_sources():
    if not (ROOT / ".originals" / "xformers").is_dir():
        pytest.skip("no sources: python scripts/originals.py fetch")
    code = "import originals; print(originals.as_text(originals.signatures()), end='')"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True, check=True
    )
    assert found.stdout == NOTES.read_text()
