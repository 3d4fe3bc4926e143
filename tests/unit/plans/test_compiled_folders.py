"""`compile_plans` reports what its folder does not have in the end: an image must not miss plans in silence."""

from __future__ import annotations

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa import OptionError
from cudnn_sdpa.offline import warmup
from cudnn_sdpa.plans.manifest import PlanManifest
from cudnn_sdpa.plans.nvrtc import Kernel
from cudnn_sdpa.plans.store import PlanStore
from tests.unit.plans.test_plan_store import plan

SIZE = 20_000


@pytest.fixture
def manifest(monkeypatch):
    """Three plans, which need no helper processes."""
    monkeypatch.setattr(warmup, "plan_all", lambda keys, *_: ((key, plan(key, SIZE)) for key in keys))
    with cudnn_sdpa.record_plans(target="h200") as recorded:
        for sq in (64, 128, 192):
            q = torch.empty(1, 2, sq, 64, dtype=torch.bfloat16, device="meta")
            cudnn_sdpa.sdpa(q, q, q)
    assert len(recorded) == 3
    return recorded


def test_what_is_kept_is_built(manifest, tmp_path):
    for built, held in ((3, 0), (0, 3)):
        report = cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
        assert (report.built, report.held, report.failed) == (built, held, {})


def test_plans_that_make_room_for_others_have_failed(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "open_store", lambda folder, _: PlanStore(folder, capacity=2 * SIZE))
    report = cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    assert report.built == PlanStore(tmp_path / "plans").info().plans < 3
    assert report.built + len(report.failed) == 3
    assert all("later plans have taken its place" in why for why in report.failed.values())


def test_a_plan_that_cannot_be_written_has_failed(manifest, tmp_path):
    cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    taken = next((tmp_path / "plans").glob("*.plan"))
    taken.unlink()
    taken.mkdir()
    report = cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    assert (report.built, report.held) == (0, 2)
    ((_, why),) = report.failed.items()
    assert "Is a directory" in why


def test_kernels_that_make_room_for_plans_have_failed(manifest, tmp_path, monkeypatch):
    """Plans of own kernels have no file, but their kernels have."""
    monkeypatch.setattr(Kernel, "compile", lambda *_: bytes(SIZE))
    with cudnn_sdpa.record_plans(target="h200") as kernels:
        q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
        cudnn_sdpa.kernels.attention(q, q, q)
    both = PlanManifest([*kernels.plans, *manifest.plans], manifest.recorded_on)
    assert cudnn_sdpa.compile_plans(both, "h200", tmp_path / "all").built == 4
    again = cudnn_sdpa.compile_plans(both, "h200", tmp_path / "all")
    assert (again.built, again.held, again.failed) == (0, 4, {})
    monkeypatch.setattr(warmup, "open_store", lambda folder, _: PlanStore(folder, capacity=2 * SIZE))
    report = cudnn_sdpa.compile_plans(both, "h200", tmp_path / "plans")
    assert any(name.startswith("attention") for name in report.failed), report
    assert report.built + len(report.failed) == 4


def test_files_of_others_in_a_folder_of_plans_stay(manifest, tmp_path):
    cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
    (tmp_path / "plans" / "terraform.plan").write_text("of somebody else")
    store = PlanStore(tmp_path / "plans")
    assert store.info().plans == 3
    store.clear()
    assert [path.name for path in store.folder.glob("*.plan")] == ["terraform.plan"]


@pytest.mark.parametrize("folder", [None, 3, "", "a\0b"])
def test_what_is_no_folder_is_refused(manifest, folder):
    with pytest.raises(OptionError, match="folder: got"):
        cudnn_sdpa.compile_plans(manifest, "h200", folder)


@pytest.mark.parametrize("path", [None, {}, 3.5])
def test_what_is_no_manifest_is_refused(path, tmp_path):
    with pytest.raises(OptionError, match="manifest: got"):
        cudnn_sdpa.compile_plans(path, "h200", tmp_path / "plans")


@pytest.mark.parametrize("target", [3, [], "", "h900"])
def test_what_is_no_gpu_is_refused(manifest, target, tmp_path):
    with pytest.raises(OptionError, match=r"target: got .*expected one of 'a100', "):
        cudnn_sdpa.compile_plans(manifest, target, tmp_path / "plans")


def test_a_damaged_plan_of_a_manifest_is_named(manifest, tmp_path):
    manifest.plans[1]["inputs"][0]["layout"]["stride"].pop()
    with pytest.raises(OptionError, match=r"a plan of '.*sdpa_forward'.*expected a plan as PlanManifest.save"):
        cudnn_sdpa.compile_plans(manifest, "h200", tmp_path / "plans")
