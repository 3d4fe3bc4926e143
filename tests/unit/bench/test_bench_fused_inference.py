"""`benchmarks fused` of norms in FP8 and of rotations in place and into pages, on CPU tensors, with a fake clock."""

from __future__ import annotations

import pytest
import torch

from benchmarks import fused, fused_inference
from benchmarks.fused_inference import COMPILED_IN_PLACE, IN_PLACE, ROPE, SEPARATE, Sizes
from benchmarks.tools import candidates, cases


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place):
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "COPIED", 1000)
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(fused_inference, "host_times", times_by_place)
    monkeypatch.setattr(fused_inference, "wait_for_native_calls", lambda: True)
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    monkeypatch.setattr(fused_inference, "NORMS", [(5, 64)])
    monkeypatch.setattr(fused_inference, "SIZES", Sizes(tokens=(3, 9), heads=(3, 2), dim=16, pages=4, page_size=4))


def test_norms_in_fp8_with_scales_of_both_kinds():
    rows = fused_inference.norms_fp8()
    assert [row["call"] for row in rows] == [
        f"{name}, {scale}, 5 × 64"
        for name in ("rms_norm_fp8", "layer_norm_fp8")
        for scale in ("a scale for each row", "a given scale")
    ]
    for row in rows:
        assert (row["cudnn_sdpa µs"], row["compiled µs"], row["compiled / ours"]) == (1, 2, 2)
        assert row["of a copy's bandwidth"] == pytest.approx(5 * 64 * 3 / 1 / (2000 / 3))
        assert row["why not"] == "–"


def test_a_norm_in_fp8_that_is_wrong_has_no_time(monkeypatch):
    def rms_norm_fp8(x, weight, *, scale):
        return fused_inference.layer_norm_fp8(x, weight, scale=scale)

    monkeypatch.setattr(fused_inference, "rms_norm_fp8", rms_norm_fp8)
    wrong, _, right, _ = fused_inference.norms_fp8()
    assert wrong["cudnn_sdpa µs"] == wrong["of a copy's bandwidth"] == wrong["compiled / ours"] == "–"
    assert "cudnn_sdpa differs from float64" in wrong["why not"]
    assert right["why not"] == "–"


def test_a_scale_that_is_wrong_has_no_time(monkeypatch):
    right = fused_inference.rms_norm_fp8

    def rms_norm_fp8(*given, scale):
        found = right(*given, scale=scale)
        return found._replace(amax=None if scale is None else found.amax * 1.1)

    monkeypatch.setattr(fused_inference, "rms_norm_fp8", rms_norm_fp8)
    of_rows, given, *_ = fused_inference.norms_fp8()
    assert of_rows["cudnn_sdpa µs"] == 1
    assert given["cudnn_sdpa µs"] == "–"


def test_rotations_into_pages_of_each_kind():
    rows = fused_inference.rope_append()
    assert [row["call"] for row in rows] == [
        f"{tokens} tokens{options}" for tokens in (3, 9) for options in ("", ", norms", ", FP8 pages")
    ]
    names = ("cudnn_sdpa", SEPARATE, IN_PLACE, "compiled")
    for row in rows:
        assert [row[f"{name} µs"] for name in (*names, "copy")] == [1, 2, 3, 4, 5]
        assert [row[f"{name}, host µs"] for name in names] == [1, 2, 3, 4]
        assert row["best of others / ours"] == 2
        assert row["why not"] == "–"


def test_rotations_in_place_and_into_new_tensors():
    rows = fused_inference.rope_in_place()
    assert [row["call"] for row in rows] == ["3 tokens", "3 tokens, norms", "9 tokens", "9 tokens, norms"]
    names = ("cudnn_sdpa", ROPE, "compiled", COMPILED_IN_PLACE)
    for row in rows:
        assert [row[f"{name} µs"] for name in (*names, "copy")] == [1, 2, 3, 4, 5]
        assert [row[f"{name}, host µs"] for name in names] == [1, 2, 3, 4]
        assert row["why not"] == "–"


@pytest.mark.parametrize("name", ["rope_", "rope", "append_paged_kv", "rope_append_paged_kv"])
def test_rotations_that_do_nothing_have_no_time(name, monkeypatch):
    def nothing(*heads, **_):
        return heads[:2] if name == "rope" else heads[0]

    monkeypatch.setattr(fused_inference, name, nothing)
    columns = {
        "rope_": {IN_PLACE, "cudnn_sdpa"},
        "rope": {SEPARATE, ROPE},
        "append_paged_kv": {SEPARATE, IN_PLACE},
        "rope_append_paged_kv": {"cudnn_sdpa"},
    }
    found = {
        column
        for rows in (fused_inference.rope_append(), fused_inference.rope_in_place())
        for column in (SEPARATE, IN_PLACE, ROPE, "cudnn_sdpa", "compiled", COMPILED_IN_PLACE)
        if any(row.get(f"{column} µs") == "–" for row in rows)
    }
    assert found == columns[name]


def test_chunks_are_at_consecutive_positions_and_decodes_are_not():
    chunk, decode = (fused_inference.Given(tokens) for tokens in (9, 3))
    expected = fused_inference.RotaryEmbedding(16)(torch.arange(9))
    assert torch.equal(chunk.angles[0], expected[0])
    assert all(any(torch.equal(row, of) for of in expected[0]) for row in decode.angles[0])
    assert len(set(chunk.slots.tolist())) == 9
