"""Manifests, device files and stored plans with any contents are read, or raise a library error that says why."""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
from pathlib import Path

import pytest

import cudnn_sdpa
from cudnn_sdpa import CudnnSdpaError, OptionError
from cudnn_sdpa.graph import target
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans import store as stores
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.store import PlanStore
from tests.unit.plans.test_plan_store import key, plan

#: Seeds of mutations of text, of a value, or of both; failures name their seed.
MUTATIONS = 300

VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.0, 0.5, 1e308, float("inf"), float("nan"), ""),
    *("x", "\x1b[31mred", "two\nlines", "\ud800", "ß", "a" * 5000, [], {}, [[]], [{}], {"a": {}}, [1, [2, [3]]]),
)


def deep(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def places(value, path=()):
    """The paths of all values in nested lists and dictionaries."""
    yield path
    if isinstance(value, (dict, list)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*path, name))


def mutated(value, r: random.Random):
    """A value with one element replaced, removed, duplicated or renamed."""
    value = copy.deepcopy(value)
    path = r.choice([path for path in places(value) if path])
    parent = value
    for name in path[:-1]:
        parent = parent[name]
    kind = r.choice(["replace", "replace", "replace", "remove", "rename", "deep"])
    if kind == "replace":
        parent[path[-1]] = r.choice(VALUES)
    elif kind == "remove":
        del parent[path[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[str(r.choice(VALUES))] = parent.pop(path[-1])
    else:
        parent[path[-1]] = deep(r.choice([3, 200]))
    return value


def damaged(text: bytes, r: random.Random) -> bytes:
    """Text with parts of it flipped, removed or duplicated."""
    begin = r.randrange(len(text))
    end = min(len(text), begin + r.choice([1, 1, 2, 30]))
    kind = r.choice(["flip", "cut", "double", "end"])
    if kind == "flip":
        return text[:begin] + bytes([text[begin] ^ 1 << r.randrange(8)]) + text[begin + 1 :]
    if kind == "cut":
        return text[:begin] + text[end:]
    if kind == "double":
        return text[:end] + text[begin:]
    return text[:begin]


def versions(value, r: random.Random) -> bytes:
    """The bytes of a file that is damaged somehow, or still valid."""
    for _ in range(r.choice([1, 1, 2, 3])):
        value = mutated(value, r)
    text = json.dumps(value).encode()
    return damaged(text, r) if r.random() < 0.3 else text


def assert_fit_for_a_terminal(text: str) -> None:
    assert text.replace("\n", "").isprintable(), repr(text)
    assert len(text) < 5000


@pytest.fixture
def manifest(tmp_path):
    manifest = PlanManifest.of([key(), key(65, is_causal=True)])
    manifest.save(tmp_path / "plans.json")
    return json.loads((tmp_path / "plans.json").read_text())


@pytest.fixture
def a_target():
    return key().target


def test_a_damaged_manifest_is_read_or_refused(manifest, a_target, tmp_path):
    path, read, refused = tmp_path / "damaged.json", 0, 0
    for seed in range(MUTATIONS):
        path.write_bytes(versions(manifest, random.Random(seed)))
        try:
            keys = PlanManifest.load(path).keys(a_target, None)
        except OptionError as error:
            refused += 1
            assert_fit_for_a_terminal(str(error))
            continue
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}: {path.read_bytes()[:2000]!r}") from error
        read += 1
        for of in keys:
            assert_fit_for_a_terminal(str(of))
            assert isinstance(hash(of), int)
            json.dumps(of.identity()).encode()
            assert all(type(n) is int for operand in of.inputs for n in operand.layout.shape)
    assert read > MUTATIONS // 100
    assert refused > MUTATIONS // 2


def test_a_damaged_manifest_that_was_not_read_from_a_file_is_used_or_refused(manifest, a_target):
    """No schema has looked at it."""
    refused = 0
    for seed in range(MUTATIONS):
        r, plans = random.Random(seed), manifest["plans"]
        for _ in range(r.choice([1, 1, 2, 3])):
            plans = mutated(plans, r) or manifest["plans"]
        try:
            PlanManifest(plans).keys(a_target, None)
        except OptionError as error:
            refused += 1
            assert_fit_for_a_terminal(str(error))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}: {plans!r:.2000}") from error
    assert refused > MUTATIONS // 2


def test_a_damaged_device_file_is_read_or_refused(tmp_path):
    good = json.loads((Path(target.__file__).parents[1] / "offline/devices/h200-cudnn-9.28.json").read_text())
    read = refused = 0
    for seed in range(MUTATIONS):
        path = tmp_path / f"{seed}.json"  # the contents of a path are cached
        path.write_bytes(versions(good, random.Random(seed)))
        try:
            properties = load_properties(str(path))
            found = Target.from_properties(properties)
        except (OptionError, cudnn_sdpa.LibraryError) as error:
            refused += 1
            assert_fit_for_a_terminal(str(error))
            continue
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}: {path.read_bytes()[:2000]!r}") from error
        read += 1
        assert_fit_for_a_terminal(str(found))
        assert isinstance(hash(found), int)
        assert found.sm >= 0 or properties["deviceVer"] < 0
    assert read > MUTATIONS // 20
    assert refused > MUTATIONS // 20


def signed(line: bytes, data: bytes) -> bytes:
    return stores._MAGIC + stores._digest(line, data).encode() + b"\n" + line + b"\n" + data


def test_a_damaged_plan_is_rejected_or_intact(tmp_path, caplog):
    """Also with a matching digest, which real damage does not have."""
    store, of = PlanStore(tmp_path / "plans"), key()
    whole = plan(of).encode()
    line = whole.split(b"\n")[2]
    taken = 0
    with caplog.at_level(logging.CRITICAL):
        for seed in range(MUTATIONS):
            r = random.Random(seed)
            forged = signed(versions(json.loads(line), r), plan(of).data)
            contents = damaged(whole, r) if r.random() < 0.3 else forged
            store.path(of).write_bytes(contents)
            store.path(of).chmod(0o600)
            found = store.load(of)
            if found is None:
                assert not store.path(of).exists()
                continue
            taken += 1
            assert stores.canonical(found.identity) == stores.canonical(of.identity())
            assert found.data == plan(of).data
            kinds = (type(found.engine), type(found.knobs), type(found.workspace))
            assert kinds == (str, dict, int)
            assert found.workspace >= 0
            assert all(type(value) is int for value in found.knobs.values())
    assert 0 < taken < MUTATIONS // 2


@pytest.fixture
def usual_recursion():
    """Python's default limit; compilers in other tests raise it, and then deeper files can be read."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
@pytest.mark.parametrize("depth", [300, 3000, 100_000])
def test_deeply_nested_files_are_errors(manifest, a_target, tmp_path, depth):
    nested = "[" * depth + "]" * depth
    path = tmp_path / "deep.json"
    manifest["plans"][0]["options"]["deep"] = "HERE"
    path.write_text(json.dumps(manifest).replace('"HERE"', nested))
    with pytest.raises(OptionError):
        PlanManifest.load(path).keys(a_target, None)
    path.write_text('{"deviceVer": 900, "multiProcessorCount": 132, "maxGridSize": ' + nested + "}")
    with pytest.raises(OptionError):
        load_properties(str(path))
    store = PlanStore(tmp_path / "plans")
    store.path(key()).write_bytes(signed(b'{"key": ' + nested.encode() + b"}", b"data"))
    store.path(key()).chmod(0o600)
    assert store.load(key()) is None


def test_an_error_message_is_not_a_file(manifest, tmp_path):
    path = tmp_path / "large.json"
    manifest["plans"][0]["inputs"][0]["layout"]["dtype"] = "x" * 1_000_000
    path.write_text(json.dumps(manifest))
    with pytest.raises(OptionError) as caught:
        PlanManifest.load(path)
    assert len(str(caught.value)) < 2000
    path.write_text(json.dumps(["x" * 1_000_000]))
    for read in (PlanManifest.load, lambda path: load_properties(str(path))):
        with pytest.raises(CudnnSdpaError) as caught:
            read(path)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", ["\x1b[31mred", "two\nlines", "bell\a", "\u202eright to left", "q\n"])
def test_names_contain_no_terminal_control_characters(manifest, tmp_path, text):
    path = tmp_path / "names.json"
    for change in (
        lambda plan: plan["inputs"][0].update(name=text),
        lambda plan: plan["inputs"][0].update(ragged=text),
        lambda plan: plan["options"].update({text: 1}),
        lambda plan: plan.update(operation=plan["operation"] + text),
    ):
        changed = copy.deepcopy(manifest)
        change(changed["plans"][0])
        path.write_text(json.dumps(changed))
        with pytest.raises(OptionError) as caught:
            PlanManifest.load(path)
        assert_fit_for_a_terminal(str(caught.value))
    path.write_text(json.dumps({"deviceVer": 900, "multiProcessorCount": 132, "deviceName": text}))
    assert_fit_for_a_terminal(str(Target.from_properties(load_properties(str(path)))))


def test_duplicate_plans_in_a_manifest_are_merged(a_target):
    manifest = PlanManifest.of([key()])
    manifest.plans *= 300
    assert len(manifest.keys(a_target, 0)) == 1
