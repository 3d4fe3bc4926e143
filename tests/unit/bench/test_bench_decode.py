"""`bench decode` on the CPU, small: rows measure what they state, and results are compared before timing."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from benchmarks import decode
from benchmarks.decode import BY_FLASH4, CONTIGUOUS, COPIES, DENSE, FP8, ON_CUDNN, V3_PACKED, VARLEN, Step
from benchmarks.tools import candidates, cases
from benchmarks.tools.flash_attention import V3
from cudnn_sdpa.attention.flash4.preferences import PagesPreference

SMALL = {"page_size": 16, "heads": (4, 2), "dims": (16, 16)}
STEPS = (
    Step((1, 1), 40, **SMALL),
    Step((3, 3), 33, **SMALL),
    Step((1, 1, 9), 33, **SMALL),
    Step((1, 1), 40, page_size=16, heads=(4, 1), dims=(32, 16)),
    Step((1, 1), 40, pages=FP8, **SMALL),
)
LABEL = "sequences × new tokens on keys"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(decode, "device_times", times_by_place)
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(cases, "COPIED", 1000)
    monkeypatch.setattr(decode, "STEPS", STEPS)
    monkeypatch.setattr(decode, "APPEND", decode.Sizes(tokens=5, layers=2, heads=2, dim=16, pages=3, page_size=4))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    monkeypatch.setattr(decode, "installed", lambda: SimpleNamespace(missing="not here"))


@pytest.fixture
def version_3(monkeypatch, cached_attention):
    module = SimpleNamespace(flash_attn_with_kvcache=cached_attention)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


def test_without_flash_attention_it_has_no_column():
    single, draft, mixed, latent, fp8 = decode.steps()
    assert all(V3 not in column for row in (single, draft, mixed, latent, fp8) for column in row)
    for row in (single, draft, latent):
        assert [row[f"{name} µs"] for name in (VARLEN, ON_CUDNN, DENSE, CONTIGUOUS)] == [1, 2, 3, 4]
    for row in (mixed, fp8):  # of which only one call has all
        assert [row[f"{name} µs"] for name in (VARLEN, ON_CUDNN, DENSE, CONTIGUOUS)] == [1, "–", "–", "–"]
    assert {row["why not"] for row in (single, draft, mixed, latent, fp8)} == {"–"}


@pytest.mark.usefixtures("version_3")
def test_flash_attention_reads_the_same_pages():
    single, draft, mixed, latent, fp8 = decode.steps()
    for row in (single, draft, latent):
        assert [row[f"{name} µs"] for name in (VARLEN, V3_PACKED, V3, ON_CUDNN, DENSE)] == [1, 2, 3, 4, 5]
        assert row[f"{V3} / {VARLEN}"] == 2, "the better of its two calls"
    assert [mixed[f"{name} µs"] for name in (V3_PACKED, V3)] == [2, "–"]
    assert [fp8[f"{name} µs"] for name in (V3_PACKED, V3)] == ["–", "–"]
    assert fp8[f"{V3} / {VARLEN}"] == "–"
    assert {row["why not"] for row in (single, draft, mixed, latent, fp8)} == {"–"}


def test_bytes_count_keys_and_values():
    single, *_, latent, fp8 = decode.steps()
    read = 2 * 40 * 2 * 16 * 2  # sequences, keys, heads, head dim, keys and values
    assert single["TB/s"] == pytest.approx(2 * read / 1e6)
    assert latent["TB/s"] == pytest.approx(2 * 40 * 32 * 2 / 1e6), "values are numbers of their keys"
    assert fp8["TB/s"] == pytest.approx(read / 1e6)
    assert single["of a copy's"] == pytest.approx(2 * read / (2000 / 5))  # the fifth on the clock


@pytest.mark.parametrize("name", [VARLEN, V3_PACKED])
@pytest.mark.usefixtures("version_3")
def test_wrong_results_are_not_timed(name, version_3, monkeypatch):
    def wrong(call):
        return lambda *given, **options: call(*given, **options) * 1.05

    if name == VARLEN:
        monkeypatch.setattr(decode, "sdpa_paged_varlen", wrong(decode.sdpa_paged_varlen))
    else:
        version_3.flash_attn_with_kvcache = wrong(version_3.flash_attn_with_kvcache)
    *_, mixed, _, _ = decode.steps()
    assert mixed[f"{name} µs"] == "–"
    assert f"{name} differs from float64" in mixed["why not"]


def test_pages_are_in_random_order():
    given = decode.Inputs(Step((1,) * 3, 150, **SMALL))
    used = given.table.flatten().tolist()
    assert sorted(used) == list(range(30))
    assert used != sorted(used)


def test_labels_name_what_differs():
    labels = [step.label for step in decode.STEPS]
    assert labels[2] == "2 × 1 and 1 × 9 on 33, pages of 16, 4/2 heads of 16"
    assert labels[3] == "2 × 1 on 40, pages of 16, 4/1 heads of 32/16"
    assert labels[4] == "2 × 1 on 40, pages of 16, FP8 pages, 4/2 heads of 16"
    assert [row[LABEL] for row in decode.steps()] == labels


def test_appended_tokens_are_compared_first(monkeypatch):
    rows = decode.append()
    assert [row["5 tokens × 2 layers"] for row in rows] == [
        "append_paged_kv",
        "append_paged_kv, FP8 pages",
        COPIES,
        "one copy of both",
    ]
    assert [row["× copies"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    monkeypatch.setattr(decode, "append_paged_kv", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="pages differs from the tokens"):
        decode.append()


def test_the_host_is_timed(monkeypatch, version_3):  # noqa: ARG001
    def once(calls, **_):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 2.0)

    monkeypatch.setattr(decode, "host_times", once)
    names = [row["call"] for row in decode.host()]
    assert names[:3] == [VARLEN, f"{VARLEN}, out=", "append_paged_kv"]
    assert V3_PACKED in names


@pytest.mark.slow
def test_mixed_steps_are_calls_that_work():
    rows = decode.plans(20)
    assert [row["steps"] for row in rows] == [2, 20]
    assert [row["plans built"] for row in rows] == [0, 0]  # the CPU has none


def test_flash_attention_4_serves_the_same_call(monkeypatch):
    """Its column is there where it is installed; where it declines, there is no time."""
    monkeypatch.setattr(decode, "installed", lambda: SimpleNamespace(missing=""))
    seen = []

    def served_by(provider, call):
        seen.append(provider)
        return call()

    monkeypatch.setattr(decode, "served_by", served_by)
    single, draft, mixed, _, fp8 = decode.steps()
    for row in (single, draft, mixed):
        assert row[f"{BY_FLASH4} µs"] == row[f"fa4 / {VARLEN}"] == 2
    assert fp8[f"{BY_FLASH4} µs"] == fp8[f"fa4 / {VARLEN}"] == "–"
    assert set(seen) == {"fa4"}


def test_rows_of_measurements_are_made_of_steps(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "scripts")
    script = importlib.import_module("preferences")
    times = [(8.04, 9.0), (3.0, 3.5), (5.0, 6.0), (1.0, 2.0), ("–", 2.0)]
    steps = [
        {LABEL: step.label, f"{BY_FLASH4} µs": one, f"{VARLEN} µs": other}
        for step, (one, other) in zip(STEPS, times, strict=True)
    ]
    rows = [{**x, "dims": tuple(x["dims"])} for x in script.rows_for_chunks({"steps": steps})]
    assert [PagesPreference(**row) for row in rows] == [
        PagesPreference(90, (16, 16), True, 1, 8.0, 9.0, STEPS[0].label),
        PagesPreference(90, (16, 16), True, 3, 3.0, 3.5, STEPS[1].label),
        PagesPreference(90, (32, 16), True, 1, 1.0, 2.0, STEPS[3].label),
    ]
    assert script.rows_for_chunks({"steps": [{LABEL: STEPS[0].label, f"{VARLEN} µs": 2.0}]}) == []
