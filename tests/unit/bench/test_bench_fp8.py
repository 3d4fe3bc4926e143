"""`bench fp8` on CPU tensors, with a fake clock."""

from __future__ import annotations

import pytest
import torch

from benchmarks import fp8
from benchmarks.fp8 import FP8, LAYER, ROTATING, SEPARATE
from benchmarks.tools import candidates, cases
from benchmarks.tools.cases import Shape
from cudnn_sdpa.nn import fp8 as layers

pytestmark = pytest.mark.usefixtures("reference_alone")  # small heads, which have no FP8 gradients on Hopper

SHAPES = (Shape(1, 4, 2, 64, 32, True), Shape(2, 2, 2, 48, 16, False))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(fp8, "device_times", times_by_place)
    monkeypatch.setattr(fp8, "host_times", times_by_place)
    monkeypatch.setattr(candidates, "device_times", times_by_place)
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


@pytest.fixture
def in_bfloat16(monkeypatch):
    normal = cases.normal
    monkeypatch.setattr(cases, "normal", lambda *shape: normal(*shape).bfloat16())


@pytest.mark.usefixtures("in_bfloat16")
def test_rotations_in_the_layer_and_before_it(monkeypatch):
    in_one_kernel = []
    right = layers.rope_fp8

    def rope_fp8(*given, **options):
        in_one_kernel.append(options.get("q_weight") is not None)
        return right(*given, **options)

    monkeypatch.setattr(layers, "rope_fp8", rope_fp8)
    rows = fp8.rotations()
    assert [(row["B, Hq, Hkv, S, D"], row["rotation"]) for row in rows] == [
        (shape.label, rotation) for shape in SHAPES for rotation in ("rope", "norms and rope")
    ]
    for row in rows:
        assert [row[f"{name} µs"] for name in (FP8, LAYER, ROTATING, SEPARATE)] == [1, 2, 3, 4]
        assert [row[f"{name}, over sdpa_fp8 µs"] for name in (LAYER, ROTATING, SEPARATE)] == [1, 2, 3]
        assert row["why not"] == "–"
    assert in_one_kernel == [False, False, True, True] * 2, "each is compared, then timed"


@pytest.mark.usefixtures("in_bfloat16")
def test_rotations_that_are_wrong_are_not_timed(monkeypatch):
    monkeypatch.setattr(fp8, "rope", lambda q, k, *_, **__: (q, k))
    for row in fp8.rotations():
        assert row[f"{SEPARATE} µs"] == row[f"{SEPARATE}, over sdpa_fp8 µs"] == "–"
        assert f"{SEPARATE} differs from float64" in row["why not"]
        assert row[f"{ROTATING} µs"] == 3


def test_queries_that_are_compared_see_the_keys_before_them():
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    asked = torch.tensor([0, 5, 11])
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert torch.allclose(fp8._exact(q, k, v, asked, causal=causal), expected[:, :, asked])
