"""`benchmarks conv` beside torch.compile, on CPU tensors, with a fake clock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import convolutions, fused
from benchmarks.convolutions import COMPILED, COMPILED_BENCHMARK, OURS, PYTORCH, PYTORCH_BENCHMARK, Case
from benchmarks.tools import candidates, cases

SMALL = Case(batch=2, channels=16, size=6, filters=8, extent=3, padding=1)
STRIDED = SMALL._replace(stride=2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place):
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    monkeypatch.setattr(convolutions, "CASES", (SMALL,))
    monkeypatch.setattr(convolutions, "MORE", STRIDED)


def test_each_candidate_has_a_time_before_and_after_autotune():
    rows = convolutions.peers()
    assert [row["convolution"] for row in rows] == [SMALL.label, STRIDED.label]
    for row in rows:
        names = (OURS, PYTORCH, PYTORCH_BENCHMARK, COMPILED, COMPILED_BENCHMARK)
        assert [row[f"{name} µs"] for name in names] == [1, 2, 3, 4, 5]
        assert row["best of peers / ours"] == 2
        assert row["tuned µs"] == 5, "the last on the clock"
        assert row["best of peers / tuned"] == 1 / 5
        assert row["why not"] == "–"


def test_a_wrong_convolution_has_no_time(monkeypatch):
    right = convolutions.conv2d
    monkeypatch.setattr(convolutions, "conv2d", lambda x, *given, **options: right(x * 1.05, *given, **options))
    for row in convolutions.peers():
        assert row["cudnn_sdpa µs"] == row["tuned µs"] == row["best of peers / ours"] == "–"
        assert "cudnn_sdpa differs from float64" in row["why not"]
        assert row["pytorch µs"] == 1


def test_plans_that_pytorch_times_are_apart_from_those_that_it_does_not_time(monkeypatch):
    flags, seen = torch.backends.cudnn, []
    before = flags.benchmark, flags.allow_tf32

    def conv2d(*given, **options):
        seen.append((flags.benchmark, flags.allow_tf32))
        return right(*given, **options)

    right = F.conv2d
    monkeypatch.setattr(F, "conv2d", conv2d)
    tensors = SMALL.inputs()
    convolutions.pytorch_conv_silu(*tensors, padding=1)
    convolutions._benchmarked(convolutions.pytorch_conv_silu, *tensors)
    assert seen == [before, (True, not before[1])]
    assert (flags.benchmark, flags.allow_tf32) == before
    with pytest.raises(ZeroDivisionError), convolutions.pytorch_benchmark():
        1 / 0  # noqa: B018
    assert (flags.benchmark, flags.allow_tf32) == before
