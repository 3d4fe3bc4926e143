"""Signatures of `cudnn_sdpa.compat` against those of the libraries whose names it has."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from functools import partialmethod
from operator import attrgetter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import compat_signatures

KNOWN = json.loads(compat_signatures.FILE.read_text())
CASES = [
    (module, name, parameters)
    for module, known in KNOWN.items()
    for functions in known["signatures"].values()
    for name, parameters in functions.items()
]


def own_parameters(module: str, name: str) -> str:
    """Parameters as `compat_signatures` writes them, without those that a `partialmethod` has given."""
    found = importlib.import_module(module)
    *of, last = name.split(".")
    bound = inspect.getattr_static(attrgetter(*of)(found), last) if of else None
    given = bound.keywords if isinstance(bound, partialmethod) else {}
    signature = inspect.signature(attrgetter(name)(found))
    plain = [x.replace(annotation=x.empty) for x in signature.parameters.values() if x.name not in given]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty)).strip("()")


@pytest.mark.parametrize(("module", "name", "parameters"), CASES, ids=[name for _, name, _ in CASES])
def test_parameters_are_those_of_the_original(module, name, parameters):
    own = own_parameters(module, name)
    if name.split(".")[-1] == "_plan_impl":  # takes one more, of which no caller of the original knows
        own = own.removesuffix(", host_indptr=None")
    assert own == parameters


def test_all_modules_have_signatures():
    assert KNOWN.keys() == compat_signatures.SOURCES.keys()
    for module, source in compat_signatures.SOURCES.items():
        known = {file: set(functions) for file, functions in KNOWN[module]["signatures"].items()}
        assert known == {file: set(names.split()) for file, names in source.names.items()}


@pytest.mark.parametrize("module", compat_signatures.SOURCES)
def test_signatures_are_those_of_the_package(module):
    source = compat_signatures.SOURCES[module]
    folder = compat_signatures.folder_of(source)
    if folder is None:
        pytest.skip(f"{source.package} is neither installed nor unpacked into .engines")
    found = compat_signatures.signatures_in(folder, source)
    if found["version"] != KNOWN[module]["version"]:
        pytest.skip(f"{source.package} {found['version']} is here, and {KNOWN[module]['version']} is compared with")
    assert found == KNOWN[module]
