"""`bench decode` on the CPU, small: rows measure what they state, and results are compared before timing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import decode
from benchmarks.tools import cases


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(decode, "device_times", times_by_place)
    monkeypatch.setattr(cases, "COPIED", 1000)
    monkeypatch.setattr(decode, "STEPS", ((2, 40, 16), (1, 33, 16)))
    monkeypatch.setattr(decode, "DRAFTS", ((2, 3, 40),))


def test_bytes_count_keys_and_values(on_cpu):  # noqa: ARG001
    first, second = decode.bandwidth()
    assert first["B, tokens, page size"] == "2, 40, 16"
    read = 2 * 40 * 8 * 128 * 2 * 4  # sequences, tokens, heads, head dim, keys and values, bytes
    assert first["TB/s"] == pytest.approx(read / 1.0 / 1e6)
    assert first["flash TB/s"] == pytest.approx(read / 3.0 / 1e6)
    assert first["of a copy's"] == pytest.approx(read / (2000 / 4.0))
    assert list(first) == list(second)


def test_pages_are_in_random_order_and_match_the_contiguous_cache(on_cpu):  # noqa: ARG001
    cache, step = decode.filled(3, 70, 16, 2)
    assert step.seq_lens_kv.tolist() == [70] * 3
    assert step.seq_lens_q.tolist() == [2] * 3
    used = step.page_table[0, :5].tolist()
    assert used != sorted(used)
    k, v = decode.dense(cache, 3)
    assert torch.equal(k[1], cache.read(1)[0])
    assert torch.equal(v[2], cache.read(2)[1])
    assert k.shape == (3, 8, 70, 128)


@pytest.mark.slow
def test_mixed_steps_are_calls_that_work(on_cpu):  # noqa: ARG001
    rows = decode.mixed(20)
    assert [row["steps"] for row in rows] == [2, 20]
    assert [row["plans built"] for row in rows] == [0, 0]  # the CPU has none
