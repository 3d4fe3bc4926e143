"""Manifests, and plans compiled from them for a GPU that is not in the machine."""

from __future__ import annotations

import copy
import json
import time

import pytest
import torch
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa import OfflineError, OptionError, UnsupportedError, compile_plans, explain
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.cli import app
from cudnn_sdpa.fused.conv_graphs import channels_last, convolution
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline import driver, warmup
from cudnn_sdpa.offline.warmup import plan_all
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.store import PlanStore


def keys(properties, dim=64):
    target = Target.from_properties(properties)
    q, k = (torch.empty(1, 4, length, dim, dtype=torch.bfloat16, device="meta") for length in (128, 200))
    forward = ForwardSpec.of(from_fields(ForwardArguments, q, k, k, is_causal=True, with_lse=True))
    backward = BackwardSpec(forward.dense, forward.out, forward.out, bias_gradient=False)
    return [forward.key(target, None), backward.key(target, None)]


@pytest.fixture
def manifest(h200):
    return PlanManifest.of(keys(h200))


def test_manifest_round_trip(manifest, h200, tmp_path):
    manifest.save(tmp_path / "plans.json")
    again = PlanManifest.load(tmp_path / "plans.json")
    assert again == manifest
    assert len(again) == 2
    assert set(again.keys(Target.from_properties(h200), None)) == set(keys(h200))
    assert again.recorded_on["gpu"] == "NVIDIA H200"


def test_the_order_of_use_does_not_matter(h200):
    one, two = keys(h200)
    assert PlanManifest.of([one, two, one]) == PlanManifest.of([two, one])


def change(manifest, tmp_path, edit):
    manifest.save(tmp_path / "plans.json")
    data = json.loads((tmp_path / "plans.json").read_text())
    edit(data)
    (tmp_path / "plans.json").write_text(json.dumps(data))
    return tmp_path / "plans.json"


WRONG = {
    "version": lambda data: data.update(manifest=2),
    "no plans": lambda data: data.pop("plans"),
    "more": lambda data: data.update(more=1),
    "operation": lambda data: data["plans"][0].update(operation="os.system"),
    "dtype": lambda data: data["plans"][0]["inputs"][0]["layout"].update(dtype="complex64"),
    "shape": lambda data: data["plans"][0]["inputs"][0]["layout"].update(shape=[1, "2"]),
    "role": lambda data: data["plans"][1]["inputs"][0].update(role="pointer"),
    "option": lambda data: data["plans"][1]["options"].update(band={"left": 1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_manifests_that_violate_the_schema_are_refused(manifest, tmp_path, name):
    with pytest.raises(OptionError, match=r"plans.json': \$"):
        PlanManifest.load(change(manifest, tmp_path, WRONG[name]))


def test_invalid_json_is_refused(tmp_path):
    (tmp_path / "plans.json").write_text("{")
    for path in (tmp_path / "plans.json", tmp_path / "none.json", tmp_path):
        with pytest.raises(OptionError, match="manifest"):
            PlanManifest.load(path)


@pytest.mark.parametrize(
    "operation", ["os:system", "antigravity:fly", "cudnn_sdpa.attention.dense.graphs:masks", "no.such:x"]
)
def test_a_manifest_imports_and_runs_no_foreign_code(manifest, h200, operation):
    other = copy.deepcopy(manifest)
    other.plans[0]["operation"] = operation
    with pytest.raises(OptionError, match="operation"):
        other.keys(Target.from_properties(h200), None)


@pytest.mark.slow
def test_plans_are_compiled_once_and_found_by_their_keys(manifest, h200, tmp_path):
    report = compile_plans(manifest, "h200", tmp_path / "plans", workers=2)
    assert (report.built, report.held, report.failed) == (2, 0, {})
    store = PlanStore(tmp_path / "plans")
    for key in keys(h200):
        plan = store.load(key)
        assert plan.engine.startswith("eng")
        assert len(plan.data) > 10_000
    assert compile_plans(manifest, "h200", tmp_path / "plans").held == 2
    again = compile_plans(manifest, "h100", tmp_path / "plans", workers=1)
    assert again.built == 2
    assert store.info().plans == 4


@pytest.mark.slow
def test_an_unsupported_plan_stops_no_other(h200, tmp_path):
    manifest = PlanManifest.of([*keys(h200), *keys(h200, dim=256)])
    report = compile_plans(manifest, "a100", tmp_path / "plans", workers=2)
    assert report.built == 3
    ((failed, reason),) = report.failed.items()
    assert failed.startswith("sdpa_backward")
    assert "SM 80" in failed
    assert reason


@pytest.mark.slow
def test_plans_that_need_the_gpu_are_left_to_it(h200, tmp_path):
    """Kernels with clusters need the GPU; `explain`, which stores nothing, reports the others."""
    calls = [
        (convolution, (channels_last(torch.empty(*x)), channels_last(torch.empty(*weight))))
        for x, weight in (((8, 512, 64, 64), (512, 512, 3, 3)), ((2, 64, 32, 32), (64, 64, 3, 3)))
    ]
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "activation": None}
    keys, notes = [], []
    for function, tensors in calls:
        x, weight = (tensor.bfloat16() for tensor in tensors)
        found = explain(function, x, weight, **geometry)
        assert found.supported
        notes.append("clusters of thread blocks" in found.on_gpu and found.on_gpu in str(found))
        keys.append(function.describe(x, weight, **geometry).key(Target.from_properties(h200), None))
    manifest = PlanManifest.of(keys)
    report = compile_plans(manifest, "h200", tmp_path / "plans", workers=1)
    ((failed, reason),) = report.failed.items()
    assert (report.built, failed) == (1, str(keys[0]))
    assert notes == [True, False]
    one_filter = channels_last(torch.empty(1, 64, 3, 3)).bfloat16()  # which no heuristic accepts on any GPU
    found = explain(convolution, calls[1][1][0].bfloat16(), one_filter, **{**geometry, "activation": "silu"})
    assert (found.supported, found.on_gpu) == (True, "")
    assert "clusters of thread blocks" in reason
    assert "convolution must be built on the GPU, by the first call or by warmup: " in reason
    assert compile_plans(manifest, "a100", tmp_path / "plans", workers=1).failed == {}


@pytest.mark.slow
def test_the_command_compiles(manifest, tmp_path):
    manifest.save(tmp_path / "plans.json")
    arguments = ["compile", str(tmp_path / "plans.json"), "--target", "b200", "-o", str(tmp_path / "plans")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 built" in result.output
    properties = load_properties("b200")
    assert all(PlanStore(tmp_path / "plans").load(key) for key in keys(properties))
    missing = CliRunner().invoke(app, [*arguments[:3], "h9000", *arguments[4:]])
    assert missing.exit_code == 2
    assert "h9000" in missing.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_warmup_raises(manifest, tmp_path):
    manifest.save(tmp_path / "plans.json")
    with pytest.raises(cudnn_sdpa.DeviceError, match="no NVIDIA GPU"):
        cudnn_sdpa.warmup(manifest)
    for command in (["warmup", str(tmp_path / "plans.json")], ["device", "--json"]):
        assert CliRunner().invoke(app, command).exit_code == 2


def test_a_recording_without_a_call_is_empty():
    with cudnn_sdpa.record_plans() as manifest:
        cudnn_sdpa.sdpa(*(torch.randn(1, 2, 8, 16) for _ in range(3)))
    assert len(manifest) == 0


@pytest.mark.slow
def test_plans_built_here_are_not_built_by_helpers(h200):
    """Each key is built once: here while helpers start, and by helpers while this process is busy."""
    many = [*keys(h200), *keys(h200, dim=128), *keys(h200, dim=32), *keys(h200, dim=96)]
    planned = []

    def here(key):
        planned.append(key)
        if len(planned) == 2:
            raise UnsupportedError("this one", ["for the test"])
        time.sleep(20 if len(planned) == 3 else 0)  # until a helper has started and taken the rest
        return "here"

    found = dict(plan_all(many, h200, 1, here))
    assert set(found) == set(many)
    assert planned[:3] == many[:3]
    assert [found[key] for key in (planned[0], planned[2])] == ["here"] * 2
    assert isinstance(found[planned[1]], UnsupportedError)
    by_helper = [made for key, made in found.items() if key not in planned]
    assert by_helper
    assert all(made.engine.startswith("eng") for made in by_helper)


def test_with_zero_workers_everything_is_planned_here(h200, monkeypatch):
    monkeypatch.setattr(warmup, "Helper", None)  # no helper is created
    refused = UnsupportedError("this one", ["for the test"])

    def here(key):
        if key.name == "sdpa_backward":
            raise refused
        return key.name

    forward, backward = keys(h200)
    assert list(plan_all([forward, backward], h200, 0, here)) == [(forward, "sdpa_forward"), (backward, refused)]


def test_unneeded_helpers_are_not_awaited(h200, monkeypatch):
    monkeypatch.setattr(warmup, "plan_offline", None)  # everything is done before a helper has started
    found = list(plan_all(keys(h200), h200, 2, lambda key: key.name))
    assert [made for _, made in found] == ["sdpa_forward", "sdpa_backward"]


def test_without_helpers_everything_is_planned_here(h200, monkeypatch):
    monkeypatch.setattr(driver, "helper_environment", no_helper)
    many = [*keys(h200), *keys(h200, dim=128)]
    found = dict(plan_all(many, h200, 2, lambda key: key.name))
    assert set(found) == set(many)
    assert all(isinstance(error, OfflineError) for _, error in plan_all(many, h200, 2))


def no_helper():
    raise OfflineError("no compiler")
