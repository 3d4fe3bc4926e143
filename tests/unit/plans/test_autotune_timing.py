"""The measurements of `autotune`: which plans are right, and which right plan is the fastest."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import autotune


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", autotune.TOLERANCE, ids=str)
def test_rounding_is_tolerated_and_errors_are_not(dtype):
    exact = torch.randn(500, 64, dtype=torch.float64)
    noise = torch.randn_like(exact) * torch.finfo(dtype).eps * exact.abs() / 4
    a, b = exact.to(dtype), (exact + noise).to(dtype)
    assert not autotune.differs(a, a)
    assert not autotune.differs(b, a)
    assert autotune.differs((exact * 1.5).to(dtype), a)
    assert autotune.differs((-exact).to(dtype), a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrong", [0.0, "neighbour"])
def test_one_wrong_row_of_many_is_detected(dtype, wrong):
    expected = rows(20_000, 64, dtype=dtype)
    found = expected.clone()
    found[777] = wrong if wrong == 0.0 else expected[778]
    assert float((found - expected).norm() / expected.norm()) < autotune.TOLERANCE[torch.bfloat16]
    assert autotune.differs(found, expected)


def test_rows_are_compared_relative_to_their_own_magnitude():
    sizes = torch.logspace(-6, 3, 2000).unsqueeze(1)
    exact = torch.randn(2000, 64) * sizes
    expected = exact.to(torch.bfloat16)
    found = (exact + exact.norm(dim=1, keepdim=True) / 8 * 2e-3 * torch.randn_like(exact)).to(torch.bfloat16)
    assert not autotune.differs(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_must_match(value):
    whole, broken = rows(64, 8), rows(64, 8)
    broken.copy_(whole)
    broken[5, 3] = value
    assert autotune.differs(broken, whole)
    assert autotune.differs(whole, broken)
    assert not autotune.differs(broken, broken.clone())


def test_integers_must_be_equal():
    a = torch.arange(12).view(3, 4)
    assert not autotune.differs(a, a.clone())
    a[2, 3] += 1
    assert autotune.differs(torch.arange(12).view(3, 4), a)


def test_results_are_compared_in_chunks(monkeypatch):
    monkeypatch.setattr(autotune, "_CHUNK_ELEMENTS", 64)
    a = rows(1000, 8)
    b = a.clone()
    assert not autotune.differs(b, a)
    b[999] = 0
    assert autotune.differs(b, a)


def test_only_a_clear_advantage_wins():
    def fastest(*times):
        return autotune.fastest([autotune.AutotuneCandidate("eng1", {}, time) for time in times])

    assert fastest(10.0, 9.9, 9.85) == 0
    assert fastest(10.0, 9.9, 9.7, 9.75) == 2
    assert fastest(10.0, None, 9.0) == 2
    assert fastest(None) == fastest(None, None) == 0


def test_memory_is_viewed_in_its_layout():
    memory = torch.arange(24.0)
    layout = TensorLayout((2, 3), (12, 2), torch.float32)
    seen = autotune.tensor_at(memory.data_ptr() + 4, layout, torch.device("cpu"))
    assert seen.tolist() == [[1, 3, 5], [13, 15, 17]]
    seen.fill_(0)
    assert memory.sum() == sum(range(24)) - (1 + 3 + 5 + 13 + 15 + 17)


@pytest.mark.parametrize("dtype", autotune.TOLERANCE, ids=str)
def test_results_of_any_layout_are_poisoned_compared_and_restored(dtype, monkeypatch):
    """The elements between those of the output do not belong to it."""
    memory = torch.ones(4, 6, 8).to(dtype)
    output = memory.transpose(0, 1)[::2, :, :4]
    values = torch.randn(output.shape).to(dtype)
    seen = []

    def write():
        seen.append(bool(output.double().isnan().all()))
        output.copy_(values)

    monkeypatch.setattr(autotune, "device_times", lambda _: [3.0, 2.0])
    assert autotune.compare([write, write], [output]) == [(3.0, ""), (2.0, "")]
    assert seen == [True, True]
    assert (memory.double() == 1).all()


def test_outputs_are_restored_after_errors(monkeypatch):
    output = torch.ones(2, 3)

    def write():
        output.fill_(5)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune, "device_times", fail)
    with pytest.raises(KeyboardInterrupt):
        autotune.compare([write, write], [output])
    assert (output == 1).all()
