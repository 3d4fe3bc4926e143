"""`Target`: the properties of a GPU that decide a plan, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudnn_sdpa import OptionError
from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.target import PLANNING_PROPERTIES, Target, load_properties

FOLDER = Path(backend.__file__).parent.parent / "offline" / "devices"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_of_the_package_describe_an_h200(path):
    target = Target.from_properties(load_properties(str(path)))
    assert target.sm == 90
    assert str(target) == "NVIDIA H200 (SM 90, 132 multiprocessors)"
    assert target.cudnn == backend.cudnn_version()
    assert target.frontend == backend.frontend_version()
    assert len(target.properties) >= len(PLANNING_PROPERTIES) - 1


def test_the_file_of_a_name_fits_the_version_of_cudnn():
    assert load_properties("h200") in [json.loads(path.read_text()) for path in FILES]


@pytest.mark.parametrize("name", PLANNING_PROPERTIES)
def test_each_planning_property_makes_another_target(name):
    properties = load_properties(str(FILES[-1]))
    if name not in properties:
        pytest.skip(f"{FILES[-1].name} has no {name}")
    changed = {**properties, name: [1, 2, 3] if isinstance(properties[name], list) else properties[name] + 10}
    assert Target.from_properties(changed) != Target.from_properties(properties)


def test_what_siblings_differ_in_makes_no_other_target():
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
def test_a_file_that_describes_no_gpu_is_named(tmp_path, content, why):
    path = tmp_path / "gpu.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=why) as caught:
        load_properties(str(path))
    assert str(path) in str(caught.value)
    assert "'h200'" in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(OptionError, match=r"gpu\.json"):
        load_properties(str(path))


def test_an_unknown_name_is_named():
    with pytest.raises(OptionError, match=r"h999.*'h200', or the path of a cuDNN device-properties JSON file"):
        load_properties("h999")
