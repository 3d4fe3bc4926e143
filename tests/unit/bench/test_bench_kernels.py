"""`bench kernels` without a GPU: its rows on small sizes, its command line and JSON."""

from __future__ import annotations

import pytest

from benchmarks import kernels

SMALL = kernels.Sizes(batch=1, heads=2, dim=8, lengths=(5, 16), exact_length=16, repeats=2)


def test_everything_that_is_timed_is_compared_with_float64():
    rows = kernels.errors(SMALL)
    of_half = [name for name in kernels.IN_HALF for _ in range(4)]
    assert sorted(row["call"] for row in rows) == sorted([*["fused", "tiled", "naive", "pytorch math"] * 2, *of_half])
    bounds = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}
    for row in rows:
        bound = bounds[row["dtype"].split(",")[0]]
        assert 0 < row["out"] < bound
        assert 0 < row["gradients"] < bound * max(1.0, row["largest gradient"])


@pytest.mark.parametrize("part", [kernels.float32, kernels.half])
def test_a_wrong_result_stops_the_benchmark(part, monkeypatch):
    for candidates in (kernels.IN_FLOAT32, kernels.IN_HALF):
        name = list(candidates)[-1] if candidates is kernels.IN_HALF else "naive"
        right = candidates[name]
        monkeypatch.setitem(candidates, name, lambda *call, right=right: right(*call) * 1.1)
    with pytest.raises(RuntimeError, match=r"out differs from that of the fused form \((naive|pytorch flash), "):
        part(SMALL)


def test_a_wrong_gradient_stops_it(monkeypatch):
    right = kernels.IN_FLOAT32["tiled"]
    wrong = lambda q, k, v, causal: right(q, k, v + 0.1 * (v - v.detach()), causal)  # noqa: E731 - wrong gradient alone
    monkeypatch.setitem(kernels.IN_FLOAT32, "tiled", wrong)
    with pytest.raises(RuntimeError, match=r"grad_v differs from that of the fused form \(tiled, float32, S=5\)"):
        kernels.float32(SMALL)


def test_errors_of_a_backend_are_no_missing_kernels(monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(kernels.IN_FLOAT32, "naive", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        kernels.float32(SMALL)
