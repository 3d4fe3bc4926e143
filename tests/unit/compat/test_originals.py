"""Functions of `cudnn_sdpa.compat` have the parameters of their originals, of which `originals.json` keeps notes."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import sys
from functools import partialmethod
from operator import attrgetter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import originals

from cudnn_sdpa.errors import UnsupportedError

NOTES = json.loads(originals.NOTES.read_text())
COMPAT = "cudnn_sdpa.compat"

#: What the originals have and these modules do not.
MISSING = re.compile(
    "flash_attn_combine|.*_with_jit_module|.*(AttentionSink|SharedPrefix|BidirectionalRanges)|.*Gappy|.*materialize"
    r"|.*\.(prewarm_paged_kv_stride_variant|resolved_backend|workspace_size)"
    "|memory_efficient_attention_(backward|partial|forward_(meta|requires_grad|torch_wrapper))"
)

#: FlashInfer's modules and what code imports from them.
MODULES = {
    "cascade": ("merge_state", "merge_state_in_place", "merge_states"),
    "decode": (
        *("BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan"),
        "single_decode_with_kv_cache",
    ),
    "page": ("append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "prefill": (
        *("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"),
        *("single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse"),
    ),
}
CASES = [(module, name) for module, of in NOTES.items() for name in of["signatures"] if not MISSING.match(name)]


def own_parameters(module: str, name: str) -> str:
    """Parameters as they are written, without types and those that a `partialmethod` has given."""
    found = importlib.import_module(f"{COMPAT}.{module}")
    *of, last = name.split(".")
    plain = inspect.getattr_static(attrgetter(*of)(found), last) if of else attrgetter(name)(found)
    if isinstance(plain, property):
        return "self"
    given = plain.keywords if isinstance(plain, partialmethod) else {}
    function = plain.__func__ if isinstance(plain, (classmethod, staticmethod)) else attrgetter(name)(found)
    signature = inspect.signature(function)
    kept = [x.replace(annotation=x.empty) for x in signature.parameters.values() if x.name not in given]
    return str(signature.replace(parameters=kept, return_annotation=signature.empty)).strip("()")


@pytest.mark.parametrize(("module", "name"), CASES, ids=[".".join(x) for x in CASES])
def test_parameters_are_those_of_the_original(module, name):
    own = own_parameters(module, name)
    if name.endswith("._plan_impl"):  # takes one more, of which no caller of the original knows
        own = own.removesuffix(", host_indptr=None")
    assert own == NOTES[module]["signatures"][name]


@pytest.mark.parametrize("module", ["flash_attn.flash_attn_interface", *map("flashinfer.{}".format, MODULES)])
def test_modules_of_the_originals_have_the_same_names(module):
    """As `from flashinfer.decode import …` is written."""
    top = importlib.import_module(f"{COMPAT}.{module.partition('.')[0]}")
    names = MODULES.get(module.removeprefix("flashinfer."), top.__all__)
    found = importlib.import_module(f"{COMPAT}.{module}")
    assert [getattr(found, name) for name in names] == [getattr(top, name) for name in names]
    assert re.fullmatch(r"\d+\.\d+\.\d+", top.__version__)


@pytest.mark.parametrize("module", NOTES)
def test_no_function_is_missing_or_added(module):
    """A class may be there without methods of its own, such as a dataclass."""
    ours = importlib.import_module(f"{COMPAT}.{module}")
    functions = {name for name in ours.__all__ if inspect.isfunction(getattr(ours, name))}
    assert functions == {name for of, name in CASES if of == module and "." not in name}
    assert {name.partition(".")[0] for of, name in CASES if of == module} <= set(ours.__all__)


#: Missing functions and classes, without methods of classes that are there; and some that are not in the notes.
LACKING = sorted(
    {
        (module, name.partition(".")[0])
        for module, of in NOTES.items()
        for name in of["signatures"]
        if MISSING.match(name) and name.partition(".")[0] not in importlib.import_module(f"{COMPAT}.{module}").__all__
    }
    | {("flash_attn", "_flash_attn_forward"), ("xformers", "MemoryEfficientAttentionCutlassOp")}
    | {("flashinfer", "trtllm_batch_decode_with_kv_cache")}
)
STAND_INS = {(module, name) for module, name in LACKING if module == "flashinfer" and name.endswith("Wrapper")}
LACKING = sorted(set(LACKING) - STAND_INS)


@pytest.mark.parametrize(("module", "name"), LACKING, ids=[".".join(x) for x in LACKING])
def test_what_is_missing_raises_with_what_works_also_on_import(module, name):
    ours = importlib.import_module(f"{COMPAT}.{module}")
    assert not hasattr(ours, name)
    with pytest.raises(UnsupportedError, match=rf"(?s){module}\.{name} .*  - .*What works: ") as caught:
        getattr(ours, name)
    with pytest.raises(ImportError) as on_import:
        exec(f"from {COMPAT}.{module} import {name}")  # noqa: S102
    assert str(on_import.value) == str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", sorted({name for _, name in STAND_INS} | {"MultiLevelCascadeAttentionWrapper"}))
def test_wrappers_that_are_missing_raise_when_they_are_made(name):
    """vLLM imports such names at the top of a file."""
    found = {}
    exec(f"from {COMPAT}.flashinfer import {name}", found)  # noqa: S102
    with pytest.raises(UnsupportedError, match=rf"(?s)flashinfer\.{name} .*What works: "):
        found[name]()


@pytest.mark.parametrize("module", NOTES)
def test_unknown_names_are_unknown(module):
    ours = importlib.import_module(f"{COMPAT}.{module}")
    with pytest.raises(AttributeError, match=r"has no attribute 'flash_atn'") as caught:
        ours.flash_atn  # noqa: B018
    assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {COMPAT}.{module} import flash_atn")  # noqa: S102


@pytest.mark.parametrize("module", NOTES)
def test_notes_are_those_of_the_sources(module):
    (name,) = [name for name, original in originals.ORIGINALS.items() if module in original.modules]
    if not originals.is_fetched(name):
        pytest.skip("no sources: python scripts/originals.py fetch")
    assert originals.notes_of(name)[module] == NOTES[module]
