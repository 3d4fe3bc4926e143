"""The benchmarks without a GPU: their logic on CPU tensors, with a fake clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import attention
from benchmarks.tools import cases, peers, training
from benchmarks.tools.cases import Shape

SMALL = replace(
    cases.QUICK,
    kernels=(Shape(1, 4, 4, 16, 8, True), Shape(2, 4, 2, 24, 8, False)),
    options=Shape(2, 4, 2, 16, 8, True),
    tokens=200,
    max_seqlens=(48,),
    training=Shape(1, 4, 2, 16, 8, True),
)


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(attention, "device_times", times_by_place)
    monkeypatch.setattr(training, "host_times", times_by_place)


def same_columns(rows):
    return all(list(row) == list(rows[0]) for row in rows)


def test_flops_count_the_matrix_products():
    shape = Shape(2, 8, 2, 10, 4, False)
    products = 2 * 8 * 10 * 10 * 4  # multiplications of one matrix product
    assert shape.flops() == 2 * 2 * products
    assert shape.flops(backward=True) == 5 * 2 * products
    assert shape._replace(causal=True).flops() == shape.flops() / 2


@pytest.mark.parametrize("error", [0.03, float("nan")])
def test_different_results_stop_the_benchmark(error):
    expected = torch.ones(8)
    cases.check_agreement(["out"], [expected * 1.01], [expected], "theirs")
    with pytest.raises(RuntimeError, match="grad_q differs from theirs"):
        cases.check_agreement(["out", "grad_q"], [expected, expected * (1 + error)], [expected] * 2, "theirs")


def test_one_row_for_each_shape_and_pass(on_cpu):  # noqa: ARG001
    rows = attention.kernels(SMALL)
    assert [row["pass"] for row in rows] == ["forward", "backward"] * 2
    assert same_columns(rows)
    assert rows[0]["B, Hq, Hkv, S, D"] == "1, 4, 4, 16, 8, causal"
    assert rows[0]["sdpa / pytorch cudnn"] == 0.5
    assert rows[3]["pytorch flash TFLOP/s"] == SMALL.kernels[1].flops(backward=True) / 3 / 1e6
    assert {row["K/V heads repeated for"] for row in rows} == {"–"}


def test_a_backend_without_grouped_queries_gets_repeated_heads(on_cpu, monkeypatch):  # noqa: ARG001
    attend = peers.scaled_dot_product_attention

    def no_groups(*args, enable_gqa, **options):
        if enable_gqa:
            raise RuntimeError("No available kernel. Aborting execution.")
        return attend(*args, **options)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", no_groups)
    rows = attention.kernels(SMALL)
    assert rows[0]["K/V heads repeated for"] == "–"
    assert rows[2]["K/V heads repeated for"] == rows[3]["K/V heads repeated for"] == "pytorch cudnn, pytorch flash"


def test_wrong_gradients_stop_the_benchmark(on_cpu, monkeypatch):  # noqa: ARG001
    right = attention.sdpa
    monkeypatch.setattr(attention, "sdpa", lambda q, k, v, **given: right(q, k, v + 0.1 * v.detach(), **given))
    with pytest.raises(RuntimeError, match="out differs from pytorch cudnn's on 1, 4, 4, 16, 8, causal"):
        attention.kernels(SMALL)
