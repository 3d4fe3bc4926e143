"""`bench fp8` on CPU tensors, with a fake clock."""

from __future__ import annotations

import pytest

from benchmarks import fp8
from benchmarks.tools.cases import Shape

pytestmark = pytest.mark.usefixtures("reference_alone")  # small heads, which have no FP8 gradients on Hopper

SHAPES = (Shape(1, 4, 2, 64, 32, True), Shape(2, 2, 2, 48, 16, False))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(fp8, "device_times", times_by_place)
    monkeypatch.setattr(fp8, "host_times", times_by_place)
    monkeypatch.setattr(fp8, "SHAPES", SHAPES)


@pytest.mark.parametrize(("measure", "share"), [(fp8.forward, 1.0), (fp8.training, 3.5)])
def test_one_row_for_each_shape(measure, share):
    rows = measure()
    assert [row["B, Hq, Hkv, S, D"] for row in rows] == [shape.label for shape in SHAPES]
    for row, shape in zip(rows, SHAPES, strict=True):
        assert [row[f"{name} µs"] for name in (fp8.FP8, fp8.BF16, fp8.FLASH)] == [1, 2, 3]
        assert row["bfloat16 / FP8"] == 2
        assert row["flash / FP8"] == 3
        assert row["sdpa_fp8 TFLOP/s"] == pytest.approx(share * shape.flops() / 1e6)


def test_wrong_results_are_not_timed(monkeypatch):
    right = fp8.sdpa_fp8
    monkeypatch.setattr(fp8, "sdpa_fp8", lambda q, k, _, *rest, **options: right(q, k, k, *rest, **options))
    with pytest.raises(RuntimeError, match="out in FP8 differs"):
        fp8.forward()
