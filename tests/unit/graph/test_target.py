"""`Target`: the GPU properties that a plan depends on, and their sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudnn_sdpa import OptionError
from cudnn_sdpa.graph import backend, target
from cudnn_sdpa.graph.target import PLANNING_PROPERTIES, Target, bundled_targets, check_name, load_properties

FOLDER = Path(backend.__file__).parent.parent / "offline" / "devices"
FILES = sorted(FOLDER.glob("h200-*.json"))
SPECIFICATIONS = json.loads((FOLDER / "specifications.json").read_text())
#: Name, compute capability, multiprocessors, KiB of shared memory and threads of a multiprocessor, MiB of L2 cache.
GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80, 108, 163, 2048, 40),
    "b200": ("NVIDIA B200", 100, 148, 227, 2048, 126.5),
    "h100": ("NVIDIA H100 80GB HBM3", 90, 132, 227, 2048, 50),
    "l40s": ("NVIDIA L40S", 89, 142, 99, 1536, 96),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 89, 128, 99, 1536, 72),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 120, 170, 99, 1536, 96),
}
#: Versions of cuDNN that read different properties, and their number.
FORMATS = {91002: 23, 91900: 23, 92700: 26, 92800: 26}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_of_the_package_describe_an_h200(path):
    target = Target.from_properties(load_properties(str(path)))
    assert target.sm == 90
    assert str(target) == "NVIDIA H200 (SM 90, 132 multiprocessors)"
    assert target.cudnn == backend.cudnn_version()
    assert target.frontend == backend.frontend_version()
    assert len(target.properties) >= len(PLANNING_PROPERTIES) - 1


def test_the_device_file_matches_the_cudnn_version():
    assert load_properties("h200") in [json.loads(path.read_text()) for path in FILES]


@pytest.mark.parametrize("name", PLANNING_PROPERTIES)
def test_each_planning_property_makes_another_target(name):
    properties = load_properties(str(FILES[-1]))
    if name not in properties:
        pytest.skip(f"{FILES[-1].name} has no {name}")
    changed = {**properties, name: [1, 2, 3] if isinstance(properties[name], list) else properties[name] + 10}
    assert Target.from_properties(changed) != Target.from_properties(properties)


@pytest.mark.parametrize(
    ("of", "versions"), [("cudnn_version", (91900, 91901, 91910)), ("frontend_version", ("1.28.0", "1.28.1"))]
)
def test_each_version_of_a_library_makes_another_target(of, versions, monkeypatch):
    properties, made = load_properties(str(FILES[-1])), set()
    for version in versions:
        monkeypatch.setattr(backend, of, lambda version=version: version)
        made.add(Target.from_properties(properties))
    assert len(made) == len(versions)


def test_sibling_gpus_share_a_target():
    properties = load_properties("h200")
    sibling = {**properties, "deviceName": "NVIDIA H200 NVL", "pciBusId": 77, "clockRate": 12345}
    assert Target.from_properties(sibling) == Target.from_properties(properties)
    assert hash(Target.from_properties(sibling)) == hash(Target.from_properties(properties))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[1, 2]", "deviceVer"),
        ("{}", "deviceVer"),
    ],
)
def test_an_invalid_device_file_is_named(tmp_path, content, why):
    path = tmp_path / "gpu.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=why) as caught:
        load_properties(str(path))
    assert str(path) in str(caught.value)
    assert "'h200'" in str(caught.value)


def test_a_binary_device_file_is_named(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(OptionError, match=r"gpu\.json"):
        load_properties(str(path))


@pytest.mark.parametrize("name", ["h999", "H9000", "specifications"])
def test_an_unknown_name_lists_the_known_ones(name):
    names = ", ".join(map(repr, bundled_targets()))
    with pytest.raises(OptionError) as caught:
        load_properties(name)
    assert f"'{name}'" in str(caught.value)
    assert f"{names}, or the path of a cuDNN device-properties JSON file" in str(caught.value)


def test_names_are_those_of_the_environment_in_any_case():
    assert load_properties("H200") == load_properties("h200")
    check_name("RTX4090", "it")
    with pytest.raises(OptionError, match="it: got 'h999'"):
        check_name("h999", "it")


def test_names_show_which_gpus_were_measured():
    assert bundled_targets() == {**dict.fromkeys(sorted(GPUS), "from public specifications"), "h200": "measured"}
    assert list(bundled_targets()) == sorted(bundled_targets())


@pytest.fixture(params=FORMATS)
def properties_for(request, monkeypatch):
    """Results of `load_properties` with each of these versions of cuDNN."""
    monkeypatch.setattr(backend, "cudnn_version", lambda: request.param)
    return target._loaded.__wrapped__


@pytest.mark.parametrize("name", GPUS)
def test_specifications_are_complete_and_marked(properties_for, name):
    properties, measured = properties_for(name), properties_for("h200")
    assert len(measured) == FORMATS[backend.cudnn_version()]
    assert set(properties) == {*measured, "source"}
    assert {key: type(value) for key, value in measured.items()} == {
        key: type(value) for key, value in properties.items() if key != "source"
    }
    missing = set(PLANNING_PROPERTIES) - set(properties)
    assert missing == (set() if backend.cudnn_version() >= 92700 else {"oversizedSharedMemoryPerBlock"})
    assert properties["source"] == "from public specifications, not measured"
    assert "source" not in measured


@pytest.mark.parametrize("name", GPUS)
def test_specifications_are_those_of_the_gpu(properties_for, name):
    marketing_name, sm, multiprocessors, shared, threads, cache = GPUS[name]
    properties = properties_for(name)
    target = Target.from_properties(properties)
    mark = "from public specifications, not measured"
    assert str(target) == f"{marketing_name} (SM {sm}, {multiprocessors} multiprocessors; {mark})"
    assert target.sm == sm
    assert properties["maxSharedMemoryPerBlockOptin"] == shared * 1024
    assert properties["maxThreadsPerSM"] == threads
    assert properties["maxCtasPerSM"] == (32 if threads == 2048 else 24)
    assert properties["l2CacheSize"] == cache * 2**20


def test_all_gpus_are_different_targets():
    assert len({Target.from_properties(load_properties(name)) for name in bundled_targets()}) == len(bundled_targets())


@pytest.mark.parametrize("name", GPUS)
def test_every_key_has_a_source(name):
    gpu = SPECIFICATIONS["gpus"][name]
    values = {**SPECIFICATIONS["compute_capabilities"][gpu["compute_capability"]], **gpu["properties"]}
    unchanged = [key for keys in SPECIFICATIONS["unchanged"].values() for key in keys]
    assert sorted([*values, *unchanged]) == sorted(json.loads(FILES[-1].read_text()))
    for key, (_, source) in values.items():
        assert any(source.startswith(known) for known in SPECIFICATIONS["sources"]), f"{key}: {source}"


def test_every_source_is_used():
    tables = [*SPECIFICATIONS["compute_capabilities"].values()]
    tables += [gpu["properties"] for gpu in SPECIFICATIONS["gpus"].values()]
    used = " ".join(source for table in tables for _, source in table.values())
    assert [name for name in SPECIFICATIONS["sources"] if name not in used] == []


def test_the_source_of_properties_is_not_part_of_the_target():
    properties = {name: value for name, value in load_properties("a100").items() if name != "source"}
    assert Target.from_properties(properties) == Target.from_properties(load_properties("a100"))
    assert str(Target.from_properties(properties)) == "NVIDIA A100-SXM4-80GB (SM 80, 108 multiprocessors)"


def test_a_device_file_may_be_marked(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**load_properties("h200"), "source": "a guess"}))
    assert str(Target.from_properties(load_properties(str(path)))).endswith("132 multiprocessors; a guess)")
